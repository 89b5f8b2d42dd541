"""Functions of nested inputs: tensors, or tuples, mappings or containers of tensors, with the examples on the first axis."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from flowbnn.batches.containers import needs_whole_batch
from flowbnn.batches.inputs import _has_indivisible_entries, apply, named_tensors, no_rows_error


def rebuild(inputs: Any, tensors: Iterator[Tensor]) -> Any:
    """Returns inputs of the same structure with other tensors.

    Args:
        inputs: Inputs whose structure is copied.
        tensors: Tensors in the order of :func:`tensors_of`.

    >>> rebuild({"x": torch.ones(1), "y": (torch.ones(1), None)}, iter([torch.zeros(1), torch.zeros(2)]))
    {'x': tensor([0.]), 'y': (tensor([0., 0.]), None)}
    """
    return apply(inputs, lambda _: next(tensors))


def repeat_each(inputs: Any, times: int) -> Any:
    """Repeats every row ``times`` times. The copies of a row are adjacent. Tensors without axes serve all rows."""
    return apply(inputs, lambda tensor: tensor.repeat_interleave(times, 0) if tensor.ndim else tensor)


def check_selectable(inputs: Any, purpose: str) -> None:
    """Raises FlowBNNError if inputs are graphs, packed sequences or lists of strings, whose rows cannot be selected.

    Args:
        inputs: Inputs of a batch.
        purpose: Use of the data, for the message.
    """
    if not isinstance(inputs, Tensor) and (needs_whole_batch(inputs) or _has_indivisible_entries(inputs)):
        raise no_rows_error(inputs, purpose)


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
    values = [join(column) for column in zip(*batches, strict=True)]
    if isinstance(first, list):
        return values
    return type(first)(*values) if hasattr(first, "_fields") else tuple(values)


def enlarge(tensor: Tensor, shape: Sequence[int], fill: float = 0.0) -> Tensor:
    """Returns a tensor that is padded at the end of its axes.

    >>> enlarge(torch.ones(2, 1, dtype=torch.long), (2, 3), fill=-100)
    tensor([[   1, -100, -100],
            [   1, -100, -100]])
    """
    if tuple(tensor.shape) == tuple(shape):
        return tensor
    result = tensor.new_full(shape, fill)
    result[tuple(slice(0, size) for size in tensor.shape)] = tensor
    return result


def join_padded(tensors: Sequence[Tensor], axis: int = 0, fill: float = 0.0) -> Tensor:
    """Concatenates tensors, padded to the largest size of every other axis.

    Args:
        tensors: Tensors with equally many axes.
        axis: Axis of the rows.
        fill: Value of the padding.
    """
    if len({tensor.shape[:axis] + tensor.shape[axis + 1 :] for tensor in tensors}) > 1:
        widest = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
        tensors = [
            enlarge(tensor, (*widest[:axis], tensor.shape[axis], *widest[axis + 1 :]), fill)
            for tensor in tensors
        ]
    return torch.cat(list(tensors), axis)


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
    """Repeats the whole batch ``times`` times. Tensors without axes serve all rows."""
    return apply(
        inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)) if tensor.ndim else tensor
    )


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
