"""Several processes that train one model: each holds a share of every batch, and torch's DDP averages their gradients.

The loss is a mean over rows, so the gradient of the whole batch is the mean of the processes' gradients, each weighted by its share
of the rows: every process multiplies its loss by that weight. All processes draw from generators in the same state
(:class:`flowbnn.noise.RowShard`), so that noise and dropout are those of one process.
"""

import os
import re
import signal
import socket
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from flowbnn.batches import batch_size
from flowbnn.errors import FlowBNNError, warn
from flowbnn.noise.passes import RowShard, share_batch
from flowbnn.training.device import Process
from flowbnn.training.options import TrainingOptions
from flowbnn.training.randomness import seed_all
from flowbnn.training.storage import is_alive

Pick = Callable[[int, int], tuple[int, int]]


def row_shard(total: int, rank: int, world: int) -> tuple[RowShard, float]:
    """The rows of one process, and the weight of their mean so that the mean over processes is the mean over all rows.

    Shares differ by one row at most. Where there are fewer rows than processes, those left over repeat a row at no weight.

    >>> [row_shard(5, rank, 2) for rank in (0, 1)]
    [(RowShard(start=0, stop=2, total=5), 0.8), (RowShard(start=2, stop=5, total=5), 1.2)]
    >>> row_shard(1, 0, 2)
    (RowShard(start=0, stop=1, total=1), 0.0)
    """
    start, stop = rank * total // world, (rank + 1) * total // world
    if start < stop:
        return RowShard(start, stop, total), (stop - start) * world / total
    start = min(start, total - 1)
    return RowShard(start, start + 1, total), 0.0


def take_rows(batch: Any, start: int, stop: int) -> Any:
    """Some rows of every tensor of a nested batch.

    >>> take_rows({"x": torch.arange(4), "y": (torch.zeros(4, 2), ["a", "b", "c", "d"])}, 1, 3)
    {'x': tensor([1, 2]), 'y': (tensor([[0., 0.],
            [0., 0.]]), ['b', 'c'])}
    """
    rows = batch_size(batch)

    def take(part: Any) -> Any:
        if isinstance(part, Tensor):
            if part.dim() and part.shape[0] != rows:
                raise FlowBNNError(
                    f"a batch has tensors of {rows} and of {part.shape[0]} rows, which cannot be shared out: give several "
                    "devices a torch DataLoader, whose examples are",
                    kind="shape",
                )
            return part[start:stop] if part.dim() else part
        if isinstance(part, Mapping):
            return {key: take(value) for key, value in part.items()}
        if isinstance(part, tuple) and hasattr(part, "_fields"):
            return type(part)(*(take(value) for value in part))
        if isinstance(part, (list, tuple)):
            plain = not any(isinstance(value, (Tensor, Mapping, list, tuple)) for value in part)
            if plain and len(part) == rows:
                return part[start:stop]
            return type(part)(take(value) for value in part)
        return part

    return take(batch)


class RowShardLoader:
    """This process's rows of every batch that a loader gives: the batches, and their order, are those of one process.

    ``announce`` is called with the share and its weight before each batch.
    """

    def __init__(
        self, loader: Any, rank: int, world: int, announce: Callable[[RowShard, float], None]
    ) -> None:
        self.loader, self.rank, self.world, self.announce = loader, rank, world, announce
        self.sampler = getattr(loader, "sampler", None)
        self.shares: deque[tuple[RowShard, float]] = deque()  # a DataLoader asks some batches ahead
        self.part = select_rows(loader, self._pick, rank)

    def _pick(self, number: int, rows: int) -> tuple[int, int]:
        self.shares.append(row_shard(rows, self.rank, self.world))
        return self.shares[-1][0][:2]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.shares.clear()
        for batch in self.part:
            self.announce(*self.shares.popleft())
            yield batch


