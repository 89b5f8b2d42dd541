r"""The stochastic part of a layer: :math:`z_l = NF_l(z_0)`, :math:`f_l = \mathrm{layer}_l(z_l \circ f_{l-1})`.

A :class:`Noise` is a small module that sits inside the layer it serves and multiplies the layer's input through a forward hook.
So the layer keeps its class, its weights, its place and its name, and everything that worked on it still does.

A forward pass leaves nothing behind: the KL is a function of the posterior and the prior alone.
"""

from collections.abc import Callable, Iterable
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.noise.layout import Layout

__all__ = ["Mode", "Noise", "Share", "Site"]

# -------------------- sharing.py


class Share(NamedTuple):
    """The rows ``[start, stop)`` of a global batch of ``total`` rows: what one process holds of it.

    Every process draws for the whole batch, from generators in the same state, and keeps its own rows. So the draws
    differ between processes, do not depend on how many there are, and leave all generators in the same state.

    >>> import torch
    >>> def draw(rows):
    ...     return torch.arange(rows)
    >>> Share(2, 4, 5).of(2, draw), Share(2, 4, 5).of(6, draw)
    (tensor([2, 3]), tensor([ 6,  7,  8,  9, 10, 11]))
    """

    start: int
    stop: int
    total: int

    def of(self, rows: int, draw: Callable[[int], Tensor]) -> Tensor:
        """This share's rows of ``draw(number of rows of the whole batch)``.

        Args:
            rows: how many this process needs: as many as its examples, or a multiple of that (several samples or positions
                of each example, one example after the other).
            draw: from a number of rows to as many draws.
        """
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
            "cannot be shared out over devices; train it on one, or use site='channel'"
        )

    def take(self, draws: Tensor, rows: int) -> Tensor:
        """This process's ``rows`` of draws for the whole batch."""
        times, rest = divmod(rows, self.stop - self.start)
        return draws if rest else draws[self.start * times : self.stop * times]


Mode = Literal["sample", "shared", "mean", "off"]
Site = Literal["channel", "position"]


