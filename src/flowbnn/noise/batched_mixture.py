r"""The mixtures of many layers, end to end: their draws and their KL in few launches.

Layer :math:`l` starts its noise at an equal mixture of :math:`K` normals :math:`\mathcal N(\mu_k, \sigma_k^2)`, which the affine map
that follows sends to :math:`\mathcal N(m_k, d_k^2)` with :math:`m_k = c + t + e^s (\mu_k - c)` and :math:`d_k = e^s \sigma_k` (see
:mod:`flowbnn.noise.batched_gaussian`): again a mixture, whose density needs no Jacobian. A layer draws one component for each row.
"""

import math
from typing import Any

import torch
from torch import Tensor

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import chosen_normal, components_of, standard_normal
from flowbnn.noise.batched_gaussian import centers
from flowbnn.noise.passes import Share, Source
from flowbnn.numerics import soft_clamp

# numbers of a layer from which on it had better draw by itself: sums of gradients then take longer than launches
MANY = 2**17
_HALF_LOG_2PI = 0.5 * math.log(2.0 * math.pi)


class Mixtures:
    """Layers whose noise begins as a mixture of normals, end to end: means and deviations ``[components, numbers]``."""

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.fresh = layers, layers[0].kl_samples
        self.sizes = tuple([noise.layout.dim for noise in layers])
        bases, affines, _ = zip(*[noise.mixed for noise in layers], strict=True)
        loc = torch.cat([base.loc for base in bases], -1)
        log_scale = torch.cat([base.log_scale for base in bases], -1)
        shift = torch.cat([affine.shift for affine in affines])
        grow = soft_clamp(torch.cat([affine.raw_log_scale for affine in affines]), affines[0].bound)
        center = centers(affines)
        self.mean = torch.addcmul(shift + center, loc - center, grow.exp())
        self.log_deviation = bases[0].bounded(log_scale) + grow
        self.deviation = self.log_deviation.exp()

    @staticmethod
    def alike(layers: list[Any], generators: list[Source]) -> bool:
        """As many components, one bound, one generator, one dtype and device."""
        kinds = {
            (len(base.loc), affine.bound, base.loc.dtype, base.loc.device)
            for base, affine, _ in (noise.mixed for noise in layers)
        }
        # generators by `is`: not every version of torch.compile knows the id of None
        return len(kinds) == 1 and all(generator is generators[0] for generator in generators)

    def start(self, rows: int, fresh: int, generator: Source, share: Share | None) -> tuple[Tensor, Tensor]:
        """Components ``[rows + fresh, layers]`` and normal numbers ``[rows + fresh, numbers]``; of shared rows those that are here."""
        loc = self.layers[0].mixed[0].loc
        whole = (rows if share is None else share.whole(rows)) + fresh
        which = components_of(len(loc), (whole, len(self.layers)), loc.device, generator)
        normal = standard_normal(torch.Size((whole, sum(self.sizes))), loc.dtype, loc.device, generator)
        if share is None:
            return which, normal
        cut = whole - fresh
        mine = [torch.cat([share.take(drawn[:cut], rows), drawn[cut:]]) for drawn in (which, normal)]
        return mine[0], mine[1]

    def draw(self, which: Tensor, normal: Tensor) -> Tensor:
        r""":math:`m_k + d_k \epsilon` with the component ``which`` of each row and layer, ``[rows, numbers]``."""
        if normal.numel() >= MANY * len(self.sizes):
            tables = (tensor.split(self.sizes, -1) for tensor in (self.mean, self.deviation, normal))
            parts = enumerate(zip(*tables, strict=True))
            return torch.cat([chosen_normal(m, d, which[:, i], some) for i, (m, d, some) in parts], -1)
        columns = [which[:, i : i + 1].expand(-1, size) for i, size in enumerate(self.sizes)]
        index = torch.cat(columns, -1)
        return torch.addcmul(self.mean.gather(0, index), self.deviation.gather(0, index), normal)

    def push(self, drawn: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the flows after the mixtures make of their draws, ``[draws, numbers]``, and the log-dets ``[layers, draws]``."""
        if not any(noise.rest for noise in self.layers):
            return drawn, None
        pushed = [noise.push(z) for noise, z in zip(self.layers, drawn.split(self.sizes, -1), strict=True)]
        return torch.cat([x for x, _ in pushed], -1), torch.stack([log_dets for _, log_dets in pushed])

    def draws(self, rows: int, generator: Source, share: Share | None) -> dict[int, Tensor]:
        """Draws ``[rows, dim]`` of each layer, by its key."""
        starts = self.draw(*self.start(rows, 0, generator, share)).split(self.sizes, -1)
        return {noise.key: noise.push(z, False)[0] for noise, z in zip(self.layers, starts, strict=True)}

    def divergences(self, generator: Source) -> tuple[dict[int, Divergence], Divergence]:
        """KL and entropy of each layer, by its key, and of all."""
        return self.ahead(0, generator, None)[1:]

    def ahead(
        self, rows: int, generator: Source, share: Share | None
    ) -> tuple[dict[int, Tensor], dict[int, Divergence], Divergence]:
        """Draws for ``rows`` rows, and KL and entropy on fresh draws, in one go."""
        starts = self.draw(*self.start(rows, self.fresh, generator, share))
        ends, log_dets = self.push(starts)
        log_dets = None if log_dets is None else log_dets[:, rows:]
        each, total = self.summary(starts[rows:], ends[rows:], log_dets)
        keys, draws = [noise.key for noise in self.layers], ends[:rows].split(self.sizes, -1)
        return dict(zip(keys, draws, strict=True)), dict(zip(keys, each, strict=True)), total

    def summary(
        self, drawn: Tensor, ends: Tensor, log_dets: Tensor | None
    ) -> tuple[list[Divergence], Divergence]:
        """KL and entropy of each layer, and their sums: the bracket of :func:`~flowbnn.distributions.divergence` on fresh draws.

        Args:
            drawn: of the mixtures, ``[draws, numbers]``.
            ends: what the flows after them made of these.
            log_dets: of the flows, ``[layers, draws]``; None where there are none.
        """
        priors = [noise.mixed[2] for noise in self.layers]
        loc, scale = torch.cat([p.loc for p in priors]), torch.cat([p.scale for p in priors])
        components = len(self.mean)
        of_each = (drawn.unsqueeze(1) - self.mean) / self.deviation  # [draws, components, numbers]
        of_prior = ((ends - loc) / scale).unsqueeze(1)
        logs = torch.cat([self.log_deviation, scale.log().unsqueeze(0)]) + _HALF_LOG_2PI
        numbers = -0.5 * torch.cat([of_each, of_prior], 1).square() - logs
        # [layers, draws, components + 1]
        sums = torch.stack([part.sum(-1) for part in numbers.split(self.sizes, -1)])
        log_q = torch.logsumexp(sums[..., :components], -1) - math.log(components)
        if log_dets is not None:
            log_q = log_q - log_dets
        counts = [float(noise.count) for noise in self.layers]
        kls, entropies = (log_q - sums[..., components]).mean(-1), -log_q.mean(-1)
        if any(count != 1.0 for count in counts):
            weights = torch.cat([kls.new_full((1,), count) for count in counts])
            kls, entropies = kls * weights, entropies * weights
        each = [Divergence(*pair) for pair in zip(kls.unbind(), entropies.unbind(), strict=True)]
        return each, Divergence(kls.sum(), entropies.sum())
