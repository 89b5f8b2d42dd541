"""Can an uncertainty score tell inputs like the training data from inputs unlike them?"""

from typing import Literal

import torch
from torch import Tensor

from flowbnn.metrics.selective import check_scores
from flowbnn.options import checked

__all__ = ["novelty_aupr", "novelty_auroc"]


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
