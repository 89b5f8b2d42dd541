"""From a loader to one tensor of outputs: small batches go through the network together, and results keep their order."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import count_data, join, rows, shapes, split_batch, tensors_of

__all__ = ["Store", "expected_rows", "in_groups"]

MOST_BYTES = 2**28  # of inputs that wait to go through together


def expected_rows(loader: Any) -> int:
    """How many rows a loader will give, or 0 where it does not say."""
    try:
        return count_data(loader)
    except (FlowBNNError, TypeError):
        return 0


def in_groups(batches: Iterable[Any], enough: Callable[[Any], int]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Batches of one shape joined until they hold ``enough`` rows, with their targets (none where the loader gives none).

    >>> loader = [(torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 2), torch.arange(3)), (torch.zeros(1, 2), torch.ones(1))]
    >>> [(len(inputs), len(targets)) for inputs, targets in in_groups(loader, lambda inputs: 6)]
    [(6, 2), (1, 1)]
    """
    waiting: list[Any] = []
    targets: list[Tensor] = []
    count = most = 0
    for batch in batches:
        inputs, truth = split_batch(batch)
        if waiting and (shapes(inputs) != shapes(waiting[0]) or count + rows(inputs) > most):
            yield join(waiting), targets
            waiting, targets, count = [], [], 0
        if not waiting:
            row = sum(tensor.numel() * tensor.element_size() for tensor in tensors_of(inputs)) // max(
                1, rows(inputs)
            )
            most = min(enough(inputs), MOST_BYTES // max(1, row))
        waiting.append(inputs)
        count += rows(inputs)
        if truth is not None:
            targets.append(truth)
    if waiting:
        yield join(waiting), targets


class Store:
    """Outputs ``[samples, rows, ...]`` of one batch after the other, in one tensor that grows only if more comes than was expected.

    It lies on the device of the outputs unless it would fill a quarter of what is free there.

    Args:
        expected: rows to come, or 0 when unknown.
    """

    def __init__(self, expected: int = 0) -> None:
        self.expected, self.filled = expected, 0
        self.tensor: Tensor | None = None

    def room(self, count: int) -> Tensor | None:
        """Where the next ``count`` rows go; None before the first, whose shape is not known yet."""
        if self.tensor is None:
            return None
        if self.filled + count > self.tensor.shape[1]:
            grown = max(self.filled + count, 2 * self.tensor.shape[1])
            larger = self.tensor.new_empty((self.tensor.shape[0], grown, *self.tensor.shape[2:]))
            larger[:, : self.filled] = self.tensor[:, : self.filled]
            self.tensor = larger
        return self.tensor[:, self.filled : self.filled + count]

    def add(self, outputs: Tensor, place: Tensor | None = None) -> None:
        """Take the next rows; those that were written to ``place``, which :meth:`room` gave, are there already."""
        count = outputs.shape[1]
        if self.tensor is None:
            if count >= self.expected:
                self.tensor = outputs
            else:
                shape = (outputs.shape[0], self.expected, *outputs.shape[2:])
                self.tensor = torch.empty(shape, dtype=outputs.dtype, device=_home(outputs, self.expected))
                self.tensor[:, :count] = outputs
        else:
            place = self.room(count) if place is None else place
            assert place is not None
            if outputs is not place:
                place.copy_(outputs)
        self.filled += count

    @property
    def outputs(self) -> Tensor:
        if self.tensor is None:
            raise FlowBNNError("the loader is empty: there is nothing to predict")
        return self.tensor[:, : self.filled]


def _home(outputs: Tensor, total: int) -> torch.device:
    needed = outputs.element_size() * outputs.numel() // max(1, outputs.shape[1]) * total
    if outputs.device.type == "cuda" and needed > torch.cuda.mem_get_info(outputs.device)[0] // 4:
        return torch.device("cpu")
    return outputs.device
