"""Scores of predicted classes and values, and calibration errors."""

import math
from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape
from flowbnn.metrics.checks import (
    check_classification,
    check_probabilities,
    check_values,
    expected_value,
    is_soft,
    mean_as_float,
)
from flowbnn.options import Count, Ge, Hint, check, checked


@checked
def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    r"""Returns the fraction of inputs whose most probable class is the target, :math:`\frac1B \sum_i 1[\arg\max_c p_{ic} = y_i]`.

    Every input has the same weight ("micro" average), regardless of the size of its class.

    Args:
        probabilities: Class probabilities ``[B, C]``, or ``[B, *positions, C]``.
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored. Over soft labels, of the shape of the
            probabilities, the score is an expectation.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]), torch.tensor([0, 1, 1, 1]))
    0.75
    """
    probabilities, targets = check_classification(probabilities, targets)
    return mean_as_float(_label_probability(targets, probabilities.argmax(-1)))


@checked
def negative_log_likelihood(probabilities: Tensor, targets: Tensor) -> float:
    r"""Returns the negative log-likelihood (NLL), the mean of :math:`-\log p_{i y_i}`, in nats.

    It is a proper score (Good, 1952), and infinite if a target has probability zero. For samples of logits use
    :meth:`flowbnn.predictive.CategoricalPredictive.nll`, which stays in the log domain and is more accurate.

    Args:
        probabilities: Class probabilities ``[B, C]``, or ``[B, *positions, C]``.
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored. Over soft labels, of the shape of the
            probabilities, the score is an expectation.

    >>> round(negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 0])), 4)  # log(10) / 2
    1.1513
    """
    probabilities, targets = check_classification(probabilities, targets)
    if is_soft(targets):
        return mean_as_float(-expected_value(probabilities.log(), targets))
    return mean_as_float(-torch.log(probabilities.gather(-1, targets.unsqueeze(-1))))


@checked
def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    r"""Returns the mean squared distance of the probabilities to the one-hot targets, *summed* over classes (Brier, 1950).

    .. math:: \frac1B \sum_i \sum_c (p_{ic} - 1[y_i = c])^2 \in [0, 2].

    For two classes this is twice the score of the probability of one class. Some papers divide by the number of classes.

    Args:
        probabilities: Class probabilities ``[B, C]``, or ``[B, *positions, C]``.
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored. Over soft labels, of the shape of the
            probabilities, the score is an expectation.

    >>> round(brier_score(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([0])), 4)  # 0.09 + 0.04 + 0.01
    0.14
    """
    probabilities, targets = check_classification(probabilities, targets)
    if is_soft(targets):
        # the expectation over labels: the squared distance, and the variance of the one-hot label
        targets = targets.to(probabilities)
        return mean_as_float((probabilities - targets).square().sum(-1) + 1.0 - targets.square().sum(-1))
    one_hot = torch.zeros_like(probabilities).scatter_(-1, targets.unsqueeze(-1), 1.0)
    return mean_as_float((probabilities - one_hot).square().sum(-1))


def _label_probability(targets: Tensor, labels: Tensor) -> Tensor:
    """Returns the probability ``[B]`` that the target is the label: 0 or 1 for class indices, and that of the soft label."""
    return targets.gather(-1, labels.unsqueeze(-1)).squeeze(-1) if is_soft(targets) else labels == targets


