r"""The learnable Gaussians of many layers, end to end: their draws and their KL in few launches.

Layer :math:`l` starts its noise at :math:`\mathcal N(\mu, \sigma^2)` with :math:`s = b \tanh(a / b)`, :math:`\sigma = e^s \sigma_0` and
:math:`\mu = c + t + e^s (\mu_0 - c)`: shift :math:`t`, raw log-scale :math:`a`, base :math:`\mathcal N(\mu_0, \sigma_0^2)`.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import standard_normal
from flowbnn.kernels import Group
from flowbnn.noise.passes import Share, Source
from flowbnn.numerics import soft_clamp

_NORMAL_ENTROPY = 0.5 * (1.0 + math.log(2.0 * math.pi))  # of a standard normal, in nats


class Gaussians:
    """Layers whose noise begins as a learnable Gaussian, end to end: those without a flow first, so that the flows lie together."""

    def __init__(self, layers: list[Any]) -> None:
        plain: list[Any] = []
        self.flows: list[Any] = []
        for noise in layers:
            (self.flows if noise.rest else plain).append(noise)
        self.layers, self.plain = plain + self.flows, len(plain)
        self.fresh = self.flows[0].kl_samples if self.flows else 0
        self.frame = frame_of(self.layers, len(self.flows))
        shifts, raws = [], []
        for noise in self.layers:
            shifts.append(noise.start[1].shift)
            raws.append(noise.start[1].raw_log_scale)
        self.mean, self.deviation, self.log_scale = gather(self.frame, shifts, raws)

    @staticmethod
    def alike(layers: list[Any], generators: list[Source]) -> bool:
        """Whether the layers can be laid end to end: one bound, one generator, one dtype and device."""
        bound, shift = layers[0].start[1].bound, layers[0].start[1].shift
        for noise, generator in zip(layers, generators, strict=True):
            affine = noise.start[1]
            same = affine.bound == bound and generator is generators[0]
            if not same or affine.shift.dtype != shift.dtype or affine.shift.device != shift.device:
                return False
        return True

    def normal(self, rows: int, width: int, generator: Source) -> Tensor:
        return standard_normal(torch.Size((rows, width)), self.mean.dtype, self.mean.device, generator)

    def sample(self, normal: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Draws of all layers from normal numbers, ``[draws, numbers]``, and the log-dets of the flows after the first ``rows``.

        Where there are normal numbers of the flows only, these alone are drawn. The flows go at once where the device has kernels for
        that, else one by one.
        """
        first, sizes = len(self.mean) - normal.shape[1], self.frame.sizes
        starts, log_det = draw(self.mean, self.deviation, normal, first), rows < len(normal)
        parts = list(starts.split(sizes[self.plain :] if first else sizes, -1))
        if not self.flows:
            return parts, None
        draws, parts = parts[: -len(self.flows)], parts[-len(self.flows) :]
        chains = [noise.chain for noise in self.flows]
        if None not in chains and kernels.available(starts):
            group = Group(chains, starts[:, self.frame.cut - first :], log_det)
            ends, log_dets = kernels.evaluate_many([group])[0]
            draws += ends.split(sizes[self.plain :], -1)
            return draws, None if log_dets is None else log_dets[:, rows:]
        volumes: list[Any] = []
        for noise, chain, start in zip(self.flows, chains, parts, strict=True):
            end, volume = (
                noise.push(start, log_det) if chain is None else kernels.evaluate(chain, start, log_det)
            )
            draws.append(end)
            volumes.append(volume)
        return draws, torch.stack(volumes)[:, rows:] if log_det else None

    def draws(self, rows: int, generator: Source, share: Share | None) -> dict[int, Tensor]:
        """Draws ``[rows, dim]`` of each layer, by its key."""
        return self.draws_from(self._shared(rows, 0, generator, share))

    def draws_from(self, normal: Tensor) -> dict[int, Tensor]:
        """The same from normal numbers ``[rows, numbers]`` of the layers in the order of :attr:`layers`."""
        return self._by_key(self.sample(normal, len(normal))[0])

    def divergences(self, generator: Source) -> tuple[dict[int, Divergence], Divergence]:
        """KL and entropy of each layer, by its key, and of all."""
        if not self.flows:
            return self.summary(None, [], None)
        normal = self.normal(self.fresh, len(self.mean) - self.frame.cut, generator)
        return self.summary(normal, *self.sample(normal, 0))

    def ahead(
        self, rows: int, generator: Source, share: Share | None
    ) -> tuple[dict[int, Tensor], dict[int, Divergence], Divergence]:
        """Draws for ``rows`` rows, and KL and entropy on fresh draws of the flows, in one go."""
        normal = self._shared(rows, self.fresh, generator, share)
        both, log_dets = self.sample(normal, rows)
        if not self.flows:
            return self._by_key(both), *self.summary(None, [], None)
        ends = [x[rows:] for x in both[self.plain :]]
        draws = self._by_key([x[:rows] for x in both])
        return draws, *self.summary(normal[rows:, self.frame.cut :], ends, log_dets)

    def summary(
        self, normal: Tensor | None, ends: list[Tensor], log_dets: Tensor | None
    ) -> tuple[dict[int, Divergence], Divergence]:
        """Closed form for the Gaussians; for the flows the bracket of :func:`~flowbnn.distributions.divergence` on fresh draws."""
        kls, entropies = summarize(
            self.frame, normal, self.mean, self.deviation, self.log_scale, log_dets, *ends
        )
        each = map(Divergence, kls.unbind(), entropies.unbind())
        return self._by_key(each), Divergence(kls.sum(), entropies.sum())

    def _by_key(self, values: Any) -> dict[int, Any]:
        return {noise.key: value for noise, value in zip(self.layers, values, strict=True)}

    def _shared(self, rows: int, fresh: int, generator: Source, share: Share | None) -> Tensor:
        """Normal numbers for ``rows`` rows and ``fresh`` more, in one draw, of which a process that has a share keeps its own rows."""
        whole = rows if share is None else share.whole(rows)
        drawn = self.normal(whole + fresh, len(self.mean), generator)
        return drawn if share is None else torch.cat([share.take(drawn[:whole], rows), drawn[whole:]])


