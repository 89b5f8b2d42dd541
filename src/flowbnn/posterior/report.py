"""Reports of a fit and of a calibration: gains over the initial network, with standard errors, and problems."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from flowbnn.errors import pluralize
from flowbnn.records import Record
from flowbnn.regression import NoiseScale


class Difference(NamedTuple):
    """Mean difference of paired examples, and its standard error.

    Args:
        mean: Mean over examples.
        error: Standard error of the mean.

    >>> import torch
    >>> print(Difference.of(torch.tensor([1.0, 3.0]), torch.tensor([0.5, 1.5])))
    +1.0000 +- 0.5000
    """

    mean: float
    error: float

    @classmethod
    def of(cls, values: Tensor, baseline: Tensor) -> "Difference":
        """Returns the mean of ``values - baseline``. The standard error of one example is infinite."""
        gap = values - baseline
        error = float(gap.std()) / math.sqrt(len(gap)) if len(gap) > 1 else math.inf
        return cls(float(gap.mean()), error)

    def __str__(self) -> str:
        return f"{self.mean:+.4f} +- {self.error:.4f}"


class Gain(NamedTuple):
    """Mean over examples before and after a fit, and the standard error of the difference.

    Args:
        before: Mean for the initial network.
        after: Mean for the posterior.
        standard_error: Standard error of the mean difference.
        name: Name of the quantity.

    >>> print(Gain(-0.25, -0.125, 0.01))
    held-out log-likelihood -0.250 -> -0.125 per example (+0.125, standard error 0.010)
    """

    before: float
    after: float
    standard_error: float
    name: str = "held-out log-likelihood"

    @classmethod
    def of(cls, before: Tensor, after: Tensor, name: str) -> "Gain":
        """Returns the gain from the values of the same examples before and after the fit."""
        error = Difference.of(after, before).error
        return cls(float(before.mean()), float(after.mean()), error, name)

    @property
    def is_loss(self) -> bool:
        """True if the mean has decreased by more than two standard errors."""
        return self.after < self.before - 2 * self.standard_error

    @property
    def is_significant(self) -> bool:
        """True if the mean has changed by more than two standard errors."""
        return abs(self.after - self.before) > 2 * self.standard_error

    def __str__(self) -> str:
        return (
            f"{self.name} {self.before:.3f} -> {self.after:.3f} per example "
            f"({self.after - self.before:+.3f}, standard error {self.standard_error:.3f})"
        )


@dataclass(frozen=True)
class FitReport(Record):
    """Report of ``fb.fit``. Each entry that points to a problem has also been raised as a warning.

    All entries but ``held_out_gain`` describe the posterior that is returned. If ``accepted`` is False, ``held_out_gain`` describes
    the rejected fit.

    Args:
        elbo: ELBO per example of the initial network and of the posterior, on ten batches and with the same draws. None if the ELBO of
            the initial network is not finite, or if ``accepted`` is False.
        held_out_gain: Log-likelihood per held-out example before and after the fit. None without validation data.
        memorization: Log-likelihood per training example minus that per held-out example, for the initial network. A large value
            shows that its weights have memorized the training data. None without validation data.
        collapsed: Layers whose noise has collapsed, as ``"point"`` or ``"prior"`` by layer name.
        elbo_gain: Rise of the ELBO per example in the last epochs. It is close to 0 after convergence.
        elbo_drop: Largest drop of the ELBO per example during training.
        noise_scale: Observation noise and residuals of a regression. None for other likelihoods.
        accepted: False if the fit was not better than the given network on held-out data. The posterior is then the given network.

    >>> print(FitReport(elbo=Gain(-1.0, -0.5, 0.1, "ELBO"), collapsed={"fc1": "prior"}))
    ELBO -1.000 -> -0.500 per example (+0.500, standard error 0.100)
    collapsed layers: fc1 (prior)
    """

    elbo: Gain | None = None
    held_out_gain: Gain | None = None
    memorization: float | None = None
    collapsed: Mapping[str, str] = field(default_factory=dict)
    elbo_gain: float = 0.0
    elbo_drop: float = 0.0
    noise_scale: NoiseScale | None = None
    accepted: bool = True

    def __str__(self) -> str:
        lines = [str(gain) for gain in (self.elbo, self.held_out_gain) if gain is not None]
        if self.collapsed:
            layers = ", ".join(f"{layer} ({state})" for layer, state in self.collapsed.items())
            lines.append(f"collapsed layers: {layers}")
        if not self.accepted:
            lines.append("the fit was not better than the given network, which is returned")
        return "\n".join(lines)


@dataclass(frozen=True)
class Calibration(Record):
    """Comparison of the candidates of a calibration, each predicted on folds that it was not fitted to.

    Args:
        choice: Name of the candidate that was returned.
        nll: Mean negative log-likelihood (NLL) of each candidate, pooled over folds. Empty without folds.
        ece: Expected calibration error of the same predictions. Empty for a regression.
        difference: NLL of each candidate minus that of the plain network, and its standard error.
        excluded: Reason for each candidate that was requested, by name or by ``"auto"``, and not compared.
        folds: Number of folds.
        examples: Number of held-out examples.
        temperature: Temperature for all held-out data.
        dimensions: Number of dimensions of the noise, or 0 if noise was not compared.
        structure: Structure of the covariance of the noise.
        prior: Prior of the noise.
        flow: Name of the flow, or None if there is none or it was not better than the Gaussian.
        flow_gain: ELBO of the flow minus that of the Gaussian, in nats. None without a flow.
        flow_error: Standard error of ``flow_gain``. None without a flow.

    >>> nll, difference = {"plain": 0.30, "temperature": 0.25}, {"plain": Difference(0.0, 0.0), "temperature": Difference(-0.05, 0.01)}
    >>> print(Calibration("temperature", nll, {}, difference, folds=4, examples=500, temperature=1.8))
                             NLL  minus plain
      plain               0.3000
    * temperature         0.2500  -0.0500 +- 0.0100
    4-fold cross-validation of 500 held-out examples: temperature is chosen (NLL -0.0500 +- 0.0100 relative to the plain network).
    """

    choice: str
    nll: Mapping[str, float] = field(default_factory=dict)
    ece: Mapping[str, float] = field(default_factory=dict)
    difference: Mapping[str, Difference] = field(default_factory=dict)
    excluded: Mapping[str, str] = field(default_factory=dict)
    folds: int = 0
    examples: int = 0
    temperature: float = 1.0
    dimensions: int = 0
    structure: str = ""
    prior: str = ""
    flow: str | None = None
    flow_gain: float | None = None
    flow_error: float | None = None

    @property
    def gain(self) -> float | None:
        """Log-likelihood per example of the choice minus that of the plain network. None without folds."""
        return -self.difference[self.choice].mean if self.difference else None

    @property
    def error(self) -> float | None:
        """Standard error of ``gain``. None without folds."""
        return self.difference[self.choice].error if self.difference else None

    @property
    def better(self) -> bool:
        """True if the choice is better than the plain network by more than two standard errors."""
        return self.gain is not None and self.error is not None and self.gain > 2.0 * self.error

    def __str__(self) -> str:
        lines = []
        if self.nll:
            lines.append(f"{'':<20} {'NLL':>7}  minus plain" + ("           ECE" if self.ece else ""))
        for name, value in self.nll.items():
            mark = "*" if name == self.choice else " "
            difference = "" if name == "plain" else str(self.difference[name])
            ece = f"{difference:<18}  {self.ece[name]:.4f}" if name in self.ece else difference
            lines.append(f"{mark} {name:<18} {value:>7.4f}  {ece}".rstrip())
        lines += [f"  {name:<18} not compared: {reason}" for name, reason in self.excluded.items()]
        if self.dimensions:
            dimensions = pluralize(self.dimensions, "dimension")
            lines.append(f"noise: {self.structure} posterior over {dimensions}, {self.prior} prior")
        if self.flow_gain is not None:
            flow = self.flow or "flow (not used)"
            gain = f"ELBO {self.flow_gain:+.2f} nats relative to the Gaussian"
            lines.append(f"{flow}: {gain}, standard error {self.flow_error:.2f}")
        return "\n".join([*lines, self._conclusion()])

    def _conclusion(self) -> str:
        """Returns a sentence about the choice."""
        examples = pluralize(self.examples, "held-out example")
        if not self.difference:
            return f"{self.choice}, fitted to {examples} without a comparison."
        start = f"{self.folds}-fold cross-validation of {examples}"
        if len(self.difference) == 1:
            return f"{start}: only the plain network was scored."
        if self.choice == "plain":
            if "mixture" in self.difference:
                return f"{start}: the plain network is returned, the mixture and temperature scaling have a higher NLL."
            return f"{start}: the plain network is returned, no calibrator is better by more than one standard error."
        reason = ""
        if self.choice == "temperature" and self.difference[self.choice].mean > 0.0:
            reason = ". The plain network is returned only if it is better by more than two standard errors"
        return f"{start}: {self.choice} is chosen (NLL {self.difference[self.choice]} relative to the plain network){reason}."