def select_rows(loader: Any, pick: Pick, rank: int) -> Iterable[Any]:
    """The rows ``pick(number, rows) -> (start, stop)`` of every batch of a loader; batches without any are left out.

    A plain ``DataLoader`` fetches only those examples. Any other loader is gone through in full, and its batches are cut. One that
    gives each process other examples already is refused: it would be cut twice.

    >>> batches = [torch.arange(4), torch.arange(4, 6)]
    >>> list(select_rows(batches, lambda number, rows: (0, rows - 2), rank=0))
    [tensor([0, 1])]
    """
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise FlowBNNError(
            "this loader's DistributedSampler gives each process other examples, and flowbnn shares a loader out itself: leave the "
            "sampler out, and give every process the same loader",
            kind="loader",
            argument="loader",
        )
    sampler = getattr(loader, "batch_sampler", None)
    if type(loader) is not DataLoader or sampler is None or isinstance(loader.dataset, IterableDataset):
        return _Picked(loader, pick, batch_size, take_rows)
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "pin_memory", "timeout", "generator", "num_workers")
    }
    if loader.num_workers:
        names = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
        options.update({name: getattr(loader, name) for name in names})
        options["worker_init_fn"] = partial(_seed_apart, rank, loader.worker_init_fn)
    indices = _Picked(sampler, pick, len, lambda batch, start, stop: list(batch)[start:stop])
    return DataLoader(loader.dataset, batch_sampler=indices, **options)


class _Picked:
    """Of every batch, of examples or of their indices, the rows that ``pick`` names."""

    def __init__(
        self, batches: Any, pick: Pick, size: Callable[[Any], int], cut: Callable[[Any, int, int], Any]
    ) -> None:
        self.batches, self.pick, self.size, self.cut = batches, pick, size, cut

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches):
            start, stop = self.pick(number, self.size(batch))
            if start < stop:
                yield self.cut(batch, start, stop)


def _seed_apart(rank: int, then: Callable[[int], None] | None, worker: int) -> None:
    """Start of a data worker: other random numbers than the same worker of another process has."""
    if rank:
        seed_all((torch.initial_seed() + 7919 * rank) % 2**32)
    if then is not None:
        then(worker)


@contextmanager
def sharded_dropout(model: nn.Module, share: Callable[[], RowShard | None]) -> Iterator[None]:
    """For the length of a ``with`` block, the network's own dropout layers draw as its noise does (:class:`RowShard`)."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    layers = [module for module in model.modules() if type(module) in kinds and "forward" not in vars(module)]
    for module in layers:
        vars(module)["forward"] = partial(_dropout, module, share)
    try:
        yield
    finally:
        for module in layers:
            del vars(module)["forward"]


def _dropout(module: Any, share: Callable[[], RowShard | None], x: Tensor) -> Tensor:
    rows = share()
    known = rows is not None and x.ndim > 1 and x.shape[0] % (rows.stop - rows.start) == 0
    if rows is None or not known or not module.training or not 0.0 < module.p < 1.0:
        return type(module).forward(module, x)
    keep = 1.0 - module.p
    rest = x.shape[1:] if type(module) is nn.Dropout else (x.shape[1], *(1,) * (x.ndim - 2))

    def draw(number: int) -> Tensor:
        return torch.empty((number, *rest), dtype=x.dtype, device=x.device).bernoulli_(keep).div_(keep)

    mask = rows.of(x.shape[0], draw)
    return x.mul_(mask) if module.inplace else x * mask


@contextmanager
def synchronized_batch_norm(model: nn.Module, device: torch.device) -> Iterator[bool]:
    """For the length of a ``with`` block, BatchNorm layers measure the whole batch; yields False where torch cannot (CPU).

    A layer changes its class and nothing else, so that its hooks and its place in the optimizer stay.
    """
    kinds: tuple[type[nn.Module], ...] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = [(module, type(module)) for module in model.modules() if type(module) in kinds]
    able = device.type == "cuda"
    for module, _ in layers if able else ():
        module.__class__ = nn.SyncBatchNorm
        module.process_group = None  # type: ignore[assignment]
    try:
        yield able or not layers
    finally:
        for module, kind in layers if able else ():
            module.__class__ = kind
            del module.process_group


LOST = re.compile(r"gloo|nccl|connection (closed|reset|refused)|broken pipe|peer|timed out", re.IGNORECASE)


class WorkerLost(FlowBNNError):
    """Another process has died."""


class Terminated(RuntimeError):
    """This process was asked to end (SIGTERM)."""


class Interrupts:
    """While installed, Ctrl-C inside ``with interrupts:`` is raised at the end of that block; a second one at once.

    Outside the main thread, or where the program has its own handler, it does nothing. With ``terminate``, SIGTERM is treated in the
    same way: the launcher sends it to the processes that are left when one has died.
    """

    def __init__(self, terminate: bool) -> None:
        self.terminate = terminate
        self.former: dict[signal.Signals, Any] = {}
        self.holding = self.ending = False
        self.waiting: type[BaseException] | None = None

    def install(self) -> None:
        """Take the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.former[signal.SIGINT] = signal.signal(signal.SIGINT, self._handle)
        if self.terminate and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self.former[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._handle)

    def remove(self) -> None:
        """Put the former handlers back."""
        for number, former in self.former.items():
            # a process that ends because another has died must still come to report it
            ignored = number == signal.SIGTERM and self.ending
            signal.signal(number, signal.SIG_IGN if ignored else former)

    def __enter__(self) -> None:
        self.holding = True

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.holding = False
        if self.waiting is not None:
            raise self.waiting

    def _handle(self, number: int, frame: FrameType | None) -> None:
        wanted = KeyboardInterrupt if number == signal.SIGINT else Terminated
        if wanted is Terminated and self.ending:
            return
        self.ending = self.ending or wanted is Terminated
        if not self.holding or self.waiting is wanted:
            raise wanted
        self.waiting = self.waiting or wanted


