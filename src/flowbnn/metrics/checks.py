"""Checks of the tensors that metrics and predictives take. Without them, wrong tensors would give wrong numbers instead of errors."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, check_entries, check_shape, requirement_error, value_error
from flowbnn.numerics import is_concrete

IGNORED = -100
"""Label of positions without a target, such as padding. Losses of torch ignore the same label."""


def mean_as_float(values: Tensor) -> float:
    """Returns the mean as a Python number, summed in double precision."""
    return values.detach().cpu().double().mean().item()


def to_floating_point(values: Tensor, name: str) -> Tensor:
    """Returns a floating point tensor in at least single precision.

    Args:
        values: Tensor to convert.
        name: Name of the argument.

    Raises:
        FlowBNNError: If the tensor is not a floating point one.
    """
    if not values.is_floating_point():
        raise value_error(name, "floating point", values.dtype, kind="dtype")
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_probabilities(probabilities: Tensor, leading: Sequence[str] = ("batch >= 1",)) -> Tensor:
    """Returns class probabilities in at least single precision.

    Args:
        probabilities: Probabilities ``[..., C]`` of at least two classes.
        leading: Names of the first axes, which any number of axes of positions may follow.

    Raises:
        FlowBNNError: If the shape is wrong, or if rows are negative or do not sum to one.
    """
    values = to_floating_point(probabilities, "probabilities")
    extra = ["..."] if probabilities.ndim > len(leading) + 1 else []
    axes = (*leading, *extra, "classes >= 2")
    check_shape("probabilities", probabilities, axes, hint="stack (1 - p, p) for one class")
    valid = (probabilities >= 0).all(-1) & ((probabilities.sum(-1) - 1).abs() <= 1e-3)  # False for NaN
    check_entries("probabilities", values, valid, "nonnegative with sum 1", hint="use softmax")
    return values


def is_soft(targets: Tensor) -> bool:
    """Returns True if targets have the shape and the type of soft labels, floating point numbers ``[B, C]`` of two or more classes."""
    return targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] > 1


def are_binary(targets: Tensor) -> bool:
    """Returns True if targets are labels 0 and 1, both of which occur. Ignored entries do not count.

    >>> are_binary(torch.tensor([[1.0, 0.0], [0.0, 0.0]])), are_binary(torch.zeros(3))
    (True, False)
    """
    zeros, ones = targets == 0, targets == 1
    return bool(zeros.any()) and bool(ones.any()) and bool((zeros | ones | (targets == IGNORED)).all())


def are_probabilities(targets: Tensor) -> bool:
    """Returns True if targets are soft labels: floating point rows ``[B, C]`` that are not negative and sum to one.

    >>> are_probabilities(torch.tensor([[0.9, 0.1], [0.5, 0.5]])), are_probabilities(torch.tensor([[0.9, 0.2]]))
    (True, False)
    """
    if not is_soft(targets) or not len(targets):
        return False
    sums, tolerance = targets.double().sum(-1), max(1e-3, torch.finfo(targets.dtype).eps)
    return bool((targets >= 0).all()) and bool(((sums - 1.0).abs() <= tolerance).all())


def expected_value(values: Tensor, targets: Tensor) -> Tensor:
    """Returns the expectation ``[...]`` of values ``[..., C]`` over soft labels. Classes of probability zero may be infinite."""
    targets = targets.to(values)
    return torch.where(targets > 0, targets * values, 0.0).sum(-1)


def check_classification(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the arguments of a classification metric on the same device, as rows ``[M, C]`` and targets ``[M]`` or ``[M, C]``.

    Args:
        probabilities: Class probabilities ``[B, C]``, or ``[B, *positions, C]``.
        targets: Class indices ``[B]`` or ``[B, *positions]``, or soft labels of the shape of the probabilities. Positions with the
            label -100 are left out.

    Raises:
        FlowBNNError: If there are no rows, or if an argument is invalid.
    """
    probabilities = check_probabilities(probabilities)
    *shape, classes = probabilities.shape
    if len(shape) > 1 and tuple(targets.shape) == tuple(shape[1:]):  # samples that were not averaged
        check_shape("probabilities", probabilities, (*shape[1:], classes), "average over samples")
    targets = check_classes(targets, shape, classes).to(probabilities.device)
    return select_valid(probabilities, targets) if len(shape) > 1 else (probabilities, targets)


