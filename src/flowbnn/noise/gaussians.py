r"""Learnable Gaussians of many layers, concatenated: draws and KL in few launches, and the draws of a prediction.

Layer :math:`l` starts its noise at :math:`\mathcal N(\mu, \sigma^2)` with :math:`s = b \tanh(a / b)`, :math:`\sigma = e^s \sigma_0` and
:math:`\mu = c + t + e^s (\mu_0 - c)`: shift :math:`t`, raw log-scale :math:`a`, base :math:`\mathcal N(\mu_0, \sigma_0^2)`. A flow may
follow. :class:`Gaussians` draws such layers at once, and :class:`SharedDraws` the noise of all layers for a prediction.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.kernels import Chain, Group
from flowbnn.noise.base import BLOCK, Noise, SeededGenerator, block_seeds
from flowbnn.noise.contexts import NoiseMode, OptionalGenerator, RowShard, Shape
from flowbnn.noise.joint import JointPart

HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)  # minus the log-density of a standard normal at 0


class Gaussians:
    """Layers whose noise begins as a learnable Gaussian, end to end: those without a flow first, so that the flows lie together."""

    def __init__(self, layers: list[Any]) -> None:
        gaussians: list[Any] = []
        self.flows: list[Any] = []
        self.chains: list[Chain | None] = []  # of the flows; None for flows of other maps
        for noise in layers:
            if noise.flow_tail:
                self.flows.append(noise)
                self.chains.append(Chain.of(noise.flow_tail[0]) if noise.flow_is_chain else None)
            else:
                gaussians.append(noise)
        self.layers, self.plain = gaussians + self.flows, len(gaussians)
        self.fresh = self.flows[0].kl_samples if self.flows else 0
        sizes: list[int] = []
        keys: list[int] = []
        tensors: list[tuple[Tensor, ...]] = []
        affines = []
        for noise in self.layers:
            base, affine, prior = noise.gaussian_base
            sizes.append(noise.layout.dim)
            keys.append(noise.key)
            affines.append(affine)
            tensors.append((prior.loc, prior.scale, base.loc, base.scale, affine.shift, affine.raw_log_scale))
        self.sizes, self.keys = tuple(sizes), tuple(keys)
        self.cut = sum(sizes[: self.plain])  # index of the first number of the flows
        columns = zip(*tensors, strict=True)
        self.prior_loc, self.prior_scale, loc, self.scale, shift, raw_log_scale = map(torch.cat, columns)
        center, bound = centers(affines), affines[0].bound
        self.log_scale = bound * torch.tanh(raw_log_scale * (1.0 / bound))
        factor = self.log_scale.exp()
        self.mean = torch.addcmul(shift + center, loc - center, factor)
        self.deviation = self.scale * factor

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

    def starts(self, normal: Tensor) -> Tensor:
        r""":math:`\mu + \sigma \epsilon` of all layers, or of the flows alone, ``[draws, numbers]`` as the normal numbers."""
        first = len(self.mean) - normal.shape[1]
        return torch.addcmul(self.mean[first:], normal, self.deviation[first:])

    def sample(self, normal: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Returns draws of all layers, and the log-determinants of the flows after the first ``rows`` draws.

        The flows are evaluated at once if the device has kernels for that, else one by one.

        Args:
            normal: Normal numbers ``[draws, numbers]`` of all layers, or of the flows alone, which are then drawn alone.
            rows: Number of draws without log-determinants.
        """
        first, sizes = len(self.mean) - normal.shape[1], self.sizes
        starts, log_det = self.starts(normal), rows < len(normal)
        draws = list(starts.split(sizes[self.plain :] if first else sizes, -1))
        if not self.flows:
            return draws, None
        draws, flow_starts = draws[: -len(self.flows)], draws[-len(self.flows) :]
        if None not in self.chains and kernels.available(starts):
            group = Group(self.chains, starts[:, self.cut - first :], log_det)  # type: ignore[arg-type]
            ends, log_dets = kernels.evaluate_many([group])[0]
            draws += ends.split(sizes[self.plain :], -1)
            return draws, None if log_dets is None else log_dets[:, rows:]
        volumes: list[Any] = []
        for noise, chain, start in zip(self.flows, self.chains, flow_starts, strict=True):
            end, volume = (
                noise.push(start, log_det) if chain is None else kernels.evaluate(chain, start, log_det)
            )
            draws.append(end)
            volumes.append(volume)
        return draws, torch.stack(volumes)[:, rows:] if log_det else None

    def divergences(self, generator: OptionalGenerator) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key, and their sums."""
        if not self.flows:
            return self.summary(None, [], None)
        shape = torch.Size((self.fresh, len(self.mean) - self.cut))
        normal = standard_normal(shape, self.mean.dtype, self.mean.device, generator)
        return self.summary(normal, *self.sample(normal, 0))

    def kl(
        self, normal: Tensor, samples: list[Tensor], log_dets: Tensor | None, rows: int
    ) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key and their sums, from the draws after the first ``rows``.

        Args:
            normal: Result of :meth:`start`.
            samples: Draws of all layers, from :meth:`sample`.
            log_dets: Log-determinants, from :meth:`sample`.
            rows: Number of draws that are not used.
        """
        if not self.flows:
            return self.summary(None, [], None)
        return self.summary(normal[rows:, self.cut :], [x[rows:] for x in samples[self.plain :]], log_dets)

    def summary(
        self, normal: Tensor | None, ends: list[Tensor], log_dets: Tensor | None
    ) -> tuple[dict[int, Divergence], Divergence]:
        r"""Returns KL and entropy by layer key and their sums: in closed form for Gaussians, as a mean over draws for flows.

        .. math:: \mathrm{KL} = \sum_i \Big(\tfrac12 E\big[(x_i - m_i)^2 / w_i^2 - \epsilon_i^2\big] - s_i
                  + \log\frac{w_i}{\sigma_0}\Big) - E[\log|\det|]

        Args:
            normal: Normal numbers :math:`\epsilon` of the flows, ``[draws, numbers]``.
            ends: Draws :math:`x` of the flows, one tensor each.
            log_dets: Log-determinants of the flows, ``[flows, draws]``.
        """
        cut, loc, width = len(self.mean) if normal is None else self.cut, self.prior_loc, self.prior_scale
        relative_scale = self.deviation[:cut] / width[:cut]
        offset = (self.mean[:cut] - loc[:cut]) / width[:cut]
        square = relative_scale.square() + offset.square() - 1
        if normal is not None:
            x = ends[0] if len(ends) == 1 else torch.cat(ends, -1)
            sampled = (((x - loc[cut:]) / width[cut:]).square() - normal.square()).mean(0)
            square = torch.cat([square, sampled]) if cut else sampled
        log_deviation = self.log_scale + self.scale.log()
        entropy = log_deviation + (HALF_LOG_2PI + 0.5)
        terms = torch.stack([0.5 * square - log_deviation + width.log(), entropy])
        # made on the device, so that compiled steps and CUDA graphs have no copy from the host
        segments = torch.cat([torch.full((n,), i, device=width.device) for i, n in enumerate(self.sizes)])
        kls, entropies = terms.new_zeros(2, len(self.sizes)).index_add(1, segments, terms).unbind()
        if log_dets is not None:
            volume = F.pad(log_dets.mean(-1), (self.plain, 0))
            kls, entropies = kls - volume, entropies + volume
        return divergences_of(self.layers, kls, entropies)

    def start(self, rows: int, fresh: int, generator: OptionalGenerator, shard: RowShard | None) -> Tensor:
        """Returns normal numbers for ``rows`` rows and ``fresh`` more. A process with a shard keeps its own rows."""
        global_rows = rows if shard is None else shard.global_rows(rows)
        shape = torch.Size((global_rows + fresh, len(self.mean)))
        normal = standard_normal(shape, self.mean.dtype, self.mean.device, generator)
        if shard is None:
            return normal
        return torch.cat([shard.select(normal[:global_rows], rows), normal[global_rows:]])


