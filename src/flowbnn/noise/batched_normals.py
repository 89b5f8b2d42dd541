r"""Learnable Gaussians and mixtures of many layers, concatenated: draws and KL in few launches.

Layer :math:`l` starts its noise at :math:`\mathcal N(\mu, \sigma^2)` with :math:`s = b \tanh(a / b)`, :math:`\sigma = e^s \sigma_0` and
:math:`\mu = c + t + e^s (\mu_0 - c)`: shift :math:`t`, raw log-scale :math:`a`, base :math:`\mathcal N(\mu_0, \sigma_0^2)`. The same
map makes of an equal mixture of normals :math:`\mathcal N(\mu_k, \sigma_k^2)` one of :math:`\mathcal N(m_k, d_k^2)` with
:math:`m_k = c + t + e^s (\mu_k - c)` and :math:`d_k = e^s \sigma_k`, whose density needs no Jacobian. A layer draws one component for
each row.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import draw_components, select_normal, standard_normal
from flowbnn.kernels import Group
from flowbnn.noise.contexts import OptionalGenerator, RowShard
from flowbnn.numerics import soft_clamp

_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)
_NORMAL_ENTROPY = 0.5 + _HALF_LOG_2PI  # of a standard normal, in nats
GATHER_LIMIT = (
    2**17
)  # numbers per layer: for more, summing the gradients of gather takes longer than launches per layer


class Gaussians:
    """Layers whose noise begins as a learnable Gaussian, end to end: those without a flow first, so that the flows lie together."""

    def __init__(self, layers: list[Any]) -> None:
        gaussians: list[Any] = []
        self.flows: list[Any] = []
        for noise in layers:
            (self.flows if noise.flow_tail else gaussians).append(noise)
        self.layers, self.plain = gaussians + self.flows, len(gaussians)
        self.fresh = self.flows[0].kl_samples if self.flows else 0
        sizes: list[int] = []
        tensors: list[tuple[Tensor, ...]] = []
        affines = []
        for noise in self.layers:
            base, affine, prior = noise.gaussian_base
            sizes.append(noise.layout.dim)
            affines.append(affine)
            tensors.append((prior.loc, prior.scale, base.loc, base.scale, affine.shift, affine.raw_log_scale))
        self.sizes = tuple(sizes)
        self.cut = sum(sizes[: self.plain])  # index of the first number of the flows
        columns = zip(*tensors, strict=True)
        self.prior_loc, self.prior_scale, loc, self.scale, shift, raw_log_scale = map(torch.cat, columns)
        center = centers(affines)
        self.log_scale = soft_clamp(raw_log_scale, affines[0].bound)
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

    def normal(self, rows: int, width: int, generator: OptionalGenerator) -> Tensor:
        return standard_normal(torch.Size((rows, width)), self.mean.dtype, self.mean.device, generator)

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
        parts = list(starts.split(sizes[self.plain :] if first else sizes, -1))
        if not self.flows:
            return parts, None
        draws, parts = parts[: -len(self.flows)], parts[-len(self.flows) :]
        chains = [noise.chain for noise in self.flows]
        if None not in chains and kernels.available(starts):
            group = Group(chains, starts[:, self.cut - first :], log_det)
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

    def draws(self, rows: int, generator: OptionalGenerator, shard: RowShard | None) -> dict[int, Tensor]:
        """Returns draws ``[rows, dim]`` by layer key."""
        return self.draws_from(self._shard_normal(rows, 0, generator, shard))

    def draws_from(self, normal: Tensor) -> dict[int, Tensor]:
        """Returns draws by layer key, from normal numbers ``[rows, numbers]`` in the order of :attr:`layers`."""
        return self._by_key(self.sample(normal, len(normal))[0])

    def divergences(self, generator: OptionalGenerator) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key, and their sums."""
        if not self.flows:
            return self.summary(None, [], None)
        normal = self.normal(self.fresh, len(self.mean) - self.cut, generator)
        return self.summary(normal, *self.sample(normal, 0))

    def draw_with_kl(
        self, rows: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> tuple[dict[int, Tensor], dict[int, Divergence], Divergence]:
        """Returns draws for ``rows`` rows, and KL and entropy on fresh draws of the flows, computed together."""
        normal = self._shard_normal(rows, self.fresh, generator, shard)
        samples, log_dets = self.sample(normal, rows)
        if not self.flows:
            return self._by_key(samples), *self.summary(None, [], None)
        ends = [x[rows:] for x in samples[self.plain :]]
        draws = self._by_key([x[:rows] for x in samples])
        return draws, *self.summary(normal[rows:, self.cut :], ends, log_dets)

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
        terms = torch.stack([0.5 * square - log_deviation + width.log(), log_deviation + _NORMAL_ENTROPY])
        # made on the device, so that compiled steps and CUDA graphs have no copy from the host
        segments = torch.cat([torch.full((n,), i, device=width.device) for i, n in enumerate(self.sizes)])
        kls, entropies = terms.new_zeros(2, len(self.sizes)).index_add(1, segments, terms).unbind()
        if log_dets is not None:
            volume = F.pad(log_dets.mean(-1), (self.plain, 0))
            kls, entropies = kls - volume, entropies + volume
        return divergences_of(self.layers, kls, entropies)

    def _by_key(self, values: Any) -> dict[int, Any]:
        result: dict[int, Any] = {}
        for noise, value in zip(self.layers, values, strict=True):
            result[noise.key] = value
        return result

    def _shard_normal(
        self, rows: int, fresh: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> Tensor:
        """Returns normal numbers for ``rows`` rows and ``fresh`` more. A process with a shard keeps its own rows."""
        global_rows = rows if shard is None else shard.global_rows(rows)
        normal = self.normal(global_rows + fresh, len(self.mean), generator)
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
    if any(count != 1.0 for count in counts):
        weights = torch.cat([kls.new_full((1,), count) for count in counts])
        kls, entropies = kls * weights, entropies * weights
    each = map(Divergence, kls.unbind(), entropies.unbind())
    keys = [noise.key for noise in layers]
    return dict(zip(keys, each, strict=True)), Divergence(kls.sum(), entropies.sum())


# -------------------- mixtures


class Mixtures:
    """Layers whose noise begins with a mixture of normals, concatenated: means and deviations ``[components, numbers]``."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.fresh = layers, layers[0].kl_samples
        self.sizes = tuple([noise.layout.dim for noise in layers])
        bases, affines, _ = zip(*[noise.mixture_base for noise in layers], strict=True)
        loc = torch.cat([base.loc for base in bases], -1)
        log_scale = torch.cat([base.log_scale for base in bases], -1)
        shift = torch.cat([affine.shift for affine in affines])
        grow = soft_clamp(torch.cat([affine.raw_log_scale for affine in affines]), affines[0].bound)
        center = centers(affines)
        self.mean = torch.addcmul(shift + center, loc - center, grow.exp())
        self.log_deviation = bases[0].bounded(log_scale) + grow
        self.deviation = self.log_deviation.exp()

    @staticmethod
    def are_compatible(layers: list[Any], generators: list[OptionalGenerator]) -> bool:
        """Returns True if layers have the same number of components, bound, generator, dtype and device."""
        kinds = {
            (len(base.loc), affine.bound, base.loc.dtype, base.loc.device)
            for base, affine, _ in (noise.mixture_base for noise in layers)
        }
        # generators by `is`: not every version of torch.compile knows the id of None
        return len(kinds) == 1 and all(generator is generators[0] for generator in generators)

    def start(
        self, rows: int, fresh: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> tuple[Tensor, Tensor]:
        """Returns components ``[rows + fresh, layers]`` and normal numbers ``[rows + fresh, numbers]``, of this process's rows."""
        loc = self.layers[0].mixture_base[0].loc
        cut = rows if shard is None else shard.global_rows(rows)
        total = cut + fresh
        which = draw_components(len(loc), (total, len(self.layers)), loc.device, generator)
        normal = standard_normal(torch.Size((total, sum(self.sizes))), loc.dtype, loc.device, generator)
        if shard is not None:
            which = torch.cat([shard.select(which[:cut], rows), which[cut:]])
            normal = torch.cat([shard.select(normal[:cut], rows), normal[cut:]])
        return which, normal

    def draw(self, which: Tensor, normal: Tensor) -> Tensor:
        r"""Returns :math:`m_k + d_k \epsilon` with the component ``which`` of each row and layer, ``[rows, numbers]``."""
        if normal.numel() >= GATHER_LIMIT * len(self.sizes):
            tables = (tensor.split(self.sizes, -1) for tensor in (self.mean, self.deviation, normal))
            columns = enumerate(zip(*tables, strict=True))
            return torch.cat([select_normal(m, d, which[:, i], e) for i, (m, d, e) in columns], -1)
        index = torch.cat([which[:, i : i + 1].expand(-1, size) for i, size in enumerate(self.sizes)], -1)
        return torch.addcmul(self.mean.gather(0, index), self.deviation.gather(0, index), normal)

    def push(self, draws: Tensor) -> tuple[Tensor, Tensor | None]:
        """Transforms draws ``[draws, numbers]`` by the flows, and returns the log-determinants ``[layers, draws]`` as well."""
        if not any(noise.flow_tail for noise in self.layers):
            return draws, None
        pushed = [noise.push(z) for noise, z in zip(self.layers, draws.split(self.sizes, -1), strict=True)]
        return torch.cat([x for x, _ in pushed], -1), torch.stack([log_dets for _, log_dets in pushed])

    def draws(self, rows: int, generator: OptionalGenerator, shard: RowShard | None) -> dict[int, Tensor]:
        """Returns draws ``[rows, dim]`` by layer key."""
        starts = self.draw(*self.start(rows, 0, generator, shard)).split(self.sizes, -1)
        return {noise.key: noise.push(z, False)[0] for noise, z in zip(self.layers, starts, strict=True)}

    def divergences(self, generator: OptionalGenerator) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key, and their sums."""
        return self.draw_with_kl(0, generator, None)[1:]

    def draw_with_kl(
        self, rows: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> tuple[dict[int, Tensor], dict[int, Divergence], Divergence]:
        """Returns draws for ``rows`` rows, and KL and entropy on fresh draws, computed together."""
        starts = self.draw(*self.start(rows, self.fresh, generator, shard))
        ends, log_dets = self.push(starts)
        log_dets = None if log_dets is None else log_dets[:, rows:]
        keys, draws = [noise.key for noise in self.layers], ends[:rows].split(self.sizes, -1)
        return dict(zip(keys, draws, strict=True)), *self.summary(starts[rows:], ends[rows:], log_dets)

    def summary(
        self, draws: Tensor, ends: Tensor, log_dets: Tensor | None
    ) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key and their sums, as means over draws (see :func:`~flowbnn.distributions.divergence`).

        Args:
            draws: Draws of the mixtures, ``[draws, numbers]``.
            ends: Draws after the flows.
            log_dets: Log-determinants of the flows, ``[layers, draws]``; None if there are none.
        """
        priors = [noise.mixture_base[2] for noise in self.layers]
        loc, scale = torch.cat([p.loc for p in priors]), torch.cat([p.scale for p in priors])
        components = len(self.mean)
        of_each = (draws.unsqueeze(1) - self.mean) / self.deviation  # [draws, components, numbers]
        of_prior = ((ends - loc) / scale).unsqueeze(1)
        logs = torch.cat([self.log_deviation, scale.log().unsqueeze(0)]) + _HALF_LOG_2PI
        numbers = -0.5 * torch.cat([of_each, of_prior], 1).square() - logs
        # [layers, draws, components + 1]
        sums = torch.stack([layer.sum(-1) for layer in numbers.split(self.sizes, -1)])
        log_q = torch.logsumexp(sums[..., :components], -1) - math.log(components)
        if log_dets is not None:
            log_q = log_q - log_dets
        kls, entropies = (log_q - sums[..., components]).mean(-1), -log_q.mean(-1)
        return divergences_of(self.layers, kls, entropies)
