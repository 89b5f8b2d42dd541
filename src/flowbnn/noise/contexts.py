"""Contexts that define the noise of a network in a forward pass.

A noise module holds its parameters and its default mode. A :class:`NoiseContext` holds everything else that a pass needs: the current
modes and the source of the draws. Contexts are frozen. A ``with`` block activates a context in its thread until the block ends.
Passes of several threads over one network are therefore independent.
"""

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from flowbnn.batches import call
from flowbnn.errors import FlowBNNError

Mode = Literal["sample", "shared", "mean", "off"]
Shape = tuple[int, ...]
OptionalGenerator = torch.Generator | None  # None stands for torch's global generator
ShapeRecord = dict[int, tuple[Shape, bool]]  # by layer key: positions, and whether under autocast

_keys = count()


def new_key() -> int:
    """Returns a new identifier of a noise module. A copy of a module has another one."""
    return next(_keys)


class NoiseMode(NamedTuple):
    """Mode of the noise of one layer.

    Args:
        mode: Name of the mode, as in :class:`~flowbnn.noise.base.Noise`.
        samples: Number of draws in mode ``shared``.
        seed: Seed of the draws in mode ``shared``.
        generator: Generator of the draws in mode ``sample``. None stands for torch's global generator.
    """

    mode: Mode = "sample"
    samples: int = 1
    seed: int = 0
    generator: OptionalGenerator = None


class RowShard(NamedTuple):
    """Rows ``[start, stop)`` of a global batch of ``total`` rows that one process holds.

    Every process draws for the global batch, from generators in the same state, and keeps its own rows. The draws therefore differ
    between processes, do not depend on their number, and leave all generators in the same state.

    >>> import torch
    >>> def draw(rows):
    ...     return torch.arange(rows)
    >>> RowShard(2, 4, 5).draw_local(2, draw), RowShard(2, 4, 5).draw_local(6, draw)
    (tensor([2, 3]), tensor([ 6,  7,  8,  9, 10, 11]))
    """

    start: int
    stop: int
    total: int

    def draw_local(self, rows: int, draw: Callable[[int], Tensor]) -> Tensor:
        """Draws for the global batch and returns the rows of this process.

        Args:
            rows: Number of rows of this process, a multiple of its examples.
            draw: Function from a number of rows to draws.
        """
        return self.select(draw(self.global_rows(rows)), rows)

    def global_rows(self, rows: int) -> int:
        """Returns the number of rows of the global batch if this process has ``rows``."""
        times, remainder = divmod(rows, self.stop - self.start)
        if not remainder:
            return self.total * times
        if rows == 1:
            return 1  # an input without examples: one draw, the same on every process
        text = f"a layer has {rows} rows, no multiple of {self.stop - self.start} examples; train on one device, or set site='channel'"
        raise FlowBNNError(text, kind="shape", rows=rows)

    def select(self, draws: Tensor, rows: int) -> Tensor:
        """Returns the ``rows`` rows of this process from draws for the global batch."""
        times, remainder = divmod(rows, self.stop - self.start)
        return draws if remainder else draws[self.start * times : self.stop * times]


class _Process:
    # one value for all threads: a backward pass may run a part of the forward pass again in another thread
    shard: RowShard | None = None


def set_row_shard(shard: RowShard | None) -> None:
    """Sets the rows of the global batch that this process holds, or None for all rows."""
    _Process.shard = shard


def current_row_shard() -> RowShard | None:
    """Returns the rows of the global batch that this process holds, or None if it holds all of them."""
    return _Process.shard


class RowCountChanged(Exception):
    """Raised if the number of rows of a layer differs from that of its draws."""


class UnexpectedNoiseShape(Exception):
    """Raised if the shape of a feature map differs from that of the draws of its layer."""


class DrawSource(Protocol):
    """Source of draws of the layers of a context."""

    def draws(self, layer: Any, positions: Shape, call: int, device: torch.device) -> Tensor:
        """Returns draws ``[samples or rows, *positions, dim]``.

        Args:
            layer: Noise module that requests the draws.
            positions: Sizes of the positions of its feature map. They are ones at site ``channel``.
            call: Number of earlier calls of the layer in this pass, at site ``position``.
            device: Device of the draws.
        """
        ...