def centers(affines: Any) -> Any:
    """Returns the centers of affine maps: one number, or a vector if they differ."""
    for affine in affines:
        if affine.center != affines[0].center:
            # made on the device, so that a compiled or recorded step has no copy from the host in it
            return torch.cat([torch.full_like(a.shift, a.center, requires_grad=False) for a in affines])
    return affines[0].center


def divergences_of(
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
        seeded: Function that returns a generator with a given seed. By default, one generator is seeded again and again.

    Attributes:
        order: Layers in the order of their draws. Each takes one generator for every block of draws.
    """

    def __init__(
        self,
        layers: Sequence[Noise],
        modes: Mapping[int, NoiseMode],
        device: torch.device,
        seeded: SeededGenerator | None = None,
    ) -> None:
        self.layers, self.modes, self.device = dict[int, Noise](), modes, device
        self.seeded = seeded or torch.Generator(device).manual_seed
        self.order: list[Noise] = []
        self.vectors: dict[int, Tensor] = {}  # [samples, dim] by layer key, of layers of site ``channel``
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
                normal = self._normal_numbers(gaussians)
                with without_autocast(group):
                    draws, _ = gaussians.sample(normal, len(normal))
                self.vectors.update(zip(gaussians.keys, draws, strict=True))
            else:
                others = group + others
            for layer in others:
                self._draw_alone(layer)
        for key, vectors in self.vectors.items():  # compiled functions are specialized to strides
            self.vectors[key] = vectors.contiguous()

    def _normal_numbers(self, gaussians: Gaussians) -> Tensor:
        """Returns the normal numbers ``[samples, numbers]`` of concatenated layers, each layer from its own seeds."""
        mean, normals = gaussians.mean, []
        self.order += gaussians.layers
        for layer in gaussians.layers:
            _, samples, seed, _ = self.modes[layer.key]
            shape, blocks = torch.Size((BLOCK, layer.layout.dim)), []
            for block_seed in block_seeds(samples, seed):
                blocks.append(standard_normal(shape, mean.dtype, mean.device, self.seeded(block_seed)))
            normals.append(torch.cat(blocks)[:samples])
        return torch.cat(normals, -1)

    def _draw_alone(self, layer: Noise) -> None:
        """Draws one layer, or the joint vector of several layers for all of them."""
        _, samples, seed, _ = self.modes[layer.key]
        if not isinstance(layer, JointPart):
            self.order.append(layer)
            self.vectors[layer.key] = layer.shared_vectors(samples, seed, self.device, self.seeded)
        elif layer.key not in self.vectors:
            self.order.append(layer)
            vectors = layer.joint_noise.shared_vectors(samples, seed, self.device, self.seeded)
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
