"""Functions of nested inputs: tensors, or tuples, mappings or containers of tensors, with the examples on the first axis."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from flowbnn.batches.containers import container_rows, container_tensors, is_container, needs_whole_batch
from flowbnn.errors import FlowBNNError


def apply(
    inputs: Any, function: Callable[[Tensor], Tensor], container: Callable[[Any], Any] | None = None
) -> Any:
    """Applies a function to each tensor of the inputs. Numbers, strings, flags and None are left unchanged.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        function: Function of a tensor.
        container: Function of a graph or a packed sequence. By default an error is raised, because their rows cannot be selected.

    >>> apply({"x": torch.ones(1), "return_dict": True}, torch.neg)
    {'x': tensor([-1.]), 'return_dict': True}
    """
    if isinstance(inputs, Tensor):
        return function(inputs)
    if is_container(inputs):
        if container is None:
            text = f"the rows of a {type(inputs).__name__} cannot be selected"
            raise FlowBNNError(text, kind="rows", argument="inputs")
        return container(inputs)
    if isinstance(inputs, Mapping):
        return {name: apply(value, function, container) for name, value in inputs.items()}
    if isinstance(inputs, list | tuple) and not needs_whole_batch(inputs):
        values = [apply(value, function, container) for value in inputs]
        return type(inputs)(*values) if hasattr(inputs, "_fields") else tuple(values)
    return inputs


def rebuild(inputs: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns inputs of the same structure with other tensors.

    Args:
        inputs: Inputs whose structure is copied.
        tensors: Tensors in the order of :func:`tensors_of`.

    >>> rebuild({"x": torch.ones(1), "y": (torch.ones(1), None)}, iter([torch.zeros(1), torch.zeros(2)]))
    {'x': tensor([0.]), 'y': (tensor([0., 0.]), None)}
    """
    return apply(inputs, lambda _: next(tensors))


def _input_error(inputs: Any) -> FlowBNNError:
    """Returns the error for inputs that are no tensors with the examples on the first axis."""
    kind = type(inputs).__name__
    return FlowBNNError(f"inputs must be tensors or arrays with the examples on the first axis, not a {kind}")


def repeat_each(inputs: Any, times: int) -> Any:
    """Repeats every row ``times`` times. The copies of a row are adjacent."""
    return apply(inputs, lambda tensor: tensor.repeat_interleave(times, 0))


def tensors_of(inputs: Any) -> list[Tensor]:
    """Returns all tensors of the inputs."""
    return [inputs] if isinstance(inputs, Tensor) else [tensor for _, tensor in named_tensors(inputs)]


def rows(inputs: Any) -> int:
    """Returns the number of examples.

    >>> rows({"x": torch.zeros(3, 2)})
    3
    """
    if isinstance(inputs, Tensor) and inputs.ndim:
        return inputs.shape[0]
    if is_container(inputs):
        return container_rows(inputs)
    tensors = tensors_of(inputs)
    if not tensors or tensors[0].ndim == 0:
        raise _input_error(inputs)
    return tensors[0].shape[0]


def take(inputs: Any, start: int, stop: int) -> Any:
    """Returns the rows from ``start`` to ``stop`` of the inputs."""
    return apply(inputs, lambda tensor: tensor[start:stop])


def has_row_axis(inputs: Any) -> bool:
    """Returns True if all tensors have the same number of rows, so that rows can be selected.

    This is not the case for a graph with its edges, for a packed sequence, or if there is a list of strings.
    """
    if isinstance(inputs, Tensor):
        return inputs.ndim > 0
    if needs_whole_batch(inputs) or _has_whole_entries(inputs):
        return False
    sizes = {tensor.shape[:1] for tensor in tensors_of(inputs)}
    return len(sizes) == 1 and len(sizes.pop()) == 1


def _has_whole_entries(inputs: Any) -> bool:
    """Returns True if an entry of a tuple or a mapping cannot be split into rows."""
    entries: Iterable[Any] = ()
    if isinstance(inputs, Mapping):
        entries = inputs.values()
    elif isinstance(inputs, list | tuple):
        entries = inputs
    others = [value for value in entries if not isinstance(value, Tensor)]
    return any(needs_whole_batch(value) or _has_whole_entries(value) for value in others)


def pick(inputs: Any, index: Tensor) -> Any:
    """Returns the rows with the given indices."""
    return apply(inputs, lambda tensor: tensor[index.to(tensor.device)])


def pad(inputs: Any, count: int) -> Any:
    """Repeats the last row until there are ``count`` rows."""
    return apply(
        inputs,
        lambda tensor: torch.cat([tensor, tensor[-1:].expand(count - len(tensor), *tensor.shape[1:])]),
    )


def join(batches: Sequence[Any]) -> Any:
    """Concatenates batches of the same structure along the first axis."""
    first = batches[0]
    if len(batches) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(batches))
    if isinstance(first, Mapping):
        return {name: join([batch[name] for batch in batches]) for name in first}
    if not isinstance(first, list | tuple):
        return first  # a number, a string, a flag or None
    return tuple(join(column) for column in zip(*batches, strict=True))


def shapes(inputs: Any) -> Any:
    """Returns the structure, row shapes, dtypes and devices of a batch. Batches can be joined if these are equal."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[1:], inputs.dtype, inputs.device)
    if isinstance(inputs, Mapping):
        return tuple((name, shapes(value)) for name, value in inputs.items())
    if isinstance(inputs, list | tuple) and not needs_whole_batch(inputs):
        return tuple(shapes(value) for value in inputs)
    return inputs if isinstance(inputs, str | int | float | None) else (type(inputs), id(inputs))


def repeat(inputs: Any, times: int) -> Any:
    """Repeats the whole batch ``times`` times."""
    return apply(inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)))


def named_tensors(batch: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Returns every tensor of a nested batch with the path to it.

    >>> [name for name, _ in named_tensors((torch.zeros(2), {"label": torch.zeros(2)}))]
    ['0', '1.label']
    """
    if isinstance(batch, Tensor):
        return [(name or "0", batch)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if is_container(batch):
        pairs = container_tensors(batch)
    elif isinstance(batch, Mapping):
        pairs = batch.items()
    elif isinstance(batch, (list, tuple)):
        pairs = enumerate(batch)
    tensors = []
    for key, value in pairs:
        path = f"{name}.{key}" if name else str(key)
        tensors += [(path, value)] if isinstance(value, Tensor) else named_tensors(value, path)
    return tensors


def batch_size(batch: Any) -> int:
    """Returns the number of rows of the first tensor of a batch, or 1 if there is none.

    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    tensors = named_tensors(batch)
    return tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1


def fingerprint(batch: Any) -> list[int]:
    """Returns a checksum of the shape, dtype and bytes of every tensor of a nested batch.

    >>> fingerprint((torch.zeros(2), torch.ones(2))) == fingerprint((torch.zeros(2), torch.ones(2, dtype=torch.int32)))
    False
    """
    dense = [tensor for _, tensor in named_tensors(batch) if tensor.layout == torch.strided]
    tensors = [tensor.detach().cpu().contiguous() for tensor in dense]
    headers = [f"{tensor.dtype} {tuple(tensor.shape)}".encode() for tensor in tensors]
    contents = [tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return [crc32(content, crc32(header)) for header, content in zip(headers, contents, strict=True)]
