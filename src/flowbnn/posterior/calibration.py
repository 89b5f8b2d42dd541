"""What was measured of a fit: a calibrated network beside its rivals, and what a fit gained."""

from collections.abc import Mapping
from dataclasses import dataclass

from flowbnn.errors import pluralize


@dataclass(frozen=True)
class Calibration:
    """What cross-validation on the held-out data says of a calibrated network, beside the plain one and temperature scaling.

    Args:
        nll: mean negative log-likelihood of an example that was left out, by ``"plain"``, ``"temperature"`` and ``"calibrated"``.
        ece: expected calibration error of the same predictions; empty for a regression.
        gain, error: by how much the calibrated network's log-likelihood exceeds that of temperature scaling, per example, and the
            standard error of this difference; None, and no ``nll``, without folds.
        folds: of the cross-validation.
        examples, dimensions: of the held-out data, and of the noise.
        structure, prior: of the posterior.
        temperature: on all held-out data.
        flow: which lies before the covariance; None where there is none, or where it was no better than the Gaussian.
        flow_gain, flow_error: of the flow's ELBO over the Gaussian's, in nats, and its standard error; None without a flow.
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
        """Whether the calibrated network beats temperature scaling by more than two standard errors."""
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
            verdict_of_flow = (
                f"{self.flow} raises" if self.flow else "The flow is left out: it does not raise"
            )
            lines.append(
                f"{verdict_of_flow} the ELBO of the Gaussian ({self.flow_gain:+.2f} nats, standard error {self.flow_error:.2f})."
            )
        if self.gain is not None and self.error is not None:
            verdict = (
                "beats temperature scaling" if self.better else "is within chance of temperature scaling"
            )
            if self.gain < -2.0 * self.error:
                verdict = "is worse than temperature scaling, which these data suffice for"
            lines.append(
                f"By {self.folds}-fold cross-validation the noise {verdict} (log-likelihood {self.gain:+.4f} per example, standard "
                f"error {self.error:.4f})."
            )
        return "\n".join(lines)
