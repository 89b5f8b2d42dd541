"""Groups small batches of a loader into full passes, and collects their outputs in order.

If several processes predict together, each reads its part of the batches from a :class:`ShardedLoader`. All return the whole result.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from flowbnn.batches import (
    check_finite,
    enlarge,
    has_row_axis,
    join,
    join_padded,
    reported_size,
    rows,
    shapes,
    split_weighted_batch,
    take,
    tensors_of,
)
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical, Likelihood
from flowbnn.likelihoods.classes import ClassLikelihood
from flowbnn.metrics.checks import IGNORED
from flowbnn.posterior.prediction import Prediction
from flowbnn.training import is_main_process, track
from flowbnn.training.device import num_processes
from flowbnn.training.distributed import WorkerLost, is_connection_loss, select_rows
from flowbnn.training.randomness import RandomState, loader_generators


def expected_rows(loader: Any) -> int:
    """Returns the number of rows of a loader, or 0 if it is unknown."""
    try:
        return reported_size(loader) or 0
    except (FlowBNNError, TypeError):
        return 0


def group_batches(
    batches: Iterable[Any], max_rows: Callable[[Any], int]
) -> Iterator[tuple[Any, list[Tensor]]]:
    """Joins consecutive batches of one shape.

    Args:
        batches: Batches of a loader.
        max_rows: Function from inputs to the number of rows of a group.

    Yields:
        Joined inputs, and the targets of their batches (an empty list if the loader has none).

    >>> loader = [(torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 2), torch.arange(3)), (torch.zeros(1, 2), torch.ones(1))]
    >>> [(len(inputs), len(targets)) for inputs, targets in group_batches(loader, lambda inputs: 6)]
    [(6, 2), (1, 1)]
    """
    group: list[Any] = []
    group_targets: list[Tensor] = []
    count = limit = 0
    for batch in batches:
        inputs, targets, _ = split_weighted_batch(batch)  # metrics do not use weights
        check_finite(inputs)
        number = rows(inputs)
        if group and (count + number > limit or shapes(inputs) != shapes(group[0])):
            yield join(group), group_targets
            group, group_targets, count = [], [], 0
        if not group:
            size = sum([tensor.numel() * tensor.element_size() for tensor in tensors_of(inputs)])
            # at most 256 MB of inputs, which are in memory besides the pass
            rows_in_memory = 2**28 * max(1, number) // max(1, size)
            limit = min(max_rows(inputs), rows_in_memory) if has_row_axis(inputs) else 0
        group.append(inputs)
        count += number
        if targets is not None:
            group_targets.append(targets)
    if group:
        yield join(group), group_targets


def split_rows(inputs: Any, size: int) -> Iterator[tuple[Any, list[Tensor]]]:
    """Splits one batch of inputs as :func:`group_batches` joins those of a loader.

    Args:
        inputs: Batch of inputs.
        size: Number of rows of a group, or 0 for one group.

    Yields:
        Inputs of a group, and an empty list of targets.
    """
    if not size:
        yield inputs, []
        return
    for start in range(0, rows(inputs), size):
        yield take(inputs, start, start + size), []


class OutputCollector:
    """Collects outputs ``[samples, rows, ...]`` of consecutive batches in one tensor.

    The tensor is allocated once, unless there are more rows than expected. It is on the device of the outputs, or on the CPU if it
    would take more than a quarter of the free memory.

    Args:
        loader: Loader of the batches.
        max_bytes: Number of bytes of outputs at which the collector is full. Processes that share a loader have no limit.
        likelihood: Observation model. Outputs for pixels or tokens may have other sizes in every batch. They are padded by zeros, and
            their targets by its ``ignore_index``.
    """

    def __init__(
        self, loader: Any, max_bytes: float = math.inf, likelihood: Likelihood | None = None
    ) -> None:
        self.likelihood, self.ignored = likelihood, getattr(likelihood, "ignore_index", IGNORED)
        self.loader, self.expected_rows, self.num_rows = loader, expected_rows(loader), 0
        self.max_bytes = math.inf if isinstance(loader, ShardedLoader) else max_bytes
        self.tensor: Tensor | None = None
        self.targets: list[Tensor] = []
        self.sample_counts: list[Tensor] = []

    def batch_index(self, index: int) -> int:
        """Returns the index in the whole loader of a batch of this process."""
        sharded = isinstance(self.loader, ShardedLoader) and not self.loader.split_batches
        return self.loader.batch_indices[index] if sharded else index

    def groups(self, prediction: Prediction) -> Iterator[tuple[Any, list[Tensor]]]:
        """Yields inputs and targets of the loader. Small batches are joined.

        Args:
            prediction: Current prediction. It defines the size of the groups, and its ``batch_index`` is set.
        """
        prediction.total_rows = self.expected_rows
        show_progress = prediction.options.progress and is_main_process()
        batches = track(self.loader, "predicting", unit="batch") if show_progress else self.loader
        for index, group in enumerate(group_batches(batches, prediction.rows_per_group)):
            prediction.batch_index = self.batch_index(index)
            yield group

    def add(
        self, outputs: Tensor, sample_counts: Tensor | None = None, targets: Sequence[Tensor] = ()
    ) -> None:
        """Adds the outputs of the next rows.

        Args:
            outputs: Outputs ``[samples, rows, ...]``.
            sample_counts: Number of samples of each row, for adaptive sampling.
            targets: Targets of the rows.
        """
        if self.tensor is not None and self.tensor.shape[2:] != outputs.shape[2:]:
            outputs = self._pad(outputs)
        start, stop, previous = self.num_rows, self.num_rows + outputs.shape[1], self.tensor
        if previous is not None and not previous.shape[1]:  # the previous rows have been consumed
            previous = None
        size = outputs.numel() * outputs.element_size()
        if previous is None and (stop >= self.expected_rows or size >= self.max_bytes):
            self.tensor = outputs
        elif previous is None:
            max_rows = min(self.expected_rows, self.max_bytes * max(1, outputs.shape[1]) / max(1, size))
            self.tensor = _allocate(outputs, max(stop, int(max_rows)), None)
        elif stop > previous.shape[1]:
            self.tensor = _allocate(outputs, max(stop, 2 * previous.shape[1]), previous)
            self.tensor[:, :start] = previous[:, :start]
        if self.tensor is not outputs and self.tensor is not None:
            self.tensor[:, start:stop] = outputs
        self.num_rows = stop
        self.targets.extend([tensor.cpu() for tensor in targets])
        if sample_counts is not None:
            self.sample_counts.append(sample_counts)

    def _pad(self, outputs: Tensor) -> Tensor:
        """Pads the positions of the outputs, and of those collected so far, to the larger sizes.

        Raises:
            FlowBNNError: If the outputs have no positions, or another number of classes.
        """
        previous = self.tensor
        assert previous is not None
        axis = getattr(self.likelihood, "class_axis", None)
        classes = 2 if axis == 1 else outputs.ndim - 1
        one_axis = axis is None and isinstance(self.likelihood, Categorical)
        fits = isinstance(self.likelihood, ClassLikelihood) and outputs.ndim == previous.ndim and not one_axis
        if not fits or (axis is not None and outputs.shape[classes] != previous.shape[classes]):
            text = (
                f"a batch has outputs of shape {tuple(outputs.shape[1:])}, others {tuple(previous.shape[1:])}"
            )
            raise FlowBNNError(f"{text}; pad batches to one length", kind="shape", argument="loader")
        widest = [max(sizes) for sizes in zip(outputs.shape[2:], previous.shape[2:], strict=True)]
        self.tensor = enlarge(previous, (*previous.shape[:2], *widest))
        return enlarge(outputs, (*outputs.shape[:2], *widest))

    @property
    def is_full(self) -> bool:
        """True if the outputs have at least ``max_bytes`` bytes."""
        tensor = self.tensor
        if tensor is None or not tensor.shape[1]:
            return False
        return tensor.numel() // tensor.shape[1] * self.num_rows * tensor.element_size() >= self.max_bytes

    def clear(self) -> None:
        """Drops the rows collected so far."""
        self.expected_rows = max(0, self.expected_rows - self.num_rows)
        if self.tensor is not None:
            self.tensor = self.tensor[:, :0].clone()
        self.num_rows, self.targets, self.sample_counts = 0, [], []

    def result(self) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Returns all outputs, sample counts and targets, of this process or of all that share the loader."""
        outputs = None if self.tensor is None else self.tensor[:, : self.num_rows]
        sample_counts = torch.cat(self.sample_counts) if self.sample_counts else None
        targets = join_padded(self.targets, fill=self.ignored) if self.targets else None
        if isinstance(self.loader, ShardedLoader):
            outputs, sample_counts, targets = self.loader.gather(
                outputs, sample_counts, targets, self.ignored
            )
        if outputs is None:
            raise FlowBNNError("loader is empty", kind="empty")
        return outputs, sample_counts, targets


