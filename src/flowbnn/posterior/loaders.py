"""Batches of a loader joined into full passes, and their outputs collected in order.

Where several processes share a loader, each has a :class:`ShardedLoader` of its batches and all get the whole.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from flowbnn.batches import (
    check_finite,
    count_data,
    has_row_axis,
    join,
    rows,
    shapes,
    split_batch,
    tensors_of,
)
from flowbnn.errors import FlowBNNError
from flowbnn.training.device import num_processes
from flowbnn.training.distributed import WorkerLost, is_connection_loss, select_rows
from flowbnn.training.randomness import RandomState, loader_generators

MOST_BYTES = 2**28  # of inputs that wait to go through together


def expected_rows(loader: Any) -> int:
    """How many rows a loader will give, or 0 where it does not say."""
    try:
        return count_data(loader)
    except (FlowBNNError, TypeError):
        return 0


def group_batches(batches: Iterable[Any], enough: Callable[[Any], int]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Batches of one shape joined until they hold ``enough`` rows, with their targets (none where the loader gives none).

    >>> loader = [(torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 2), torch.arange(3)), (torch.zeros(1, 2), torch.ones(1))]
    >>> [(len(inputs), len(targets)) for inputs, targets in group_batches(loader, lambda inputs: 6)]
    [(6, 2), (1, 1)]
    """
    waiting: list[Any] = []
    targets: list[Tensor] = []
    count = most = 0
    for batch in batches:
        inputs, truth = split_batch(batch)
        check_finite(inputs)
        number = rows(inputs)
        if waiting and (count + number > most or shapes(inputs) != shapes(waiting[0])):
            yield join(waiting), targets
            waiting, targets, count = [], [], 0
        if not waiting:
            size = sum([tensor.numel() * tensor.element_size() for tensor in tensors_of(inputs)])
            room = MOST_BYTES * max(1, number) // max(1, size)
            most = min(enough(inputs), room) if has_row_axis(inputs) else 0
        waiting.append(inputs)
        count += number
        if truth is not None:
            targets.append(truth)
    if waiting:
        yield join(waiting), targets


class OutputCollector:
    """Outputs ``[samples, rows, ...]`` of one batch after the other, in one tensor that grows only if more comes than was expected.

    It lies on the device of the outputs unless it would fill a quarter of what is free there.

    Args:
        loader: of the batches, which may say how many rows there will be.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.expected, self.filled = loader, expected_rows(loader), 0
        self.tensor: Tensor | None = None
        self.targets: list[Tensor] = []
        self.sample_counts: list[Tensor] = []

    def number(self, group: int) -> int:
        """The number in the whole loader of a batch that this process predicts by itself."""
        return (
            self.loader.numbers[group]
            if isinstance(self.loader, ShardedLoader) and not self.loader.cut
            else group
        )

    def add(
        self, outputs: Tensor, sample_counts: Tensor | None = None, targets: Sequence[Tensor] = ()
    ) -> None:
        """Take the next rows, the samples that each had, and their targets."""
        start, stop, old = self.filled, self.filled + outputs.shape[1], self.tensor
        if old is None and stop >= self.expected:
            self.tensor = outputs
        elif old is None or stop > old.shape[1]:
            self.tensor = _empty_like(
                outputs, self.expected if old is None else max(stop, 2 * old.shape[1]), old
            )
            if old is not None:
                self.tensor[:, :start] = old[:, :start]
        if self.tensor is not outputs and self.tensor is not None:
            self.tensor[:, start:stop] = outputs
        self.filled = stop
        self.targets.extend([part.cpu() for part in targets])
        if sample_counts is not None:
            self.sample_counts.append(sample_counts)

    def result(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All outputs, the samples that each input had, and the targets: those of this process, or of all that share the loader."""
        outputs = None if self.tensor is None else self.tensor[:, : self.filled]
        sample_counts = torch.cat(self.sample_counts) if self.sample_counts else None
        targets = torch.cat(self.targets) if self.targets else None
        if isinstance(self.loader, ShardedLoader):
            outputs, sample_counts, targets = self.loader.gather(outputs, sample_counts, targets)
        if outputs is None:
            raise FlowBNNError("the loader is empty: there is nothing to predict", kind="empty")
        return outputs, sample_counts, targets


