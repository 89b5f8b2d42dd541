"""What a prediction is asked for: one batch of inputs or a loader, all of it numbers."""

from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import split_batch, tensors_of

__all__ = ["check_finite", "checked_batch", "failure", "is_batch"]


def checked_batch(batch: Any) -> Any:
    """A batch of a loader, whose inputs are numbers."""
    check_finite(split_batch(batch)[0])
    return batch


def is_batch(inputs: Any) -> bool:
    """Whether this is one batch of inputs; else it may be a loader of them."""
    if isinstance(inputs, Tensor) or hasattr(inputs, "keys"):
        return True
    return isinstance(inputs, tuple) and bool(inputs) and all(isinstance(part, Tensor) for part in inputs)


def check_finite(inputs: Any) -> None:
    """Refuse inputs that hold NaN or infinity."""
    tensors = (
        [inputs]
        if isinstance(inputs, Tensor)
        else list(inputs.values() if hasattr(inputs, "keys") else inputs)
    )
    for tensor in tensors:
        if (
            isinstance(tensor, Tensor)
            and tensor.is_floating_point()
            and not bool(torch.isfinite(tensor).all())
        ):
            bad = (~torch.isfinite(tensor)).flatten(1).any(1) if tensor.ndim > 1 else ~torch.isfinite(tensor)
            raise FlowBNNError(
                f"the inputs hold NaN or infinity in {int(bad.sum())} of {len(bad)} rows; clean them before predicting"
            )


def failure(inputs: Any, error: Exception) -> str:
    """Why a network does not take inputs, in a line: their shapes, what it said, and what may help."""
    tensors = list(tensors_of(inputs))
    sizes = ", ".join(str(tuple(part.shape)) for part in tensors)
    said = str(error).strip().splitlines() or [type(error).__name__]
    advice = ""
    if any(part.dtype == torch.uint8 for part in tensors):
        advice = "; bytes are made numbers by images.float() / 255"
    return f"shape {sizes}: {said[0]}{advice}"
