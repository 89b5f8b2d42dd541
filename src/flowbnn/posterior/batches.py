"""Batches of a loader: inputs and targets in the forms PyTorch users have them, joined into full passes; outputs collected in order.

Where several processes share a loader, each has a :class:`Share` of its batches and all get the whole.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed

from flowbnn.batches import apply, call, repeat_each, rows, split_batch, tensors_of
from flowbnn.errors import FlowBNNError
from flowbnn.training.distributed import WorkerLost, is_connection_loss, pick_rows
from flowbnn.training.randomness import Randomness, loader_generators

__all__ = [
    "Collected",
    "Share",
    "apply",
    "call",
    "check_finite",
    "count_data",
    "divisible",
    "expected_rows",
    "failure",
    "grouped",
    "is_batch",
    "join",
    "mirrored",
    "move",
    "pad",
    "pick",
    "repeat",
    "repeat_each",
    "rows",
    "shapes",
    "sharing",
    "take",
    "tensors_of",
]


def move(inputs: Any, device: torch.device, dtype: torch.dtype | None = None) -> Any:
    """To the device, and real numbers to the network's own precision where it is given."""

    def to(tensor: Tensor) -> Tensor:
        wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        return tensor.to(device, wanted, non_blocking=True)

    return apply(inputs, to)


def take(inputs: Any, start: int, stop: int) -> Any:
    return apply(inputs, lambda tensor: tensor[start:stop])


def divisible(inputs: Any) -> bool:
    """Whether all tensors have the examples on their first axis, so that some can be taken; not so a graph with its edges, say."""
    if isinstance(inputs, Tensor):
        return inputs.ndim > 0
    sizes = {tensor.shape[:1] for tensor in tensors_of(inputs)}
    return len(sizes) == 1 and len(sizes.pop()) == 1


def pick(inputs: Any, index: Tensor) -> Any:
    """The rows of these numbers."""
    return apply(inputs, lambda tensor: tensor[index.to(tensor.device)])


def mirrored(inputs: Any) -> Any:
    """Other rows of the same kind: each one's values in reverse order."""
    return apply(inputs, lambda tensor: tensor.flip(list(range(1, tensor.ndim))))


def pad(inputs: Any, count: int) -> Any:
    """As many rows as asked for, the last one repeated."""
    return apply(
        inputs,
        lambda tensor: torch.cat([tensor, tensor[-1:].expand(count - len(tensor), *tensor.shape[1:])]),
    )


def join(parts: Sequence[Any]) -> Any:
    """Batches of one shape as one."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat(list(parts))
    if isinstance(first, Mapping):
        return {name: join([part[name] for part in parts]) for name in first}
    return tuple(join(column) for column in zip(*parts, strict=True))


def shapes(inputs: Any) -> Any:
    """What two batches must have in common to be joined: the names or places of their tensors, and each one's row."""
    if isinstance(inputs, Tensor):
        return (inputs.shape[1:], inputs.dtype, inputs.device)
    if isinstance(inputs, Mapping):
        return tuple((name, shapes(value)) for name, value in inputs.items())
    return tuple(shapes(value) for value in inputs) if isinstance(inputs, list | tuple) else type(inputs)


def repeat(inputs: Any, times: int) -> Any:
    """``times`` copies of the batch, one block after the other."""
    return apply(inputs, lambda tensor: tensor.repeat(times, *(1,) * (tensor.ndim - 1)))


def count_data(loader: Any) -> int:
    """The number of examples one pass over the loader (all of its workers together) sees, which weighs the KL."""
    number = getattr(loader, "num_data", None)  # loaders that hold their data on the device say it themselves
    if isinstance(number, int):
        return number
    if isinstance(loader, list | tuple):
        return sum([rows(split_batch(batch)[0]) for batch in loader])
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    size = getattr(batches, "batch_size", None)
    if sampler is not None and isinstance(size, int) and hasattr(sampler, "__len__"):
        count = len(sampler)
        if getattr(batches, "drop_last", False):
            count = count // size * size
        return count * int(getattr(sampler, "num_replicas", 1))
    raise FlowBNNError("this loader does not say how many examples it gives; say it with num_data=")


