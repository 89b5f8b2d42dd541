r"""Mixtures of normals of many layers, concatenated: draws and KL in few launches.

The affine map of :mod:`flowbnn.noise.gaussians` makes of an equal mixture of normals :math:`\mathcal N(\mu_k, \sigma_k^2)` one of
:math:`\mathcal N(m_k, d_k^2)` with :math:`m_k = c + t + e^s (\mu_k - c)` and :math:`d_k = e^s \sigma_k`, whose density needs no
Jacobian. A layer draws one component for each row.
"""

import math
from typing import Any

import torch
from torch import Tensor

from flowbnn.distributions import Divergence
from flowbnn.distributions.draws import draw_components, select_normal, standard_normal
from flowbnn.noise.contexts import OptionalGenerator, RowShard
from flowbnn.noise.gaussians import HALF_LOG_2PI, centers, count_divergences
from flowbnn.numerics import soft_clamp


class Mixtures:
    """Layers whose noise begins with a mixture of normals, concatenated.

    The methods are those of :class:`~flowbnn.noise.gaussians.Gaussians`. Means and deviations have the shape ``[components, numbers]``.

    Args:
        layers: Noise modules.
    """

    # numbers per layer: for more, summing the gradients of gather takes longer than launches per layer
    gather_limit = 2**17

    def __init__(self, layers: list[Any]) -> None:
        self.layers, self.kl_samples = layers, layers[0].kl_samples
        self.keys = tuple([noise.key for noise in layers])
        self.sizes = tuple([noise.layout.dim for noise in layers])
        bases, affines, _ = zip(*[noise.mixture_base for noise in layers], strict=True)
        loc = torch.cat([base.loc for base in bases], -1)
        log_scale = torch.cat([base.log_scale for base in bases], -1)
        shift = torch.cat([affine.shift for affine in affines])
        log_factor = soft_clamp(torch.cat([affine.raw_log_scale for affine in affines]), affines[0].bound)
        center = centers(affines)
        self.mean = torch.addcmul(shift + center, loc - center, log_factor.exp())
        self.log_deviation = bases[0].bounded(log_scale) + log_factor
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

    def draw_base(
        self, rows: int, kl_samples: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> Tensor:
        """Returns draws of the mixtures ``[rows + kl_samples, numbers]``. A process with a shard keeps its own rows.

        Args:
            rows: Number of rows of this process.
            kl_samples: Number of further draws, which are the same on all processes.
            generator: Generator of the draws.
            shard: Rows of the global batch that this process holds, or None.
        """
        return self.select(*self.draw_components(rows, kl_samples, generator, shard))

    def draw_components(
        self, rows: int, kl_samples: int, generator: OptionalGenerator, shard: RowShard | None
    ) -> tuple[Tensor, Tensor]:
        """Returns components ``[draws, layers]`` and normal numbers ``[draws, numbers]``, with the arguments of :meth:`draw_base`."""
        loc = self.layers[0].mixture_base[0].loc
        global_rows = rows if shard is None else shard.global_rows(rows)
        total = global_rows + kl_samples
        components = draw_components(len(loc), (total, len(self.layers)), loc.device, generator)
        normal = standard_normal(torch.Size((total, sum(self.sizes))), loc.dtype, loc.device, generator)
        if shard is not None:
            components = torch.cat([shard.select(components[:global_rows], rows), components[global_rows:]])
            normal = torch.cat([shard.select(normal[:global_rows], rows), normal[global_rows:]])
        return components, normal

    def select(self, components: Tensor, normal: Tensor) -> Tensor:
        r"""Returns :math:`m_k + d_k \epsilon` with component :math:`k` of each draw and layer, ``[draws, numbers]``.

        Args:
            components: Components :math:`k`, ``[draws, layers]``.
            normal: Normal numbers :math:`\epsilon`, ``[draws, numbers]``.
        """
        if normal.numel() >= self.gather_limit * len(self.sizes):
            tables = (tensor.split(self.sizes, -1) for tensor in (self.mean, self.deviation, normal))
            layers = enumerate(zip(*tables, strict=True))
            return torch.cat([select_normal(m, d, components[:, i], e) for i, (m, d, e) in layers], -1)
        columns = [components[:, i : i + 1].expand(-1, size) for i, size in enumerate(self.sizes)]
        index = torch.cat(columns, -1)
        return torch.addcmul(self.mean.gather(0, index), self.deviation.gather(0, index), normal)

    def sample(self, base_draws: Tensor, rows: int) -> tuple[list[Tensor], Tensor | None]:
        """Returns draws of all layers after their flows, and the log-determinants after the first ``rows`` draws.

        Args:
            base_draws: Draws of the mixtures, ``[draws, numbers]``.
            rows: Number of draws without log-determinants.
        """
        draws, needs_log_det = base_draws.split(self.sizes, -1), rows < len(base_draws)
        if not any(noise.flow_tail for noise in self.layers):
            return list(draws), None
        pushed = [noise.push(z, needs_log_det) for noise, z in zip(self.layers, draws, strict=True)]
        log_dets = torch.stack([log_det for _, log_det in pushed])[:, rows:] if needs_log_det else None
        return [x for x, _ in pushed], log_dets

    def divergences(self, generator: OptionalGenerator) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key, and their sums."""
        base_draws = self.draw_base(0, self.kl_samples, generator, None)
        return self.divergences_of_draws(base_draws, *self.sample(base_draws, 0), 0)

    def divergences_of_draws(
        self, base_draws: Tensor, samples: list[Tensor], log_dets: Tensor | None, rows: int
    ) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key and their sums, from the draws after the first ``rows``.

        Args:
            base_draws: Result of :meth:`draw_base`.
            samples: Draws of all layers, from :meth:`sample`.
            log_dets: Log-determinants, from :meth:`sample`.
            rows: Number of draws that are not used.
        """
        draws = base_draws if log_dets is None else torch.cat(samples, -1)
        return self.compute_divergences(base_draws[rows:], draws[rows:], log_dets)

    def compute_divergences(
        self, base_draws: Tensor, draws: Tensor, log_dets: Tensor | None
    ) -> tuple[dict[int, Divergence], Divergence]:
        """Returns KL and entropy by layer key and their sums, as means over draws (see :func:`~flowbnn.distributions.divergence`).

        Args:
            base_draws: Draws of the mixtures, ``[draws, numbers]``.
            draws: Draws after the flows.
            log_dets: Log-determinants of the flows, ``[layers, draws]``; None if there are none.
        """
        priors = [noise.mixture_base[2] for noise in self.layers]
        loc, scale = torch.cat([p.loc for p in priors]), torch.cat([p.scale for p in priors])
        num_components = len(self.mean)
        standardized = (base_draws.unsqueeze(1) - self.mean) / self.deviation  # [draws, components, numbers]
        standardized_by_prior = ((draws - loc) / scale).unsqueeze(1)
        logs = torch.cat([self.log_deviation, scale.log().unsqueeze(0)]) + HALF_LOG_2PI
        numbers = -0.5 * torch.cat([standardized, standardized_by_prior], 1).square() - logs
        # [layers, draws, components + 1]
        sums = torch.stack([layer.sum(-1) for layer in numbers.split(self.sizes, -1)])
        log_q = torch.logsumexp(sums[..., :num_components], -1) - math.log(num_components)
        if log_dets is not None:
            log_q = log_q - log_dets
        kls, entropies = (log_q - sums[..., num_components]).mean(-1), -log_q.mean(-1)
        return count_divergences(self.layers, kls, entropies)
