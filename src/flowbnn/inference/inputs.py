"""What a prediction is asked for: one batch of inputs or a loader, all of it numbers."""

from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import split_batch

__all__ = ["check_finite", "checked_batch", "is_batch"]


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
