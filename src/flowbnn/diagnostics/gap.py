r"""KL divergence from a posterior of noise to the exact posterior, and the part of it that correlations explain.

.. math:: \mathrm{KL}[q(z) \,\|\, p(z \mid D)] = \log p(D) - \mathrm{ELBO}(q)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.diagnostics.evidence import (
    Draws,
    Evidence,
    bridge_evidence,
    importance_sampling,
    warn_if_different,
)
from flowbnn.diagnostics.noise_chains import NoiseChains, noise_chains
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.options import Seed, checked
from flowbnn.posterior.base import Posterior


@dataclass(frozen=True)
class Gap:
    r"""KL divergence from a posterior to the exact one, :math:`\log p(D) - \mathrm{ELBO}`, and its parts.

    Args:
        nats: KL divergence in nats.
        error: Standard error of the KL divergence.
        within_layers: Nats that correlation within layers would gain.
        across_layers: Nats that correlation across layers would gain.
        dimensions: Number of noise variables.
        examples: Number of examples.
        evidence: Estimate of the log-evidence.
        elbo: ELBO of the posterior.
    """

    nats: float
    error: float
    within_layers: float
    across_layers: float
    dimensions: int
    examples: int
    evidence: Evidence
    elbo: float

    @property
    def remainder(self) -> float:
        """Nats that no Gaussian correlation explains: wrong means and variances, and non-Gaussian shapes."""
        return self.nats - self.within_layers - self.across_layers

    @property
    def per_dimension(self) -> float:
        """KL divergence per noise variable."""
        return self.nats / self.dimensions

    @property
    def per_example(self) -> float:
        """KL divergence per example, which indicates the effect on predictions."""
        return self.nats / self.examples


@checked
def elbo_gap(
    posterior: Posterior,
    loader: Iterable[Any],
    chains: NoiseChains | None = None,
    samples: Draws = 400,
    seed: Seed = 0,
) -> Gap:
    r"""Returns the gap between the log-evidence and the ELBO, and the part of it that correlations would close.

    :math:`T(\Lambda)` denotes the nats that a Gaussian loses without its correlations within, or across, layers
    (:func:`correlation_nats`). :math:`\Lambda_r = E_r[G(z)] + V^{-1}` is the optimal precision at draws of :math:`r`, with the
    Gauss-Newton matrix :math:`G` and the prior variance :math:`V`. The posterior lacks

    .. math:: T(\Lambda_p) \Big(1 - \frac{T(C_q^{-1})}{T(\Lambda_q)}\Big),

    the nats of the correlations in the exact posterior :math:`p` times the fraction that its own covariance :math:`C_q` misses.

    Args:
        posterior: Fitted posterior of noise.
        loader: Data that the posterior was fitted to.
        chains: Chains of :func:`~flowbnn.diagnostics.noise_chains`, of this posterior or of another one with the same prior. None
            runs chains.
        samples: Number of draws of the ELBO.
        seed: Seed of all draws.
    """
    target = NoiseTarget(posterior, loader, seed)
    chains = (chains or noise_chains(posterior, loader, seed=seed)).check_target(target)
    pareto, bridge = importance_sampling(target, samples), bridge_evidence(chains)
    warn_if_different(bridge, pareto.psis_evidence)
    draws = target.draw(max(4096, 16 * target.dim), 98)[0]
    covariance = draws.T.cov().reshape(target.dim, target.dim)
    present = correlation_nats(torch.linalg.inv(covariance), target.sizes, len(draws) - 1.0)
    optimal = correlation_nats(target.precision(draws), target.sizes)
    exact = correlation_nats(target.precision(chains.vectors.flatten(0, 1)), target.sizes)
    within, across = (
        total * min(1.0, max(0.0, 1.0 - current / max(best, 1e-3)))
        for total, current, best in zip(exact, present, optimal, strict=True)
    )
    nats, error = bridge.value - pareto.elbo, math.hypot(bridge.error, pareto.elbo_error)
    return Gap(nats, error, within, across, target.dim, target.count, bridge, pareto.elbo)


def correlation_nats(
    precision: Tensor, sizes: Sequence[int], degrees_of_freedom: float | None = None
) -> tuple[float, float]:
    r"""Returns the decrease of the ELBO of a Gaussian if it loses its correlations within blocks, and across blocks.

    A Gaussian has the precision :math:`\Lambda`, in blocks :math:`l` with entries :math:`i`. Its best approximation by independent
    blocks has the diagonal blocks as precision, and its best factorized approximation has the diagonal. Therefore

    .. math:: \mathrm{across} = \tfrac12 \Big(\sum_l \log|\Lambda_{ll}| - \log|\Lambda|\Big), \qquad
              \mathrm{within} = \tfrac12 \Big(\sum_i \log\Lambda_{ii} - \sum_l \log|\Lambda_{ll}|\Big)

    (Turner and Sahani 2011, https://doi.org/10.1017/CBO9780511984679.006).

    Args:
        precision: Precision matrix ``[D, D]``.
        sizes: Sizes of the blocks, which add up to D.
        degrees_of_freedom: Degrees of freedom if the precision is the inverse of a sample covariance: the number of draws minus one.
            The bias of the determinants of Wishart matrices is then removed.

    Returns:
        ``(within, across)`` in nats.

    >>> precision = torch.linalg.inv(torch.tensor([[1.0, 0.8], [0.8, 1.0]]))  # correlation 0.8: -log(1 - 0.64) / 2 = 0.51
    >>> [[round(value, 2) for value in correlation_nats(precision, sizes)] for sizes in ([2], [1, 1])]
    [[0.51, 0.0], [0.0, 0.51]]
    """
    dim = len(precision)

    def log_det(matrix: Tensor) -> float:
        value, size = float(torch.linalg.slogdet(matrix.double())[1]), len(matrix)
        if degrees_of_freedom is None:
            return value
        # the inverse of a diagonal block is Wishart, with fewer degrees of freedom by the number of other dimensions
        ranks = degrees_of_freedom - (dim - size) - torch.arange(size, dtype=torch.float64)
        return (
            value
            + float(torch.special.digamma(ranks / 2.0).sum())
            + size * math.log(2.0 / degrees_of_freedom)
        )

    blocks = [block.split(list(sizes), 1)[index] for index, block in enumerate(precision.split(list(sizes)))]
    diagonal = sum(log_det(entry.reshape(1, 1)) for entry in precision.diagonal())
    block_diagonal = sum(log_det(block) for block in blocks)
    return 0.5 * (diagonal - block_diagonal), 0.5 * (block_diagonal - log_det(precision))
