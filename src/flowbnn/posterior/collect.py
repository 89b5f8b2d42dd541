"""From a loader to one tensor of outputs: small batches go through the network together, and results keep their order."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from flowbnn.errors import FlowBNNError
from flowbnn.posterior.batches import count_data, join, rows, shapes, split_batch, tensors_of
from flowbnn.training.distributed import WorkerLost, is_connection_loss, pick_rows
from flowbnn.training.randomness import Randomness, loader_generators

__all__ = ["Gathering", "Sharded", "Store", "expected_rows", "gathering", "in_groups"]

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


# -------------------- gathering.py

Sharded = Literal["auto"] | bool


@contextmanager
def gathering(loader: Any, sharded: Sharded, shared_draws: bool) -> Iterator["Gathering | None"]:
    """What shares ``loader`` out for the length of a ``with`` block, or None where this process predicts all of it.

    From here on all processes draw alike: seeds and orders are those of the first.

    Args:
        sharded: ``"auto"`` shares it out where several processes are connected, False never does.
        shared_draws: the draws are the same for all inputs, so that batches can be cut; else each is predicted whole.
    """
    if sharded not in ("auto", True, False):
        raise FlowBNNError(f"sharded is 'auto', True or False, not {sharded!r}")
    connected = distributed.is_available() and distributed.is_initialized()
    if not sharded or not connected or distributed.get_world_size() == 1:
        yield None
        return
    part = Gathering(loader, shared_draws)
    try:
        yield part
    except Exception as error:
        if not part.done and not is_connection_loss(error):
            part.report(str(error))  # the others wait for this one's share
        raise


class Gathering:
    """A loader of this process's share.

    With draws that are shared by all inputs every process takes some rows of every batch. With draws of its own for every
    example, which depend on what is in the batch, batches go whole to one process after the other.
    """

    def __init__(self, loader: Any, cut: bool) -> None:
        self.loader, self.cut, self.done = loader, cut, False
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        self.device = _device()
        random = Randomness(loader_generators(loader), self.device)
        found = [random.torch_state()]
        _told(lambda: distributed.broadcast_object_list(found, 0))
        random.restore(found[0])
        self.sizes: list[int] = []  # this process's rows of every batch
        self.numbers: list[int] = []  # of the batches of which it has any
        try:
            self.num_data = -(-count_data(loader) // self.world)
        except (FlowBNNError, TypeError):
            self.num_data = 0

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
        _told(lambda: distributed.all_gather_object(reports, (trouble, self.sizes, kinds)))
        for rank, (message, _, _) in enumerate(reports):
            if message is not None and trouble is None:
                raise FlowBNNError(f"worker {rank} of {self.world} cannot predict its share: {message}")
        return reports

    def gather(
        self, outputs: Tensor | None, targets: Tensor | None, spent: Tensor | None
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Everybody's outputs ``[samples, rows, ...]``, targets and sample counts, in the order of the loader."""
        reports = self.report(None, outputs, targets, spent)
        sizes = [report[1] for report in reports]
        if not any(map(sum, sizes)):
            raise FlowBNNError("the loader is empty: there is nothing to predict")
        together, truth, counts = (
            self._joined(tensor, axis, sizes, [report[2][place] for report in reports])
            for place, (tensor, axis) in enumerate(((outputs, 1), (targets, 0), (spent, 0)))
        )
        assert together is not None
        return together, truth, counts

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
            _told(lambda carried=carried, rank=rank: distributed.broadcast(carried, rank))  # type: ignore[misc]
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


def _told(exchange: Callable[[], Any]) -> None:
    try:
        exchange()
    except RuntimeError as error:
        if not is_connection_loss(error):
            raise
        raise WorkerLost("another worker died while this one was predicting") from None
