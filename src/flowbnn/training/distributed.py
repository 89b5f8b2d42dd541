r"""Training in several processes: every process holds a shard of the rows of every batch, and torch's DDP averages the gradients.

The loss is a mean over rows. The gradient of the global batch is therefore the weighted mean of the gradients of the processes,

.. math:: \nabla L = \frac{1}{P} \sum_{p=1}^{P} w_p \nabla L_p, \qquad w_p = P \frac{n_p}{n},

where process :math:`p` holds :math:`n_p` of :math:`n` rows and multiplies its loss by :math:`w_p`. All processes draw from generators
in the same state (:class:`flowbnn.noise.contexts.RowShard`), so noise and dropout are those of one process.
"""

import os
import re
import socket
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from flowbnn.batches import batch_size
from flowbnn.errors import FlowBNNError, warn
from flowbnn.noise.contexts import RowShard, set_row_shard
from flowbnn.training.device import Process
from flowbnn.training.interrupts import Terminated
from flowbnn.training.options import TrainingOptions
from flowbnn.training.randomness import seed_all
from flowbnn.training.storage import is_alive

RowRange = Callable[[int, int], tuple[int, int]]  # (index of the batch, its rows) -> (start, stop)


def row_shard(total: int, rank: int, world: int) -> tuple[RowShard, float]:
    """Returns the rows of one process and the weight of its loss.

    The sizes of the shards differ by one row at most. If there are fewer rows than processes, the remaining processes repeat a row
    with weight 0.

    Args:
        total: Number of rows of the global batch.
        rank: Index of the process.
        world: Number of processes.

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
    """Returns a range of rows of every tensor of a nested batch.

    Args:
        batch: Tensor, or nested tuples, lists and mappings of tensors.
        start: First row.
        stop: Row after the last one.

    Raises:
        FlowBNNError: If the tensors have different numbers of rows.

    >>> take_rows({"x": torch.arange(4), "y": (torch.zeros(4, 2), ["a", "b", "c", "d"])}, 1, 3)
    {'x': tensor([1, 2]), 'y': (tensor([[0., 0.],
            [0., 0.]]), ['b', 'c'])}
    """
    rows = batch_size(batch)

    def take(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.dim() and value.shape[0] != rows:
                text = f"a batch with tensors of {rows} and of {value.shape[0]} rows cannot be split; use a torch DataLoader"
                raise FlowBNNError(text, kind="shape")
            return value[start:stop] if value.dim() else value
        if isinstance(value, Mapping):
            return {key: take(entry) for key, entry in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return type(value)(*(take(entry) for entry in value))
        if isinstance(value, (list, tuple)):
            plain = not any(isinstance(entry, (Tensor, Mapping, list, tuple)) for entry in value)
            if plain and len(value) == rows:
                return value[start:stop]
            return type(value)(take(entry) for entry in value)
        return value

    return take(batch)


class RowShardLoader:
    """Loader of one process's rows of every batch of another loader.

    The batches and their order are those of one process.

    Args:
        loader: Loader of global batches.
        rank: Index of the process.
        world: Number of processes.
        on_shard: Function called with the shard and the weight of its loss before each batch.
    """

    def __init__(
        self, loader: Any, rank: int, world: int, on_shard: Callable[[RowShard, float], None]
    ) -> None:
        self.loader, self.rank, self.world, self.on_shard = loader, rank, world, on_shard
        self.sampler = getattr(loader, "sampler", None)
        self.shards: deque[tuple[RowShard, float]] = deque()  # a DataLoader requests batches in advance
        self.local_loader = select_rows(loader, self._local_rows, rank)

    def _local_rows(self, index: int, rows: int) -> tuple[int, int]:
        self.shards.append(row_shard(rows, self.rank, self.world))
        return self.shards[-1][0][:2]

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.shards.clear()
        for batch in self.local_loader:
            self.on_shard(*self.shards.popleft())
            yield batch


def select_rows(loader: Any, row_range: RowRange, rank: int) -> Iterable[Any]:
    """Returns a loader of some rows of every batch; batches without any row are left out.

    A plain ``DataLoader`` fetches only the selected examples. Every other loader is iterated in full and its batches are cut.

    Args:
        loader: Loader of whole batches.
        row_range: Function ``(index, rows) -> (start, stop)`` of the index of a batch and its number of rows.
        rank: Index of the process, which seeds its data workers.

    Raises:
        FlowBNNError: If the loader has a ``DistributedSampler``, because its batches would be split twice.

    >>> batches = [torch.arange(4), torch.arange(4, 6)]
    >>> list(select_rows(batches, lambda index, rows: (0, rows - 2), rank=0))
    [tensor([0, 1])]
    """
    if isinstance(getattr(loader, "sampler", None), DistributedSampler):
        text = "flowbnn splits the batches itself: leave the DistributedSampler out and give every process the same loader"
        raise FlowBNNError(text, kind="loader", argument="loader")
    sampler = getattr(loader, "batch_sampler", None)
    if type(loader) is not DataLoader or sampler is None or isinstance(loader.dataset, IterableDataset):
        return _RowSelection(loader, row_range, batch_size, take_rows)
    options: dict[str, Any] = {
        name: getattr(loader, name)
        for name in ("collate_fn", "pin_memory", "timeout", "generator", "num_workers")
    }
    if loader.num_workers:
        names = ("prefetch_factor", "persistent_workers", "multiprocessing_context")
        options.update({name: getattr(loader, name) for name in names})
        options["worker_init_fn"] = partial(_seed_data_worker, rank, loader.worker_init_fn)
    indices = _RowSelection(sampler, row_range, len, lambda batch, start, stop: list(batch)[start:stop])
    return DataLoader(loader.dataset, batch_sampler=indices, **options)


class _RowSelection:
    """Iterable of a range of rows of every batch, of examples or of their indices."""

    def __init__(
        self,
        batches: Any,
        row_range: RowRange,
        size: Callable[[Any], int],
        cut: Callable[[Any, int, int], Any],
    ) -> None:
        self.batches, self.row_range, self.size, self.cut = batches, row_range, size, cut

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            start, stop = self.row_range(index, self.size(batch))
            if start < stop:
                yield self.cut(batch, start, stop)


def _seed_data_worker(rank: int, init: Callable[[int], None] | None, worker: int) -> None:
    """Gives a data worker other random numbers than the same worker of another process."""
    if rank:
        seed_all((torch.initial_seed() + 7919 * rank) % 2**32)
    if init is not None:
        init(worker)


@contextmanager
def sharded_dropout(model: nn.Module, shard: Callable[[], RowShard | None]) -> Iterator[None]:
    """Context manager in which dropout layers draw the mask of the global batch and use their shard of it.

    Args:
        model: Network with dropout layers.
        shard: Function that returns the shard of the current batch.
    """
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
    layers = [module for module in model.modules() if type(module) in kinds and "forward" not in vars(module)]
    for module in layers:
        vars(module)["forward"] = partial(_dropout, module, shard)
    try:
        yield
    finally:
        for module in layers:
            del vars(module)["forward"]


def _dropout(module: Any, shard: Callable[[], RowShard | None], x: Tensor) -> Tensor:
    """Applies the rows of a dropout mask that is drawn for the global batch."""
    rows = shard()
    divisible = rows is not None and x.ndim > 1 and x.shape[0] % (rows.stop - rows.start) == 0
    if rows is None or not divisible or not module.training or not 0.0 < module.p < 1.0:
        return type(module).forward(module, x)
    keep = 1.0 - module.p
    row_shape = x.shape[1:] if type(module) is nn.Dropout else (x.shape[1], *(1,) * (x.ndim - 2))

    def draw(number: int) -> Tensor:
        return torch.empty((number, *row_shape), dtype=x.dtype, device=x.device).bernoulli_(keep).div_(keep)

    mask = rows.draw_local(x.shape[0], draw)
    return x.mul_(mask) if module.inplace else x * mask


@contextmanager
def synchronized_batch_norm(model: nn.Module, device: torch.device) -> Iterator[bool]:
    """Context manager in which BatchNorm layers use the statistics of the global batch.

    torch's ``SyncBatchNorm`` replaces them for the time of the block. It shares their weights, running statistics and hooks. The
    original layers are put back at the end.

    Args:
        model: Network with BatchNorm layers.
        device: Device of the network. torch synchronizes statistics on CUDA devices only.

    Yields:
        False if the network has BatchNorm layers that are not synchronized, else True.
    """
    kinds = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    layers = [
        (parent, name, child)
        for parent in list(model.modules())
        for name, child in parent._modules.items()
        if type(child) in kinds
    ]
    synchronized = device.type == "cuda"
    for parent, name, child in layers if synchronized else ():
        layer = nn.SyncBatchNorm.convert_sync_batchnorm(child)
        vars(layer).update({key: value for key, value in vars(child).items() if "_hooks" in key})
        parent._modules[name] = layer
    try:
        yield synchronized or not layers
    finally:
        for parent, name, child in layers if synchronized else ():
            parent._modules[name] = child


class WorkerLost(FlowBNNError):
    """Raised when another process has died."""


def is_connection_loss(error: BaseException) -> bool:
    """Returns True if an error of torch means that another process does not respond.

    >>> is_connection_loss(RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:3021"))
    True
    >>> is_connection_loss(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    if isinstance(error, (distributed.DistError, WorkerLost)):
        return True
    pattern = r"gloo|nccl|connection (closed|reset|refused)|broken pipe|peer|timed out"
    return type(error) is RuntimeError and re.search(pattern, str(error), re.IGNORECASE) is not None


class Worker(Process):
    """One of several processes that train together, on one machine or more.

    Args:
        options: Options of the training run.
    """

    def __init__(self, options: TrainingOptions) -> None:
        super().__init__(options)
        self.rank, self.num_processes = distributed.get_rank(), distributed.get_world_size()
        self.row_shard: RowShard | None = None
        self.workers: list[Any] = [None] * self.num_processes  # host and process id of every rank
        distributed.all_gather_object(self.workers, (socket.gethostname(), os.getpid()))

    def wrap(self, objective: nn.Module) -> nn.Module:
        """Moves the objective to the device and wraps it by torch's ``DistributedDataParallel``."""
        objective = super().wrap(objective)
        # a layer may be unused in some batches; buffers are synchronized once per epoch
        ids = [self.device] if self.device.type == "cuda" else None
        return DistributedDataParallel(
            objective, ids, find_unused_parameters=True, broadcast_buffers=False, gradient_as_bucket_view=True
        )

    @contextmanager
    def synchronized_layers(self, objective: nn.Module) -> Iterator[None]:
        """Context manager in which dropout and BatchNorm treat the batch of all processes as one."""
        with ExitStack() as stack:
            stack.callback(self.set_shard, None, 1.0)
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "find_unused_parameters=True was specified")
            stack.enter_context(sharded_dropout(objective, lambda: self.row_shard))
            synchronized = stack.enter_context(synchronized_batch_norm(objective, self.device))
            if not synchronized and self.rank == 0:
                text = f"on CPUs each of {self.num_processes} processes has BatchNorm statistics of its own, which change the result"
                warn(text, kind="batch norm")
            yield

    def shard(self, loader: Any) -> Any:
        """Returns a loader of this process's rows of every batch."""
        return RowShardLoader(loader, self.rank, self.num_processes, self.set_shard)

    def set_shard(self, shard: RowShard | None, weight: float) -> None:
        """Sets the rows of the global batch that the next step holds, and the weight of their loss."""
        self.loss_weight, self.global_rows = weight, None if shard is None else shard.total
        if shard != self.row_shard:
            self.row_shard = shard
            set_row_shard(shard)

    def average(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns scalars of a batch, averaged over the rows of all processes."""
        names = sorted(values)  # the same order in all processes
        scalars = [torch.as_tensor(values[name], device=self.device).detach().double() for name in names]
        packed = torch.stack(scalars) * (self.loss_weight / self.num_processes)
        distributed.all_reduce(packed)
        return dict(zip(names, packed.unbind(), strict=True))

    def broadcast(self, value: Any) -> Any:
        """Returns the value of the first process."""
        message = [value]
        distributed.broadcast_object_list(message, 0, device=self.device)
        return message[0]

    def synchronize_buffers(self, objective: nn.Module) -> None:
        """Waits for all processes and copies the buffers of the first one."""
        buffers = list(objective.buffers())
        values = self.broadcast([buffer.cpu() for buffer in buffers] if self.rank == 0 else None)
        for buffer, value in zip(buffers, values, strict=True):
            buffer.copy_(value)

    def describe_lost_worker(self, error: BaseException) -> str | None:
        """Returns a description of the process that died if that caused the error, else None."""
        terminated = isinstance(error, Terminated)
        if not terminated and not is_connection_loss(error):
            return None
        dead = self.dead_ranks(0.5 if terminated else 3.0)
        if dead:
            names = " and ".join(str(rank) for rank in dead)
            return f"worker{'s' if len(dead) > 1 else ''} {names} of {self.num_processes} died"
        if terminated:
            return f"worker {self.rank} of {self.num_processes} received SIGTERM"
        return f"one of {self.num_processes} workers does not respond"

    def dead_ranks(self, timeout: float) -> list[int]:
        """Returns the ranks of dead processes on this machine, and waits up to ``timeout`` seconds for the first one."""
        deadline = time.monotonic() + timeout
        host = self.workers[self.rank][0]
        while True:
            dead = [
                rank for rank, (other, pid) in enumerate(self.workers) if other == host and not is_alive(pid)
            ]
            if dead or time.monotonic() > deadline:
                return dead
            time.sleep(0.05)