def is_batch(inputs: Any) -> bool:
    """Whether this is one batch of inputs; else it may be a loader of them."""
    if isinstance(inputs, Tensor) or hasattr(inputs, "keys"):
        return True
    return isinstance(inputs, tuple) and bool(inputs) and all(isinstance(part, Tensor) for part in inputs)


def check_finite(inputs: Any, what: str = "inputs") -> None:
    """Refuse inputs that hold NaN or infinity."""
    for tensor in tensors_of(inputs):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            bad = (~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()
            raise FlowBNNError(
                f"the {what} hold NaN or infinity in {len(bad)} of {len(tensor)} rows (the first is row {int(bad[0])}); "
                "clean them first",
                kind="finite",
            )


def failure(inputs: Any, error: Exception) -> str:
    """Why a network does not take inputs, in a line: their shapes, what it said, and what may help."""
    tensors = tensors_of(inputs)
    sizes = ", ".join(str(tuple(part.shape)) for part in tensors)
    said = str(error).strip().splitlines() or [type(error).__name__]
    advice = ""
    if any(part.dtype == torch.uint8 for part in tensors):
        advice = "; bytes become numbers by images.float() / 255"
    elif "same dtype" in said[0] and any(not part.is_floating_point() for part in tensors):
        advice = "; integers are made real numbers by inputs.float()"
    elif any(part.ndim in (1, 3) for part in tensors) and re.search("shape|channels|dim", said[0]):
        advice = "; the examples come first: a single one is given as inputs[None]"
    return f"shape {sizes}: {said[0]}{advice}"


MOST_BYTES = 2**28  # of inputs that wait to go through together


def expected_rows(loader: Any) -> int:
    """How many rows a loader will give, or 0 where it does not say."""
    try:
        return count_data(loader)
    except (FlowBNNError, TypeError):
        return 0


def grouped(batches: Iterable[Any], enough: Callable[[Any], int]) -> Iterator[tuple[Any, list[Tensor]]]:
    """Batches of one shape joined until they hold ``enough`` rows, with their targets (none where the loader gives none).

    >>> loader = [(torch.zeros(3, 2), torch.arange(3)), (torch.zeros(3, 2), torch.arange(3)), (torch.zeros(1, 2), torch.ones(1))]
    >>> [(len(inputs), len(targets)) for inputs, targets in grouped(loader, lambda inputs: 6)]
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
            most = min(enough(inputs), _most(inputs, number))
        waiting.append(inputs)
        count += number
        if truth is not None:
            targets.append(truth)
    if waiting:
        yield join(waiting), targets


def _most(inputs: Any, number: int) -> int:
    """Rows like these that may wait together; none where batches cannot be joined."""
    if not divisible(inputs):
        return 0
    size = 0
    for tensor in tensors_of(inputs):
        size += tensor.numel() * tensor.element_size()
    return MOST_BYTES * max(1, number) // max(1, size)


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
            outputs, spent, targets = self.loader.gather(outputs, spent, targets)
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
        """What all processes report, in their order: their trouble, or the sizes of their shares and their tensors."""
        self.done = True
        reports: list[Any] = [None] * self.world
        _exchange(lambda: distributed.all_gather_object(reports, (trouble, self.sizes, tensors)))
        for rank, (message, _, _) in enumerate(reports):
            if message is not None and trouble is None:
                raise FlowBNNError(f"worker {rank} of {self.world} cannot predict its share: {message}")
        return reports

    def gather(
        self, outputs: Tensor | None, spent: Tensor | None, targets: Tensor | None
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Everybody's outputs ``[samples, rows, ...]``, sample counts and targets, in the order of the loader."""
        home = torch.device("cpu") if outputs is None else outputs.device
        own = [None if tensor is None else tensor.cpu() for tensor in (outputs, spent, targets)]
        _, sizes, tensors = zip(*self.report(None, *own), strict=True)
        outputs, spent, targets = map(partial(_in_order, sizes), zip(*tensors, strict=True), (1, 0, 0))
        return None if outputs is None else outputs.to(home), spent, targets


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
