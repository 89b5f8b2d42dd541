r"""Noise of a layer: :math:`z_l = NF_l(z_0)`, :math:`f_l = \mathrm{layer}_l(z_l \circ f_{l-1})`.

A :class:`Noise` is a small module inside the layer that it serves. A forward hook multiplies the layer's input by a draw. The layer
keeps its class, weights, place and name.

A forward pass stores nothing on the module. Its state is in a :class:`~flowbnn.noise.contexts.NoiseContext`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowbnn.distributions import Divergence
from flowbnn.errors import FlowBNNError, describe_value, requirement_error, value_error
from flowbnn.noise.contexts import (
    ForwardState,
    Mode,
    NoiseContext,
    NoiseMode,
    OptionalGenerator,
    RowCountChanged,
    RowShard,
    Shape,
    UnexpectedNoiseShape,
    context_of,
    new_key,
)
from flowbnn.noise.layout import Layout

Site = Literal["channel", "position"]
SeededGenerator = Callable[[int], torch.Generator]
BLOCK = 32  # shared draws per seed, so that draw s does not depend on the number of draws


def block_seeds(samples: int, seed: int) -> range:
    """Returns the seeds of the blocks of shared draws."""
    return range(seed, seed + 7919 * -(-samples // BLOCK), 7919)


class Noise(nn.Module, ABC):
    """Base class for multiplicative noise of one layer. Subclasses define how vectors are drawn.

    ==========  ============================================================================================================
    ``sample``  every example gets its own draw in every pass of the network
    ``shared``  ``samples`` fixed draws, the same for all inputs (the batch has one copy of the inputs per draw)
    ``mean``    the noise is the posterior mean
    ``off``     the noise is one, which gives the plain network
    ==========  ============================================================================================================

    Args:
        layout: Position of the noise vector on the layer's tensor.
        site: ``"channel"`` for one vector per feature map, ``"position"`` for one vector at every position.
    """

    gaussian_base: Any = None  # (base, affine map, prior) of noise that begins with a learnable Gaussian
    mixture_base: Any = None  # the same for noise that begins with a mixture
    is_constant: bool = False  # True for constant factors, which do not count as noise

    def __init__(self, layout: Layout, site: Site) -> None:
        super().__init__()
        self.layout, self.site = layout, site
        self.label = type(self).__name__  # text in the table of the conversion
        self.recipe: Any = None  # recipe that the noise was built from, for saving
        self.fitted = False  # True once its parameters have been trained or loaded
        self.default_mode = NoiseMode()  # mode outside of every context
        self.key = new_key()

    @property
    def joint_noise(self) -> "Noise":
        """Noise whose vector this layer uses a slice of: the module itself unless layers share one vector."""
        return self

    # -------------------- to be defined by subclasses

    @abstractmethod
    def draw(self, shape: Shape, generator: OptionalGenerator = None) -> Tensor:
        """Returns noise vectors of shape ``shape + (dim,)``."""

    @abstractmethod
    def mean(self) -> Tensor:
        """Returns the posterior mean, ``[dim]``."""

    def draw_rows(
        self, rows: int, positions: Shape, generator: OptionalGenerator, shard: RowShard | None
    ) -> Tensor:
        """Returns draws ``[rows, *positions, dim]`` for the rows of a batch, or for this process's shard of it."""
        if shard is None:
            return self.draw((rows, *positions), generator)
        return shard.draw_local(rows, lambda number: self.draw((number, *positions), generator))

    def draw_each(self, positions: Shape, generators: Iterable[torch.Generator]) -> Tensor:
        """Returns one draw at positions ``positions`` per generator, ``[draws, *positions, dim]``.

        Each generator is used before the next is requested, so one that is seeded again may be yielded several times.
        """
        return torch.stack([self.draw(positions, generator) for generator in generators])

    def divergence(
        self, samples: int | None = None, generator: OptionalGenerator = None
    ) -> Divergence | None:
        """Returns KL to the prior and entropy in nats, or None for noise without a density (dropout)."""
        return None

    # -------------------- vectors of one call of the layer

    @property
    def passes_through(self) -> bool:
        """True if the noise can multiply the layer's output instead (see :class:`~flowbnn.noise.layout.Layout`)."""
        return self.layout.fan_out > 0 and self.site == "channel"

    def shared_vectors(
        self, samples: int, seed: int, device: torch.device, make_generator: SeededGenerator | None = None
    ) -> Tensor:
        """Returns the draws of mode ``shared``, ``[samples, dim]``. At site ``position`` these are the draws of one position.

        Args:
            samples: Number of draws.
            seed: Seed of this layer's draws.
            device: Device of the draws.
            make_generator: Function from a seed to a generator, for each block of draws. By default, one generator is reseeded.
        """
        if self.site == "position":
            return self.shared_maps((), 0, samples, seed, device)
        with torch.no_grad():
            make_generator = make_generator or torch.Generator(device).manual_seed
            draws = self.draw_each((BLOCK,), map(make_generator, block_seeds(samples, seed)))
            return draws.flatten(0, 1)[:samples]

    def shared_maps(
        self, positions: Shape, start: int, stop: int, seed: int, device: torch.device, call: int = 0
    ) -> Tensor:
        """Returns the draws ``start`` to ``stop`` of mode ``shared`` at site ``position``, ``[stop - start, *positions, dim]``.

        The maps are large. Every draw therefore has its own seed, and only the requested ones are made.

        Args:
            positions: Sizes of the positions.
            start: First draw.
            stop: End of the range of draws.
            seed: Seed of this layer's draws.
            device: Device of the draws.
            call: Number of earlier calls of the layer in the pass. Each call has its own draws, as in training.
        """
        generator, first = torch.Generator(device), seed + 15_485_863 * call
        with torch.no_grad():
            return self.draw_each(
                positions, (generator.manual_seed(first + 7919 * index) for index in range(start, stop))
            )

    def _vectors(self, context: NoiseContext, positions: Shape, rows: int, device: torch.device) -> Tensor:
        """Returns the noise of one call, ``[rows, *positions, dim]``, or ``[1, *positions, dim]`` if one draw serves all rows."""
        mode, samples, *_ = context.modes[self.key]
        forward, dim = context.forward, self.layout.dim
        if mode == "mean":
            memo = {} if forward is None else forward.memo
            if (self.key, "mean") not in memo:
                with torch.no_grad():
                    memo[self.key, "mean"] = self.mean()
            return memo[self.key, "mean"].view(1, *(1,) * len(positions), dim)
        source, mapped = context.source, context.mapped
        if source is not None or mapped is not None:
            call = 0 if self.site == "channel" else self._count_call(forward)
            if mapped is not None:
                tensor, examples = mapped.tensors.get((self.key, call)), mapped.rows or 1
                if tensor is None or tensor.numel() != examples * dim * math.prod(positions):
                    raise UnexpectedNoiseShape(
                        f"no draws for {self.label} at positions {positions}, call {call}"
                    )
                vectors = tensor.view(examples, *positions, dim)
            elif source is not None:
                vectors = source.draws(self, positions, call, device)
            if vectors.shape[0] not in (1, rows):  # len() would fix the number of rows of an exported graph
                raise RowCountChanged(f"a layer has {rows} rows, but draws for {vectors.shape[0]}")
            return vectors
        if mode == "sample":
            return self._example_vectors(context, rows, positions)
        vectors = self._shared(forward, positions, context.modes[self.key], device)
        if rows % samples:
            text = f"the noise holds {samples} shared draws, so the batch must hold as many blocks, got {rows} rows"
            raise FlowBNNError(text, kind="shape")
        return vectors if samples == 1 else vectors.repeat_interleave(rows // samples, 0, output_size=rows)

    def _count_call(self, forward: ForwardState | None) -> int:
        """Returns the number of earlier calls of this layer in the pass. Each call has its own draws at site ``position``."""
        if forward is None or not forward.reuses_draws():
            return 0
        call = forward.calls.get(self.key, 0)
        forward.calls[self.key] = call + 1
        return call

    def _shared(
        self, forward: ForwardState | None, positions: Shape, mode: NoiseMode, device: torch.device
    ) -> Tensor:
        """Returns the draws of mode ``shared``, ``[samples, *positions, dim]``."""
        if self.site == "position":
            return self.shared_maps(positions, 0, mode.samples, mode.seed, device, self._count_call(forward))
        memo = {} if forward is None else forward.memo
        if self.key not in memo:
            memo[self.key] = self.shared_vectors(mode.samples, mode.seed, device)
        return memo[self.key].view(mode.samples, *positions, self.layout.dim)

    def _example_vectors(self, context: NoiseContext, rows: int, positions: Shape) -> Tensor:
        """Returns one draw per example, ``[rows, *positions, dim]``, or one draw for all examples if they interact."""
        forward, generator = context.forward, context.modes[self.key].generator
        reuses_draws = forward is not None and forward.reuses_draws()
        required = context.prepared is not None and context.prepared.required
        one_draw = self.layout.one_draw and not required
        if required:
            draws = forward.draws.get(self.key) if forward is not None and reuses_draws else None
            if draws is None or forward is None or len(draws) != forward.split_rows(rows)[0]:
                text = f"a layer of {rows} rows has no batch axis or runs twice (activation checkpointing); set its rule to None"
                raise FlowBNNError(text, kind="unsupported", argument="rules", key=self.key)
        if forward is None or not reuses_draws:
            return self.draw_rows(1 if one_draw else rows, positions, generator, context.shard)
        examples, times = (1, 1) if one_draw else forward.split_rows(rows)
        if self.site == "channel":
            vectors = forward.draws.get(self.key)
            if vectors is None or len(vectors) != examples:
                vectors = forward.group.draw_examples(self, examples, context)
            vectors = vectors.view(examples, *positions, self.layout.dim) if positions else vectors
        else:
            self.record_shape(context, positions)
            vectors = forward.draws.pop(self.key, None)  # serves one call, because each call draws anew
            if vectors is None or vectors.shape[:-1] != (examples, *positions):
                vectors = self.draw_rows(examples, positions, generator, context.shard)
        if times == 1:
            return vectors
        if self.layout.examples_first:
            return vectors.repeat_interleave(times, 0)
        return vectors.repeat(times, *(1,) * (vectors.ndim - 1))

    def record_shape(self, context: NoiseContext, positions: Shape) -> None:
        """Writes the positions of this layer's draws into the context, for later passes."""

    def multiply(self, inputs: tuple[Tensor, ...], module: nn.Module | None = None) -> tuple[Tensor, ...]:
        """Multiplies the inputs of the layer by one draw, or by pieces of one draw if their widths differ.

        A tensor that is passed twice (self-attention) is returned as one tensor, which torch's fast paths require.

        Args:
            inputs: Inputs of the layer, or its output.
            module: Layer whose output is multiplied around the bias, for noise that passes through it.
        """
        context, layout = context_of(self), self.layout
        if context.modes[self.key].mode == "off":
            return inputs
        axis = layout.batch_axis if inputs[0].ndim > layout.unbatched_ndim else None
        factors: dict[Shape, Tensor] = {}
        results: list[Tensor] = []
        offset = 0
        for index, x in enumerate(inputs):
            if not layout.split and index and x is inputs[index - 1]:
                results.append(results[-1])
                continue
            positions: Shape = (1,) * (x.ndim - (1 if axis is None else 2))
            if self.site == "position":
                excluded_axes = (axis, x.ndim + layout.feature_axis)
                positions = tuple(
                    [size for number, size in enumerate(x.shape) if number not in excluded_axes]
                )
            if positions not in factors:
                vectors = self._vectors(context, positions, 1 if axis is None else x.shape[axis], x.device)
                if axis != 0:
                    vectors = vectors[0] if axis is None else vectors.movedim(0, axis)
                if positions and layout.feature_axis != -1:
                    vectors = vectors.movedim(-1, layout.feature_axis)
                factors[positions] = vectors.to(x.dtype)
            factor = factors[positions]
            if layout.split:
                factor = factor.narrow(layout.feature_axis, offset, layout.split[index])
                offset += layout.split[index]
            if module is not None:
                results.append(self._scale_output(module, x, factor))
            elif context.mapped is not None and torch.compiler.is_compiling():
                results.append(_multiply_features_last(x, factor, layout.feature_axis))
            else:
                results.append(x * factor)
        return tuple(results)

    # -------------------- hooks

    def input_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Multiplies the input of the layer, as a forward pre-hook."""
        if isinstance(module, nn.MultiheadAttention):
            names = ("query", "key", "value")
            inputs = list(args[:3]) + [kwargs[name] for name in names[len(args[:3]) :]]
            kwargs = {name: value for name, value in kwargs.items() if name not in names}
            return (*self.multiply(tuple(inputs)), *args[3:]), kwargs
        if not args and not kwargs:
            return args, kwargs
        name = "" if args else next(iter(kwargs))
        x = args[0] if args else kwargs[name]
        if isinstance(x, Tensor):
            (x,) = self.multiply((x,))
        elif isinstance(x, PackedSequence):
            x = self._multiply_packed(x)
        else:
            text = f"noise multiplies a tensor, but the layer got a {type(x).__name__}; leave it plain with None in the rules"
            raise TypeError(text)
        return ((x, *args[1:]), kwargs) if args else (args, {**kwargs, name: x})

    def _scale_output(self, module: nn.Module, output: Tensor, factor: Tensor) -> Tensor:
        """Returns the output of the layer for a multiplied input, computed from its output for the plain input."""
        if self.layout.fan_out > 1 and self.layout.dim > 1:  # one number serves all outputs
            factor = factor.repeat_interleave(self.layout.fan_out, self.layout.feature_axis)
        bias: Any = getattr(module, "bias", None)
        if bias is None:
            return output * factor
        bias = bias.to(output.dtype).view(-1, *(1,) * (-1 - self.layout.feature_axis))
        return (output * factor).add_(bias * (1.0 - factor))  # twice as fast as a broadcast addcmul on a CPU

    def pass_through_hook(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Any:
        """Multiplies the output of a layer in which every output reads one input, as a forward hook."""
        return self.multiply((output,), module)[0]

    def output_hook(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Multiplies the output of the layer, as a forward hook."""
        return self.multiply((output,))[0]

    def _multiply_packed(self, packed: PackedSequence) -> PackedSequence:
        """Multiplies a packed batch, which interleaves its sequences, by one vector per sequence."""
        context, flat = context_of(self), packed.data
        mode = context.modes[self.key].mode
        if mode == "off":
            return packed
        sequences = int(packed.batch_sizes[0])
        rows = sequences if self.site == "channel" else len(flat)
        vectors = self._vectors(context, (), rows, flat.device).to(flat.dtype)
        if self.site == "channel" and len(vectors) > 1:
            vectors = vectors if packed.sorted_indices is None else vectors[packed.sorted_indices]
            steps = [torch.arange(int(n), device=flat.device) for n in packed.batch_sizes]
            vectors = vectors[torch.cat(steps)]
        return packed._replace(data=flat * vectors)

    # -------------------- copies

    def __getstate__(self) -> dict[str, Any]:
        """Returns the state without a recipe that is code, which cannot be pickled."""
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

    Active at prediction, this is MC dropout (Gal & Ghahramani, 2016). It has no parameters and no KL.

    Args:
        layout: Position of the noise vector on the layer's tensor.
        rate: Probability :math:`p` that an entry is zero.
        site: ``"channel"`` to drop features of the whole map, ``"position"`` to drop them at every position.
    """

    def __init__(self, layout: Layout, rate: float, site: Site = "position") -> None:
        super().__init__(layout, site)
        self.rate = rate
        self.label = f"Dropout({rate:g})"
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def draw(self, shape: Shape, generator: OptionalGenerator = None) -> Tensor:
        device = self.get_buffer("_device").device
        uniform = torch.rand((*shape, self.layout.dim), generator=generator, device=device)
        return (uniform >= self.rate).float() / (1.0 - self.rate)

    def mean(self) -> Tensor:
        return torch.ones(self.layout.dim, device=self.get_buffer("_device").device)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, dim={self.layout.dim}, site={self.site}"


def _multiply_features_last(x: Tensor, factor: Tensor, axis: int) -> Tensor:
    """Returns ``x * factor``, computed with the features on the last axis.

    The compiler stores the product of several samples in the order in which it is computed. A convolution on a GPU reads this order
    without a copy.
    """
    return (x.movedim(axis, -1) * factor.movedim(axis, -1)).movedim(-1, axis)


# -------------------- noise of a network


def noise_layers(model: nn.Module, argument: str | None = None) -> dict[str, Noise]:
    """Returns the noise modules of a converted network by the names of their layers, in the order of the network.

    Args:
        model: Network.
        argument: Name of the argument that holds the network, for errors.
    """
    if not isinstance(model, nn.Module):
        hint = "pass its .model" if isinstance(getattr(model, "model", None), nn.Module) else ""
        if hasattr(model, "to_tensors"):  # an estimator of flowbnn.sklearn
            hint = "pass its .posterior_.model, with data to_tensors(X, y)"
        value = describe_value(model)
        raise value_error("the network", "an nn.Module", value, hint, kind="network", argument=argument)
    layers: dict[str, Noise] = {}
    visited: set[int] = set()
    stack: list[tuple[str, nn.Module]] = [("", model)]
    while stack:  # the order of named_modules, without the children of the noise, which are many
        name, module = stack.pop()
        if id(module) in visited:
            continue
        visited.add(id(module))
        if isinstance(module, Noise):
            if not module.is_constant:
                layers[name.rpartition(".")[0]] = module
            continue
        prefix = f"{name}." if name else ""
        for child_name, child in reversed(module._modules.items()):
            if child is not None:
                stack.append((prefix + child_name, child))
    return layers


def check_without_noise(model: nn.Module, owner: str) -> None:
    """Raises FlowBNNError if a network already has noise.

    Args:
        model: Network.
        owner: Method or function that needs a network without noise, for the message.
    """
    if noise_layers(model, "network"):
        text = f"{owner} needs a network without noise; use fb.to_deterministic(network)"
        raise FlowBNNError(text, kind="network", argument="network")


def layers_with_noise(model: nn.Module, argument: str | None = None) -> dict[str, Noise]:
    """Returns :func:`noise_layers`. Raises FlowBNNError, with the name of the argument, if there are none."""
    layers = noise_layers(model, argument)
    if not layers:
        hint = "use to_stochastic(network, rules)"
        raise requirement_error("the network", "noise", hint=hint, kind="network", argument=argument)
    return layers


def make_noise_modes(
    model: nn.Module | Mapping[str, Noise],
    mode: Mode,
    samples: int = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> dict[int, NoiseMode]:
    """Returns one mode for all layers of a network, by layer key, for a :class:`~flowbnn.noise.contexts.NoiseContext`.

    The shared draws of each layer have their own seed, derived from ``seed`` and the layer's index in the network.

    Args:
        model: Stochastic network, or its layers from :func:`noise_layers`.
        mode: Name of the mode.
        samples: Number of draws in mode ``shared``.
        seed: Seed of the draws. In mode ``shared``, None draws a random seed.
        generator: Generator of the draws in mode ``sample``.
    """
    layers = model if isinstance(model, Mapping) else layers_with_noise(model)
    if mode == "shared" and seed is None:
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
    if mode == "sample" and seed is not None and generator is None:
        noise = next(iter(layers.values()))
        device = next((t.device for t in (*noise.parameters(), *noise.buffers())), torch.device("cpu"))
        generator = torch.Generator(device).manual_seed(seed)
    modes: dict[int, NoiseMode] = {}
    indices: dict[int, int] = {}
    for number, layer in enumerate(layers.values()):
        index = indices.setdefault(id(layer.joint_noise), number)
        modes[layer.key] = NoiseMode(mode, samples, ((seed or 0) * 1_000_003 + index) % 2**63, generator)
    return modes
