r"""The stochastic part of a layer: :math:`z_l = NF_l(z_0)`, :math:`f_l = \mathrm{layer}_l(z_l \circ f_{l-1})`.

An :class:`InputNoise` is a small module that sits inside the layer it serves and multiplies the layer's input through a
forward hook. So the layer keeps its class, its weights, its place and its name, and everything that worked on it still does.

``forward`` has no side effects: the KL is a function of the posterior and the prior, never of what a pass left behind.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from flowbnn.distributions import Base, DiagonalNormal, Divergence, Flow, NormalBase, divergence
from flowbnn.errors import FlowBNNError
from flowbnn.layers.layout import Layout
from flowbnn.transforms import Affine, Compose, Transform

__all__ = ["DropoutNoise", "InputNoise", "Mode", "Noise", "Site"]

Mode = Literal["sample", "shared", "mean", "off"]
Site = Literal["channel", "position"]


class Noise(nn.Module):
    """What every kind of noise shares: where it goes and in which mode it is. Subclasses draw vectors.

    ==========  =====================================================================================================
    ``sample``  every example, at every call, gets its own draw
    ``shared``  ``samples`` fixed draws, the same for all inputs: the batch holds that many copies, one block per draw
    ``mean``    the noise is held at its posterior mean
    ``off``     the noise is held at one: the plain network
    ==========  =====================================================================================================
    """

    def __init__(self, layout: Layout, site: Site) -> None:
        super().__init__()
        if site not in ("channel", "position"):
            raise FlowBNNError(f"site is 'channel' or 'position', not {site!r}")
        self.layout, self.site = layout, site
        self.label = type(self).__name__  # what the conversion's table shows
        self.recipe: Any = None  # what this noise was built from, for saving
        self.mode: Mode = "sample"
        self.samples = 1
        self.repeat = 1  # > 1: this layer is where the sample axis enters the batch
        self.generator: torch.Generator | None = None
        self.seed = 0  # of the shared draws
        self.part = (0, 1)  # which of the shared draws are in this batch: [start, stop)
        self._shared: dict[tuple[int, ...], Tensor] = {}
        self.group: Any = None  # the network's NoiseGroup, which may have drawn for this pass already
        self.ready: Tensor | None = None

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Noise vectors of shape ``shape + (dim,)``."""
        raise NotImplementedError(f"{type(self).__name__} must define draw(shape, generator)")

    @property
    def passes_through(self) -> bool:
        """Whether the noise may as well multiply the layer's output (see :class:`~flowbnn.layers.layout.Layout`)."""
        return self.layout.fan_out > 0 and self.site == "channel"

    def mean(self) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} must define mean()")

    def divergence(self, samples: int | None = None) -> Divergence | None:
        """KL to the prior and entropy in nats, or None for noise that has no density (dropout)."""
        return None

    def hold(
        self, mode: Mode, samples: int = 1, seed: int = 0, generator: torch.Generator | None = None
    ) -> None:
        """Set the mode. ``generator`` serves mode ``sample``; ``samples`` and ``seed`` mode ``shared``."""
        if mode not in ("sample", "shared", "mean", "off"):
            raise FlowBNNError(f"the noise is 'sample', 'shared', 'mean' or 'off', not {mode!r}")
        self.mode, self.samples, self.seed, self.generator = mode, samples, seed, generator
        self.part = (0, samples)
        self.repeat, self.ready = 1, None
        self._shared.clear()
        if mode == "mean":
            with torch.no_grad():
                self._shared[()] = self.mean()

    def _shared_draws(self, positions: tuple[int, ...], device: torch.device) -> Tensor:
        """The fixed draws for a feature map of this size, made once: they depend on the seed and nothing else."""
        if positions not in self._shared:
            generator = torch.Generator(device).manual_seed(self.seed)
            with torch.no_grad():
                self._shared[positions] = self.draw((self.samples, *positions), generator)
        return self._shared[positions]

    def _spread(self, x: Tensor, position: tuple[int, ...], batch_axis: int | None, rows: int) -> Tensor:
        """The noise laid out to multiply ``x``; ``position`` holds the sizes of the axes that are neither batch nor feature."""
        at = position if self.site == "position" else (1,) * len(position)
        if self.ready is not None and self.ready.shape[0] == rows and batch_axis == 0 and self.group.serves():
            shape = [1] * (len(at) + 2)
            shape[0], shape[self.layout.feature_axis] = rows, self.layout.dim
            return self.ready.view(shape).to(x.dtype)
        if self.mode == "mean":
            vectors = self._shared[()].expand(1, *(1,) * len(at), self.layout.dim)
        elif self.mode == "shared":
            start, stop = self.part
            vectors = self._shared_draws(at, x.device)[start:stop]
            if rows % (stop - start):
                raise FlowBNNError(
                    f"the noise holds {stop - start} shared draws, so the batch must hold as many blocks; got {rows} rows"
                )
            vectors = vectors.repeat_interleave(rows // (stop - start), 0, output_size=rows)
        elif (
            self.ready is not None
            and self.ready.shape[0] == rows
            and self.site == "channel"
            and self.group.serves()
        ):
            vectors = self.ready.view(rows, *at, self.layout.dim)
        else:
            vectors = self.draw((rows, *at), self.generator)
        if batch_axis is None:
            vectors = vectors[0]
        else:
            vectors = vectors.movedim(0, batch_axis)
        return vectors.movedim(-1, self.layout.feature_axis).to(x.dtype)

    def multiply(self, x: Tensor) -> Tensor:
        """Multiply one input tensor of the layer by noise."""
        return self.multiply_all((x,))[0]

    def multiply_all(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Multiply several inputs by one draw, or by the pieces of one draw where their widths differ."""
        if self.mode == "off" and self.repeat == 1:
            return inputs
        done: dict[int, Tensor] = {}
        first = inputs[0]
        batched = first.ndim > self.layout.unbatched_ndim
        axis = self.layout.batch_axis if batched else None
        rows = first.shape[axis] * self.repeat if axis is not None else 1
        noise: dict[tuple[int, ...], Tensor] = {}
        results = []
        offset = 0
        for index, x in enumerate(inputs):
            width = self.layout.split[index] if self.layout.split else self.layout.dim
            key = id(x) if not self.layout.split else id(x) + index
            if key not in done:
                grown = self._grow(x, axis)
                if self.mode != "off":
                    feature = x.ndim + self.layout.feature_axis
                    position = tuple(n for i, n in enumerate(x.shape) if i not in (axis, feature))
                    at = position if self.site == "position" else (1,) * len(position)
                    if at not in noise:
                        noise[at] = self._spread(x, position, axis, rows)
                    piece = noise[at]
                    if self.layout.split:
                        piece = piece.narrow(self.layout.feature_axis, offset, width)
                    grown = grown * piece
                done[key] = grown
            results.append(done[key])
            offset += width
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
        axis = self.layout.batch_axis if output.ndim > self.layout.unbatched_ndim else None
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
            raise FlowBNNError("samples cannot enter at a packed sequence; predict with fold='input'")
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

    def __deepcopy__(self, memo: dict[int, Any]) -> "Noise":
        from copy import deepcopy

        copy = self.__class__.__new__(self.__class__)
        memo[id(self)] = copy
        state = {
            name: value
            for name, value in self.__dict__.items()
            if name not in ("_shared", "generator", "ready")
        }
        copy.__dict__.update(deepcopy(state, memo))
        copy._shared, copy.generator, copy.ready = dict(self._shared), None, None
        return copy


class InputNoise(Noise):
    r"""Noise whose posterior is a flow: a base pushed through a transform, with a prior on the result.

    .. math:: \mathrm{KL}[q(z) \| p(z)] = E_{q_0}\Big[\log q_0(z_0) - \sum_i \log|\det J_{g_i}| - \log p(z_k)\Big]

    Args:
        base: where the noise starts, :math:`q_0`.
        transform: the flow.
        prior: :math:`p`, on the *transformed* noise.
        layout: how the vector lies on the layer's tensor.
        site: ``"channel"``, one vector for the whole feature map, or ``"position"``, an independent one at every position.
        positions: for site ``"position"``: ``"mean"`` counts the KL of one position, as document 000 does (a KL tempered
            by the number of positions); an integer counts that many, which is exact when it is the map's size.
        kl_samples: fresh draws for a KL without closed form.
        label: what the conversion's table shows.
    """

    def __init__(
        self,
        base: Base,
        transform: Transform,
        prior: Base,
        layout: Layout,
        site: Site = "channel",
        positions: int | Literal["mean"] = "mean",
        kl_samples: int = 16,
        label: str = "flow",
    ) -> None:
        super().__init__(layout, site)
        self.base, self.transform, self.prior = base, transform, prior
        self.positions, self.kl_samples, self.label = positions, kl_samples, label
        # a normal base, one elementwise affine map and a normal prior: what can be done for many layers at once
        parts = list(transform) if isinstance(transform, Compose) else [transform]
        gaussian = isinstance(base, NormalBase) and isinstance(prior, NormalBase) and len(parts) == 1
        self.gaussian: Any = (base, parts[0], prior) if gaussian and isinstance(parts[0], Affine) else None

    @property
    def count(self) -> int:
        """How many vectors the KL of this layer counts."""
        return 1 if self.site == "channel" or self.positions == "mean" else int(self.positions)

    def posterior(self) -> Flow:
        """The distribution of one noise vector."""
        return Flow(self.base.distribution(), self.transform)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        """Noise vectors, always in float32 or better: flows lose their footing in bfloat16."""
        device = next(
            self.base.buffers() if isinstance(self.base, NormalBase) else self.base.parameters()
        ).device.type
        if torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return self._draw(shape, generator)
        return self._draw(shape, generator)

    def _draw(self, shape: tuple[int, ...], generator: torch.Generator | None) -> Tensor:
        if self.gaussian is not None:  # no log-det, and the two affine maps in one: half the launches
            base, affine, _ = self.gaussian
            mean, deviation, _ = affine.push_normal(base.loc, base.scale)
            return DiagonalNormal(mean, deviation).rsample(shape, generator)
        return self.posterior().rsample(shape, generator)

    def mean(self) -> Tensor:
        base = self.base.distribution()
        if self.transform.linearity != "none":
            return self.transform(base.mean)[0]
        generator = torch.Generator(base.mean.device).manual_seed(0)
        return self.posterior().rsample((4096,), generator).mean(0)

    def divergence(self, samples: int | None = None) -> Divergence:
        device = self.base.distribution().mean.device.type
        with torch.autocast(device, enabled=False):
            kl, entropy = divergence(
                self.posterior(), self.prior.distribution(), samples or self.kl_samples, self.generator
            )
        return Divergence(kl * self.count, entropy * self.count)

    def extra_repr(self) -> str:
        return f"{self.label}, dim={self.layout.dim}, site={self.site}"


class DropoutNoise(Noise):
    r"""Dropout as multiplicative noise: :math:`z_i = b_i / (1 - p)`, :math:`b_i \sim \mathrm{Bernoulli}(1 - p)`.

    Kept on at prediction this is MC dropout (Gal & Ghahramani, 2016). It has nothing to train and no KL.
    """

    def __init__(self, layout: Layout, rate: float, site: Site = "position") -> None:
        super().__init__(layout, site)
        if not 0.0 <= rate < 1.0:
            raise FlowBNNError(f"a dropout rate is at least 0 and below 1, not {rate}")
        self.rate = rate
        self.label = f"Dropout({rate:g})"
        self.register_buffer("_device", torch.empty(0), persistent=False)

    def draw(self, shape: tuple[int, ...], generator: torch.Generator | None = None) -> Tensor:
        device = self.get_buffer("_device").device
        uniform = torch.rand((*shape, self.layout.dim), generator=generator, device=device)
        return (uniform >= self.rate).float() / (1.0 - self.rate)

    def mean(self) -> Tensor:
        return torch.ones(self.layout.dim, device=self.get_buffer("_device").device)

    def extra_repr(self) -> str:
        return f"rate={self.rate}, dim={self.layout.dim}, site={self.site}"
