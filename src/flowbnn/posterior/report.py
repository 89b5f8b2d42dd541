"""Report of a finished fit: what it gained over the initial network, and whether it can be trusted."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from flowbnn.regression import NoiseScale


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
        error = float((after - before).std() / len(before) ** 0.5) if len(before) > 1 else float("inf")
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
class FitReport:
    """Report of ``fb.fit``. Each entry that points to a problem has also been raised as a warning.

    All entries but ``held_out`` describe the posterior that is returned. If ``accepted`` is False, ``held_out`` describes the rejected
    fit.

    Args:
        elbo: ELBO per example of the initial network and of the posterior, on ten batches and with the same draws. None if the ELBO of
            the initial network is not finite, or if ``accepted`` is False.
        held_out: Log-likelihood per held-out example before and after the fit. None without validation data.
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
    held_out: Gain | None = None
    memorization: float | None = None
    collapsed: Mapping[str, str] = field(default_factory=dict)
    elbo_gain: float = 0.0
    elbo_drop: float = 0.0
    noise_scale: NoiseScale | None = None
    accepted: bool = True

    def __str__(self) -> str:
        lines = [str(gain) for gain in (self.elbo, self.held_out) if gain is not None]
        if self.collapsed:
            layers = ", ".join(f"{layer} ({state})" for layer, state in self.collapsed.items())
            lines.append(f"collapsed layers: {layers}")
        if not self.accepted:
            lines.append("the fit was not better than the given network, which is returned")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values for a file."""
        return {**asdict(self), "collapsed": dict(self.collapsed)}

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> "FitReport":
        """Returns the report that :meth:`to_dict` stored."""
        values = dict(document)
        kinds = {"elbo": Gain, "held_out": Gain, "noise_scale": NoiseScale}
        for name, kind in kinds.items():
            if values.get(name) is not None:
                values[name] = kind(*values[name])
        return cls(**values)