class Frame(NamedTuple):
    """What is fixed: the layers' places and the constants of base and prior, laid end to end.

    Args:
        sizes: length of each layer's vector.
        cut: where the vectors of the flows begin.
        bound: of the log-scales.
        counts: how many vectors the KL of each layer counts.
        center, loc, scale: of the affine maps and the base.
        prior_loc, prior_scale: of the prior.
    """

    sizes: tuple[int, ...]
    cut: int
    bound: float
    counts: tuple[float, ...]
    center: Any
    loc: Tensor
    scale: Tensor
    prior_loc: Tensor
    prior_scale: Tensor


def frame_of(layers: list[Any], flows: int) -> Frame:
    """The frame of layers whose noise starts as a learnable Gaussian, of which the last ``flows`` have a flow."""
    sizes, counts, affines = [], [], []
    constants: tuple[list[Tensor], ...] = ([], [], [], [])
    for noise in layers:
        base, affine, prior = noise.start
        sizes.append(noise.layout.dim)
        counts.append(float(noise.count))
        affines.append(affine)
        for tensors, tensor in zip(constants, (base.loc, base.scale, prior.loc, prior.scale), strict=True):
            tensors.append(tensor)
    cut, bound = sum(sizes[: len(sizes) - flows]), affines[0].bound
    return Frame(tuple(sizes), cut, bound, tuple(counts), centers(affines), *map(torch.cat, constants))


def centers(affines: Any) -> Any:
    """The centers of affine maps: one number, or a vector where they differ."""
    for affine in affines:
        if affine.center != affines[0].center:
            # made on the device, so that a compiled or recorded step has no copy from the host in it
            return torch.cat([torch.full_like(a.shift, a.center, requires_grad=False) for a in affines])
    return affines[0].center


def gather(frame: Frame, shifts: list[Tensor], raws: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`\mu`, :math:`\sigma` and :math:`s` of all layers."""
    log_scale = soft_clamp(torch.cat(raws), frame.bound)
    factor = log_scale.exp()
    mean = torch.addcmul(torch.cat(shifts) + frame.center, frame.loc - frame.center, factor)
    return mean, frame.scale * factor, log_scale


def draw(mean: Tensor, deviation: Tensor, normal: Tensor, first: int = 0) -> Tensor:
    r""":math:`\mu + \sigma \epsilon` for the numbers from ``first`` on; ``normal`` has the draws on its first axis."""
    if first:
        mean, deviation = mean[first:], deviation[first:]
    return torch.addcmul(mean, normal, deviation)


def summarize(
    frame: Frame,
    normal: Tensor | None,
    mean: Tensor,
    deviation: Tensor,
    log_scale: Tensor,
    log_dets: Tensor | None,
    *ends: Tensor,
) -> tuple[Tensor, Tensor]:
    r"""KL and entropy of every layer: closed form for Gaussians, the mean over draws for the flows.

    .. math:: \mathrm{KL} = \sum_i \Big(\tfrac12 E\big[(x_i - m_i)^2 / w_i^2 - \epsilon_i^2\big] - s_i + \log\frac{w_i}{\sigma_0}\Big)
              - E[\log|\det|]

    Args:
        normal: the :math:`\epsilon` of the flows' draws, ``[draws, numbers]``.
        mean, deviation, log_scale: of the Gaussians.
        log_dets: of the flows, ``[flows, draws]``.
        ends: the flows' draws :math:`x`, one tensor each.
    """
    cut, loc, width = frame.cut, frame.prior_loc, frame.prior_scale
    if normal is None:
        square = (deviation / width).square() + ((mean - loc) / width).square() - 1
    else:
        square = (
            (deviation[:cut] / width[:cut]).square() + ((mean[:cut] - loc[:cut]) / width[:cut]).square() - 1
        )
        x = ends[0] if len(ends) == 1 else torch.cat(ends, -1)
        sampled = (((x - loc[cut:]) / width[cut:]).square() - normal.square()).mean(0)
        square = torch.cat([square, sampled]) if cut else sampled
    log_base = frame.scale.log()
    both = torch.stack(
        [0.5 * square - log_scale + width.log() - log_base, log_scale + log_base + _NORMAL_ENTROPY]
    )
    # made on the device, so that a compiled or recorded step has no copy from the host in it
    segments = torch.cat([torch.full((n,), i, device=mean.device) for i, n in enumerate(frame.sizes)])
    kls, entropies = both.new_zeros(2, len(frame.sizes)).index_add(1, segments, both).unbind()
    if log_dets is not None:
        volume = F.pad(log_dets.mean(-1), (len(frame.sizes) - len(ends), 0))
        kls, entropies = kls - volume, entropies + volume
    if any(count != 1.0 for count in frame.counts):
        counts = torch.cat([kls.new_full((1,), count) for count in frame.counts])
        kls, entropies = kls * counts, entropies * counts
    return kls, entropies
