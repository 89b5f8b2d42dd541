"""Examples of a density, with their contexts: in memory, or from a loader."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from numbers import Real
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, move
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.options import Hint, check

LOADER = Annotated[Iterable[Any], Hint("a tensor, an array or a loader")]
ROWS = 4096  # evaluated at a time
BESIDE = "a loader gives the context beside the examples; leave out context="


def in_memory(data: Any) -> bool:
    """Whether it is no loader: a list of numbers, or of rows of them, is none, a list of batches is one."""
    first = data[0] if isinstance(data, list) and data else None
    while isinstance(first, list | tuple) and first and not isinstance(first[0], np.ndarray):
        first = first[0]
    rows = isinstance(first, Real) or (isinstance(data, list) and isinstance(first, np.ndarray))
    return rows or isinstance(data, Tensor | np.ndarray | tuple)


def loaded(data: Any, context: Any, flow: nn.Module) -> TensorLoader:
    """Examples, and contexts if there are any, that lie in memory: a tensor or a tuple of them."""
    if context is not None and not getattr(flow, "context_dim", 0):
        raise FlowBNNError(
            f"a context is given, but {type(flow).__name__} has no context_dim", argument="context"
        )
    tensors = [as_tensor(one) for one in (data if isinstance(data, tuple) else (data,))]
    return TensorLoader(*tensors, *(() if context is None else (context,)), batch_size=ROWS)


def as_tensor(data: Any) -> Any:
    """Arrays and lists of numbers as tensors, in the precision they have; a loader would round them. The rest as it is."""
    with suppress(TypeError, ValueError, RuntimeError):
        known = data is None or isinstance(data, Tensor)
        # torch refuses flipped arrays, and warns of those that are read only
        return data if known else torch.as_tensor(np.require(data, requirements=("C", "W")))
    return data


def batches(data: Any, context: Any, flow: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Examples and their contexts, from a tensor or a loader."""
    if not in_memory(data):
        check("data", data, LOADER)
        if context is not None:
            raise FlowBNNError(BESIDE, argument="context")
    for batch in loaded(data, context, flow) if in_memory(data) else data:
        yield pair(batch, flow)


def pair(batch: Any, flow: nn.Module) -> tuple[Tensor, Tensor | None]:
    """Examples and context of a batch, as the flow takes them; labels are left out where it takes no context."""
    if not isinstance(batch, Tensor | tuple | list):
        found = type(batch).__name__
        raise FlowBNNError(
            f"a batch is a tensor, or a tuple that begins with one, not of type {found}", argument="data"
        )
    parts = (batch,) if isinstance(batch, Tensor) else tuple(batch)
    count = 2 if getattr(flow, "context_dim", 0) else 1
    for one in parts[:count]:
        if isinstance(one, Tensor):  # what else there is, is refused where it is moved
            check("data", one, Tensor)
    x, *context = move(parts[:count], device_of(flow))
    return x, move(context[0], x.device, dtype_of(flow)) if context else None
