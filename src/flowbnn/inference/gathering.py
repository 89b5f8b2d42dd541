"""Prediction by several processes: each takes a share of a loader, and all get the whole result in the loader's order."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, distributed

from flowbnn.errors import FlowBNNError
from flowbnn.inference.batches import count_data
from flowbnn.training.crew import WorkerLost, is_connection_loss
from flowbnn.training.randomness import Randomness, loader_generators
from flowbnn.training.sharing import pick_rows

__all__ = ["Gathering", "Sharded", "gathering"]

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
