"""From a loader to one tensor of outputs: small batches go through the network together, and results keep their order."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed

from flowbnn.errors import FlowBNNError
from flowbnn.posterior.batches import (
    check_finite,
    count_data,
    divisible,
    join,
    rows,
    shapes,
    split_batch,
    tensors_of,
)
from flowbnn.training.distributed import WorkerLost, is_connection_loss, pick_rows
from flowbnn.training.randomness import Randomness, loader_generators

__all__ = ["Collected", "Share", "expected_rows", "grouped", "sharing"]

MOST_BYTES = 2**28  # of inputs that wait to go through together


def expected_rows(loader: Any) -> int:
    """How many rows a loader will give, or 0 where it does not say."""
    try:
        return count_data(loader)
    except (FlowBNNError, TypeError):
        return 0


def grouped(
    batches: Iterable[Any], enough: Callable[[Any], int]
) -> Iterator[tuple[int, tuple[Any, list[Tensor]]]]:
    """Batches of one shape joined until they hold ``enough`` rows, with their targets (none where the loader gives none), numbered.

    >>> loader = [(torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 2), torch.arange(3)), (torch.zeros(1, 2), torch.ones(1))]
    >>> [(number, len(inputs), len(targets)) for number, (inputs, targets) in grouped(loader, lambda inputs: 6)]
    [(0, 6, 2), (1, 1, 1)]
    """
    return enumerate(_groups(batches, enough))


def _groups(batches: Iterable[Any], enough: Callable[[Any], int]) -> Iterator[tuple[Any, list[Tensor]]]:
    waiting: list[Any] = []
    targets: list[Tensor] = []
    count = most = 0
    for batch in batches:
        inputs, truth = split_batch(batch)
        check_finite(inputs)
        if waiting and (shapes(inputs) != shapes(waiting[0]) or count + rows(inputs) > most):
            yield join(waiting), targets
            waiting, targets, count = [], [], 0
        if not waiting:
            size = sum([tensor.numel() * tensor.element_size() for tensor in tensors_of(inputs)])
            most = min(enough(inputs), MOST_BYTES * max(1, rows(inputs)) // max(1, size))
            most = most if divisible(inputs) else 0
        waiting.append(inputs)
        count += rows(inputs)
        if truth is not None:
            targets.append(truth)
    if waiting:
        yield join(waiting), targets


class Collected:
    """Outputs ``[samples, rows, ...]`` of one batch after the other, in one tensor that grows only if more comes than was expected.

    It lies on the device of the outputs unless it would fill a quarter of what is free there.

    Args:
        loader: of the batches, which may say how many rows there will be.
    """

    def __init__(self, loader: Any) -> None:
        self.loader, self.expected, self.filled = loader, expected_rows(loader), 0
        self.tensor: Tensor | None = None
        self.targets: list[Tensor] = []
        self.spent: list[Tensor] = []

    def number(self, group: int) -> int:
        """The number in the whole loader of a batch that this process predicts by itself."""
        return self.loader.numbers[group] if isinstance(self.loader, Share) and not self.loader.cut else group

    def add(self, outputs: Tensor, spent: Tensor | None = None, targets: Sequence[Tensor] = ()) -> None:
        """Take the next rows, the samples that each had, and their targets."""
        start, stop = self.filled, self.filled + outputs.shape[1]
        if self.tensor is None and stop >= self.expected:
            self.tensor = outputs
        else:
            self._make_room(outputs, stop)[:, start:stop] = outputs
        self.filled = stop
        self.targets.extend([part.cpu() for part in targets])
        if spent is not None:
            self.spent.append(spent)

    def _make_room(self, outputs: Tensor, needed: int) -> Tensor:
        old = self.tensor
        if old is not None and needed <= old.shape[1]:
            return old
        size = self.expected if old is None else max(needed, 2 * old.shape[1])
        home = _home(outputs, size) if old is None else old.device
        self.tensor = torch.empty(
            (outputs.shape[0], size, *outputs.shape[2:]), dtype=outputs.dtype, device=home
        )
        if old is not None:
            self.tensor[:, : self.filled] = old[:, : self.filled]
        return self.tensor

    def gathered(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """All outputs, the samples that each input had, and the targets: those of this process, or of all that share the loader."""
        outputs = None if self.tensor is None else self.tensor[:, : self.filled]
        spent = torch.cat(self.spent) if self.spent else None
        targets = torch.cat(self.targets) if self.targets else None
        if isinstance(self.loader, Share):
            return self.loader.gather(outputs, spent, targets)
        if outputs is None:
            raise FlowBNNError("the loader is empty: there is nothing to predict", kind="empty")
        return outputs, spent, targets


def _home(outputs: Tensor, total: int) -> torch.device:
    needed = outputs.element_size() * outputs.numel() // max(1, outputs.shape[1]) * total
    if outputs.device.type == "cuda" and needed > torch.cuda.mem_get_info(outputs.device)[0] // 4:
        return torch.device("cpu")
    return outputs.device


@contextmanager
def sharing(loader: Any, sharded: bool, cut: bool) -> Iterator[Any]:
    """This process's share of a loader, for a ``with`` block; all of it where there is one process, or ``sharded`` is False.

    From here on all processes draw alike: seeds and orders are those of the first.

    Args:
        cut: whether batches can be cut, since the draws are the same for all inputs; else each is predicted whole.
    """
    connected = distributed.is_available() and distributed.is_initialized()
    if not sharded or not connected or distributed.get_world_size() == 1:
        yield loader
        return
    share = Share(loader, cut)
    try:
        yield share
    except Exception as error:
        if not share.done and not is_connection_loss(error):
            share.report(str(error))  # the others wait for this one's share
        raise


class Share:
    """A loader of this process's share.

    With draws that are shared by all inputs every process takes some rows of every batch. With draws of its own for every
    example, which depend on what is in the batch, batches go whole to one process after the other.
    """

    def __init__(self, loader: Any, cut: bool) -> None:
        self.loader, self.cut, self.done = loader, cut, False
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.device = _device()
        random = Randomness(loader_generators(loader), self.device)
        state = [random.torch_state()]
        _exchange(lambda: distributed.broadcast_object_list(state, 0))
        random.restore(state[0])
        self.sizes: list[int] = []  # this process's rows of every batch
        self.numbers: list[int] = []  # of the batches of which it has any
        self.num_data = -(-expected_rows(loader) // self.world)

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
        return iter(pick_rows(self.loader, self._pick, self.rank))

    def report(self, trouble: str | None = None, *tensors: Tensor | None) -> list[Any]:
        """What all processes have to tell, in their order: their trouble, or their shares' sizes and the kinds of their tensors."""
        self.done = True
        kinds = [None if tensor is None else (tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        reports: list[Any] = [None] * self.world
        _exchange(lambda: distributed.all_gather_object(reports, (trouble, self.sizes, kinds)))
        for rank, (message, _, _) in enumerate(reports):
            if message is not None and trouble is None:
                raise FlowBNNError(f"worker {rank} of {self.world} cannot predict its share: {message}")
        return reports

    def gather(
        self, outputs: Tensor | None, spent: Tensor | None, targets: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Everybody's outputs ``[samples, rows, ...]``, sample counts and targets, in the order of the loader."""
        reports = self.report(None, outputs, spent, targets)
        sizes = [report[1] for report in reports]
        if not any(map(sum, sizes)):
            raise FlowBNNError("the loader is empty: there is nothing to predict")
        together, counts, truth = (
            self._joined(tensor, axis, sizes, [report[2][place] for report in reports])
            for place, (tensor, axis) in enumerate(((outputs, 1), (spent, 0), (targets, 0)))
        )
        assert together is not None
        return together, counts, truth

    def _joined(
        self, own: Tensor | None, axis: int, sizes: list[list[int]], kinds: list[Any]
    ) -> Tensor | None:
        if all(kind is None for kind in kinds):
            return None
        home = torch.device("cpu") if own is None else own.device
        parts: list[Iterator[Tensor]] = []
        for rank, kind in enumerate(kinds):
            if kind is None:
                parts.append(iter(()))
                continue
            shape, dtype = kind
            part = own if rank == self.rank and own is not None else torch.empty(shape, dtype=dtype)
            carried = (
                part.to(self.device).contiguous().view(-1).view(torch.uint8)
            )  # bytes: all kinds of numbers travel
            _exchange(lambda carried=carried, rank=rank: distributed.broadcast(carried, rank))  # type: ignore[misc]
            whole = carried.view(dtype).view(shape).to(home)
            parts.append(iter(whole.split([size for size in sizes[rank] if size], axis)))
        pieces = [
            next(part)
            for batch in zip(*sizes, strict=True)
            for part, size in zip(parts, batch, strict=True)
            if size
        ]
        return torch.cat(pieces, axis)


def _device() -> torch.device:
    """Where messages lie."""
    if distributed.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _exchange(exchange: Callable[[], Any]) -> None:
    try:
        exchange()
    except RuntimeError as error:
        if not is_connection_loss(error):
            raise
        raise WorkerLost("another worker died while this one was predicting") from None
