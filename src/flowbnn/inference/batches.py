"""What a loader gives: inputs and targets, in the forms PyTorch users have them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = ["call", "count_data", "move", "repeat", "rows", "split_batch", "take"]


def split_batch(batch: Any) -> tuple[Any, Any]:
    """``(inputs, targets)`` of a batch; targets are None for a bare tensor.

    The inputs may be a tensor, a tuple (passed as ``model(*inputs)``) or a mapping (``model(**inputs)``).
    """
    if isinstance(batch, list | tuple) and len(batch) == 2:
        return batch[0], batch[1]
    if isinstance(batch, list | tuple) and len(batch) == 1:
        return batch[0], None
    if isinstance(batch, list | tuple):
        return tuple(batch[:-1]), batch[-1]
    return batch, None


def _map(inputs: Any, function: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(inputs, Tensor):
        return function(inputs)
    if isinstance(inputs, Mapping):
        return {name: _map(value, function) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple):
        return tuple(_map(value, function) for value in inputs)
    raise FlowBNNError(f"inputs are tensors, or tuples or mappings of them, not {type(inputs).__name__}")


def move(inputs: Any, device: torch.device) -> Any:
    return _map(inputs, lambda tensor: tensor.to(device, non_blocking=True))


def take(inputs: Any, start: int, stop: int) -> Any:
    return _map(inputs, lambda tensor: tensor[start:stop])


def repeat(inputs: Any, times: int) -> Any:
    """``times`` copies of the batch, one block after the other."""
    return _map(inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)))


def _tensors(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from _tensors(value)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from _tensors(value)


def rows(inputs: Any) -> int:
    first = next(_tensors(inputs), None)
    if first is None or first.ndim == 0:
        raise FlowBNNError("inputs are tensors with the examples on their first axis")
    return first.shape[0]


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


def count_data(loader: Iterable[Any]) -> int:
    """The number of examples one pass over the loader sees, which weighs the KL."""
    batch_size, sampler = getattr(loader, "batch_size", None), getattr(loader, "sampler", None)
    if sampler is not None and hasattr(sampler, "__len__"):
        if getattr(loader, "drop_last", False) and batch_size:
            return len(sampler) // batch_size * batch_size
        return len(sampler)
    if isinstance(loader, list | tuple):
        return sum(rows(split_batch(batch)[0]) for batch in loader)
    number = getattr(loader, "num_data", None)  # loaders that hold their data on the device say it themselves
    if isinstance(number, int):
        return number
    raise FlowBNNError("this loader has no length; say how many training examples there are with num_data=")
