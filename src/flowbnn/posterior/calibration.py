"""A calibrated network beside the plain one and temperature scaling."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Calibration:
    """What cross-validation on the held-out data says of a calibrated network, beside the plain one and temperature scaling.

    Args:
        nll: mean negative log-likelihood of an example that was left out, by ``"plain"``, ``"temperature"`` and ``"calibrated"``.
        ece: expected calibration error of the same predictions; empty for a regression.
        gain, error: by how much the calibrated network's log-likelihood exceeds that of temperature scaling, per example, and the
            standard error of this difference.
        folds: of the cross-validation.
        examples, dimensions: of the held-out data, and of the noise.
        structure, prior: of the posterior.
        temperature: on all held-out data.
        flow: which lies before the covariance; None where there is none, or where it was no better than the Gaussian.
        flow_gain, flow_error: of the flow's ELBO over the Gaussian's, in nats, and its standard error.
    """

    nll: Mapping[str, float]
    ece: Mapping[str, float]
    gain: float
    error: float
    folds: int
    examples: int
    dimensions: int
    structure: str
    prior: str
    temperature: float
    flow: str | None = None
    flow_gain: float = float("nan")
    flow_error: float = float("nan")

    @property
    def better(self) -> bool:
        """Whether the calibrated network beats temperature scaling by more than two standard errors."""
        return self.gain > 2.0 * self.error

    def to_dict(self) -> dict[str, Any]:
        """Plain values; what was not measured is None."""
        return {name: None if value != value else value for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> "Calibration":
        """What :meth:`to_dict` gave, again."""
        known: dict[str, Any] = {name: math.nan if value is None else value for name, value in plain.items()}
        return cls(**{**known, "flow": plain.get("flow")})

    def __str__(self) -> str:
        lines = [f"{'':<12} {'NLL':>7}" + ("     ECE" if self.ece else "")] if self.nll else []
        for name, value in self.nll.items():
            lines.append(
                f"{name:<12} {value:>7.4f}" + (f"  {self.ece[name]:>6.4f}" if name in self.ece else "")
            )
        verdict = "beats temperature scaling" if self.better else "is within chance of temperature scaling"
        if self.gain < -2.0 * self.error:
            verdict = "is worse than temperature scaling, which these data suffice for"
        lines.append(
            f"{self.structure} posterior over {self.dimensions:,} dimensions, {self.prior} prior, {self.examples:,} held-out examples"
        )
        if self.flow_gain == self.flow_gain:
            verdict_of_flow = (
                f"{self.flow} raises" if self.flow else "The flow is left out: it does not raise"
            )
            lines.append(
                f"{verdict_of_flow} the ELBO of the Gaussian ({self.flow_gain:+.2f} nats, standard error {self.flow_error:.2f})."
            )
        if self.nll:
            lines.append(
                f"By {self.folds}-fold cross-validation the noise {verdict} (log-likelihood {self.gain:+.4f} per example, standard "
                f"error {self.error:.4f})."
            )
        return "\n".join(lines)