def _empty_like(outputs: Tensor, rows: int, old: Tensor | None) -> Tensor:
    """Room for so many rows of outputs: where the old room was, or where it leaves three quarters of the free memory."""
    shape = (outputs.shape[0], rows, *outputs.shape[2:])
    device = outputs.device if old is None else old.device
    needed = outputs.element_size() * outputs.numel() // max(1, outputs.shape[1]) * rows
    if old is None and device.type == "cuda" and needed > torch.cuda.mem_get_info(device)[0] // 4:
        device = torch.device("cpu")
    return torch.empty(shape, dtype=outputs.dtype, device=device)


def shard_loader(loader: Any, sharded: bool, cut: bool) -> AbstractContextManager[Any]:
    """This process's share of a loader, for a ``with`` block; all of it where there is one process, or ``sharded`` is False.

    From here on all processes draw alike: seeds and orders are those of the first.

    Args:
        cut: whether batches can be cut, since the draws are the same for all inputs; else each is predicted whole.
    """
    return ShardedLoader(loader, cut) if sharded and num_processes() > 1 else nullcontext(loader)


class ShardedLoader:
    """A loader of this process's share; at the end of its ``with`` block, the other processes hear of an error.

    With draws that are shared by all inputs every process takes some rows of every batch. With draws of its own for every
    example, which depend on what is in the batch, batches go whole to one process after the other.
    """

    def __init__(self, loader: Any, cut: bool) -> None:
        self.loader, self.cut, self.done = loader, cut, False
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        on_gpu = distributed.get_backend() == "nccl"  # where its messages lie
        device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        random = RandomState(loader_generators(loader), device)
        state = [random.torch_state()]
        _exchange(lambda: distributed.broadcast_object_list(state, 0))
        random.restore(state[0])
        self.sizes: list[int] = []  # this process's rows of every batch
        self.numbers: list[int] = []  # of the batches of which it has any
        self.num_data = -(-expected_rows(loader) // self.world)

    def __enter__(self) -> "ShardedLoader":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self.done and not is_connection_loss(error):
            self.report(str(error))  # the others wait for this one's share

    def _pick(self, number: int, rows: int) -> tuple[int, int]:
        if self.cut:
            start, stop = self.rank * rows // self.world, (self.rank + 1) * rows // self.world
        else:
            start, stop = 0, rows if number % self.world == self.rank else 0
        self.sizes.append(stop - start)
        if start < stop:
            self.numbers.append(number)
        return start, stop

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sizes, self.numbers = [], []
        return iter(select_rows(self.loader, self._pick, self.rank))

    def report(self, trouble: str | None = None, *tensors: Tensor | None) -> list[Any]:
        """What all processes report, in their order: their trouble, or the sizes of their shares and their tensors."""
        self.done = True
        reports: list[Any] = [None] * self.world
        _exchange(lambda: distributed.all_gather_object(reports, (trouble, self.sizes, tensors)))
        for rank, (message, _, _) in enumerate(reports):
            if message is not None and trouble is None:
                raise FlowBNNError(
                    f"worker {rank} of {self.world} cannot predict its share: {message}", kind="worker"
                )
        return reports

    def gather(
        self, outputs: Tensor | None, sample_counts: Tensor | None, targets: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Everybody's outputs ``[samples, rows, ...]``, sample counts and targets, in the order of the loader."""
        home = torch.device("cpu") if outputs is None else outputs.device
        own = [None if tensor is None else tensor.cpu() for tensor in (outputs, sample_counts, targets)]
        _, sizes, tensors = zip(*self.report(None, *own), strict=True)
        outputs, sample_counts, targets = map(
            partial(_in_order, sizes), zip(*tensors, strict=True), (1, 0, 0)
        )
        return None if outputs is None else outputs.to(home), sample_counts, targets


def _in_order(sizes: Sequence[list[int]], parts: Sequence[Tensor | None], axis: int) -> Tensor | None:
    """The rows of all processes in the order of the loader, of every batch of which each has had so many; None if there are none."""
    pieces = [
        iter(() if part is None else part.split([size for size in own if size], axis))
        for part, own in zip(parts, sizes, strict=True)
    ]
    ordered = [
        next(piece)
        for batch in zip(*sizes, strict=True)
        for piece, size, part in zip(pieces, batch, parts, strict=True)
        if size and part is not None
    ]
    return torch.cat(ordered, axis) if ordered else None


def _exchange(exchange: Callable[[], Any]) -> None:
    try:
        exchange()
    except RuntimeError as error:
        if not is_connection_loss(error):
            raise
        raise WorkerLost("another worker died while this one was predicting") from None
