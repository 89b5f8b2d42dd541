"""Metrics of the order of uncertainties: detection of novel inputs, and of wrong predictions."""

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from flowbnn.errors import check_shape, value_error
from flowbnn.metrics.checks import check_scores
from flowbnn.options import Bounds, checked


@checked
def novelty_auroc(known_scores: Tensor, novel_scores: Tensor) -> float:
    r"""Returns the area under the ROC curve (AUROC) of the detection of novel inputs.

    It is the probability that a novel input has a higher score than a known one. Ties count one half.

    .. math:: \frac{1}{NM} \sum_{i,j} \left( 1[n_j > k_i] + \tfrac12 1[n_j = k_i] \right)

    Random scores have an AUROC of 0.5 (Hendrycks & Gimpel, 2017, https://arxiv.org/abs/1610.02136). Only the order of the scores
    matters.

    Args:
        known_scores: Uncertainties of known inputs, ``[N]``, such as the entropy, the mutual information, or minus the confidence.
        novel_scores: Uncertainties of novel inputs, ``[M]``.

    >>> novelty_auroc(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5]))  # correct for 5 of 6 pairs
    0.833...
    """
    known, novel = _count_scores(known_scores, novel_scores)
    known_below = known.cumsum(0) - 0.5 * known
    return float((novel * known_below).sum() / (novel.sum() * known.sum()))


@checked
def novelty_aupr(
    known_scores: Tensor, novel_scores: Tensor, positive: Literal["novel", "known"] = "novel"
) -> float:
    r"""Returns the area under the precision-recall curve (AUPR), as average precision :math:`\sum_t (R_t - R_{t-1}) P_t`.

    Random scores have an AUPR equal to the fraction of positives (Hendrycks & Gimpel, 2017).

    Args:
        known_scores: Uncertainties of known inputs, ``[N]``.
        novel_scores: Uncertainties of novel inputs, ``[M]``.
        positive: Class to detect: ``"novel"`` inputs by high scores ("AUPR-out"), or ``"known"`` inputs by low scores ("AUPR-in").

    >>> novelty_aupr(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5]))  # (1/1 + 2/3) / 2
    0.833...
    """
    known, novel = _count_scores(known_scores, novel_scores)
    positives, negatives = (novel.flip(0), known.flip(0)) if positive == "novel" else (known, novel)
    precision = positives.cumsum(0) / (positives + negatives).cumsum(0)
    return float((positives * precision).sum() / positives.sum())


def _count_scores(known_scores: Tensor, novel_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the numbers of known and of novel inputs with each distinct score, in ascending order of the scores."""
    scores = [check_scores(known_scores, "known_scores"), check_scores(novel_scores, "novel_scores")]
    values, index = torch.cat([tensor.detach().cpu().double() for tensor in scores]).unique(
        return_inverse=True
    )
    known, novel = (
        torch.bincount(group, minlength=len(values)).double()
        for group in index.split([len(tensor) for tensor in scores])
    )
    return known, novel


@dataclass(frozen=True)
class RiskCoverage:
    """Risk-coverage curve of selective prediction.

    Args:
        coverage: Fractions of the inputs that are answered, the most certain first, ``[B]``.
        risk: Error rates on the answered inputs, ``[B]``.
        area: Mean of the error rates over the coverages (AURC).
    """

    coverage: Tensor
    risk: Tensor
    area: float

    @checked
    def risk_at(self, coverage: Annotated[float, Bounds(gt=0, le=1)]) -> float:
        """Returns the error rate if at least this fraction of the inputs is answered.

        Args:
            coverage: Fraction of the inputs.

        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([True, True, True, False]))
        >>> curve.risk_at(0.75), curve.risk_at(1.0)
        (0.0, 0.25)
        """
        answered = (self.coverage >= coverage - 1e-12).nonzero()[0, 0]
        return float(self.risk[answered])


@checked
def risk_coverage(uncertainty: Tensor, correct: Tensor) -> RiskCoverage:
    r"""Returns the risk-coverage curve and the area under it, AURC (Geifman & El-Yaniv, 2017).

    With the inputs in ascending order of their uncertainty,

    .. math:: r_k = \frac1k \sum_{i \le k} 1[\text{wrong}_i], \qquad \mathrm{AURC} = \frac1B \sum_{k=1}^B r_k ,

    at coverages :math:`k/B`. Lower is better. An uninformative uncertainty has the error rate as its AURC. Inputs of equal
    uncertainty are assigned the error rate of their group, which is the expectation over their orders.

    Args:
        uncertainty: Uncertainties of the inputs, ``[B]``.
        correct: Booleans ``[B]``, True for correct predictions.

    Raises:
        FlowBNNError: If ``correct`` is not a boolean tensor of the same shape.

    >>> curve = risk_coverage(torch.tensor([0.3, 0.1, 0.2, 0.4]), torch.tensor([True, True, False, False]))
    >>> curve.coverage.tolist(), curve.risk[[0, 1, 3]].tolist()
    ([0.25, 0.5, 0.75, 1.0], [0.0, 0.5, 0.5])
    >>> round(curve.area, 4)  # (0 + 1/2 + 1/3 + 2/4) / 4
    0.3333
    """
    uncertainty = check_scores(uncertainty, "uncertainty")
    check_shape("correct", correct, uncertainty.shape)
    if correct.dtype != torch.bool:
        raise value_error("correct", "boolean", correct.dtype, kind="shape")
    _, group, counts = uncertainty.detach().cpu().unique(return_inverse=True, return_counts=True)
    errors = torch.bincount(group, weights=(~correct).cpu().double(), minlength=len(counts)) / counts
    answered = torch.arange(1, len(group) + 1, dtype=torch.float64)
    risk = errors.repeat_interleave(counts).cumsum(0) / answered
    return RiskCoverage(answered / len(group), risk, risk.mean().item())