def is_connection_loss(error: BaseException) -> bool:
    """Whether an error of torch says that another process does not answer.

    >>> is_connection_loss(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:3021"))
    True
    >>> is_connection_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, (distributed.DistError, WorkerLost)):
        return True
    return type(error) is RuntimeError and LOST.search(str(error)) is not None


class Worker(Process):
    """One of several processes, on one machine or more."""

    def __init__(self, options: TrainingOptions) -> None:
        super().__init__(options)
        self.rank, self.num_processes = distributed.get_rank(), distributed.get_world_size()
        self.share: RowShard | None = None
        self.everyone: list[Any] = [None] * self.num_processes
        distributed.all_gather_object(self.everyone, (socket.gethostname(), os.getpid()))

    def wrap(self, objective: nn.Module) -> nn.Module:
        objective = super().wrap(objective)
        # layers may be idle, in all batches or in some; running statistics are those of the first process at the end of an epoch
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            objective, ids, find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    @contextmanager
    def sharing(self, objective: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            stack.callback(self.take_share, None, 1.0)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
            stack.enter_context(sharded_dropout(objective, lambda: self.share))
            whole = stack.enter_context(synchronized_batch_norm(objective, self.device))
            if not whole and self.rank == 0:
                warn(
                    f"on a CPU, BatchNorm in {self.num_processes} processes takes its statistics from each one's own rows (torch "
                    "synchronises them on GPUs only), so the result depends on their number",
                    kind="batch norm",
                )
            yield

    def share_out(self, loader: Any) -> Any:
        return RowShardLoader(loader, self.rank, self.num_processes, self.take_share)

    def take_share(self, share: RowShard | None, weight: float) -> None:
        """Which rows of the global batch the next step holds."""
        self.weight, self.rows = weight, None if share is None else share.total
        if share != self.share:
            self.share = share
            share_batch(share)

    def average(self, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        names = sorted(numbers)  # the processes must agree on what they exchange
        values = [torch.as_tensor(numbers[name], device=self.device).detach().double() for name in names]
        packed = torch.stack(values) * (self.weight / self.num_processes)
        distributed.all_reduce(packed)
        return dict(zip(names, packed.unbind(), strict=True))

    def agree(self, value: Any) -> Any:
        box = [value]
        distributed.broadcast_object_list(box, 0, device=self.device)
        return box[0]

    def synchronize(self, objective: nn.Module) -> None:
        buffers = list(objective.buffers())
        first = self.agree([buffer.cpu() for buffer in buffers] if self.rank == 0 else None)
        for buffer, value in zip(buffers, first, strict=True):
            buffer.copy_(value)

    def lost(self, error: BaseException) -> str | None:
        terminated = isinstance(error, Terminated)
        if not terminated and not is_connection_loss(error):
            return None
        gone = self.gone(0.5 if terminated else 3.0)
        if gone:
            names = " and ".join(str(rank) for rank in gone)
            return f"worker{'s' if len(gone) > 1 else ''} {names} of {self.num_processes} died"
        if terminated:
            return f"worker {self.rank} of {self.num_processes} was asked to end (SIGTERM)"
        return f"one of {self.num_processes} workers does not answer"

    def gone(self, seconds: float) -> list[int]:
        """The processes of this machine that are no more, looked for until there is one."""
        until = time.monotonic() + seconds
        here = self.everyone[self.rank][0]
        while True:
            dead = [
                rank for rank, (host, pid) in enumerate(self.everyone) if host == here and not is_alive(pid)
            ]
            if dead or time.monotonic() > until:
                return dead
            time.sleep(0.05)
