"""What metrics and predictives ask of their tensors beyond the type: what would give a wrong number in silence is an error."""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = [
    "as_float",
    "average",
    "check_classes",
    "check_finite",
    "check_probabilities",
    "check_scored",
    "check_values",
]


def as_float(values: Tensor, name: str) -> Tensor:
    """``values`` in at least single precision."""
    if not isinstance(values, Tensor) or not values.is_floating_point():
        given = values.dtype if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise FlowBNNError(
            f"{name} must be a floating point tensor, not {given}", kind="dtype", argument=name
        )
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def average(values: Tensor) -> float:
    """Mean as a Python number, summed in double precision."""
    return values.detach().cpu().double().mean().item()


def check_finite(values: Tensor, name: str) -> None:
    """Finite numbers in every row ``[B, ...]``."""
    bad = ~torch.isfinite(values.detach()).flatten(1).all(-1)
    if bad.any():
        raise FlowBNNError(
            f"{name} not finite in {int(bad.sum())} of {len(bad)} rows", kind="not finite", argument=name
        )


def check_probabilities(probabilities: Tensor) -> Tensor:
    """Rows ``[..., C]`` of non-negative numbers that sum to one, of at least two classes."""
    probabilities = as_float(probabilities, "probabilities")
    if probabilities.ndim < 2 or probabilities.shape[-1] < 2:
        raise FlowBNNError(
            f"probabilities must be [B, C] with at least two classes, not {list(probabilities.shape)}; "
            "for the probability p of one class stack (1 - p, p)",
            kind="shape",
            argument="probabilities",
        )
    values = probabilities.detach()
    wrong = ~((values >= 0).all(-1) & ((values.sum(-1) - 1).abs() <= 1e-3))  # NaN and infinity are wrong, too
    if wrong.any():
        raise FlowBNNError(
            f"probabilities must be finite, not negative, and sum to one, unlike {int(wrong.sum())} of {wrong.numel()} rows; "
            "apply softmax to logits first",
            kind="value",
            argument="probabilities",
        )
    return probabilities


def check_scored(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The pair every classification metric takes: ``[B, C]`` and ``[B]``, with at least one row."""
    probabilities = check_probabilities(probabilities)
    if probabilities.ndim != 2 or not len(probabilities):
        raise FlowBNNError(
            f"probabilities must be [B, C] with at least one row, not {list(probabilities.shape)}; "
            "average over the samples first",
            kind="shape",
            argument="probabilities",
        )
    return probabilities, check_classes(targets, *probabilities.shape).to(probabilities.device)


def check_classes(targets: Tensor, inputs: int, classes: int) -> Tensor:
    """Class indices ``[inputs]`` in ``0 .. classes - 1``, as ``int64``."""
    if targets.is_floating_point() or targets.is_complex() or targets.shape != (inputs,):
        one_hot = targets.shape == (inputs, classes)
        advice = "targets.argmax(-1) of one-hot targets" if one_hot else "targets.long()"
        raise FlowBNNError(
            f"targets must be [{inputs}] integers, one class for each input, not {targets.dtype} {list(targets.shape)}; use {advice}",
            kind="shape",
            argument="targets",
        )
    outside = (targets < 0) | (targets >= classes)
    if outside.any():
        raise FlowBNNError(
            f"targets hold label {int(targets[outside][0])} ({int(outside.sum())} of {inputs} labels are outside "
            f"the {classes} classes); labels go from 0 to {classes - 1}",
            kind="value",
            argument="targets",
        )
    return targets.long()


def check_values(targets: Tensor, shape: torch.Size) -> Tensor:
    """Finite real targets of ``shape`` ``[B, D]``; ``[B]`` stands for ``[B, 1]`` and never broadcasts to ``[B, B]``."""
    targets = as_float(targets, "targets")
    if targets.ndim == 1 and shape[-1] == 1:
        targets = targets.unsqueeze(-1)
    if targets.shape != shape:
        raise FlowBNNError(
            f"targets must be {list(shape)}, not {list(targets.shape)}", kind="shape", argument="targets"
        )
    check_finite(targets, "targets")
    return targets
