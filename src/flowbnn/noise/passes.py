"""What one pass of a network needs of its noise: one object, which the pass carries and drops.

A noise module keeps its parameters and the mode it is held in (:class:`Setting`). Everything else lives in a :class:`NoisePass`: the
mode in force, which samples are in the batch, draws made ahead, draws kept while they serve. The layers find the pass that governs
them through a variable of their thread, so passes of several threads over one network do not meet.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

Mode = Literal["sample", "shared", "mean", "off"]
Sizes = tuple[int, ...]
Source = torch.Generator | None  # of random numbers; None is torch's own

_keys = count()


def new_key() -> int:
    """What a pass knows a noise module by; a copy of the module has another one."""
    return next(_keys)


class Setting(NamedTuple):
    """The mode in which noise is held.

    Args:
        mode: see :class:`~flowbnn.noise.base.Noise`.
        samples: how many draws mode ``shared`` holds.
        seed: of the draws of mode ``shared``.
        generator: of the draws of mode ``sample``; None is torch's own.
    """

    mode: Mode = "sample"
    samples: int = 1
    seed: int = 0
    generator: Source = None


class RowShard(NamedTuple):
    """The rows ``[start, stop)`` of a global batch of ``total`` rows: what one process holds of it.

    Every process draws for the whole batch, from generators in the same state, and keeps its own rows. So the draws
    differ between processes, do not depend on how many there are, and leave all generators in the same state.

    >>> import torch
    >>> def draw(rows):
    ...     return torch.arange(rows)
    >>> RowShard(2, 4, 5).of(2, draw), RowShard(2, 4, 5).of(6, draw)
    (tensor([2, 3]), tensor([ 6,  7,  8,  9, 10, 11]))
    """

    start: int
    stop: int
    total: int

    def of(self, rows: int, draw: Callable[[int], Tensor]) -> Tensor:
        """This share's ``rows`` rows, a multiple of its examples, of ``draw(number of rows of the whole batch)``."""
        return self.take(draw(self.whole(rows)), rows)

    def whole(self, rows: int) -> int:
        """Rows of the whole batch, where this process has ``rows``."""
        times, rest = divmod(rows, self.stop - self.start)
        if not rest:
            return self.total * times
        if rows == 1:
            return 1  # an input without examples: one draw, the same on every process
        raise FlowBNNError(
            f"a layer with noise sees {rows} rows where this process has {self.stop - self.start} examples, so its noise "
            "cannot be shared out over devices; train it on one, or use site='channel'",
            kind="shape",
        )

    def take(self, draws: Tensor, rows: int) -> Tensor:
        """This process's ``rows`` of draws for the whole batch."""
        times, rest = divmod(rows, self.stop - self.start)
        return draws if rest else draws[self.start * times : self.stop * times]


class _Process:
    share: RowShard | None = (
        None  # the same for all threads: a backward pass may run parts again in another one
    )


def share_batch(share: RowShard | None) -> None:
    """Say which rows of a global batch this process holds, until the next call; None: all of them."""
    _Process.share = share


def current_share() -> RowShard | None:
    """The rows of the global batch that this process holds, or None where it holds all of them."""
    return _Process.share


class Unfolded(Exception):
    """A layer sees another number of rows than a batch of folded samples has for it: its rows have been moved."""


class _Thread(threading.local):
    def __init__(self) -> None:
        # an attribute of the instance from the start: torch's compiler guards on it being there
        self.innermost: NoisePass | None = None


_thread = _Thread()


@dataclass(eq=False)
class Forward:
    """One forward pass of a network: what has been drawn in it."""

    group: Any  # the network's NoiseGroup
    sizes: Sizes  # the first two of what the network was given; none where that is no tensor
    draws: dict[int, Tensor]  # by the key of their layer; some may have been made ahead
    outer: "Forward | None"  # the forward pass around it, where the network calls itself
    held: dict[Any, Any]  # where shared draws and means are kept
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    calls: dict[int, int] = field(default_factory=dict)  # of layers of site ``position`` in mode ``shared``

    def serves(self) -> bool:
        """Whether draws may be kept for the pass: not in a part of it that will run again (activation checkpointing).

        Such a part draws for itself, so that torch's generator, which is put back for the second run, gives the same draws again.
        """
        if torch.is_grad_enabled() != self.gradients:
            return False
        return (
            torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )

    def examples(self, rows: int, repeated: int = 1) -> tuple[int, int]:
        """How many examples the ``rows`` rows of a layer belong to, and how many rows each has.

        Several where a network folds time steps or frames into its rows (``x.flatten(0, 1)``): the noise belongs to the example, of
        which a layer before has put ``repeated`` samples into the batch.
        """
        if not self.sizes or rows in self.sizes:
            return rows, 1
        given = self.sizes[0] * repeated
        return (rows, 1) if given == 0 or rows % given else (given, rows // given)


@dataclass(eq=False)
class NoisePass:
    """How the noise of some layers behaves inside a ``with`` block of this object, in this thread.

    Args:
        settings: the mode of every layer that it governs, by the layer's key. Other layers, and copies of these, are not governed.
        shares: whether draws are those of this process's share of a batch, as in training.
        held: where shared draws and means are kept for longer than a forward pass: for a prediction, in which no parameter changes.
    """

    settings: dict[int, Setting]
    shares: bool = True
    held: dict[Any, Any] | None = None
    part: tuple[int, int] | None = None  # which of the shared draws are in the batch; None: all
    entry: tuple[int, int] = (-1, 1)  # the layer at which samples enter the batch, and how many
    rows: dict[int, int] = field(default_factory=dict)  # that layers must see where samples are folded
    given: Any = None  # gives a layer its draws at some positions, where a pass is handed them
    prepared: dict[int, Tensor] = field(default_factory=dict)  # draws for the next forward pass
    gradients: bool = False  # whether these were made with gradients
    only_prepared: bool = False  # refuse to draw for a layer for which nothing was prepared
    asked: dict[int, tuple[Sizes, bool]] = field(default_factory=dict)  # positions, see InputNoise.ask
    forward: Forward | None = None
    outer: "NoisePass | None" = None
    passing: bool = False  # made for one forward pass only

    def __enter__(self) -> "NoisePass":
        self.outer = _thread.innermost
        _thread.innermost = self
        return self

    def __exit__(self, *error: object) -> None:
        _thread.innermost = self.outer

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """For the length of a ``with`` block inside this one, this pass governs nothing."""
        _thread.innermost = self.outer
        try:
            yield
        finally:
            _thread.innermost = self

    @property
    def share(self) -> RowShard | None:
        return _Process.share if self.shares else None


def governing(noise: Any) -> NoisePass | None:
    """The innermost pass of this thread that governs this layer."""
    found = _thread.innermost
    while found is not None and noise.key not in found.settings:
        found = found.outer
    return found


def pass_of(noise: Any) -> NoisePass:
    """The innermost pass of this thread that governs this layer; without one, a layer behaves as it is held itself."""
    found = governing(noise)
    return NoisePass({noise.key: noise.setting}) if found is None else found


def innermost(group: Any) -> NoisePass | None:
    """The pass of this thread in which a forward pass of this network is going on."""
    found = _thread.innermost
    while found is not None and (found.forward is None or found.forward.group is not group):
        found = found.outer
    return found
