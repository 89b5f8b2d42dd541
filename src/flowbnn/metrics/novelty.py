"""Can an uncertainty score tell inputs like the training data from inputs unlike them?"""

from typing import Literal

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.metrics.checks import check_scores

__all__ = ["novelty_aupr", "novelty_auroc"]


def novelty_auroc(known_scores: Tensor, novel_scores: Tensor) -> float:
    r"""Area under the ROC curve: the chance that a novel input scores higher than a known one, ties counting half.

    .. math:: \frac{1}{NM} \sum_{i,j} \left( 1[n_j > k_i] + \tfrac12 1[n_j = k_i] \right)

    One half is guessing. Scores are uncertainties (entropy, mutual information, minus confidence): higher means more novel
    (Hendrycks & Gimpel, 2017). Any scale will do, since only the order counts.

    >>> novelty_auroc(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5]))  # right in 5 of 6 pairs
    0.833...
    """
    from torchmetrics.functional.classification import binary_auroc  # here: it is slow, and brings pyplot

    ranks, novel = _ranked(known_scores, novel_scores)
    return float(binary_auroc(ranks, novel))


def novelty_aupr(
    known_scores: Tensor, novel_scores: Tensor, positive: Literal["novel", "known"] = "novel"
) -> float:
    r"""Area under the precision-recall curve, as average precision :math:`\sum_t (R_t - R_{t-1}) P_t` over thresholds.

    The positives are the inputs to be found: ``"novel"`` ones by high scores ("AUPR-out"), or ``"known"`` ones by low
    scores ("AUPR-in"). Guessing gives the share of the positives, not one half (Hendrycks & Gimpel, 2017).

    >>> novelty_aupr(torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.3, 0.5]))  # (1/1 + 2/3) / 2
    0.833...
    """
    if positive not in ("novel", "known"):
        raise FlowBNNError(f"unknown positive '{positive}'{nearest(positive, ['novel', 'known'])}")
    from torchmetrics.functional.classification import binary_average_precision

    ranks, novel = _ranked(known_scores, novel_scores)
    if positive == "known":
        ranks, novel = 1.0 - ranks, 1 - novel
    return float(binary_average_precision(ranks, novel))


def _ranked(known_scores: Tensor, novel_scores: Tensor) -> tuple[Tensor, Tensor]:
    """Scores as dense ranks in [0, 1], and 1 where the input is novel.

    Ranks, because torchmetrics squeezes scores outside [0, 1] through a sigmoid, which ties entropies or log-densities
    that differ: it gives 0.5 for known (100, 101) and novel (102, 103), where 1 is right.
    """
    known, novel = check_scores(known_scores, "known_scores"), check_scores(novel_scores, "novel_scores")
    known, novel = known.detach().cpu().double(), novel.detach().cpu().double()
    _, ranks = torch.cat([known, novel]).unique(return_inverse=True)
    is_novel = torch.arange(len(ranks)) >= len(known)
    return ranks.double() / ranks.max().clamp(min=1), is_novel.long()
