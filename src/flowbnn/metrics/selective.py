"""What is gained by answering only when sure."""

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics.checks import as_float
from flowbnn.options import Interval, checked

__all__ = ["RiskCoverage", "risk_coverage"]


@dataclass(frozen=True)
class RiskCoverage:
    """The error rate ``risk`` when only the surest share ``coverage`` of the inputs is answered, and its mean ``area``."""

    coverage: Tensor
    risk: Tensor
    area: float

    @checked
    def risk_at(self, coverage: Annotated[float, Interval(gt=0, le=1)]) -> float:
        """Error rate when at least this share of the inputs is answered.

        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([True, True, True, False]))
        >>> curve.risk_at(0.75), curve.risk_at(1.0)
        (0.0, 0.25)
        """
        answered = (self.coverage >= coverage - 1e-12).nonzero()[0, 0]
        return float(self.risk[answered])


@checked
def risk_coverage(uncertainty: Tensor, correct: Tensor) -> RiskCoverage:
    r"""Risk-coverage curve and its area, AURC (Geifman & El-Yaniv, 2017).

    With the inputs ordered from the surest to the least sure,

    .. math:: r_k = \frac1k \sum_{i \le k} 1[\text{wrong}_i], \qquad \mathrm{AURC} = \frac1B \sum_{k=1}^B r_k ,

    at coverages :math:`k/B`. Lower is better; a useless uncertainty gives the error rate. Inputs of equal uncertainty have no
    order among themselves, so each takes the error rate of its group, which is the expectation over all orders.

    Args:
        uncertainty: ``[B]``, higher means less sure.
        correct: ``[B]`` booleans: was the answer right?

    >>> curve = risk_coverage(torch.tensor([0.3, 0.1, 0.2, 0.4]), torch.tensor([True, True, False, False]))
    >>> curve.coverage.tolist(), curve.risk[[0, 1, 3]].tolist()
    ([0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 0.5])
    >>> round(curve.area, 4)  # (0 + 1/2 + 1/3 + 2/4) / 4
    0.3333
    """
    uncertainty = check_scores(uncertainty, "uncertainty")
    if correct.dtype != torch.bool or correct.shape != uncertainty.shape:
        raise FlowBNNError(
            f"correct must be a boolean tensor of shape {list(uncertainty.shape)}, like labels == targets",
            kind="shape",
            argument="correct",
        )
    _, group, counts = uncertainty.detach().cpu().unique(return_inverse=True, return_counts=True)
    wrong = torch.bincount(group, weights=(~correct).cpu().double(), minlength=len(counts)) / counts
    answered = torch.arange(1, len(group) + 1, dtype=torch.float64)
    risk = wrong.repeat_interleave(counts).cumsum(0) / answered
    return RiskCoverage(answered / len(group), risk, risk.mean().item())


def check_scores(scores: Tensor, name: str) -> Tensor:
    """A non-empty vector without NaN; infinities have an order and are allowed."""
    scores = as_float(scores, name)
    if scores.ndim != 1 or not len(scores) or scores.isnan().any():
        raise FlowBNNError(
            f"{name} must be a vector with at least one score and without NaN, not {list(scores.shape)} with "
            f"{int(scores.isnan().sum())} NaN",
            kind="value",
            argument=name,
        )
    return scores
