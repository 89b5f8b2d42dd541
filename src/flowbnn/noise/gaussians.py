r"""Learnable Gaussians of many layers, concatenated: draws and KL in few launches, and the draws of a prediction.

Layer :math:`l` starts its noise at :math:`\mathcal N(\mu, \sigma^2)` with :math:`s = b \tanh(a / b)`, :math:`\sigma = e^s \sigma_0` and
:math:`\mu = c + t + e^s (\mu_0 - c)`: shift :math:`t`, raw log-scale :math:`a`, base :math:`\mathcal N(\mu_0, \sigma_0^2)`. A flow may
follow. :class:`Gaussians` draws such layers at once, and :class:`SharedDraws` the noise of all layers for a prediction.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.kernels import HALF_LOG_2PI, Chain, Group
from flowbnn.noise.base import BLOCK, Noise, SeededGenerator, block_seeds
from flowbnn.noise.contexts import NoiseMode, OptionalGenerator, RowShard, Shape
from flowbnn.noise.joint import JointPart


class Gaussians:
    """Layers whose noise begins as a learnable Gaussian, concatenated.

    The noise of all layers is one vector of "numbers". Layers without a flow come first, so that the numbers of the flows are adjacent.

    Args:
        layers: Noise modules.

    Attributes:
        layers, keys, sizes: Noise modules in the order of their numbers, their keys, and the length of each.
        flows: Noise modules with a flow. They are the last layers.
        chains: Flow of each of these as a chain of kernels, or None if it has other maps.
        num_gaussians: Number of layers without a flow.
        flow_start: Index of the first number of the flows.
        kl_samples: Number of draws that estimate the KL of a flow, or 0 without flows.
        mean, deviation: Mean and standard deviation of each number before the flows.
        sums: KL and entropy of each layer without the part that depends on draws, or None if they have not been computed.
    """

    def __init__(self, layers: list[Any]) -> None:
        gaussians: list[Any] = []
        self.flows: list[Any] = []
        self.chains: list[Chain | None] = []
        for noise in layers:
            if noise.flow_tail:
                self.flows.append(noise)
                self.chains.append(Chain.of(noise.flow_tail[0]) if noise.flow_is_chain else None)
            else:
                gaussians.append(noise)
        self.layers, self.num_gaussians = gaussians + self.flows, len(gaussians)
        self.kl_samples = self.flows[0].kl_samples if self.flows else 0
        sizes: list[int] = []
        keys: list[int] = []
        constants: list[tuple[Tensor, ...]] = []
        affines = []
        for noise in self.layers:
            base, affine, prior = noise.gaussian_base
            sizes.append(noise.layout.dim)
            keys.append(noise.key)
            affines.append(affine)
            constants.append((prior.loc, prior.scale, base.loc, base.scale))
        self.sizes, self.keys, self.affines = tuple(sizes), tuple(keys), affines
        self.flow_start = sum(sizes[: self.num_gaussians])
        self.constants = list(zip(*constants, strict=True))
        parameters = [affine.shift for affine in affines] + [affine.raw_log_scale for affine in affines]
        tensors = [tensor for column in self.constants for tensor in column]
        self.sums: tuple[Tensor, Tensor] | None = None
        if kernels.moments_available(tensors, parameters):
            centers = [affine.center for affine in affines]
            settings = self.sizes, self.flow_start, affines[0].bound, centers, self.constants
            # a copy without results: autograd would hide a cycle of results and their history from the garbage collector
            reference = copy(self)._compute_moments
            self.mean, self.deviation, *sums = kernels.MomentsFunction.apply(
                *settings, reference, *parameters
            )
            self.sums = sums[0], sums[1]
        else:
            self.mean, self.deviation, self.log_deviation = self._merge(parameters)

    @property
    def priors(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the priors of all numbers."""
        return torch.cat(self.constants[0]), torch.cat(self.constants[1])

    def _merge(self, parameters: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Returns mean, standard deviation and its logarithm of each number, for the shifts and the raw log-scales of the layers."""
        count = len(self.sizes)
        loc, scale = torch.cat(self.constants[2]), torch.cat(self.constants[3])
        shift, raw_log_scale = torch.cat(parameters[:count]), torch.cat(parameters[count:])
        center, bound = centers(self.affines), self.affines[0].bound
        log_scale = bound * torch.tanh(raw_log_scale * (1.0 / bound))
        factor = log_scale.exp()
        mean = torch.addcmul(shift + center, loc - center, factor)
        return mean, scale * factor, log_scale + scale.log()

    def _compute_moments(self, *parameters: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Computes :class:`flowbnn.kernels.MomentsFunction` by torch's operations."""
        mean, deviation, log_deviation = self._merge(list(parameters))
        numbers = mean.new_zeros(len(mean) - self.flow_start)
        return mean, deviation, *self._add_up(mean, deviation, log_deviation, numbers)

    def _add_up(
        self, mean: Tensor, deviation: Tensor, log_deviation: Tensor, sampled: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Returns KL and entropy of each layer, without the log-determinants of the flows.

        Args:
            mean, deviation, log_deviation: Moments of each number.
            sampled: Mean over draws of the difference of squares in the formula of :meth:`compute_divergences`, for each number of the
                flows. None without flows.
        """
        (loc, width), cut = self.priors, self.flow_start
        relative_scale, offset = deviation / width, (mean - loc) / width
        square = relative_scale.square() + offset.square() - 1
        if sampled is not None:
            square = torch.cat([square[:cut], sampled]) if cut else sampled
        entropy = log_deviation + (HALF_LOG_2PI + 0.5)
        terms = torch.stack([0.5 * square - log_deviation + width.log(), entropy])
        # made on the device, so that compiled steps and CUDA graphs have no copy from the host
        segments = torch.cat([torch.full((n,), i, device=width.device) for i, n in enumerate(self.sizes)])
        kls, entropies = terms.new_zeros(2, len(self.sizes)).index_add(1, segments, terms).unbind()
        return kls, entropies

    @staticmethod
    def are_compatible(layers: list[Any], generators: list[OptionalGenerator]) -> bool:
        """Returns True if layers can be concatenated: they have the same bound, generator, dtype and device."""
        bound, shift = layers[0].gaussian_base[1].bound, layers[0].gaussian_base[1].shift
        for noise, generator in zip(layers, generators, strict=True):
            affine = noise.gaussian_base[1]
            same = affine.bound == bound and generator is generators[0]
            if not same or affine.shift.dtype != shift.dtype or affine.shift.device != shift.device:
                return False
        return True

    def draw_base(
        self, rows: int, kl_samples: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> Tensor:
        """Returns standard normal numbers ``[rows + kl_samples, numbers]``. A process with a shard keeps its own rows.

        Args:
            rows: Number of rows of this process.
            kl_samples: Number of further draws, which are the same on all processes.
            generator: Generator of the draws.
            shard: Rows of the global batch that this process holds, or None.
        """
        global_rows = rows if shard is None else shard.global_rows(rows)
        shape = torch.Size((global_rows + kl_samples, len(self.mean)))
        normal = standard_normal(shape, self.mean.dtype, self.mean.device, generator)
        if shard is None:
            return normal
        return torch.cat([shard.select(normal[:global_rows], rows), normal[global_rows:]])

    def scale_and_shift(self, normal: Tensor) -> Tensor:
        r"""Returns :math:`\mu + \sigma \epsilon` for normal numbers ``[draws, numbers]`` of all layers, or of the flows alone."""
        first = len(self.mean) - normal.shape[1]
        mean, deviation = (
            (self.mean[first:], self.deviation[first:]) if first else (self.mean, self.deviation)
        )
        return torch.addcmul(mean, normal, deviation)

    def sample(self, normal: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Returns draws of all layers, and the log-determinants of the flows after the first ``rows`` draws.

        The flows are evaluated at once if the device has kernels for that, else one by one.

        Args:
            normal: Normal numbers ``[draws, numbers]`` of all layers, or of the flows alone, which are then drawn alone.
            rows: Number of draws without log-determinants.
        """
        first, sizes = len(self.mean) - normal.shape[1], self.sizes  # index of the first number
        values, needs_log_det = self.scale_and_shift(normal), rows < len(normal)
        draws = list(values.split(sizes[self.num_gaussians :] if first else sizes, -1))
        if not self.flows:
            return draws, None
        draws, flow_inputs = draws[: -len(self.flows)], draws[-len(self.flows) :]
        if None not in self.chains and kernels.available(values):
            group = Group(self.chains, values[:, self.flow_start - first :], needs_log_det)  # type: ignore[arg-type]
            flow_outputs, joined_log_dets = kernels.evaluate_many([group])[0]
            draws += flow_outputs.split(sizes[self.num_gaussians :], -1)
            return draws, None if joined_log_dets is None else joined_log_dets[:, rows:]
        log_dets: list[Any] = []
        for noise, chain, value in zip(self.flows, self.chains, flow_inputs, strict=True):
            if chain is None:
                draw, log_det = noise.push(value, needs_log_det)
            else:
                draw, log_det = kernels.evaluate(chain, value, needs_log_det)
            draws.append(draw)
            log_dets.append(log_det)
        return draws, torch.stack(log_dets)[:, rows:] if needs_log_det else None

    def divergences(self, generator: OptionalGenerator) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key, and their sums."""
        if not self.flows:
            return self.compute_divergences(None, [], None)
        shape = torch.Size((self.kl_samples, len(self.mean) - self.flow_start))
        normal = standard_normal(shape, self.mean.dtype, self.mean.device, generator)
        return self.compute_divergences(normal, *self.sample(normal, 0))

    def divergences_of_draws(
        self, normal: Tensor, samples: list[Tensor], log_dets: Tensor | None, rows: int
    ) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key and their sums, from the draws after the first ``rows``.

        Args:
            normal: Result of :meth:`draw_base`.
            samples: Draws of all layers, from :meth:`sample`.
            log_dets: Log-determinants, from :meth:`sample`.
            rows: Number of draws that are not used.
        """
        if not self.flows:
            return self.compute_divergences(None, [], None)
        flow_draws = [draws[rows:] for draws in samples[self.num_gaussians :]]
        return self.compute_divergences(normal[rows:, self.flow_start :], flow_draws, log_dets)

    def compute_divergences(
        self, normal: Tensor | None, flow_draws: list[Tensor], log_dets: Tensor | None
    ) -> tuple[dict[int, Divergence], Divergence]:
        r"""Returns KL and entropy by layer key and their sums: in closed form for Gaussians, as a mean over draws for flows.

        .. math:: \mathrm{KL} = \sum_i \Big(\tfrac12 E\big[(x_i - m_i)^2 / w_i^2 - \epsilon_i^2\big] - s_i
                  + \log\frac{w_i}{\sigma_0}\Big) - E[\log|\det|]

        Args:
            normal: Normal numbers :math:`\epsilon` of the flows, ``[draws, numbers]``, or None without flows.
            flow_draws: Draws :math:`x` of the flows, one tensor each.
            log_dets: Log-determinants of the flows, ``[flows, draws]``.
        """
        sampled = None
        if normal is not None:
            x = flow_draws[0] if len(flow_draws) == 1 else torch.cat(flow_draws, -1)
            loc, width = (torch.cat(column[self.num_gaussians :]) for column in self.constants[:2])
            sampled = (((x - loc) / width).square() - normal.square()).mean(0)
        if self.sums is None:
            kls, entropies = self._add_up(self.mean, self.deviation, self.log_deviation, sampled)
        else:
            kls, entropies = self.sums
            if sampled is not None:
                parts = sampled.split(self.sizes[self.num_gaussians :])
                sums = torch.stack([0.5 * part.sum() for part in parts])
                kls = kls + F.pad(sums, (self.num_gaussians, 0))
        if log_dets is not None:
            mean_log_det = F.pad(log_dets.mean(-1), (self.num_gaussians, 0))
            kls, entropies = kls - mean_log_det, entropies + mean_log_det
        return count_divergences(self.layers, kls, entropies)


def centers(affines: Any) -> Any:
    """Returns the centers of affine maps: one number, or a vector if they differ."""
    for affine in affines:
        if affine.center != affines[0].center:
            # made on the device, so that a compiled or recorded step has no copy from the host in it
            return torch.cat([torch.full_like(a.shift, a.center, requires_grad=False) for a in affines])
    return affines[0].center


def count_divergences(
    layers: list[Any], kls: Tensor, entropies: Tensor
) -> tuple[dict[int, Divergence], Divergence]:
    """Returns KL and entropy by layer key and their sums, multiplied by the number of vectors that each layer counts."""
    counts = [float(noise.count) for noise in layers]
    if counts != [1.0] * len(counts):
        weights = torch.cat([kls.new_full((1,), count) for count in counts])
        kls, entropies = kls * weights, entropies * weights
    by_key: dict[int, Divergence] = {}
    for noise, kl, entropy in zip(layers, kls.unbind(), entropies.unbind(), strict=True):
        by_key[noise.key] = Divergence(kl, entropy)
    return by_key, Divergence(kls.sum(), entropies.sum())


def without_autocast(layers: list[Any]) -> AbstractContextManager[Any]:
    """Disables autocast if any of the layers has a flow: flows are not accurate in bfloat16."""
    device = (layers[0].gaussian_base or layers[0].mixture_base)[1].shift.device.type
    if torch.is_autocast_enabled(device) and any(noise.flow_tail for noise in layers):
        return torch.autocast(device, enabled=False)
    return nullcontext()


# -------------------- draws of predictions


class SharedDraws:
    """Draws of mode ``shared`` of all layers of a network: sample ``s`` is the same network for all inputs.

    Args:
        layers: Noise modules of the network.
        modes: Modes by layer key, which have the seeds and the number of samples.
        device: Device of the draws.
        make_generator: Function from a seed to a generator. By default, one generator is reseeded.
        cache: Dictionary that keeps the normal numbers of the last seed, or None.

    Attributes:
        vectors: Draws ``[samples, dim]`` of layers of site ``channel``, by layer key.
        order: Layers in the order of their draws. Each takes one generator for every block of draws.
    """

    def __init__(
        self,
        layers: Sequence[Noise],
        modes: Mapping[int, NoiseMode],
        device: torch.device,
        make_generator: SeededGenerator | None = None,
        cache: dict[Any, Any] | None = None,
    ) -> None:
        self.layers, self.modes, self.device = dict[int, Noise](), modes, device
        self.make_generator = make_generator or torch.Generator(device).manual_seed
        self.order: list[Noise] = []
        self.vectors: dict[int, Tensor] = {}
        group: list[Any] = []
        others: list[Noise] = []
        for layer in layers:
            self.layers[layer.key] = layer
            if layer.site == "channel":
                noise: Any = layer
                plain = noise.gaussian_base is not None and noise.uses_default_draw
                (group if plain and not (noise.normalizing and noise.reads_batch) else others).append(layer)
        with torch.no_grad():
            if len(group) > 1 and Gaussians.are_compatible(group, [None] * len(group)):
                gaussians = Gaussians(group)
                self.order += gaussians.layers
                normal = self._normal_numbers(gaussians, {} if cache is None else cache)
                with without_autocast(group):
                    draws, _ = gaussians.sample(normal, len(normal))
                self.vectors.update(zip(gaussians.keys, draws, strict=True))
            else:
                others = group + others
            for layer in others:
                self._draw_alone(layer)
        for key, vectors in self.vectors.items():  # compiled functions are specialized to strides
            self.vectors[key] = vectors.contiguous()

    def _normal_numbers(self, gaussians: Gaussians, cache: dict[Any, Any]) -> Tensor:
        """Returns the normal numbers ``[samples, numbers]`` of concatenated layers, each layer from its own seeds."""
        modes = [self.modes[key] for key in gaussians.keys]
        dtype, device = gaussians.mean.dtype, gaussians.mean.device
        # everything that the numbers depend on
        signature = (modes, gaussians.sizes, dtype, device)
        last_signature, last_normal = cache.get("normal numbers", (None, None))  # one read, for threads
        if last_signature == signature:
            return last_normal
        normals = []
        for size, mode in zip(gaussians.sizes, modes, strict=True):
            shape, blocks = torch.Size((BLOCK, size)), []
            for block_seed in block_seeds(mode.samples, mode.seed):
                blocks.append(standard_normal(shape, dtype, device, self.make_generator(block_seed)))
            normals.append(torch.cat(blocks)[: mode.samples])
        normal = torch.cat(normals, -1)
        if normal.numel() <= 2**22:  # 16 MB
            cache["normal numbers"] = signature, normal
        return normal

    def _draw_alone(self, layer: Noise) -> None:
        """Draws one layer, or the joint vector of several layers for all of them."""
        mode = self.modes[layer.key]
        samples, seed = mode.samples, mode.seed
        if not isinstance(layer, JointPart):
            self.order.append(layer)
            self.vectors[layer.key] = layer.shared_vectors(samples, seed, self.device, self.make_generator)
        elif layer.key not in self.vectors:
            self.order.append(layer)
            vectors = layer.joint_noise.shared_vectors(samples, seed, self.device, self.make_generator)
            for other in self.layers.values():
                if isinstance(other, JointPart) and other.joint_noise is layer.joint_noise:
                    self.vectors[other.key] = vectors[:, other.span]

    def tensors(
        self, shapes: Iterable[tuple[int, int, Shape]], start: int, stop: int
    ) -> dict[tuple[int, int], Tensor]:
        """Returns draws ``[stop - start, *positions, dim]`` by layer key and call.

        Args:
            shapes: Layer key, number of earlier calls, and positions of each call of a layer in a pass.
            start: First sample.
            stop: End of the range of samples.
        """
        result: dict[tuple[int, int], Tensor] = {}
        for key, call, positions in shapes:
            if key in self.vectors:
                result[key, call] = self.vectors[key][start:stop]
            elif (layer := self.layers.get(key)) is not None:
                result[key, call] = layer.shared_maps(
                    positions, start, stop, self.modes[key].seed, self.device, call
                )
        return result


class SampleDraws:
    """Draws of one sample of :class:`SharedDraws`, as a source of a :class:`~flowbnn.noise.contexts.NoiseContext`.

    Args:
        shared: Draws of all samples.
        index: Number of the sample.
    """

    def __init__(self, shared: SharedDraws, index: int) -> None:
        self.shared, self.index = shared, index
        self.maps: dict[Any, Tensor] = {}  # of this sample, for all chunks of rows

    def draws(self, layer: Noise, positions: Shape, call: int, device: torch.device) -> Tensor:
        vectors = self.shared.vectors.get(layer.key)
        if vectors is not None:
            return vectors[self.index : self.index + 1].view(1, *positions, layer.layout.dim)
        if (layer.key, call, positions) not in self.maps:
            seed = self.shared.modes[layer.key].seed
            self.maps[layer.key, call, positions] = layer.shared_maps(
                positions, self.index, self.index + 1, seed, device, call
            )
        return self.maps[layer.key, call, positions]
