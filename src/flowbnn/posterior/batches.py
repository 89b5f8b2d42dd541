"""What a loader gives: inputs and targets, in the forms PyTorch users have them."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = [
    "apply",
    "call",
    "check_finite",
    "checked_batch",
    "count_data",
    "divisible",
    "failure",
    "is_batch",
    "join",
    "mirrored",
    "move",
    "pad",
    "pick",
    "repeat",
    "repeat_each",
    "rows",
    "shapes",
    "split_batch",
    "take",
    "tensors_of",
]


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


def move(inputs: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """To the device, and real numbers to the network's own precision where it is given."""

    def to(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, non_blocking=True)

    return apply(inputs, to)


def take(inputs: Any, start: int, stop: int) -> Any:
    return apply(inputs, lambda tensor: tensor[start:stop])


def divisible(inputs: Any) -> bool:
    """Whether all tensors have the examples on their first axis, so that some can be taken; not so a graph with its edges, say."""
    sizes = {tensor.shape[:1] for tensor in tensors_of(inputs)}
    return len(sizes) == 1 and len(sizes.pop()) == 1


def pick(inputs: Any, index: Tensor) -> Any:
    """The rows of these numbers."""
    return apply(inputs, lambda tensor: tensor[index.to(tensor.device)])


def mirrored(inputs: Any) -> Any:
    """Other rows of the same kind: each one's values in reverse order."""
    return apply(inputs, lambda tensor: tensor.flip(list(range(1, tensor.ndim))))


def pad(inputs: Any, count: int) -> Any:
    """As many rows as asked for, the last one repeated."""
    return apply(
        inputs,
        lambda tensor: torch.cat([tensor, tensor[-1:].expand(count - len(tensor), *tensor.shape[1:])]),
    )


def join(parts: Sequence[Any]) -> Any:
    """Batches of one shape as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    return tuple(join(column) for column in zip(*parts, strict=True))


def shapes(inputs: Any) -> Any:
    """What two batches must have in common to be joined: the names or places of their tensors, and each one's row."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[1:], inputs.dtype, inputs.device)
    if isinstance(inputs, Mapping):
        return tuple((name, shapes(value)) for name, value in inputs.items())
    return tuple(shapes(value) for value in inputs) if isinstance(inputs, list | tuple) else type(inputs)


def repeat(inputs: Any, times: int) -> Any:
    """``times`` copies of the batch, one block after the other."""
    return apply(inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)))


def repeat_each(inputs: Any, times: int) -> Any:
    """``times`` copies of every row, one row after the other: rows of one example stay together."""
    return apply(inputs, lambda tensor: tensor.repeat_interleave(times, 0))


def tensors_of(inputs: Any) -> Iterator[Tensor]:
    if isinstance(inputs, Tensor):
        yield inputs
    elif isinstance(inputs, Mapping):
        for value in inputs.values():
            yield from tensors_of(value)
    elif isinstance(inputs, list | tuple):
        for value in inputs:
            yield from tensors_of(value)


def rows(inputs: Any) -> int:
    first = next(tensors_of(inputs), None)
    if first is None or first.ndim == 0:
        raise FlowBNNError(f"inputs are tensors with the examples on their first axis{_from_numpy(inputs)}")
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


def count_data(loader: Any) -> int:
    """The number of examples one pass over the loader (all of its workers together) sees, which weighs the KL."""
    number = getattr(loader, "num_data", None)  # loaders that hold their data on the device say it themselves
    if isinstance(number, int):
        return number
    if isinstance(loader, list | tuple):
        return sum(rows(split_batch(batch)[0]) for batch in loader)
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    size = getattr(batches, "batch_size", None)
    if sampler is not None and isinstance(size, int) and hasattr(sampler, "__len__"):
        count = len(sampler)
        if getattr(batches, "drop_last", False):
            count = count // size * size
        return count * int(getattr(sampler, "num_replicas", 1))
    raise FlowBNNError("how many examples this loader gives cannot be told; say it with num_data=")


# -------------------- inputs.py


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
