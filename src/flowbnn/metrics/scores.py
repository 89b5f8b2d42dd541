"""Scores of predicted classes and values, and whether a confidence of 80 % means right four times of five."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics.checks import average, check_probabilities, check_scored, check_values
from flowbnn.options import Count, Ge, Hint, check, checked


@checked
def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    r"""Share of inputs whose most probable class is the target: :math:`\frac1B \sum_i 1[\arg\max_c p_{ic} = y_i]`.

    Every input counts the same ("micro"), whatever the size of its class.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]), torch.tensor([0, 1, 1, 1]))
    0.75
    """
    probabilities, targets = check_scored(probabilities, targets)
    return average(probabilities.argmax(-1) == targets)


@checked
def negative_log_likelihood(probabilities: Tensor, targets: Tensor) -> float:
    r"""Mean of :math:`-\log p_{i y_i}`, in nats; a proper score (Good, 1952), infinite when a target had probability zero.

    From samples, :meth:`flowbnn.predictive.CategoricalPredictive.nll` is more exact: it never leaves the log domain.

    >>> round(negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 0])), 4)  # log(10) / 2
    1.1513
    """
    probabilities, targets = check_scored(probabilities, targets)
    return average(-torch.log(probabilities.gather(-1, targets.unsqueeze(-1))))


@checked
def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    r"""Mean squared distance of the probabilities to the one-hot target, *summed* over classes (Brier, 1950):

    .. math:: \frac1B \sum_i \sum_c (p_{ic} - 1[y_i = c])^2 \in [0, 2].

    With two classes that is twice the score that looks at one class's probability only; some papers divide by the number
    of classes.

    >>> round(brier_score(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([0])), 4)  # 0.09 + 0.04 + 0.01
    0.14
    """
    probabilities, targets = check_scored(probabilities, targets)
    aim = torch.zeros_like(probabilities).scatter_(-1, targets.unsqueeze(-1), 1.0)
    return average((probabilities - aim).square().sum(-1))


class ReliabilityBin(TypedDict):
    """One bar of a reliability diagram; an empty bin has ``fraction`` 0 and no confidence or accuracy."""

    low: float
    high: float
    confidence: float | None
    accuracy: float | None
    fraction: float


@checked
def calibration_error(
    probabilities: Tensor,
    targets: Tensor,
    bins: Count = 15,
    kind: Literal["equal", "adaptive", "classwise"] = "equal",
) -> float:
    r"""Expected calibration error, the mean gap between confidence and accuracy weighed by each bin's share of the inputs:

    .. math:: \mathrm{ECE} = \sum_b \frac{|B_b|}{B} \, |\mathrm{acc}(B_b) - \mathrm{conf}(B_b)| .

    Args:
        probabilities: ``[B, C]``.
        targets: class indices ``[B]``.
        bins: number of bins; 15 is the custom.
        kind: ``"equal"``: bins ``(low, high]`` of equal width on the largest probability (Guo et al., 2017);
            ``"adaptive"``: bins of equal numbers of inputs, equal confidences kept together in the bin of
            their middle rank, so the order of the inputs never matters (Nguyen & O'Connor, 2015);
            ``"classwise"``: the equal-width error of each class's own probability against "is it this class", averaged
            over classes (Kull et al., 2019; static calibration error of Nixon et al., 2019).

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> y = torch.tensor([0, 1, 1, 1])
    >>> round(calibration_error(p, y), 4)  # (|0.5 - 0.9| + |1 - 0.6|) / 2
    0.4
    >>> round(calibration_error(p, y, bins=1), 4)  # |0.75 - 0.75|: one bin hides everything
    0.0
    """
    probabilities, targets = check_scored(probabilities, targets)
    if kind == "classwise":
        classes = range(probabilities.shape[-1])
        return sum(_gap(_equal(probabilities[:, c], targets == c, bins)) for c in classes) / len(classes)
    confidence, labels = probabilities.max(-1)
    fill = _equal if kind == "equal" else _adaptive
    return _gap(fill(confidence, labels == targets, bins))


@checked
def reliability(probabilities: Tensor, targets: Tensor, bins: Count = 15) -> list[ReliabilityBin]:
    r"""The bars of a reliability diagram (DeGroot & Fienberg, 1983): equal-width bins ``(low, high]`` of the confidence.

    ``fraction`` is the bin's share of the inputs, so that ``calibration_error`` is the sum of
    ``fraction * abs(accuracy - confidence)``. Plain Python values, ready for JSON.

    >>> p = torch.tensor([[0.875, 0.125], [0.875, 0.125], [0.375, 0.625], [0.375, 0.625]])
    >>> for bar in reliability(p, torch.tensor([0, 1, 1, 1]), bins=4):
    ...     print(bar)
    {'low': 0.0, 'high': 0.25, 'confidence': None, 'accuracy': None, 'fraction': 0.0}
    {'low': 0.25, 'high': 0.5, 'confidence': None, 'accuracy': None, 'fraction': 0.0}
    {'low': 0.5, 'high': 0.75, 'confidence': 0.625, 'accuracy': 1.0, 'fraction': 0.5}
    {'low': 0.75, 'high': 1.0, 'confidence': 0.875, 'accuracy': 0.5, 'fraction': 0.5}
    """
    probabilities, targets = check_scored(probabilities, targets)
    confidence, labels = probabilities.max(-1)
    bars = []
    for index, (count, total, right) in enumerate(_equal(confidence, labels == targets, bins).T.tolist()):
        bar = ReliabilityBin(
            low=index / bins,
            high=(index + 1) / bins,
            confidence=total / count if count else None,
            accuracy=right / count if count else None,
            fraction=count / len(targets),
        )
        bars.append(bar)
    return bars


@checked
def calibration_floor(
    given: Tensor | Sequence[ReliabilityBin], number: Count | None = None, bins: Count = 15
) -> float:
    r"""The calibration error that is left when every probability is right: what chance alone makes of a test set of this size.

    Of the :math:`n_b` inputs in a bin of mean confidence :math:`c_b`, a perfectly calibrated classifier gets a binomial number right,
    and the mean distance of its share from :math:`c_b` is not zero (de Moivre's formula):

    .. math:: \mathrm{floor} = \sum_b \frac{n_b}{n} \, \mathbb E \left| \tfrac1{n_b} \mathrm{Bin}(n_b, c_b) - c_b \right| , \qquad
        \mathbb E \, |\mathrm{Bin}(m, p) - m p| = 2 k \tbinom mk p^k (1 - p)^{m - k + 1} , \; k = \lfloor m p \rfloor + 1 .

    An error near its floor cannot be told from zero, and does not rank two classifiers. The confidences within a
    bin are taken as equal, which overstates the floor by a few parts in a thousand for 15 bins.

    Args:
        given: probabilities ``[B, C]``, or the bars of :func:`reliability`.
        number: of inputs that bars were counted on.
        bins: of the probabilities' confidences.

    >>> p = torch.tensor([[0.875, 0.125], [0.875, 0.125], [0.375, 0.625], [0.375, 0.625]])
    >>> round(calibration_floor(p, bins=4), 4)
    0.2422
    """
    if isinstance(given, Tensor):
        given = check_probabilities(given)
        given, number = reliability(given, given.argmax(-1), bins), len(given)
    counted = Annotated[int, Ge(1), Hint("give the number of inputs that the bars were counted on")]
    check("number", number, counted)
    assert number is not None
    total = 0.0
    for bar in given:
        count, chance = round(number * bar["fraction"]), bar["confidence"]
        if count and chance is not None and 0.0 < chance < 1.0:
            above = math.floor(count * chance) + 1
            total += 2.0 * math.exp(
                math.log(above)
                + math.lgamma(count + 1)
                - math.lgamma(above + 1)
                - math.lgamma(count - above + 1)
                + above * math.log(chance)
                + (count - above + 1) * math.log1p(-chance)
            )
    return total / number


def _equal(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    # the edges k / bins are rounded in the confidence's own precision, so that a float32 0.6 meets the edge 9 / 15 exactly
    edges = torch.arange(1, bins, device=confidence.device, dtype=confidence.dtype) / bins
    return _fill(torch.bucketize(confidence.detach().contiguous(), edges), confidence, correct, bins)


def _adaptive(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    _, inverse, counts = confidence.detach().unique(return_inverse=True, return_counts=True)
    twice_middle_rank = 2 * counts.cumsum(0) - counts - 1
    return _fill((twice_middle_rank * bins // (2 * len(confidence)))[inverse], confidence, correct, bins)


def _fill(index: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Number of inputs, sum of confidences and number right in each bin, ``[3, bins]``, in double precision."""
    parts = [part.detach().cpu().double() for part in (torch.ones_like(confidence), confidence, correct)]
    return torch.stack([torch.bincount(index.cpu(), weights=part, minlength=bins) for part in parts])


def _gap(filled: Tensor) -> float:
    """sum_b (n_b / n) |acc_b - conf_b|, in which the n_b cancels."""
    count, confidence, correct = filled
    return float((correct - confidence).abs().sum() / count.sum())


# -------------------- regression


@checked
def root_mean_squared_error(predictions: Tensor, targets: Tensor) -> float:
    r""":math:`\sqrt{\frac{1}{BD} \sum_{id} (\hat y_{id} - y_{id})^2}`, in the target's own unit.

    Predictions are ``[B, D]``; targets have the same shape, or ``[B]`` when D is 1.

    >>> root_mean_squared_error(torch.tensor([[1.0], [2.0]]), torch.tensor([4.0, 6.0]))  # sqrt((9 + 16) / 2)
    3.5355...
    """
    predictions = check_values(predictions, "predictions")
    targets = check_values(targets, "targets", predictions.shape).to(predictions.device)
    return math.sqrt(average((predictions - targets).square()))


@checked
def interval_coverage(low: Tensor, high: Tensor, targets: Tensor) -> float:
    r"""Share of targets inside their interval: :math:`\frac{1}{BD} \sum_{id} 1[l_{id} \le y_{id} \le h_{id}]`.

    A calibrated interval of mass 0.9 covers 0.9 of unseen targets; below is overconfident, above underconfident.

    >>> interval_coverage(torch.zeros(4, 1), torch.ones(4, 1), torch.tensor([0.5, 1.0, 1.5, -1.0]))
    0.5
    """
    low, high = check_values(low, "low"), check_values(high, "high")
    if low.shape != high.shape or (low > high).any():
        raise FlowBNNError("low and high must have one shape, and low must not lie above high")
    targets = check_values(targets, "targets", low.shape).to(low.device)
    return average((low <= targets) & (targets <= high))
