"""Batches of inputs: a tensor, or a tuple or mapping of tensors, with the examples on the first axis; networks called with them."""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError

__all__ = [
    "apply",
    "batch_size",
    "call",
    "check_finite_batch",
    "device_of",
    "dtype_of",
    "first_nonfinite_tensor",
    "is_finite",
    "named_tensors",
    "repeat_each",
    "rows",
    "split_batch",
    "tensors_of",
]


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
    return [inputs] if isinstance(inputs, Tensor) else [tensor for _, tensor in named_tensors(inputs)]


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


# -------------------- batches of a loader, in any nesting


def named_tensors(batch: Any, name: str = "") -> list[tuple[str, Tensor]]:
    """Every tensor of a nested batch with its place in it.

    >>> [name for name, _ in named_tensors((torch.zeros(2), {"label": torch.zeros(2)}))]
    ['0', '1.label']
    """
    if isinstance(batch, Tensor):
        return [(name or "0", batch)]
    pairs: Iterable[tuple[Any, Any]] = ()
    if isinstance(batch, Mapping):
        pairs = batch.items()
    elif isinstance(batch, (list, tuple)):
        pairs = enumerate(batch)
    tensors = []
    for key, part in pairs:
        place = f"{name}.{key}" if name else str(key)
        tensors += [(place, part)] if isinstance(part, Tensor) else named_tensors(part, place)
    return tensors


def batch_size(batch: Any) -> int:
    """Rows of the batch's first tensor; 1 where it has no tensor or the tensor no axes.

    >>> batch_size((torch.zeros(8, 3), torch.zeros(8)))
    8
    """
    tensors = named_tensors(batch)
    return tensors[0][1].shape[0] if tensors and tensors[0][1].dim() else 1


def is_finite(tensor: Tensor) -> bool:
    """Whether all entries are finite. The sum tells in one pass; only a sum that overflowed needs a second look."""
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    total = tensor.sum() if tensor.is_floating_point() else torch.view_as_real(tensor).sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def first_nonfinite_tensor(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """The first name whose tensor is not finite."""
    return next((name for name, tensor in named if not is_finite(tensor)), None)


def check_finite_batch(batch: Any, epoch: int, index: int) -> None:
    """Refuse a batch that holds NaN or infinite numbers, or no rows; ``epoch`` and ``index`` count from 0.

    >>> check_finite_batch((torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])), epoch=2, index=5)
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: epoch 3, batch 6: 1 of 2 rows of tensor '0' hold NaN or infinite values; ...
    """
    for name, tensor in named_tensors(batch):
        empty = tensor.dim() > 0 and tensor.shape[0] == 0
        if not empty and is_finite(tensor):
            continue
        trouble = f"tensor {name!r} has no rows; leave empty batches out of the loader"
        if not empty:
            bad = ~torch.isfinite(tensor)
            rows = int(bad.flatten(1).any(1).sum()) if tensor.dim() > 1 else int(bad.sum())
            trouble = (
                f"{rows} of {tensor.shape[0] if tensor.dim() else 1} rows of tensor {name!r} hold NaN or infinite values; "
                "clean the data or leave these rows out"
            )
        raise FlowBNNError(f"epoch {epoch + 1}, batch {index + 1}: {trouble}", kind="batch")
