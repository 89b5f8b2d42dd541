"""Loader of tensors in memory."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from flowbnn.batches import ColumnNames, as_tensor, column_names
from flowbnn.errors import FlowBNNError
from flowbnn.options import Count, checked

Augment = Callable[[Tensor, torch.Generator | None], Tensor]


class TensorLoader:
    """Loader of batches of tensors in memory.

    It needs one index operation per batch, where a ``DataLoader`` needs one per example. The tensors may be on a GPU, for example as
    bytes. ``augment`` and ``prepare`` then convert the first tensor of each batch on that device.

    Args:
        tensors: Tensors, arrays or lists of numbers with the examples on the first axis, all of one length and on one device.
        batch_size: Number of examples in a batch. The last batch may be smaller.
        shuffle: If True, draws a new order at every pass.
        generator: Generator of the orders and the augmentation, saved in checkpoints. None uses torch's global generator.
        augment: Function ``(images, generator) -> images`` of the first tensor of a batch, such as a random crop.
        prepare: Function ``images -> images`` that follows it, such as a normalization.
        drop_last: If True, leaves out a smaller last batch. ``num_data`` counts the examples of one pass.
        group_size: Number of batches that are gathered, augmented and prepared at once, which saves a GPU about thirty kernel
            launches per batch. With a ``generator`` and complete passes it does not change the batches. None uses groups of 16 MiB on
            a GPU, and single batches elsewhere. It is 1 if ``augment`` or ``prepare`` may depend on the whole batch, which is assumed
            unless their class has the attribute ``row_wise``.

    >>> loader = TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=2)
    >>> len(loader), loader.num_data, [targets.tolist() for _, targets in loader]
    (3, 5, [[0, 1], [2, 3], [4]])
    >>> [targets.tolist() for _, targets in TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=4, drop_last=True)]
    [[0, 1, 2, 3]]
    """

    @checked
    def __init__(
        self,
        *tensors: Any,
        batch_size: Count,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
        augment: Augment | None = None,
        prepare: Callable[[Tensor], Tensor] | None = None,
        drop_last: bool = False,
        group_size: Count | None = None,
    ) -> None:
        self.tensors = tuple([_default_precision(values) for values in tensors])
        self.input_columns: ColumnNames = column_names(tensors[0]) if tensors else {}
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        devices = sorted({str(tensor.device) for tensor in self.tensors})
        count = shapes[0][0] if shapes and shapes[0] else -1
        self.num_data = count // batch_size * batch_size if drop_last else count
        problem = ""
        if count < 0 or any(shape[:1] != (count,) for shape in shapes):
            problem = f"needs equally long tensors, got shapes {shapes}"
        elif any(tensor.layout is not torch.strided for tensor in self.tensors):
            problem = "needs dense tensors; use .to_dense()"
        elif len(devices) > 1:
            problem = f"needs one device, got {', '.join(devices)}"
        elif drop_last and not self.num_data:
            problem = f"needs {batch_size} examples with drop_last=True, got {count}"
        if problem:
            raise FlowBNNError(f"TensorLoader {problem}", kind="loader")
        self.batch_size, self.shuffle, self.generator = batch_size, shuffle, generator
        self.augment, self.prepare, self.drop_last, self.group_size = augment, prepare, drop_last, group_size

    def __len__(self) -> int:
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        """Yields batches. They are made in groups, but their random numbers are drawn batch by batch."""
        order = self._order() if self.shuffle else None
        device, augment = self.tensors[0].device, cast("Any", self.augment)
        # the attribute counts only on the class itself, because a subclass may override its methods
        steps = (self.augment, self.prepare)
        separable = all(step is None or "row_wise" in vars(type(step)) for step in steps)
        length = self.batch_size * (self._batches_per_group() if separable else 1)
        for start in range(0, self.num_data, length):
            stop = min(start + length, self.num_data)
            sizes = [min(self.batch_size, stop - begin) for begin in range(start, stop, self.batch_size)]
            indices = slice(start, stop) if order is None else order[start:stop]
            block = [tensor[indices] for tensor in self.tensors]
            if augment is not None and separable:
                draws = [augment.draw(size, device, self.generator) for size in sizes]
                block[0] = augment.apply(block[0], draws[0] if len(draws) == 1 else torch.cat(draws, -1))
            elif augment is not None:
                block[0] = augment(block[0], self.generator)
            if self.prepare is not None:
                block[0] = self.prepare(block[0])
            if len(sizes) == 1:
                yield tuple(block)
                continue
            yield from zip(*(tensor.split(self.batch_size) for tensor in block), strict=True)

    def _batches_per_group(self) -> int:
        """Returns the number of batches in a group."""
        first = self.tensors[0]
        if self.group_size is not None or first.device.type != "cuda":
            return self.group_size or 1
        size = first[:1].numel() * self.batch_size * (4 if self.prepare is not None else first.element_size())
        return max(1, min(64, 2**24 // max(1, size)))  # up to 16 MiB

    def _order(self) -> Tensor:
        """Returns a random order of the examples."""
        device = self.tensors[0].device
        source = device if self.generator is None else self.generator.device
        order = torch.randperm(len(self.tensors[0]), generator=self.generator, device=source)
        return order if source == device else order.to(device, non_blocking=True)


def _default_precision(values: Any) -> Tensor:
    """Converts arrays and lists to tensors, and real numbers of arrays to torch's default dtype."""
    if isinstance(values, Tensor):
        return values
    tensor = as_tensor(values, check=False)
    return tensor.to(torch.get_default_dtype()) if tensor.is_floating_point() else tensor
