r"""The stochastic part of a layer: :math:`z_l = NF_l(z_0)`, :math:`f_l = \mathrm{layer}_l(z_l \circ f_{l-1})`.

A :class:`Noise` is a small module that sits inside the layer it serves and multiplies the layer's input through a forward hook.
So the layer keeps its class, its weights, its place and its name, and everything that worked on it still does.

A forward pass leaves nothing behind: what it needs is in its :class:`~flowbnn.noise.passes.NoisePass`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError
from flowbnn.noise.layout import Layout
from flowbnn.noise.passes import Mode, NoisePass, RowShard, Setting, Sizes, Source, Unfolded, new_key, pass_of

Site = Literal["channel", "position"]
BLOCK = 32  # shared draws that come from one seed


def blocks(samples: int, seed: int, source: torch.Generator) -> Iterator[torch.Generator]:
    """The generator of each block of shared draws, so that draw ``s`` is the same however many there are."""
    return (source.manual_seed(seed + 7919 * block) for block in range(-(-samples // BLOCK)))


class Noise(nn.Module, ABC):
    """What every kind of noise shares: where it goes and in which mode it is held. Subclasses draw vectors.

    ==========  =====================================================================================================
    ``sample``  every example gets its own draw in every pass of the network
    ``shared``  ``samples`` fixed draws, the same for all inputs: the batch holds that many copies, one block per draw
    ``mean``    the noise is held at its posterior mean
    ``off``     the noise is held at one: the plain network
    ==========  =====================================================================================================
    """

    start: Any = None  # where the noise begins as a learnable Gaussian: base, affine map and prior
    mixed: Any = None  # the same where it begins as a mixture
    fixed: bool = False  # whether it is a constant, and so no noise any more

    def __init__(self, layout: Layout, site: Site) -> None:
        super().__init__()
        self.layout, self.site = layout, site
        self.label = type(self).__name__  # what the conversion's table shows
        self.recipe: Any = None  # what this noise was built from, for saving
        self.fitted = False  # whether its parameters have been trained or read from a file
        self.setting = Setting()  # where no pass governs it
        self.key = new_key()

    @property
    def whole(self) -> "Noise":
        """The noise that this is a part of: itself, unless layers share one vector."""
        return self

    # -------------------- what a kind of noise defines

    @abstractmethod
    def draw(self, shape: Sizes, generator: Source = None) -> Tensor:
        """Noise vectors of shape ``shape + (dim,)``."""

    @abstractmethod
    def mean(self) -> Tensor:
        """The posterior mean, ``[dim]``."""

    def draw_rows(self, rows: int, at: Sizes, generator: Source, share: RowShard | None) -> Tensor:
        """Draws for the rows of a batch, at positions ``at``; of a shared batch, the rows of this process."""
        if share is None:
            return self.draw((rows, *at), generator)
        return share.of(rows, lambda number: self.draw((number, *at), generator))

    def draw_each(self, at: Sizes, generators: Iterable[torch.Generator]) -> Tensor:
        """One draw at positions ``at`` from each generator, ``[draws, *at, dim]``; each is read before the next is asked for."""
        return torch.stack([self.draw(at, generator) for generator in generators])

    def divergence(self, samples: int | None = None, generator: Source = None) -> Divergence | None:
        """KL to the prior and entropy in nats, or None for noise that has no density (dropout)."""
        return None

    # -------------------- the vectors of one call of the layer

    @property
    def passes_through(self) -> bool:
        """Whether the noise may as well multiply the layer's output (see :class:`~flowbnn.noise.layout.Layout`)."""
        return self.layout.fan_out > 0 and self.site == "channel"

    def shared_vectors(self, samples: int, seed: int, device: torch.device) -> Tensor:
        """The fixed draws of mode ``shared``, ``[samples, dim]``: at site ``position`` those at one position."""
        if self.site == "position":
            return self.shared_maps((), 0, samples, seed, device)
        with torch.no_grad():
            drawn = self.draw_each((BLOCK,), blocks(samples, seed, torch.Generator(device)))
            return drawn.flatten(0, 1)[:samples]

    def shared_maps(
        self, at: Sizes, start: int, stop: int, seed: int, device: torch.device, call: int = 0
    ) -> Tensor:
        """The fixed draws of mode ``shared`` at site ``position``, ``[stop - start, *at, dim]``.

        They are large, so every draw has a seed of its own and only those in use are made. Each ``call`` of the layer in a pass has
        draws of its own, as in training.
        """
        source, first = torch.Generator(device), seed + 15_485_863 * call
        with torch.no_grad():
            return self.draw_each(
                at, (source.manual_seed(first + 7919 * index) for index in range(start, stop))
            )

    def _noise(self, state: NoisePass, x: Tensor, at: Sizes, axis: int | None, rows: int) -> Tensor:
        """The noise of one call, laid out to multiply ``x``: ``at`` has the sizes of its positions, ``axis`` holds the examples."""
        if state.rows and state.rows.get(self.key) != rows:
            raise Unfolded
        mode, samples, seed, _ = state.settings[self.key]
        forward, dim = state.forward, self.layout.dim
        held: dict[Any, Any] = ({} if state.held is None else state.held) if forward is None else forward.held
        if mode == "sample":
            vectors = self._sampled(state, rows, at)
            if self.site == "channel" and axis == 0:
                if at:
                    shape = [1] * (len(at) + 2)
                    shape[0], shape[self.layout.feature_axis] = rows, dim
                    vectors = vectors.view(shape)
                return vectors.to(x.dtype)
        elif mode == "mean":
            if (self.key, "mean") not in held:
                with torch.no_grad():
                    held[self.key, "mean"] = self.mean()
            vectors = held[self.key, "mean"].view(1, *(1,) * len(at), dim)
        else:
            start, stop = state.part or (0, samples)
            if state.given is not None:
                vectors = state.given.draws(self, at, x.device)
            elif self.site == "channel":
                if self.key not in held:
                    held[self.key] = self.shared_vectors(samples, seed, x.device)
                vectors = held[self.key][start:stop].view(stop - start, *at, dim)
            else:
                vectors = self._maps(state, held, (at, start, stop), x.device)
            if rows % len(vectors):
                raise FlowBNNError(
                    f"the noise holds {len(vectors)} shared draws, so the batch must hold as many blocks; got {rows} rows",
                    kind="shape",
                )
            if len(vectors) == 1:
                vectors = vectors.expand(rows, *vectors.shape[1:])
            else:
                vectors = vectors.repeat_interleave(rows // len(vectors), 0, output_size=rows)
        vectors = vectors[0] if axis is None else vectors.movedim(0, axis)
        return vectors.movedim(-1, self.layout.feature_axis).to(x.dtype)

    def _maps(self, state: NoisePass, held: dict[Any, Any], asked: Any, device: torch.device) -> Tensor:
        """The maps of some samples, kept until others are asked for; each call in a forward pass has its own."""
        forward, call = state.forward, 0
        if forward is not None and forward.serves():
            call = forward.calls.get(self.key, 0)
            forward.calls[self.key] = call + 1
        if held.get((self.key, call), (None,))[0] != asked:
            (at, start, stop), seed = asked, state.settings[self.key].seed
            held[self.key, call] = (asked, self.shared_maps(at, start, stop, seed, device, call))
        return held[self.key, call][1]

    def _sampled(self, state: NoisePass, rows: int, at: Sizes) -> Tensor:
        """A draw of its own for every example, ``[rows, *at, dim]``."""
        forward, generator = state.forward, state.settings[self.key].generator
        if state.only_prepared:
            known = None if forward is None or not forward.serves() else forward.draws.get(self.key)
            if known is None or len(known) != forward.examples(rows, state.entry[1])[0]:  # type: ignore[union-attr]
                raise FlowBNNError(
                    f"one noise vector for each example cannot be given to a layer that sees {rows} rows, whose input has no axis "
                    "of examples or which runs twice (activation checkpointing); leave it plain with None in the rules",
                    kind="unsupported",
                    argument="rules",
                )
        if forward is None or not forward.serves():
            return self.draw_rows(rows, at, generator, state.share)
        examples, times = forward.examples(rows, state.entry[1])
        if self.site == "channel":
            drawn = forward.draws.get(self.key)
            if drawn is None or len(drawn) != examples:
                drawn = forward.group.draw_for(self, examples, state)
            drawn = drawn.view(examples, *at, self.layout.dim) if at else drawn
        else:
            self.ask(state, at)
            drawn = forward.draws.pop(self.key, None)  # serves once, since each call draws anew
            if drawn is None or drawn.shape[:-1] != (examples, *at):
                drawn = self.draw_rows(examples, at, generator, state.share)
        if times == 1:
            return drawn
        if self.layout.examples_first:
            return drawn.repeat_interleave(times, 0)
        return drawn.repeat(times, *(1,) * (drawn.ndim - 1))

    def ask(self, state: NoisePass, at: Sizes) -> None:
        """Tell the pass at which positions this layer draws."""

    def multiply(self, inputs: tuple[Tensor, ...], through: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Multiply the layer's inputs by one draw, or by the pieces of one draw where their widths differ.

        A tensor that is given twice (self-attention) comes back as one, which torch's fast paths look for.

        Args:
            through: the layer, where noise that passes through it multiplies its output instead, around the bias.
        """
        state, layout = pass_of(self), self.layout
        off = state.settings[self.key].mode == "off"
        repeat = state.entry[1] if state.entry[0] == self.key else 1  # samples that enter the batch here
        if off and repeat == 1:
            return inputs
        axis = layout.batch_axis if inputs[0].ndim > layout.unbatched_ndim else None
        rows = inputs[0].shape[axis] * repeat if axis is not None else 1
        noise: dict[Sizes, Tensor] = {}
        results: list[Tensor] = []
        offset = 0
        for index, x in enumerate(inputs):
            if not layout.split and index and x is inputs[index - 1]:
                results.append(results[-1])
                continue
            product = x
            if repeat > 1 and axis is not None:  # samples enter here, on axis 0: one block of the batch each
                product = x.repeat(repeat, *(1,) * (x.ndim - 1))
            if not off:
                at: Sizes = (1,) * (x.ndim - (1 if axis is None else 2))
                if self.site == "position":
                    feature = x.ndim + layout.feature_axis
                    at = tuple([n for i, n in enumerate(x.shape) if i != axis and i != feature])
                if at not in noise:
                    noise[at] = self._noise(state, x, at, axis, rows)
                piece = noise[at]
                if layout.split:
                    piece = piece.narrow(layout.feature_axis, offset, layout.split[index])
                    offset += layout.split[index]
                product = product * piece if through is None else self._around_bias(through, product, piece)
            results.append(product)
        return tuple(results)

    # -------------------- hooks

    def input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Forward pre-hook of the layer."""
        if isinstance(module, nn.MultiheadAttention):
            names = ("query", "key", "value")
            given = list(args[:3]) + [kwargs[name] for name in names[len(args[:3]) :]]
            noisy = self.multiply(tuple(given))
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            return (*noisy, *args[3:]), kwargs
        if not args and not kwargs:
            return args, kwargs
        name = "" if args else next(iter(kwargs))
        x = args[0] if args else kwargs[name]
        if isinstance(x, Tensor):
            (x,) = self.multiply((x,))
        elif isinstance(x, PackedSequence):
            x = self._multiply_packed(x)
        else:
            raise FlowBNNError(
                f"noise multiplies a tensor, but this layer was given a {type(x).__name__}; leave it plain with None in the rules",
                kind="layer",
            )
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})

    def _around_bias(self, module: nn.Module, output: Tensor, noise: Tensor) -> Tensor:
        if self.layout.fan_out > 1:
            noise = noise.repeat_interleave(self.layout.fan_out, self.layout.feature_axis)
        bias: Any = getattr(module, "bias", None)
        if bias is None:
            return output * noise
        bias = bias.to(output.dtype).view(-1, *(1,) * (-1 - self.layout.feature_axis))
        return output * noise + bias * (1.0 - noise)  # twice as fast as a broadcast addcmul on a CPU

    def pass_through_hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        """Forward hook of a layer whose every output reads one input."""
        return self.multiply((output,), module)[0]

    def output_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Forward hook of a layer whose noise is on its output."""
        return self.multiply((output,))[0]

    def _multiply_packed(self, packed: PackedSequence) -> PackedSequence:
        """One vector per sequence; a packed batch interleaves its sequences, so the vectors are gathered step by step."""
        state = pass_of(self)
        mode = state.settings[self.key].mode
        if mode == "off":
            return packed
        flat = packed.data
        by_sequence = self.site == "channel"
        noise = self._noise(state, flat, (), 0, int(packed.batch_sizes[0]) if by_sequence else len(flat))
        if by_sequence and mode != "mean":
            noise = noise if packed.sorted_indices is None else noise[packed.sorted_indices]
            steps = [torch.arange(int(n), device=flat.device) for n in packed.batch_sizes]
            noise = noise[torch.cat(steps)]
        return packed._replace(data=flat * noise)

    # -------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Without a recipe that is code, which cannot go to another process."""
        state = dict(self.__dict__)
        if self.recipe is not None and "factory" in vars(self.recipe):
            state["recipe"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.key = new_key()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Noise":
        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        copy.__dict__.update({name: deepcopy(value, memo) for name, value in self.__getstate__().items()})
        copy.recipe, copy.key = self.recipe, new_key()
        return copy


class DropoutNoise(Noise):
    r"""Dropout as multiplicative noise: :math:`z_i = b_i / (1 - p)`, :math:`b_i \sim \mathrm{Bernoulli}(1 - p)`.

    Kept on at prediction this is MC dropout (Gal & Ghahramani, 2016). It has nothing to train and no KL.
    """

    def __init__(self, layout: Layout, rate: float, site: Site = "position") -> None:
        super().__init__(layout, site)
        self.rate = rate
        self.label = f"Dropout({rate:g})"
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def draw(self, shape: Sizes, generator: Source = None) -> Tensor:
        device = self.get_buffer("_device").device
        uniform = torch.rand((*shape, self.layout.dim), generator=generator, device=device)
        return (uniform >= self.rate).float() / (1.0 - self.rate)

    def mean(self) -> Tensor:
        return torch.ones(self.layout.dim, device=self.get_buffer("_device").device)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, dim={self.layout.dim}, site={self.site}"


# -------------------- the noise of a network


def noise_layers(model: nn.Module) -> dict[str, Noise]:
    """The noise modules of a converted network by the name of the layer they serve, in the network's order."""
    if not isinstance(model, nn.Module):
        owner = type(model).__name__
        advice = "; its network is its .model" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise FlowBNNError(f"this takes a network (torch.nn.Module), not a {owner}{advice}", kind="network")
    layers: dict[str, Noise] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:  # as named_modules goes, but not into the noise, which has the most parts
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, Noise):
            if not module.fixed:
                layers[name.rpartition(".")[0]] = module
            continue
        prefix = f"{name}." if name else ""
        for part, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((prefix + part, child))
    return layers


def layers_with_noise(model: nn.Module) -> dict[str, Noise]:
    """The same of a network that must have noise."""
    layers = noise_layers(model)
    if not layers:
        raise FlowBNNError(
            "this network has no noise; convert it first with to_stochastic(network, rules)", kind="network"
        )
    return layers


def settings_of(
    model: nn.Module,
    mode: Mode,
    samples: int = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> dict[int, Setting]:
    """One mode for all noise of a network, by the keys of its layers: what :class:`~flowbnn.noise.passes.NoisePass` takes.

    Each layer's shared draws come from its own stream, derived from ``seed`` and the layer's place in the network.
    """
    layers = layers_with_noise(model)
    if mode == "shared" and seed is None:
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
    if mode == "sample" and seed is not None and generator is None:
        device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        generator = torch.Generator(device).manual_seed(seed)
    settings: dict[int, Setting] = {}
    places: dict[int, int] = {}
    for index, layer in enumerate(layers.values()):
        place = places.setdefault(id(layer.whole), index)
        settings[layer.key] = Setting(mode, samples, ((seed or 0) * 1_000_003 + place) % 2**63, generator)
    return settings