class ReliabilityBin(TypedDict):
    """A bar of a reliability diagram. An empty bin has a ``fraction`` of 0 and no confidence and accuracy."""

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
    r"""Returns the expected calibration error (ECE), the weighted mean difference of confidence and accuracy in bins.

    .. math:: \mathrm{ECE} = \sum_b \frac{|B_b|}{B} \, |\mathrm{acc}(B_b) - \mathrm{conf}(B_b)| .

    Unlike torchmetrics, a confidence of exactly 1 belongs to the last bin, and two classes are scored by the predicted class.

    Args:
        probabilities: Class probabilities ``[B, C]``, or ``[B, *positions, C]``.
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored. Over soft labels, of the shape of the
            probabilities, the score is an expectation.
        bins: Number of bins. 15 is common.
        kind: Type of the bins. ``"equal"``: bins ``(low, high]`` of equal width of the largest probability (Guo et al., 2017).
            ``"adaptive"``: bins of equal numbers of inputs; equal confidences share the bin of their middle rank, so that the order of
            the inputs does not matter (Nguyen & O'Connor, 2015). ``"classwise"``: the equal-width error of the probability of each
            class, averaged over classes (Kull et al., 2019; static calibration error of Nixon et al., 2019).

    >>> p = torch.tensor([[0.9, 0.1], [0.9, 0.1], [0.4, 0.6], [0.4, 0.6]])
    >>> y = torch.tensor([0, 1, 1, 1])
    >>> round(calibration_error(p, y), 4)  # (|0.5 - 0.9| + |1 - 0.6|) / 2
    0.4
    >>> round(calibration_error(p, y, bins=1), 4)  # |0.75 - 0.75|: the errors cancel in one bin
    0.0
    """
    probabilities, targets = check_classification(probabilities, targets)
    if kind == "classwise":
        classes = range(probabilities.shape[-1])
        correct = [targets[:, c] if is_soft(targets) else targets == c for c in classes]
        errors = [_weighted_gap(_equal_bins(probabilities[:, c], correct[c], bins)) for c in classes]
        return sum(errors) / len(classes)
    confidence, labels = probabilities.max(-1)
    make_bins = _equal_bins if kind == "equal" else _adaptive_bins
    return _weighted_gap(make_bins(confidence, _label_probability(targets, labels), bins))


@checked
def reliability(probabilities: Tensor, targets: Tensor, bins: Count = 15) -> list[ReliabilityBin]:
    r"""Returns the bars of a reliability diagram (DeGroot & Fienberg, 1983) with equal-width bins ``(low, high]`` of the confidence.

    The ``fraction`` of a bin is the fraction of the inputs in it. :func:`calibration_error` is therefore the sum of
    ``fraction * abs(accuracy - confidence)``.

    Args:
        probabilities: Class probabilities ``[B, C]``, or ``[B, *positions, C]``.
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored. Over soft labels, of the shape of the
            probabilities, the score is an expectation.
        bins: Number of bins.

    Returns:
        Plain Python values that JSON can store.

    >>> p = torch.tensor([[0.875, 0.125], [0.875, 0.125], [0.375, 0.625], [0.375, 0.625]])
    >>> for bar in reliability(p, torch.tensor([0, 1, 1, 1]), bins=4):
    ...     print(bar)
    {'low': 0.0, 'high': 0.25, 'confidence': None, 'accuracy': None, 'fraction': 0.0}
    {'low': 0.25, 'high': 0.5, 'confidence': None, 'accuracy': None, 'fraction': 0.0}
    {'low': 0.5, 'high': 0.75, 'confidence': 0.625, 'accuracy': 1.0, 'fraction': 0.5}
    {'low': 0.75, 'high': 1.0, 'confidence': 0.875, 'accuracy': 0.5, 'fraction': 0.5}
    """
    probabilities, targets = check_classification(probabilities, targets)
    confidence, labels = probabilities.max(-1)
    contents = _equal_bins(confidence, _label_probability(targets, labels), bins).T.tolist()
    return [
        ReliabilityBin(
            low=index / bins,
            high=(index + 1) / bins,
            confidence=confidences / count if count else None,
            accuracy=num_correct / count if count else None,
            fraction=count / len(targets),
        )
        for index, (count, confidences, num_correct) in enumerate(contents)
    ]


@checked
def calibration_floor(
    predictions: Tensor | Sequence[ReliabilityBin], number: Count | None = None, bins: Count = 15
) -> float:
    r"""Returns the expected calibration error of a perfectly calibrated classifier on a test set of this size.

    In a bin of :math:`n_b` inputs with mean confidence :math:`c_b`, the number of correct predictions of a perfectly calibrated
    classifier is binomial. The mean distance of its accuracy from :math:`c_b` is not zero (de Moivre's formula):

    .. math:: \mathrm{floor} = \sum_b \frac{n_b}{n} \, \mathbb E \left| \tfrac1{n_b} \mathrm{Bin}(n_b, c_b) - c_b \right| , \qquad
        \mathbb E \, |\mathrm{Bin}(m, p) - m p| = 2 k \tbinom mk p^k (1 - p)^{m - k + 1} , \; k = \lfloor m p \rfloor + 1 .

    A calibration error near the floor is not significantly different from zero, and does not rank two classifiers. The confidences in a
    bin are assumed to be equal, which overestimates the floor by a few parts in a thousand for 15 bins.

    Args:
        predictions: Class probabilities ``[B, C]`` or ``[B, *positions, C]``, or the bars of :func:`reliability`.
        number: Number of inputs of the bars.
        bins: Number of bins of the probabilities.

    >>> p = torch.tensor([[0.875, 0.125], [0.875, 0.125], [0.375, 0.625], [0.375, 0.625]])
    >>> round(calibration_floor(p, bins=4), 4)
    0.2422
    """
    if isinstance(predictions, Tensor):
        probabilities = check_probabilities(predictions)
        predictions = reliability(probabilities, probabilities.argmax(-1), bins)
        number = probabilities[..., 0].numel()
    check("number", number, Annotated[int, Ge(1), Hint("number of inputs")])
    assert number is not None
    total = 0.0
    for bar in predictions:
        count, chance = round(number * bar["fraction"]), bar["confidence"]
        if count and chance is not None and 0.0 < chance < 1.0:
            k = math.floor(count * chance) + 1
            log_binomial = math.lgamma(count + 1) - math.lgamma(k + 1) - math.lgamma(count - k + 1)
            log_power = k * math.log(chance) + (count - k + 1) * math.log1p(-chance)
            total += 2.0 * math.exp(math.log(k) + log_binomial + log_power)
    return total / number


