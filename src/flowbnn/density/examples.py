"""Examples and their contexts as batches, from tensors, arrays, lists or loaders."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, is_array, move, split_labels
from flowbnn.batches.arrays import as_tensor as array_tensor
from flowbnn.data import TensorLoader
from flowbnn.data.formats import as_loader, is_list_of_examples
from flowbnn.errors import FlowBNNError
from flowbnn.options import Hint, check

Loader = Annotated[Iterable[Any], Hint("tensor, array or loader")]


def is_in_memory(data: Any) -> bool:
    """Returns whether data are a tensor, an array, a data frame, a tuple of them, or a list of numbers.

    A list of tensors, or of tuples that begin with one, is a list of batches. It counts as a loader.

    >>> is_in_memory(torch.zeros(3, 2)), is_in_memory([[0.0, 1.0]]), is_in_memory([torch.zeros(3, 2)])
    (True, True, False)
    """
    if is_list_of_examples(data):  # (x, y), which as_loader collates
        return False
    first = data[0] if isinstance(data, list) and data else None
    while isinstance(first, list | tuple) and first and not isinstance(first[0], np.ndarray):
        first = first[0]
    rows = isinstance(first, Real) or (isinstance(data, list) and isinstance(first, np.ndarray))
    return rows or isinstance(data, Tensor | tuple) or (not isinstance(data, list) and is_array(data))


def make_loader(data: Any, context: Any, flow: nn.Module, batch_size: int = 4096) -> TensorLoader:
    """Returns a loader of examples in memory and, if given, of their contexts.

    Args:
        data: Tensor or array of examples, or a tuple of examples and contexts.
        context: Contexts, one row for each example, or None.
        flow: Flow that reads the batches.
        batch_size: Number of examples in a batch.
    """
    if context is not None and not getattr(flow, "context_dim", 0):
        text = f"{type(flow).__name__} takes no context (it has no context_dim)"
        raise FlowBNNError(text, argument="context")
    values = data if isinstance(data, tuple) else (data,)
    tensors = [as_tensor(value) for value in values if value is not None]  # (x, None) has no context
    return TensorLoader(*tensors, *(() if context is None else (context,)), batch_size=batch_size)


def as_tensor(data: Any) -> Any:
    """Returns arrays, data frames and lists of numbers as tensors of the same precision, and everything else unchanged."""
    if data is None or isinstance(data, Tensor):
        return data
    if is_array(data) and not isinstance(data, list):
        return array_tensor(data, check=False)
    with suppress(TypeError, ValueError, RuntimeError):
        # torch does not accept arrays with negative strides and warns about read-only arrays
        return torch.as_tensor(np.require(data, requirements=("C", "W")))
    return data


def iterate_batches(data: Any, context: Any, flow: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yields the examples and the context of each batch.

    Args:
        data: Examples in memory, or a loader.
        context: Contexts of examples in memory. The batches of a loader contain theirs.
        flow: Flow that reads the batches.
    """
    if is_in_memory(data):
        data = make_loader(data, context, flow)
    else:
        data = as_loader(data, argument="data")
        check_loader(data, context)
    for batch in data:
        yield split_batch(batch, flow)


def check_loader(data: Any, context: Any) -> None:
    """Raises FlowBNNError if data are no loader, or if a context is given beside one."""
    check("data", data, Loader)
    if context is not None:
        raise FlowBNNError("context= needs data in memory; a loader yields (x, context)", argument="context")


def split_batch(batch: Any, flow: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Returns the examples and the context of a batch on the device of a flow.

    Labels and other tensors are left out. A flow without ``context_dim`` gets no context. The values of a mapping are in their order.
    """
    if isinstance(batch, tuple) and batch and isinstance(batch[0], Mapping):  # inputs of a mapping in memory
        batch = batch[0]
    if isinstance(batch, Mapping):
        batch = tuple(split_labels(batch)[0].values())
    if is_array(batch):
        batch = as_tensor(batch)
    if not isinstance(batch, Tensor | tuple | list):
        kind = type(batch).__name__
        raise FlowBNNError(f"a batch must be a tensor or begin with one, got {kind}", argument="data")
    tensors = (batch,) if isinstance(batch, Tensor) else tuple(as_tensor(value) for value in batch)
    count = 2 if getattr(flow, "context_dim", 0) else 1
    for tensor in tensors[:count]:
        if isinstance(tensor, Tensor):  # `move` refuses everything else
            check("data", tensor, Tensor)
    x, *context = move(tensors[:count], device_of(flow))
    return x, move(context[0], x.device, dtype_of(flow)) if context else None