@dataclass(frozen=True)
class MappedDraws:
    """Draws of one sample of each layer, made before the pass.

    Args:
        tensors: Draws ``[dim]``, ``[*positions, dim]``, or ``[rows, *positions, dim]`` where every example has its own, by layer key
            and call.
        rows: Number of examples that have draws of their own, or 0 if one draw serves all.
    """

    tensors: Mapping[tuple[int, int], Tensor]
    rows: int = 0


@dataclass(frozen=True)
class PreparedDraws:
    """Draws per example that were made before the pass.

    Args:
        tensors: Draws ``[rows, *positions, dim]`` by layer key.
        gradients: True if they were made with gradients enabled. They serve passes with the same setting only.
        required: If True, layers without prepared draws raise an error instead of drawing.
    """

    tensors: Mapping[int, Tensor]
    gradients: bool
    required: bool = False


@dataclass(frozen=True, eq=False)
class ForwardState:
    """State of one forward pass of a network, whose dictionaries its layers fill while they run. It ends with the pass.

    Args:
        group: Noise modules of the network.
        sizes: First two sizes of the first input tensor, or empty without tensors.
        draws: Draws per example of this pass, by layer key.
        gradients: True if gradients were enabled when the pass began.
        calls: Number of calls of layers of site ``position`` in mode ``shared``, by layer key.
        memo: Means and shared draws of this pass.
    """

    group: "NoiseGroup"
    sizes: Shape
    draws: dict[int, Tensor]
    gradients: bool = field(default_factory=torch.is_grad_enabled)
    calls: dict[int, int] = field(default_factory=dict)
    memo: dict[Any, Tensor] = field(default_factory=dict)

    def reuses_draws(self) -> bool:
        """Returns False while layers run that will run again in the backward pass (activation checkpointing).

        These layers make their own draws. Torch restores its generator for the second run, which therefore gives the same draws.
        """
        if torch.is_grad_enabled() != self.gradients:
            return False
        return (
            torch.compiler.is_compiling() or torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        )

    def split_rows(self, rows: int) -> tuple[int, int]:
        """Returns the number of examples that ``rows`` rows of a layer belong to, and the rows of each.

        An example has several rows if the network flattens time steps or frames into its rows (``x.flatten(0, 1)``).
        """
        if not self.sizes or rows in self.sizes:
            return rows, 1
        examples = self.sizes[0]
        return (rows, 1) if examples == 0 or rows % examples else (examples, rows // examples)


class _Thread(threading.local):
    def __init__(self) -> None:
        # set here, because torch's compiler guards on the attribute of the instance
        self.stack: tuple[NoiseContext, ...] = ()


_thread = _Thread()


@dataclass(frozen=True, eq=False)
class NoiseContext:
    """Behavior of the noise of some layers inside a ``with`` block, in this thread.

    Args:
        modes: Mode of each layer, by layer key. Other layers, and copies of these, are not affected.
        source: Source of draws. If None, each layer makes its own.
        mapped: Draws of one sample, which are used instead of a source.
        prepared: Draws per example for the first forward pass in the block.
        sharded: If True, draws per example are those of this process's :class:`RowShard`.
        recorded_shapes: Dictionary into which layers of site ``position`` write the positions that they draw for.
        forward: Current forward pass, or None outside of the network's root.
    """

    modes: Mapping[int, NoiseMode]
    source: DrawSource | None = None
    mapped: MappedDraws | None = None
    prepared: PreparedDraws | None = None
    sharded: bool = True
    recorded_shapes: ShapeRecord | None = None
    forward: ForwardState | None = None

    def __enter__(self) -> "NoiseContext":
        _thread.stack = (*_thread.stack, self)
        return self

    def __exit__(self, *error: object) -> None:
        _thread.stack = _thread.stack[:-1]

    def change(self, prepared: PreparedDraws | None, forward: ForwardState | None) -> "NoiseContext":
        """Returns a copy with other prepared draws and another forward pass."""
        return NoiseContext(
            self.modes, self.source, self.mapped, prepared, self.sharded, self.recorded_shapes, forward
        )

    @property
    def shard(self) -> RowShard | None:
        """Rows of the global batch to draw for, or None for all rows."""
        return _Process.shard if self.sharded else None


class NoiseGroup:
    """Noise of one network. Hooks on the root of the network mark the beginning and the end of a forward pass.

    A layer of site ``channel`` with one draw per example draws once per pass. If the layer is called again, it uses the same draw,
    because the noise belongs to the network.

    Args:
        layers: Noise modules of the network.
        draw_examples: Function of a noise module, a number of examples and a context that returns the draws of the module.
    """

    def __init__(self, layers: list[Any], draw_examples: Callable[[Any, int, NoiseContext], Tensor]) -> None:
        self.layers, self.draw_examples = layers, draw_examples

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begins a forward pass, as a forward pre-hook of the root."""
        stack, first_key = _thread.stack, self.layers[0].key
        position = len(stack) - 1
        while position >= 0 and first_key not in stack[position].modes:
            if stack[position].mapped is not None and self._intersects(stack[position]):
                break
            position -= 1
        covers_all = position >= 0
        for layer in self.layers:
            covers_all = covers_all and layer.key in stack[position].modes
        if position >= 0 and not covers_all and stack[position].mapped is not None:
            # layers without draws did not run when the draws were made; if they run now, they raise an error
            covers_all, completed = True, self._complete(stack[position])
            stack = (*stack[:position], completed, *stack[position + 1 :])
        # without a single context that covers all layers, each has the mode of its own context
        context = stack[position] if covers_all else NoiseContext(current_modes(self.layers))
        sizes: Shape = ()
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                sizes = tuple(value.shape[:2])
                break
        draws: dict[int, Tensor] = {}
        prepared = context.prepared
        if prepared is not None and prepared.tensors:
            later_draws = dict(prepared.tensors)
            for layer in self.layers:
                tensor = later_draws.pop(layer.key, None)
                # without gradients this is the first of two runs (activation checkpointing), which make their own draws
                if tensor is not None and prepared.gradients == torch.is_grad_enabled():
                    draws[layer.key] = tensor
            # later passes in the same context make new draws
            context = context.change(
                PreparedDraws(later_draws, prepared.gradients, prepared.required), context.forward
            )
            stack = (*stack[:position], context, *stack[position + 1 :])
        _thread.stack = (*stack, context.change(context.prepared, ForwardState(self, sizes, draws)))

    def _intersects(self, context: NoiseContext) -> bool:
        """Returns True if a context has the mode of one of the layers."""
        return any(layer.key in context.modes for layer in self.layers)

    def _complete(self, context: NoiseContext) -> NoiseContext:
        """Returns a context of draws that were made before the pass, with a mode for each layer."""
        modes = dict(context.modes)
        for layer in self.layers:
            modes.setdefault(layer.key, NoiseMode("shared"))
        return NoiseContext(
            modes, context.source, context.mapped, context.prepared, context.sharded,
            context.recorded_shapes, context.forward,
        )  # fmt: skip

    def end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Ends a forward pass, as a forward hook of the root that is called even if the pass fails.

        This removes the context of the innermost pass of this network, and all contexts that were entered inside it.
        """
        stack = _thread.stack
        for index in range(len(stack) - 1, -1, -1):
            forward = stack[index].forward
            if forward is not None and forward.group is self:
                _thread.stack = stack[:index]
                return


def context_of(noise: Any) -> NoiseContext:
    """Returns the innermost context of this thread for a layer, or a context with the layer's default mode."""
    for context in reversed(_thread.stack):
        if noise.key in context.modes:
            return context
    return NoiseContext({noise.key: noise.default_mode})


def current_modes(layers: Iterable[Any]) -> dict[int, NoiseMode]:
    """Returns the current modes of these layers, by layer key."""
    return {layer.key: context_of(layer).modes[layer.key] for layer in layers}


def forward_sample(
    model: nn.Module, keys: tuple[tuple[int, int], ...], draws: list[Tensor], inputs: Any, rows: int = 0
) -> Tensor:
    """Returns the outputs of one sampled network.

    Args:
        model: Stochastic network in evaluation mode.
        keys: Layer key and number of earlier calls of each draw.
        draws: Draws ``[*positions, dim]``, or ``[rows, *positions, dim]`` where every example has its own.
        inputs: Inputs.
        rows: Number of examples that have draws of their own, or 0 if one draw serves all.
    """
    modes: dict[int, NoiseMode] = {}
    for key, _ in keys:
        modes[key] = NoiseMode("shared")
    with NoiseContext(modes, mapped=MappedDraws(dict(zip(keys, draws, strict=True)), rows), sharded=False):
        return call(model, inputs)