def select_valid(values: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the rows ``[M, C]`` of values ``[B, *positions, C]`` at positions that have a target, and their targets.

    Args:
        values: Values ``[B, *positions, C]``.
        targets: Class indices ``[B, *positions]``, of which -100 is ignored, or soft labels ``[B, *positions, C]``.

    Raises:
        FlowBNNError: If no position has a target.
    """
    values = values.flatten(0, -2)
    if targets.is_floating_point():
        return values, targets.flatten(0, -2)
    targets = targets.flatten()
    valid = targets != IGNORED
    check_any_target(valid)
    return values[valid], targets[valid]


def check_any_target(valid: Tensor) -> None:
    """Raises FlowBNNError if all targets are ignored.

    Args:
        valid: True for targets that are not ignored.
    """
    if not bool(valid.any()):
        text = f"all {valid.numel()} targets have the ignored label; leave out examples without labels, or check ignore_index"
        raise FlowBNNError(text, kind="targets", argument="targets")


def check_integers(name: str, values: Tensor, kind: str = "shape", hint: str = "") -> None:
    """Raises FlowBNNError if a tensor holds real numbers instead of integers.

    Args:
        name: Name of the argument.
        values: Tensor to check.
        kind: Kind of the error.
        hint: Advice that follows the message.
    """
    if values.is_floating_point():
        raise value_error(name, "integers", values.dtype, hint or f"use {name}.long()", kind=kind)


def check_hard_labels(targets: Tensor, subject: str, argument: str = "targets") -> None:
    """Raises FlowBNNError if targets are soft labels.

    Args:
        targets: Class indices or soft labels.
        subject: Name of what needs class indices.
        argument: Name of the argument that holds the targets.
    """
    if targets.is_floating_point():
        value, hint = "soft labels", "use targets.argmax(-1)"
        raise requirement_error(subject, "class indices", value, hint, kind="targets", argument=argument)


def check_classes(targets: Tensor, shape: Sequence[int], classes: int, kind: str | None = None) -> Tensor:
    """Returns class indices as ``int64``, and soft labels unchanged.

    Args:
        targets: Class indices from 0 to ``classes - 1``, or soft labels. Positions may have the label -100.
        shape: Shape of class indices, ``(inputs, *positions)``. Soft labels have another axis of size ``classes``.
        classes: Number of classes.
        kind: Kind of the error. By default ``"shape"`` for a wrong shape or dtype and ``"range"`` for a wrong label.

    Raises:
        FlowBNNError: If the shape, the dtype or a label is wrong.
    """
    inputs, *positions = shape
    if targets.is_floating_point() and targets.shape == (*shape, classes):
        valid = (targets >= 0).all(-1) & ((targets.double().sum(-1) - 1.0).abs() <= 1e-3)
        check_entries("targets", targets, valid, "nonnegative with sum 1", kind=kind or "range")
        return targets
    hints = {
        (inputs, 1, *positions): "use targets.squeeze(1)",
        (inputs, classes): "use targets.argmax(1) for one-hot labels",
    }
    hint = hints.get(tuple(targets.shape), "")
    check_shape("targets", targets, tuple(shape), hint, kind or "shape")
    check_integers("targets", targets, kind or "shape", "use targets.long() or likelihood='gaussian'")
    if targets.dtype == torch.int64 and targets.numel() and is_concrete(targets):
        low, high = targets.aminmax()  # in a third of the time of the comparisons of all labels
        if low >= 0 and high < classes:
            return targets.long()
    valid = (targets >= 0) & (targets < classes)
    if positions:
        valid |= targets == IGNORED
    hint = f"the outputs have {classes} class{'es' if classes != 1 else ''}"
    check_entries("targets", targets, valid, f"from 0 to {classes - 1}", hint, kind=kind or "range")
    return targets.long()


def as_binary_labels(targets: Tensor, shape: Sequence[int]) -> Tensor:
    """Returns labels 0 and 1 as integers of a shape. They may be floating point numbers, or have a second axis of size one.

    Args:
        targets: Labels, as :class:`~flowbnn.likelihoods.Bernoulli` accepts them. Other targets are returned unchanged.
        shape: Shape of the labels, ``(inputs, *positions)``.

    >>> as_binary_labels(torch.tensor([[1.0], [0.0]]), (2,))
    tensor([1, 0])
    """
    inputs, *positions = shape
    if targets.shape == (inputs, 1, *positions):
        targets = targets.squeeze(1)
    is_binary = (targets == 0) | (targets == 1) | (targets == IGNORED)
    return targets.long() if targets.shape == tuple(shape) and bool(is_binary.all()) else targets


def check_values(values: Tensor, name: str, shape: torch.Size | None = None) -> Tensor:
    """Returns finite real values ``[B, D]`` in at least single precision.

    Args:
        values: Real values. A vector ``[B]`` is reshaped to ``[B, 1]`` if ``shape`` has one column, and never broadcasts to ``[B, B]``.
        name: Name of the argument.
        shape: Required shape. By default any shape ``[B, D]`` with at least one number is accepted.

    Raises:
        FlowBNNError: If the shape or the dtype is wrong, or if values are not finite.
    """
    if shape is not None and values.ndim == 1 and shape[-1] == 1:
        values = values.unsqueeze(-1)
    check_shape(name, values, shape or ("batch >= 1", "outputs >= 1"))
    check_entries(name, values, torch.isfinite(values.detach()), "finite", kind="not finite")
    return to_floating_point(values, name)


def check_scores(scores: Tensor, name: str) -> Tensor:
    """Returns a vector of scores in at least single precision. Infinite scores are allowed.

    Args:
        scores: Scores ``[B]``.
        name: Name of the argument.

    Raises:
        FlowBNNError: If there are no scores, or if scores are NaN.
    """
    check_shape(name, scores, ("batch >= 1",))
    check_entries(name, scores, ~scores.isnan(), "a number", kind="not finite")
    return to_floating_point(scores, name)
