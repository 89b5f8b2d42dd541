"""Checks that batches have finite numbers."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from flowbnn.batches.rows import named_tensors, tensors_of
from flowbnn.errors import FlowBNNError


def check_finite(inputs: Any, what: str = "inputs") -> None:
    """Raises an error if inputs have NaN or infinite values, or are sparse or meta tensors.

    Args:
        inputs: Tensor, or nested tuples, lists and mappings of tensors.
        what: Name of the inputs in the message.
    """
    for tensor in tensors_of(inputs):
        if tensor.layout is not torch.strided or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"a {tensor.layout} tensor; use x.to_dense()"
            raise FlowBNNError(f"the {what} are {kind}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()
            text = f"the {what} have NaN or infinite values in {len(bad)} of {len(tensor)} rows, first in row {int(bad[0])}; clean them"
            raise FlowBNNError(text, kind="finite")


def is_finite(tensor: Tensor) -> bool:
    """Returns True if all values of a tensor are finite.

    A finite sum proves this in one pass. Only a sum that overflowed needs a second one.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.numel() == 0:
        return True
    tensor = tensor.detach()
    total = tensor.sum() if tensor.is_floating_point() else torch.view_as_real(tensor).sum()
    return math.isfinite(total.item()) or bool(torch.isfinite(tensor).all())


def first_nonfinite_tensor(named: Iterable[tuple[str, Tensor]]) -> str | None:
    """Returns the name of the first tensor that is not finite, or None."""
    return next((name for name, tensor in named if not is_finite(tensor)), None)


def check_finite_batch(batch: Any, epoch: int | None, index: int) -> None:
    """Raises an error if a nested batch has NaN or infinite values, or a tensor without rows.

    Args:
        batch: Tensor, or nested tuples, lists and mappings of tensors.
        epoch: Index of the epoch for the message, or None if there are no epochs.
        index: Index of the batch for the message.

    >>> check_finite_batch((torch.tensor([[1.0], [float("nan")]]), torch.tensor([0, 1])), epoch=2, index=5)
    Traceback (most recent call last):
    ...
    flowbnn.errors.FlowBNNError: epoch 3, batch 6: 1 of 2 rows of tensor '0' have NaN or infinite values; ...
    """
    check_finite_tensors(named_tensors(batch), epoch, index)


def check_finite_tensors(tensors: Sequence[tuple[str, Tensor]], epoch: int | None, index: int) -> None:
    """Raises an error if a named tensor has NaN or infinite values or no rows, as :func:`check_finite_batch`."""
    for name, tensor in tensors:
        empty = tensor.dim() > 0 and tensor.shape[0] == 0
        if not empty:
            # a finite sum proves that all values are finite, in one pass
            if not (tensor.is_floating_point() or tensor.is_complex()):
                continue
            if tensor.is_floating_point() and math.isfinite(tensor.detach().sum().item()):
                continue
            if is_finite(tensor):
                continue
        problem = f"tensor {name!r} has no rows; leave empty batches out of the loader"
        if not empty:
            bad = ~torch.isfinite(tensor)
            count = int(bad.flatten(1).any(1).sum()) if tensor.dim() > 1 else int(bad.sum())
            rows = tensor.shape[0] if tensor.dim() else 1
            problem = (
                f"{count} of {rows} rows of tensor {name!r} have NaN or infinite values; clean or remove them"
            )
        place = "" if epoch is None else f"epoch {epoch + 1}, "
        raise FlowBNNError(f"{place}batch {index + 1}: {problem}", kind="batch", tensor=name)
