"""Checks of the tensors that metrics and predictives take. Without them, wrong tensors would give wrong numbers instead of errors."""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError


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
    values, shape = to_floating_point(probabilities, "probabilities"), list(probabilities.shape)
    if len(shape) != ndim or shape[-1] < 2 or (ndim == 2 and not shape[0]):
        text = (
            f"probabilities must be [B, C] with B > 0 and C > 1, got {shape}; stack (1 - p, p) for one class"
        )
        raise FlowBNNError(text, kind="shape", argument="probabilities")
    valid = (probabilities >= 0).all(-1) & ((probabilities.sum(-1) - 1).abs() <= 1e-3)  # False for NaN
    if not valid.all():
        count = f"{int((~valid).sum())} of {valid.numel()}"
        text = f"probabilities are negative or do not sum to one in {count} rows; apply softmax to logits"
        raise FlowBNNError(text, kind="range", argument="probabilities")
    return values


def check_classification(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the arguments of a classification metric on the same device.

    Args:
        probabilities: Class probabilities ``[B, C]``.
        targets: Class indices ``[B]``.

    Raises:
        FlowBNNError: If there are no rows, or if an argument is invalid.
    """
    probabilities = check_probabilities(probabilities)
    return probabilities, check_classes(targets, *probabilities.shape).to(probabilities.device)


def check_classes(targets: Tensor, inputs: int, classes: int, kind: str | None = None) -> Tensor:
    """Returns class indices as ``int64``.

    Args:
        targets: Class indices ``[inputs]`` from 0 to ``classes - 1``.
        inputs: Number of inputs.
        classes: Number of classes.
        kind: Kind of the error. By default ``"shape"`` for a wrong shape or dtype and ``"range"`` for a wrong label.

    Raises:
        FlowBNNError: If the shape, the dtype or a label is wrong.
    """
    if targets.is_floating_point() or targets.shape != (inputs,):
        # advice by the shape: a column of labels, one-hot labels, or labels of another type
        hints: dict[tuple[int, ...], str] = {
            (inputs, 1): "; use targets.squeeze(1)",
            (inputs, classes): "; use targets.argmax(1) for one-hot targets",
        }
        hint = hints.get(tuple(targets.shape), "; use targets.long()" if targets.shape == (inputs,) else "")
        text = f"targets must be ({inputs},) integers, got {targets.dtype} {tuple(targets.shape)}{hint}"
        raise FlowBNNError(text, kind=kind or "shape", argument="targets")
    invalid = (targets < 0) | (targets >= classes)
    if invalid.any():
        text = (
            f"targets must be from 0 to {classes - 1} for {classes} classes, got {int(targets[invalid][0])}"
        )
        raise FlowBNNError(text, kind=kind or "range", argument="targets")
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
    if values.ndim != 2 or values.shape != (shape or values.shape) or (shape is None and not values.numel()):
        expected = "[B, D], not empty" if shape is None else list(shape)
        text = f"{name} must be {expected}, got {list(values.shape)}"
        raise FlowBNNError(text, kind="shape", argument=name)
    finite = torch.isfinite(values.detach()).all(-1)
    if not finite.all():
        text = f"{name} has {int((~finite).sum())} of {len(finite)} rows with NaN or infinity"
        raise FlowBNNError(text, kind="not finite", argument=name)
    return to_floating_point(values, name)


def check_scores(scores: Tensor, name: str) -> Tensor:
    """Returns a vector of scores in at least single precision. Infinite scores are allowed.

    Args:
        scores: Scores ``[B]``.
        name: Name of the argument.

    Raises:
        FlowBNNError: If there are no scores, or if scores are NaN.
    """
    invalid = int(scores.isnan().sum())
    if scores.ndim != 1 or not len(scores) or invalid:
        text = f"{name} must be [B] without NaN, got {list(scores.shape)} with {invalid} NaN"
        raise FlowBNNError(text, kind="not finite" if invalid else "shape", argument=name)
    return to_floating_point(scores, name)