def _allocate(outputs: Tensor, num_rows: int, previous: Tensor | None) -> Tensor:
    """Returns an empty tensor for ``num_rows`` rows of outputs, on the device of the previous one."""
    shape = (outputs.shape[0], num_rows, *outputs.shape[2:])
    device = outputs.device if previous is None else previous.device
    num_bytes = outputs.element_size() * outputs.numel() // max(1, outputs.shape[1]) * num_rows
    if previous is None and device.type == "cuda" and num_bytes > torch.cuda.mem_get_info(device)[0] // 4:
        device = torch.device("cpu")
    return torch.empty(shape, dtype=outputs.dtype, device=device)


def shard_loader(loader: Any, sharded: bool, split_batches: bool) -> AbstractContextManager[Any]:
    """Returns a context manager of this process's part of a loader, or of the loader itself if there is one process.

    It sets the random states of all processes to that of the first process.

    Args:
        loader: Loader.
        sharded: If False, this process predicts everything.
        split_batches: If True, each batch is divided among the processes. This requires that all inputs share their draws.
    """
    return ShardedLoader(loader, split_batches) if sharded and num_processes() > 1 else nullcontext(loader)


class ShardedLoader:
    """This process's part of a loader. Its ``with`` block reports errors to the other processes.

    Args:
        loader: Loader.
        split_batches: If True, every process reads some rows of every batch. If False, the processes read whole
            batches in turn, because draws depend on the batch.
    """

    def __init__(self, loader: Any, split_batches: bool) -> None:
        self.loader, self.split_batches, self.has_reported = loader, split_batches, False
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        nccl = distributed.get_backend() == "nccl"  # this backend communicates by the GPU
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        random = RandomState(loader_generators(loader), device)
        state = [random.torch_state()]
        _communicate(lambda: distributed.broadcast_object_list(state, 0))
        random.restore(state[0])
        self.sizes: list[int] = []  # rows of this process in every batch
        self.batch_indices: list[int] = []  # batches in which it has rows
        self.num_data = -(-expected_rows(loader) // self.world)

    def __enter__(self) -> "ShardedLoader":
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, Exception) and not self.has_reported and not is_connection_loss(error):
            self.report(str(error))  # the other processes wait for this report

    def _select(self, index: int, num_rows: int) -> tuple[int, int]:
        if self.split_batches:
            start, stop = self.rank * num_rows // self.world, (self.rank + 1) * num_rows // self.world
        else:
            start, stop = 0, num_rows if index % self.world == self.rank else 0
        self.sizes.append(stop - start)
        if start < stop:
            self.batch_indices.append(index)
        return start, stop

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        self.sizes, self.batch_indices = [], []
        return iter(select_rows(self.loader, self._select, self.rank))

    def report(self, error: str | None = None, *tensors: Tensor | None) -> list[Any]:
        """Exchanges reports with all processes.

        Args:
            error: Message of an error in this process, or None.
            tensors: Tensors of this process.

        Returns:
            For each process its error, the sizes of its parts, and its tensors.
        """
        self.has_reported = True
        reports: list[Any] = [None] * self.world
        _communicate(lambda: distributed.all_gather_object(reports, (error, self.sizes, tensors)))
        for rank, (message, _, _) in enumerate(reports):
            if message is not None and error is None:
                text = f"worker {rank} of {self.world} failed: {message}"
                raise FlowBNNError(text, kind="worker")
        return reports

    def gather(
        self, outputs: Tensor | None, sample_counts: Tensor | None, targets: Tensor | None, ignored: int
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Returns the outputs ``[samples, rows, ...]``, sample counts and targets of all processes, in the order of the loader.

        Args:
            outputs: Outputs of this process, or None.
            sample_counts: Number of samples of each row, or None.
            targets: Targets, or None.
            ignored: Value that pads targets.
        """
        device = torch.device("cpu") if outputs is None else outputs.device
        local = [None if tensor is None else tensor.cpu() for tensor in (outputs, sample_counts, targets)]
        _, sizes, tensors = zip(*self.report(None, *local), strict=True)
        outputs, sample_counts, targets = map(
            partial(_interleave, sizes), zip(*tensors, strict=True), (1, 0, 0), (0, 0, ignored)
        )
        return None if outputs is None else outputs.to(device), sample_counts, targets


def _interleave(
    sizes: Sequence[list[int]], tensors: Sequence[Tensor | None], axis: int, fill: float
) -> Tensor | None:
    """Returns the rows of all processes in the order of the loader, or None if there are none.

    Args:
        sizes: Rows of every process in every batch.
        tensors: Tensor of every process.
        axis: Axis of the rows.
        fill: Value of the padding, if processes have other sizes of the other axes.
    """
    pieces = [
        iter(() if tensor is None else tensor.split([size for size in local if size], axis))
        for tensor, local in zip(tensors, sizes, strict=True)
    ]
    chunks = [
        next(piece)
        for batch in zip(*sizes, strict=True)
        for piece, size, tensor in zip(pieces, batch, tensors, strict=True)
        if size and tensor is not None
    ]
    return join_padded(chunks, axis, fill) if chunks else None


def _communicate(exchange: Callable[[], Any]) -> None:
    """Runs a collective operation. Raises WorkerLost if another process has died."""
    try:
        exchange()
    except RuntimeError as error:
        if not is_connection_loss(error):
            raise
        raise WorkerLost("another worker died") from None
