"""What a prediction is asked for: one batch of inputs or a loader, all of it numbers."""

import re
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


def check_finite(inputs: Any, what: str = "inputs") -> None:
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
                f"the {what} hold NaN or infinity in {int(bad.sum())} of {len(bad)} rows (the first is row {int(bad.nonzero()[0])}); "
                "clean them first"
            )


def failure(inputs: Any, error: Exception) -> str:
    """Why a network does not take inputs, in a line: their shapes, what it said, and what may help."""
    tensors = list(tensors_of(inputs))
    sizes = ", ".join(str(tuple(part.shape)) for part in tensors)
    said = str(error).strip().splitlines() or [type(error).__name__]
    advice = ""
    if any(part.dtype == torch.uint8 for part in tensors):
        advice = "; bytes are made numbers by images.float() / 255"
    elif "same dtype" in said[0] and any(not part.is_floating_point() for part in tensors):
        advice = "; whole numbers are made real ones by inputs.float()"
    elif any(part.ndim in (1, 3) for part in tensors) and re.search("shape|channels|dim", said[0]):
        advice = "; the examples come first: a single one is given as inputs[None]"
    return f"shape {sizes}: {said[0]}{advice}"
