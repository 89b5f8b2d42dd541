"""Held-out data that cannot calibrate a network: too few examples, equal targets, a missing class, or labels that contradict it."""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import pluralize, warn
from flowbnn.methods.calibrators.lbfgs import minimize_batch
from flowbnn.metrics.checks import IGNORED
from flowbnn.posterior.report import Difference
from flowbnn.predictive import CategoricalPredictive

# fewer examples cannot be split into two folds of two
MIN_EXAMPLES = 4


class LabelProblem(NamedTuple):
    """Reason why labels cannot calibrate a network.

    Args:
        kind: Kind of the warning.
        message: Message of the warning.
    """

    kind: str
    message: str


def find_one_class(targets: Tensor) -> LabelProblem | None:
    """Returns a problem if all examples are of one class.

    Args:
        targets: Class labels ``[N]`` or ``[N, *positions]``, or soft labels with an axis of classes.
    """
    present = distinct_classes(hard_labels(targets))
    if len(present) != 1:
        return None
    number = pluralize(len(targets), "held-out example")
    text = f"{number} of class {int(present)} and of no other class; provide all classes"
    return LabelProblem("classes", text)


def find_missing_class(predictive: Any, targets: Tensor) -> LabelProblem | None:
    r"""Returns a problem if a class has no example although the network often predicts it.

    Ignored positions do not count, and soft labels are not checked.

    If the probabilities :math:`p_i` of a class are right, it has no example with probability
    :math:`\prod_i (1 - p_i) \le e^{-\sum_i p_i}`. This is a problem if the bound is below 0.01, divided by the number of classes.

    Args:
        predictive: Predictive distribution of the network for the examples.
        targets: Class labels ``[N]`` or ``[N, *positions]``, or soft labels with an axis of classes.
    """
    if targets.is_floating_point():  # soft labels give every class some probability
        return None
    probabilities = predictive.probabilities.cpu()
    rows, classes = len(probabilities), probabilities.shape[-1]
    labels = hard_labels(targets).reshape(rows, -1)
    counts = labels != IGNORED
    # the positions of an example are not independent, so that they count as one
    shares = counts / counts.sum(1, keepdim=True).clamp(min=1)
    expected = (probabilities.reshape(rows, -1, classes) * shares.unsqueeze(-1)).sum((0, 1))
    expected[labels[counts]] = 0.0
    missing = int(expected.argmax())
    if float(expected[missing]) <= math.log(100.0 * classes):
        return None
    number = f"{float(expected[missing]):.0f} of {int(counts.any(1).sum())}"
    text = f"no held-out example has class {missing}, but the network expects {number}; provide examples of all classes"
    return LabelProblem("missing class", text)


def find_contradiction(predictive: Any, targets: Tensor) -> LabelProblem | None:
    r"""Returns a problem if class frequencies predict significantly better than the network, and its logits do not improve them.

    The logits help if :math:`a` is significantly positive in :math:`\mathrm{softmax}(a \log p + b)` with an offset :math:`b` for each
    class. A network whose only fault is wrong class frequencies therefore passes.

    Args:
        predictive: Predictive distribution of the network for the examples.
        targets: Class labels ``[N]`` or ``[N, *positions]``, or soft labels with an axis of classes.
    """
    labels, log_probabilities = hard_labels(targets), predictive.log_probabilities.cpu()
    classes, valid = log_probabilities.shape[-1], labels != IGNORED
    counts = torch.bincount(labels[valid], minlength=classes).double()
    left_out = (counts[labels.clamp(min=0)] - 1.0 + 1.0 / classes) / int(valid.sum())
    frequencies = torch.where(valid, -left_out.log(), 0.0).reshape(len(labels), -1).sum(1)
    flat = targets.flatten() if targets.numel() == len(targets) else targets
    gap = Difference.of(predictive.nll(flat).double().cpu(), frequencies)
    if gap.mean <= 2.0 * gap.error:
        return None
    step = 1 + int(valid.sum()) // 2**17  # a subset of many positions suffices
    log_p = log_probabilities[valid][::step].clamp(min=-1e3)
    used = labels[valid][::step]

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        # the first problem has a slope, the second has none; a weak penalty keeps offsets of absent classes finite
        logits = (x[:, :1] * (rows == 0)[:, None])[..., None] * log_p + x[:, None, 1:]
        nll = -logits.log_softmax(-1)[:, torch.arange(len(used)), used].sum(1)
        return (nll + 0.01 * x.square().sum(1)) / len(used)

    x = minimize_batch(objective, log_p.new_zeros(2, 1 + classes))
    values = len(used) * objective(x, torch.arange(2))
    if float(x[0, 0]) > 0.0 and float(values[1] - values[0]) >= 2.0:  # two nats are two standard errors
        return None
    text = "class frequencies predict the labels better than the network; check the order of the classes"
    return LabelProblem("labels", text)


def find_equal_targets(targets: Tensor) -> LabelProblem | None:
    """Returns a problem if several real-valued targets are equal.

    Args:
        targets: Targets ``[N, ...]``.
    """
    if len(targets) < 2 or not bool((targets == targets[:1]).all()):
        return None
    text = f"all {len(targets)} held-out targets are equal; provide targets that differ"
    return LabelProblem("targets", text)


def find_few_examples(number: int) -> LabelProblem | None:
    """Returns a problem if there are fewer than :data:`MIN_EXAMPLES` examples.

    Args:
        number: Number of held-out examples.
    """
    if number >= MIN_EXAMPLES:
        return None
    return LabelProblem(
        "examples", f"a calibration needs at least {MIN_EXAMPLES} held-out examples, got {number}"
    )


def warn_unusable(predictive: Any, targets: Tensor) -> bool:
    """Warns if no calibrator can be fitted: too few examples, examples of one class, or equal targets.

    Args:
        predictive: Predictive distribution of the network for the held-out examples.
        targets: Targets of the examples.

    Returns:
        True if predictions must not be changed.
    """
    has_classes = isinstance(predictive, CategoricalPredictive)
    problem = find_one_class(targets) if has_classes else find_equal_targets(targets)
    problem = problem or find_few_examples(len(targets))
    if problem is not None:
        warn(f"{problem.message}; predictions not changed", kind=problem.kind)
    return problem is not None


def warn_contradiction(predictive: Any, targets: Tensor) -> None:
    """Warns if labels contradict the predictions of a network.

    Args:
        predictive: Predictive distribution of the network for the held-out examples.
        targets: Class labels or soft labels of the examples, or other targets, which are not checked.
    """
    if not isinstance(predictive, CategoricalPredictive):
        return
    contradiction = find_contradiction(predictive, targets)
    if contradiction is not None:
        warn(contradiction.message, kind=contradiction.kind)


def hard_labels(targets: Tensor) -> Tensor:
    """Returns class labels ``[N]`` or ``[N, *positions]`` on the CPU, of soft labels the most probable class."""
    labels = targets.argmax(-1) if targets.is_floating_point() else targets
    return (labels.flatten() if labels.numel() == len(labels) else labels).long().cpu()


def distinct_classes(labels: Tensor) -> Tensor:
    """Returns the classes that occur among labels. Ignored positions do not count."""
    return labels[labels != IGNORED].unique() if labels.ndim > 1 else labels.unique()
