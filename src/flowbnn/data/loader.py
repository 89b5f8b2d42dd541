"""Batches of tensors that lie in memory, without the cost of fetching them one example at a time."""

from collections.abc import Iterator

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["TensorLoader"]


class TensorLoader:
    """Shuffled batches of tensors in memory: one index operation for a batch, where a ``DataLoader`` has one for an example.

    Args:
        tensors: with the examples on their first axis, all of one length.
        batch_size: examples in a batch; the last batch may be smaller.
        shuffle: a new order at every pass.
        generator: source of the orders, kept in checkpoints; None takes torch's global one.

    >>> loader = TensorLoader(torch.arange(5.0), torch.arange(5), batch_size=2)
    >>> len(loader), loader.num_data, [targets.tolist() for _, targets in loader]
    (3, 5, [[0, 1], [2, 3], [4]])
    """

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        shuffle: bool = False,
        generator: torch.Generator | None = None,
    ) -> None:
        if not tensors or any(tensor.ndim == 0 for tensor in tensors):
            raise FlowBNNError("a TensorLoader needs tensors with the examples on their first axis")
        lengths = [len(tensor) for tensor in tensors]
        if len(set(lengths)) > 1:
            raise FlowBNNError(f"the tensors of a TensorLoader are of one length, not {lengths}")
        if batch_size < 1:
            raise FlowBNNError(f"batch_size is at least 1, not {batch_size}")
        self.tensors, self.batch_size = tensors, batch_size
        self.shuffle, self.generator = shuffle, generator
        self.num_data = lengths[0]

    def __len__(self) -> int:
        return -(-self.num_data // self.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        if not self.shuffle:
            for start in range(0, self.num_data, self.batch_size):
                yield tuple(tensor[start : start + self.batch_size] for tensor in self.tensors)
            return
        order = torch.randperm(self.num_data, generator=self.generator)
        for chosen in order.split(self.batch_size):
            yield tuple(tensor[chosen] for tensor in self.tensors)
