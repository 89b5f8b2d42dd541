"""What metrics and predictives ask of their tensors beyond the type: what would give a wrong number in silence is an error."""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError


def average(values: Tensor) -> float:
    """Mean as a Python number, summed in double precision."""
    return values.detach().cpu().double().mean().item()


def _accepted(values: Tensor, name: str, trouble: str) -> Tensor:
    """The values in at least single precision, where nothing is wrong with them."""
    if not values.is_floating_point():
        trouble = f"must be a floating point tensor, not {values.dtype}"
    if trouble:
        raise FlowBNNError(f"{name} {trouble}", argument=name)
    return values.to(torch.promote_types(values.dtype, torch.float32))


def check_probabilities(probabilities: Tensor, ndim: int = 2) -> Tensor:
    """Rows ``[..., C]`` of non-negative numbers that sum to one, of at least two classes."""
    shape, trouble = list(probabilities.shape), ""
    wrong = ~((probabilities >= 0).all(-1) & ((probabilities.sum(-1) - 1).abs() <= 1e-3))  # NaN is wrong, too
    if len(shape) < 2 or shape[-1] < 2:
        trouble = f"must be [B, C] with at least two classes, not {shape}; for the probability p of one class stack (1 - p, p)"
    elif len(shape) != ndim or (ndim == 2 and not shape[0]):
        trouble = f"must be [B, C] with at least one row, not {shape}; average over the samples first"
    elif wrong.any():
        trouble = (
            f"must be finite, not negative, and sum to one, unlike {int(wrong.sum())} of {wrong.numel()} rows; "
            "apply softmax to logits first"
        )
    return _accepted(probabilities, "probabilities", trouble)


def check_scored(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The pair every classification metric takes: ``[B, C]`` and ``[B]``, with at least one row."""
    probabilities = check_probabilities(probabilities)
    return probabilities, check_classes(targets, *probabilities.shape).to(probabilities.device)


def check_classes(targets: Tensor, inputs: int, classes: int) -> Tensor:
    """Class indices ``[inputs]`` in ``0 .. classes - 1``, as ``int64``."""
    outside, trouble = (targets < 0) | (targets >= classes), ""
    if targets.is_floating_point() or targets.shape != (inputs,):
        trouble = f"must be [{inputs}] integers, one class for each input, not {targets.dtype} {list(targets.shape)}"
        if targets.shape == (inputs, classes):
            trouble += "; use targets.argmax(-1) of one-hot targets"
        elif targets.is_floating_point():
            trouble += "; use targets.long()"
    elif outside.any():
        trouble = (
            f"hold label {int(targets[outside][0])} ({int(outside.sum())} of {inputs} labels are outside "
            f"the {classes} classes); labels go from 0 to {classes - 1}"
        )
    if trouble:
        raise FlowBNNError(f"targets {trouble}", argument="targets")
    return targets.long()


def check_values(values: Tensor, name: str, shape: torch.Size | None = None) -> Tensor:
    """Finite real values ``[B, D]``, of this shape; ``[B]`` stands for ``[B, 1]`` and never broadcasts to ``[B, B]``."""
    if shape is not None and values.ndim == 1 and shape[-1] == 1:
        values = values.unsqueeze(-1)
    bad, trouble = ~torch.isfinite(values.detach()).flatten(1).all(-1) if values.ndim > 1 else None, ""
    if shape is not None and values.shape != shape:
        trouble = f"must be {list(shape)}, not {list(values.shape)}"
    elif values.ndim != 2 or bad is None or (shape is None and not values.numel()):
        trouble = f"must be [B, D] with at least one row, not {list(values.shape)}"
    elif bad.any():
        trouble = f"not finite in {int(bad.sum())} of {len(bad)} rows"
    return _accepted(values, name, trouble)


def check_scores(scores: Tensor, name: str) -> Tensor:
    """A non-empty vector without NaN; infinities have an order and are allowed."""
    unknown, trouble = int(scores.isnan().sum()), ""
    if scores.ndim != 1 or not len(scores) or unknown:
        trouble = f"must be a vector with at least one score and without NaN, not {list(scores.shape)} with {unknown} NaN"
    return _accepted(scores, name, trouble)