class Noise(nn.Module):
    """What every kind of noise shares: where it goes and in which mode it is. Subclasses draw vectors.

    ==========  =====================================================================================================
    ``sample``  every example gets its own draw in every pass of the network
    ``shared``  ``samples`` fixed draws, the same for all inputs: the batch holds that many copies, one block per draw
    ``mean``    the noise is held at its posterior mean
    ``off``     the noise is held at one: the plain network
    ==========  =====================================================================================================
    """

    # gives the shared draw at some positions, where a pass is handed its draws
    given: Callable[[tuple[int, ...]], Tensor] | None = None

    def __init__(self, layout: Layout, site: Site) -> None:
        super().__init__()
        if site not in ("channel", "position"):
            raise FlowBNNError(f"site is 'channel' or 'position', not {site!r}")
        self.layout, self.site = layout, site
        self.label = type(self).__name__  # what the conversion's table shows
        self.recipe: Any = None  # what this noise was built from, for saving
        self.fitted = False  # whether its parameters have been trained or read from a file
        self.mode: Mode = "sample"
        self.samples = 1
        self.repeat = 1  # > 1: this layer is where the sample axis enters the batch
        self.generator: torch.Generator | None = None
        self.share: Share | None = None  # the batch is spread over several processes: the rows that are here
        self.seed = 0  # of the shared draws
        self.calls = 0  # in this pass, of site ``position`` in mode ``shared``
        self.part = (0, 1)  # which of the shared draws are in this batch: [start, stop)
        self.group: Any = None  # the network's NoiseGroup, which draws for many layers at once
        self.ready: Tensor | None = None  # this layer's draw in the pass that is going on
        self._held: dict[Any, Tensor] = {}  # the mean, or the shared draws
        self._stamp: tuple[Any, ...] = ()

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Noise vectors of shape ``shape + (dim,)``."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(shape, generator)")

    def draw_rows(self, rows: int, at: tuple[int, ...]) -> Tensor:
        """Draws for the rows of this batch, at positions ``at``; in a shared batch, these rows of the draws for all of it."""
        if self.share is None:
            return self.draw((rows, *at), self.generator)
        return self.share.of(rows, lambda number: self.draw((number, *at), self.generator))

    def draw_each(self, at: tuple[int, ...], generators: Iterable[torch.Generator]) -> Tensor:
        """One draw at positions ``at`` from each generator, ``[draws, *at, dim]``; each is read before the next is asked for."""
        return torch.stack([self.draw(at, generator) for generator in generators])

    @property
    def passes_through(self) -> bool:
        """Whether the noise may as well multiply the layer's output (see :class:`~flowbnn.noise.layout.Layout`)."""
        return self.layout.fan_out > 0 and self.site == "channel"

    def mean(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define mean()")

    def divergence(
        self, samples: int | None = None, generator: torch.Generator | None = None
    ) -> Divergence | None:
        """KL to the prior and entropy in nats, or None for noise that has no density (dropout)."""
        return None

    def hold(
        self, mode: Mode, samples: int = 1, seed: int = 0, generator: torch.Generator | None = None
    ) -> None:
        """Set the mode. ``generator`` serves mode ``sample``; ``samples`` and ``seed`` mode ``shared``."""
        if mode not in ("sample", "shared", "mean", "off"):
            raise FlowBNNError(f"the noise is 'sample', 'shared', 'mean' or 'off', not {mode!r}")
        state = {"mode": mode, "samples": samples, "seed": seed, "generator": generator, "part": (0, samples)}
        # quicker than torch sets attributes
        vars(self).update(state, share=None, repeat=1, ready=None, _held={})

    def _marks(self) -> tuple[Any, ...]:
        """Changes when a parameter or buffer does (not when its ``.data`` is written to, which torch does not tell)."""
        return tuple(
            (tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version)
            for tensor in (*self.parameters(), *self.buffers())
        )

    def _fresh(self) -> dict[Any, Tensor]:
        """What is held, unless a parameter has changed since it was computed."""
        if not torch.compiler.is_compiling():
            stamp = self._marks()
            if stamp != self._stamp:
                self._held, self._stamp = {}, stamp
        return self._held

    def _held_mean(self) -> Tensor:
        held = self._fresh()
        if "mean" not in held:
            with torch.no_grad():
                held["mean"] = self.mean()
        return held["mean"]

    def _shared_draws(self, at: tuple[int, ...], device: torch.device) -> Tensor:
        """The fixed draws that are in this batch; they depend on the seed and the parameters, and on nothing else.

        Noise over a feature map is large, so there every draw has a seed of its own and only those in use are kept.
        """
        if self.given is not None:
            return self.given(at)
        held, (start, stop) = self._fresh(), self.part
        with torch.no_grad():
            if self.site == "channel":
                if at not in held:
                    held[at] = self.draw((self.samples, *at), torch.Generator(device).manual_seed(self.seed))
                return held[at][start:stop]
            number = 0
            if self.group is not None and self.group.serves():
                number, self.calls = (
                    self.calls,
                    self.calls + 1,
                )  # each call of a pass has a draw of its own, as in training
            key = (at, self.part, number)
            if key not in held:
                if not number:
                    held.clear()
                held[key] = self.shared_maps(at, start, stop, device, number)
            return held[key]

    def shared_maps(
        self, at: tuple[int, ...], start: int, stop: int, device: torch.device, number: int = 0
    ) -> Tensor:
        """The fixed draws of mode ``shared`` at site ``position``, ``[stop - start, *at, dim]``; they are not kept.

        ``number``: of the layer's call in a pass, which has draws of its own.
        """
        source, first = torch.Generator(device), self.seed + 15_485_863 * number
        with torch.no_grad():
            return self.draw_each(
                at, (source.manual_seed(first + 7919 * index) for index in range(start, stop))
            )

    def shared_vectors(self, device: torch.device) -> Tensor:
        """The fixed draws of mode ``shared`` in this batch, ``[draws, dim]``, as they are at one position of a feature map."""
        return self._shared_draws((), device)

    def _spread(self, x: Tensor, position: tuple[int, ...], batch_axis: int | None, rows: int) -> Tensor:
        """The noise laid out to multiply ``x``; ``position`` holds the sizes of the axes that are neither batch nor feature."""
        at = position if self.site == "position" else (1,) * len(position)
        if self.mode == "mean":
            vectors = self._held_mean().expand(1, *(1,) * len(at), self.layout.dim)
        elif self.mode == "shared":
            vectors = self._shared_draws(at, x.device)
            if rows % len(vectors):
                raise FlowBNNError(
                    f"the noise holds {len(vectors)} shared draws, so the batch must hold as many blocks; got {rows} rows"
                )
            if len(vectors) == 1:
                vectors = vectors.expand(rows, *vectors.shape[1:])
            else:
                vectors = vectors.repeat_interleave(rows // len(vectors), 0, output_size=rows)
        elif self.site == "channel" and self.group is not None and self.group.serves():
            vectors = self.group.draw_for(self, rows)
            if batch_axis == 0:
                shape = [1] * (len(at) + 2)
                shape[0], shape[self.layout.feature_axis] = rows, self.layout.dim
                return vectors.view(shape).to(x.dtype)
            vectors = vectors.view(rows, *at, self.layout.dim)
        else:
            prepared = self._prepared(rows, at)
            vectors = self.draw_rows(rows, at) if prepared is None else prepared
        vectors = vectors[0] if batch_axis is None else vectors.movedim(0, batch_axis)
        return vectors.movedim(-1, self.layout.feature_axis).to(x.dtype)

    def _prepared(self, rows: int, at: tuple[int, ...]) -> Tensor | None:
        """A draw made ahead of this pass, where it fits; it serves once, since each call draws anew."""
        if (
            self.ready is None
            or self.site == "channel"
            or not self.group.serves()
            or not self._fits(rows, at)
        ):
            return None
        drawn, self.ready = self.ready, None
        return drawn

    def _fits(self, rows: int, at: tuple[int, ...]) -> bool:
        return self.ready is not None and self.ready.shape[:-1] == (rows, *at)

    def _batch_axis(self, x: Tensor) -> int | None:
        return self.layout.batch_axis if x.ndim > self.layout.unbatched_ndim else None

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply one input tensor of the layer by noise."""
        return self.multiply_all((x,))[0]

    def multiply_all(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Multiply several inputs by one draw, or by the pieces of one draw where their widths differ.

        A tensor that is given twice (self-attention) comes back as one, which torch's fast paths look for.
        """
        if self.mode == "off" and self.repeat == 1:
            return inputs
        axis = self._batch_axis(inputs[0])
        rows = inputs[0].shape[axis] * self.repeat if axis is not None else 1
        noise: dict[tuple[int, ...], Tensor] = {}
        results: list[Tensor] = []
        offset = 0
        for index, x in enumerate(inputs):
            if not self.layout.split and index and x is inputs[index - 1]:
                results.append(results[-1])
                continue
            grown = self._grow(x, axis)
            if self.mode != "off":
                feature = x.ndim + self.layout.feature_axis
                position = tuple(n for i, n in enumerate(x.shape) if i not in (axis, feature))
                at = position if self.site == "position" else (1,) * len(position)
                if at not in noise:
                    noise[at] = self._spread(x, position, axis, rows)
                piece = noise[at]
                if self.layout.split:
                    piece = piece.narrow(self.layout.feature_axis, offset, self.layout.split[index])
                    offset += self.layout.split[index]
                grown = grown * piece
            results.append(grown)
        return tuple(results)

    def _grow(self, x: Tensor, axis: int | None) -> Tensor:
        """Repeat the batch, one block per sample, where this layer is the one that lets the samples in."""
        if self.repeat == 1 or axis is None:
            return x
        sizes = [1] * x.ndim
        sizes[axis] = self.repeat
        return x.repeat(sizes)

    def input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer."""
        if isinstance(module, nn.MultiheadAttention):
            names = ("query", "key", "value")
            given = list(args[:3]) + [kwargs[name] for name in names[len(args[:3]) :]]
            noisy = self.multiply_all(tuple(given))
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            return (*noisy, *args[3:]), kwargs
        if args:
            return (self._multiply_input(args[0]), *args[1:]), kwargs
        name = next(iter(kwargs), None)
        if name is None:
            return args, kwargs
        return args, {**kwargs, name: self._multiply_input(kwargs[name])}

    def pass_through_hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        """Forward hook of a layer whose every output reads one input: multiply there, around the bias."""
        if self.mode == "off" and self.repeat == 1:
            return None
        axis = self._batch_axis(output)
        rows = output.shape[axis] * self.repeat if axis is not None else 1
        output = self._grow(output, axis)
        if self.mode == "off":
            return output
        feature = self.layout.feature_axis
        noise = self._spread(output, (1,) * (output.ndim - (1 if axis is None else 2)), axis, rows)
        noise = noise.repeat_interleave(self.layout.fan_out, feature) if self.layout.fan_out > 1 else noise
        bias: Any = getattr(module, "bias", None)
        if bias is None:
            return output * noise
        bias = bias.to(output.dtype).view(-1, *(1,) * (-1 - feature))
        return output * noise + bias * (1.0 - noise)  # twice as fast as a broadcast addcmul on a CPU

    def output_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of a layer that reads no real-valued features."""
        return self.multiply(output)

    def _multiply_input(self, x: Any) -> Any:
        if isinstance(x, PackedSequence):
            return self._multiply_packed(x)
        if not isinstance(x, Tensor):
            raise FlowBNNError(
                f"noise multiplies a tensor, but this layer was given a {type(x).__name__}; leave it plain with None in the rules"
            )
        return self.multiply(x)

    def _multiply_packed(self, packed: PackedSequence) -> PackedSequence:
        """One vector per sequence; a packed batch interleaves its sequences, so the vectors are gathered step by step."""
        if self.mode == "off":
            return packed
        if self.repeat != 1:
            raise FlowBNNError("samples cannot enter the batch at a packed sequence")
        batch = int(packed.batch_sizes[0])
        flat = packed.data
        if self.site == "position":
            noise = self._spread(flat, (), 0, flat.shape[0])
        else:
            vectors = self._spread(flat, (), 0, batch)
            if self.mode != "mean" and packed.sorted_indices is not None:
                vectors = vectors[packed.sorted_indices]
            steps = [torch.arange(int(n), device=flat.device) for n in packed.batch_sizes]
            noise = vectors if self.mode == "mean" else vectors[torch.cat(steps)]
        return packed._replace(data=flat * noise)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """What is held moves with the module."""
        result = super()._apply(fn, recurse)
        self._held = {key: fn(value) for key, value in self._held.items()}
        self._stamp = self._marks()
        return result

    def __getstate__(self) -> dict[str, Any]:
        """Without what belongs to a pass, and without a recipe that is code: neither can go to another process."""
        state = {**self.__dict__, "ready": None, "generator": None, "share": None, "given": None}
        if self.recipe is not None and "factory" in vars(self.recipe):
            state["recipe"] = None
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> "Noise":
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__dict__.update({name: deepcopy(value, memo) for name, value in self.__getstate__().items()})
        copy.recipe = self.recipe
        return copy