def _equal_bins(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Returns the contents of bins of equal width."""
    # the edges are rounded in the precision of the confidence, so that a float32 0.6 equals the edge 9 / 15
    edges = torch.arange(1, bins, device=confidence.device, dtype=confidence.dtype) / bins
    index = torch.bucketize(confidence.detach().contiguous(), edges)
    return _bin_contents(index, confidence, correct, bins)


def _adaptive_bins(confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Returns the contents of bins of equal numbers of inputs."""
    _, inverse, counts = confidence.detach().unique(return_inverse=True, return_counts=True)
    twice_middle_rank = 2 * counts.cumsum(0) - counts - 1
    index = (twice_middle_rank * bins // (2 * len(confidence)))[inverse]
    return _bin_contents(index, confidence, correct, bins)


def _bin_contents(index: Tensor, confidence: Tensor, correct: Tensor, bins: int) -> Tensor:
    """Returns the number of inputs, the sum of confidences and the number correct of each bin, ``[3, bins]``, in float64."""
    columns = (torch.ones_like(confidence), confidence, correct)
    weights = [column.detach().cpu().double() for column in columns]
    return torch.stack([torch.bincount(index.cpu(), weights=weight, minlength=bins) for weight in weights])


def _weighted_gap(contents: Tensor) -> float:
    """Returns sum_b (n_b / n) |acc_b - conf_b|, in which n_b cancels."""
    count, confidence, correct = contents
    return float((correct - confidence).abs().sum() / count.sum())


# -------------------- regression


@checked
def root_mean_squared_error(predictions: Tensor, targets: Tensor) -> float:
    r"""Returns :math:`\sqrt{\frac{1}{BD} \sum_{id} (\hat y_{id} - y_{id})^2}`, in the unit of the targets.

    Args:
        predictions: Predicted values ``[B, D]``.
        targets: Targets of the same shape, or ``[B]`` if D is 1.

    >>> root_mean_squared_error(torch.tensor([[1.0], [2.0]]), torch.tensor([4.0, 6.0]))  # sqrt((9 + 16) / 2)
    3.5355...
    """
    predictions = check_values(predictions, "predictions")
    targets = check_values(targets, "targets", predictions.shape).to(predictions.device)
    return math.sqrt(mean_as_float((predictions - targets).square()))


@checked
def interval_coverage(low: Tensor, high: Tensor, targets: Tensor) -> float:
    r"""Returns the fraction of targets inside their intervals, :math:`\frac{1}{BD} \sum_{id} 1[l_{id} \le y_{id} \le h_{id}]`.

    Calibrated intervals of mass 0.9 cover 0.9 of unseen targets. A lower coverage means overconfidence.

    Args:
        low: Lower ends ``[B, D]``.
        high: Upper ends ``[B, D]``.
        targets: Targets of the same shape, or ``[B]`` if D is 1.

    Raises:
        FlowBNNError: If the shapes differ, or if a lower end is above its upper end.

    >>> interval_coverage(torch.zeros(4, 1), torch.ones(4, 1), torch.tensor([0.5, 1.0, 1.5, -1.0]))
    0.5
    """
    low, high = check_values(low, "low"), check_values(high, "high")
    check_shape("high", high, low.shape)
    check_entries("low", low, low <= high, "at most high")
    targets = check_values(targets, "targets", low.shape).to(low.device)
    return mean_as_float((low <= targets) & (targets <= high))
