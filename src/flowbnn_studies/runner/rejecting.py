"""Rejecting as a new class what a network is too unsure of, and how often that is right."""

from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.predictive import CategoricalPredictive

__all__ = ["UNCERTAINTIES", "accuracy_with_new", "threshold_for", "uncertainty"]

UNCERTAINTIES = {"nll": "NLL*", "entropy": "entropy*", "variance": "total variance"}


def uncertainty(predictive: CategoricalPredictive, name: str) -> Tensor:
    r"""The uncertainties of document 002, section 1.6, from the mean probabilities :math:`p_k^* = \frac1T \sum_t p_{kt}`.

    .. math:: NLL^* = -\log \max_k p_k^*, \qquad H^* = -\sum_k p_k^* \log p_k^*, \qquad
              V_{tot} = \sum_k \frac1T \sum_t (p_{kt} - p_k^*)^2

    >>> import torch
    >>> samples = torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])  # two networks that contradict each other
    >>> predictive = CategoricalPredictive.from_probabilities(samples)
    >>> [round(float(uncertainty(predictive, name)), 4) for name in UNCERTAINTIES]  # log 2, log 2, 2 / 4
    [0.6931, 0.6931, 0.5]
    """
    if name == "nll":
        return predictive.nll()
    return predictive.entropy if name == "entropy" else predictive.total_variance


def threshold_for(scores: Tensor, kept: float = 0.95) -> float:
    """The uncertainty that this share of held-out known inputs does not exceed: no novel input is needed to choose it.

    The smallest of the scores that at least the share ``kept`` of them is at or below.

    >>> import torch
    >>> threshold_for(torch.tensor([0.4, 0.1, 0.3, 0.2]), kept=0.75)
    0.3...
    """
    if not 0.0 < kept <= 1.0:
        raise FlowBNNError(f"kept is a share above 0 and at most 1, not {kept}")
    if not scores.numel():
        raise FlowBNNError("a threshold is chosen on held-out inputs, and there are none")
    ordered = scores.flatten().double().sort().values
    place = min(len(ordered), max(1, -int(-(kept * len(ordered) - 1e-9) // 1))) - 1
    return float(ordered[place])


def accuracy_with_new(
    labels: Tensor, targets: Tensor, known: Tensor, novel: Tensor, threshold: float
) -> dict[str, float]:
    """Accuracy when "new" counts as a class: an input whose uncertainty is above the threshold is called new.

    Args:
        labels, targets: predicted and true classes of the known inputs.
        known, novel: uncertainties of the known and of the novel inputs.
        threshold: above it an input is called new.

    Returns:
        ``accuracy``: the share of all inputs that is right: a known one with its class, a novel one with "new".
        ``found``: the share of novel inputs that is called new. ``lost``: the share of known ones that is.

    >>> import torch
    >>> known, novel = torch.tensor([0.1, 0.2, 0.9, 0.3]), torch.tensor([0.8, 0.2])
    >>> accuracy_with_new(torch.tensor([0, 1, 2, 0]), torch.tensor([0, 1, 2, 1]), known, novel, 0.5)  # (2 + 1) / 6
    {'accuracy': 0.5, 'found': 0.5, 'lost': 0.25}
    """
    if len(known) != len(targets) or len(labels) != len(targets):
        raise FlowBNNError(
            f"{len(targets)} known inputs need as many labels and uncertainties, not {len(labels)} and {len(known)}"
        )
    rejected, found = known.double() > threshold, novel.double() > threshold
    right = int(((labels == targets) & ~rejected).sum()) + int(found.sum())
    return {
        "accuracy": right / (len(targets) + len(novel)),
        "found": float(found.double().mean()),
        "lost": float(rejected.double().mean()),
    }
