"""What every metric asks of its input, with the line it says otherwise; shared with ``flowbnn.predictive``."""

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = [
    "as_float",
    "average",
    "check_class_targets",
    "check_mass",
    "check_probabilities",
    "check_real_targets",
    "check_scored",
    "check_scores",
]


def as_float(values: Tensor, name: str) -> Tensor:
    """``values`` in at least single precision; refuses what is not a tensor of real numbers."""
    if not isinstance(values, Tensor):
        raise FlowBNNError(f"{name} must be a tensor, not {type(values).__name__}; use torch.as_tensor")
    if not values.is_floating_point():
        raise FlowBNNError(f"{name} must be floating point, not {values.dtype}; use .float()")
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def average(values: Tensor) -> float:
    """Mean as a Python number, summed in double precision."""
    return values.detach().cpu().double().mean().item()


def check_probabilities(probabilities: Tensor, tolerance: float = 1e-3) -> Tensor:
    """Rows ``[..., C]`` of finite, non-negative numbers that sum to one."""
    probabilities = as_float(probabilities, "probabilities")
    if probabilities.ndim < 2 or probabilities.shape[-1] < 2:
        raise FlowBNNError(
            f"probabilities must be [B, C] with at least two classes, not {list(probabilities.shape)}; "
            "for the probability p of one class stack (1 - p, p)"
        )
    with torch.no_grad():
        finite = torch.isfinite(probabilities).all(-1)
        if not finite.all():
            raise FlowBNNError(
                f"probabilities are not finite in {int((~finite).sum())} of {finite.numel()} rows"
            )
        wrong = (probabilities < 0).any(-1) | ((probabilities.sum(-1) - 1).abs() > tolerance)
        if wrong.any():
            raise FlowBNNError(
                f"probabilities are negative or do not sum to one in {int(wrong.sum())} of {wrong.numel()} rows; "
                "apply softmax to logits first"
            )
    return probabilities


def check_scored(probabilities: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The pair every classification metric takes: ``[B, C]`` and ``[B]``, with at least one row."""
    probabilities = check_probabilities(probabilities)
    if probabilities.ndim != 2:
        raise FlowBNNError(
            f"probabilities must be [B, C], not {list(probabilities.shape)}; average over the samples first"
        )
    targets = check_class_targets(targets, *probabilities.shape).to(probabilities.device)
    if not len(targets):
        raise FlowBNNError("there are no inputs to score; give at least one row of probabilities")
    return probabilities, targets


def check_class_targets(targets: Tensor, inputs: int, classes: int) -> Tensor:
    """Class indices ``[inputs]`` in ``0 .. classes - 1``, as ``int64``."""
    if not isinstance(targets, Tensor):
        raise FlowBNNError(f"targets must be a tensor, not {type(targets).__name__}; use torch.as_tensor")
    if targets.is_floating_point() or targets.is_complex():
        raise FlowBNNError(f"targets must be class indices, not {targets.dtype}; use targets.long()")
    if targets.shape != (inputs,):
        advice = "; for one-hot targets use targets.argmax(-1)" if targets.shape == (inputs, classes) else ""
        raise FlowBNNError(
            f"targets must be [{inputs}], one class for each input, not {list(targets.shape)}{advice}"
        )
    targets = targets.long()
    outside = (targets < 0) | (targets >= classes)
    if outside.any():
        raise FlowBNNError(
            f"targets hold label {int(targets[outside][0])} ({int(outside.sum())} of {inputs} labels are outside "
            f"the {classes} classes); labels go from 0 to {classes - 1}"
        )
    return targets


def check_real_targets(targets: Tensor, shape: torch.Size) -> Tensor:
    """Finite real targets of ``shape`` ``[B, D]``; ``[B]`` is taken for ``[B, 1]``, never broadcast to ``[B, B]``."""
    targets = as_float(targets, "targets")
    if targets.ndim == 1 and shape[-1] == 1:
        targets = targets.unsqueeze(-1)
    if targets.shape != shape:
        raise FlowBNNError(f"targets must be {list(shape)}, not {list(targets.shape)}")
    if not torch.isfinite(targets).all():
        raise FlowBNNError(
            f"targets are not finite in {int((~torch.isfinite(targets)).sum())} places; drop those rows"
        )
    return targets


def check_scores(scores: Tensor, name: str) -> Tensor:
    """A non-empty vector without NaN; infinities have an order and are allowed."""
    scores = as_float(scores, name)
    if scores.ndim != 1 or not len(scores):
        raise FlowBNNError(f"{name} must be a vector with at least one score, not {list(scores.shape)}")
    if scores.isnan().any():
        raise FlowBNNError(
            f"{name} holds NaN in {int(scores.isnan().sum())} of {len(scores)} places, which has no rank"
        )
    return scores


def check_mass(mass: float) -> float:
    """A share strictly between nought and one."""
    if not 0.0 < mass < 1.0:
        raise FlowBNNError(f"mass must lie between 0 and 1, not {mass}; 0.9 means 90 %")
    return float(mass)
