"""Result of a calibration: comparison of the calibrated network with temperature scaling."""

from collections.abc import Mapping
from dataclasses import dataclass

from flowbnn.errors import pluralize


@dataclass(frozen=True)
class Calibration:
    """Comparison of a calibrated network with the plain network and with temperature scaling, by cross-validation.

    Args:
        nll: Mean negative log-likelihood (NLL) of an example in the fold that was left out, by ``"plain"``, ``"temperature"`` and
            ``"calibrated"``. Empty without folds.
        ece: Expected calibration error of the same predictions. Empty for regression.
        gain: Log-likelihood per example of the calibrated network minus that of temperature scaling. None without folds.
        error: Standard error of ``gain``. None without folds.
        folds: Number of folds.
        examples: Number of held-out examples.
        dimensions: Number of dimensions of the noise.
        structure: Structure of the covariance.
        prior: Prior of the noise.
        temperature: Temperature for all held-out data.
        flow: Name of the flow, or None if there is none or it was not better than the Gaussian.
        flow_gain: ELBO of the flow minus that of the Gaussian, in nats. None without a flow.
        flow_error: Standard error of ``flow_gain``. None without a flow.
    """

    nll: Mapping[str, float]
    ece: Mapping[str, float]
    gain: float | None
    error: float | None
    folds: int
    examples: int
    dimensions: int
    structure: str
    prior: str
    temperature: float
    flow: str | None = None
    flow_gain: float | None = None
    flow_error: float | None = None

    @property
    def better(self) -> bool:
        """True if the calibrated network is better than temperature scaling by more than two standard errors."""
        return self.gain is not None and self.error is not None and self.gain > 2.0 * self.error

    def __str__(self) -> str:
        lines = [f"{'':<12} {'NLL':>7}" + ("     ECE" if self.ece else "")] if self.nll else []
        for name, value in self.nll.items():
            lines.append(
                f"{name:<12} {value:>7.4f}" + (f"  {self.ece[name]:>6.4f}" if name in self.ece else "")
            )
        lines.append(
            f"{self.structure} posterior over {pluralize(self.dimensions, 'dimension')}, {self.prior} prior, "
            f"{pluralize(self.examples, 'held-out example')}"
        )
        if self.flow_gain is not None:
            flow = self.flow or "flow (not used)"
            lines.append(
                f"{flow}: ELBO {self.flow_gain:+.2f} nats relative to the Gaussian, standard error {self.flow_error:.2f}"
            )
        if self.gain is not None and self.error is not None:
            comparison = "significantly better" if self.better else "not significantly better"
            if self.gain < -2.0 * self.error:
                comparison = "significantly worse"
            lines.append(
                f"{self.folds}-fold cross-validation: the calibrated network is {comparison} than temperature scaling (log-likelihood "
                f"{self.gain:+.4f} per example, standard error {self.error:.4f})."
            )
        return "\n".join(lines)
