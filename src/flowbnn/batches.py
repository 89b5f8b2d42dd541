"""Batches of inputs: a tensor, or a tuple or mapping of tensors, with the examples on the first axis; networks called with them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = ["apply", "call", "device_of", "dtype_of", "repeat_each", "rows", "split_batch", "tensors_of"]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """``(inputs, targets)`` of a batch; targets are None for a bare tensor.

    The inputs may be a tensor, a tuple (passed as ``model(*inputs)``) or a mapping (``model(**inputs)``).
    """
    if not isinstance(batch, list | tuple):
        return batch, None
    if len(batch) <= 2:
        return batch[0], batch[1] if len(batch) == 2 else None
    return tuple(batch[:-1]), batch[-1]


def apply(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The inputs with ``function`` applied to each of their tensors."""
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: apply(value, function) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(apply(value, function) for value in inputs)
    raise FlowBNNError(
        f"inputs are tensors, or tuples or mappings of them, not {type(inputs).__name__}{_from_numpy(inputs)}"
    )


def _from_numpy(inputs: Any) -> str:
    """What to do with an array, as the tail of an error message."""
    return "; give torch.from_numpy(inputs).float()" if type(inputs).__name__ == "ndarray" else ""


def repeat_each(inputs: Any, times: int) -> Any:
    """``times`` copies of every row, one row after the other: rows of one example stay together."""
    return apply(inputs, lambda tensor: tensor.repeat_interleave(times, 0))


def tensors_of(inputs: Any) -> list[Tensor]:
    """All tensors of the inputs."""
    if isinstance(inputs, Tensor):
        return [inputs]
    parts = inputs.values() if isinstance(inputs, Mapping) else inputs
    known = isinstance(inputs, Mapping | list | tuple)
    return [one for part in parts for one in tensors_of(part)] if known else []


def rows(inputs: Any) -> int:
    """The number of examples."""
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise FlowBNNError(f"inputs are tensors with the examples on their first axis{_from_numpy(inputs)}")
    return tensors[0].shape[0]


def call(model: nn.Module, inputs: Any) -> Tensor:
    """Run the network and take its tensor of outputs (``.logits`` where it returns an object that has one)."""
    if isinstance(inputs, Mapping):
        outputs = model(**inputs)
    elif isinstance(inputs, list | tuple):
        outputs = model(*inputs)
    else:
        outputs = model(inputs)
    if isinstance(outputs, Tensor):
        return outputs
    logits = getattr(outputs, "logits", None)
    if isinstance(logits, Tensor):
        return logits
    raise FlowBNNError(
        f"the network returns a {type(outputs).__name__}; flowbnn needs one tensor of outputs, so wrap it in a module that picks it"
    )


def dtype_of(model: nn.Module) -> torch.dtype | None:
    """The precision of the network's weights, which its inputs are brought to."""
    for parameter in model.parameters():
        if parameter.is_floating_point():
            return parameter.dtype
    return None


def device_of(model: nn.Module) -> torch.device:
    tensor = next(iter(model.parameters()), None)
    return tensor.device if tensor is not None else torch.device("cpu")
