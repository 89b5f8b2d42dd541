"""Checks of the tensors that metrics and predictives take. Without them, wrong tensors would give wrong numbers instead of errors."""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, check_entries, check_shape


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
        raise FlowBNNError(f"{name} needs floating point, got {values.dtype}", kind="dtype", argument=name)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_probabilities(probabilities: Tensor, ndim: int = 2) -> Tensor:
    """Returns class probabilities in at least single precision.

    Args:
        probabilities: Probabilities ``[..., C]`` of at least two classes.
        ndim: Number of axes. Tensors ``[B, C]`` must have at least one row.

    Raises:
        FlowBNNError: If the shape is wrong, or if rows are negative or do not sum to one.
    """
    values = to_floating_point(probabilities, "probabilities")
    axes = ("batch >= 1", "classes >= 2") if ndim == 2 else ("samples", "batch", "classes >= 2")
    check_shape("probabilities", probabilities, axes, hint="stack (1 - p, p) for one class")
    valid = (probabilities >= 0).all(-1) & ((probabilities.sum(-1) - 1).abs() <= 1e-3)  # False for NaN
    check_entries("probabilities", values, valid, "nonnegative with sum 1", hint="use softmax")
    return values


def is_soft(targets: Tensor) -> bool:
    """Returns True if targets have the shape and the type of soft labels, floating point numbers ``[B, C]`` of two or more classes."""
    return targets.is_floating_point() and targets.ndim == 2 and targets.shape[1] > 1


def are_probabilities(targets: Tensor) -> bool:
    """Returns True if targets are soft labels: floating point rows ``[B, C]`` that are not negative and sum to one.

    >>> are_probabilities(torch.tensor([[0.9, 0.1], [0.5, 0.5]])), are_probabilities(torch.tensor([[0.9, 0.2]]))
    (True, False)
    """
    if not is_soft(targets) or not len(targets):
        return False
    sums = targets.double().sum(-1)
    return bool((targets >= 0).all()) and bool(((sums - 1.0).abs() <= 1e-3).all())


def expected_value(values: Tensor, targets: Tensor) -> Tensor:
    """Returns the expectation ``[B]`` of values ``[B, C]`` over soft labels. A class of probability zero may have an infinite value."""
    targets = targets.to(values)
    return torch.where(targets > 0, targets * values, 0.0).sum(-1)


def check_classification(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the arguments of a classification metric on the same device.

    Args:
        probabilities: Class probabilities ``[B, C]``.
        targets: Class indices ``[B]``, or soft labels ``[B, C]``.

    Raises:
        FlowBNNError: If there are no rows, or if an argument is invalid.
    """
    probabilities = check_probabilities(probabilities)
    return probabilities, check_classes(targets, *probabilities.shape).to(probabilities.device)


def check_classes(targets: Tensor, inputs: int, classes: int, kind: str | None = None) -> Tensor:
    """Returns class indices as ``int64``, and soft labels unchanged.

    Args:
        targets: Class indices ``[inputs]`` from 0 to ``classes - 1``, or soft labels ``[inputs, classes]``.
        inputs: Number of inputs.
        classes: Number of classes.
        kind: Kind of the error. By default ``"shape"`` for a wrong shape or dtype and ``"range"`` for a wrong label.

    Raises:
        FlowBNNError: If the shape, the dtype or a label is wrong.
    """
    if is_soft(targets) and targets.shape == (inputs, classes):
        valid = (targets >= 0).all(-1) & ((targets.double().sum(-1) - 1.0).abs() <= 1e-3)
        check_entries("targets", targets, valid, "nonnegative with sum 1", kind=kind or "range")
        return targets
    hints = {
        (inputs, 1): "use targets.squeeze(1)",
        (inputs, classes): "use targets.argmax(1) for one-hot labels",
    }
    hint = hints.get(tuple(targets.shape), "")  # type: ignore[arg-type]
    check_shape("targets", targets, (inputs,), hint, kind or "shape")
    if targets.is_floating_point():
        text = f"targets must be integers, got {targets.dtype}; use targets.long(), or likelihood='gaussian' for real numbers"
        raise FlowBNNError(text, kind=kind or "shape", argument="targets")
    valid = (targets >= 0) & (targets < classes)
    check_entries("targets", targets, valid, f"from 0 to {classes - 1}", kind=kind or "range")
    return targets.long()


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
