"""What an uncertainty is worth as an order of the inputs: does it find novel inputs, and wrong answers?"""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics.checks import check_scores
from flowbnn.options import Bounds, checked


@checked
def novelty_auroc(known_scores: Tensor, novel_scores: Tensor) -> float:
    r"""Area under the ROC curve: the chance that a novel input scores higher than a known one, ties counting half.

    .. math:: \frac{1}{NM} \sum_{i,j} \left( 1[n_j > k_i] + \tfrac12 1[n_j = k_i] \right)

    One half is guessing. Scores are uncertainties (entropy, mutual information, minus confidence): higher means more novel
    (Hendrycks & Gimpel, 2017, https://arxiv.org/abs/1610.02136). Any scale will do, since only the order counts.

    >>> novelty_auroc(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5]))  # right in 5 of 6 pairs
    0.833...
    """
    known, novel = _counts(known_scores, novel_scores)
    below = known.cumsum(0) - 0.5 * known
    return float((novel * below).sum() / (novel.sum() * known.sum()))


@checked
def novelty_aupr(
    known_scores: Tensor, novel_scores: Tensor, positive: Literal["novel", "known"] = "novel"
) -> float:
    r"""Area under the precision-recall curve, as average precision :math:`\sum_t (R_t - R_{t-1}) P_t` over thresholds.

    The positives are the inputs to be found: ``"novel"`` ones by high scores ("AUPR-out"), or ``"known"`` ones by low
    scores ("AUPR-in"). Guessing gives the share of the positives, not one half (Hendrycks & Gimpel, 2017).

    >>> novelty_aupr(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5]))  # (1/1 + 2/3) / 2
    0.833...
    """
    known, novel = _counts(known_scores, novel_scores)
    right, wrong = (novel.flip(0), known.flip(0)) if positive == "novel" else (known, novel)
    precision = right.cumsum(0) / (right + wrong).cumsum(0)
    return float((right * precision).sum() / right.sum())


def _counts(known_scores: Tensor, novel_scores: Tensor) -> tuple[Tensor, Tensor]:
    """How many known and how many novel inputs have each score, from the lowest to the highest."""
    parts = [check_scores(known_scores, "known_scores"), check_scores(novel_scores, "novel_scores")]
    values, place = torch.cat([part.detach().cpu().double() for part in parts]).unique(return_inverse=True)
    known, novel = (
        torch.bincount(some, minlength=len(values)).double() for some in place.split([len(p) for p in parts])
    )
    return known, novel


@dataclass(frozen=True)
class RiskCoverage:
    """The error rate ``risk`` when only the surest share ``coverage`` of the inputs is answered, and its mean ``area``."""

    coverage: Tensor
    risk: Tensor
    area: float

    @checked
    def risk_at(self, coverage: Annotated[float, Bounds(gt=0, le=1)]) -> float:
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
