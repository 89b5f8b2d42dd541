r"""Refinement of a Gaussian posterior of the noise by the exact Hessian of the log-likelihood.

At the maximum of the ELBO the precision of a Gaussian is :math:`V^{-1} - E_q[\nabla^2 \log p(D \mid z)]`. Natural gradients with the
Gauss-Newton matrix :math:`G` leave out the curvature of the network, and end at a posterior that is too narrow. The expected Hessian
follows from gradients alone, by the identity of Price for :math:`z = m + \delta` with covariance :math:`\Lambda^{-1}`:

.. math:: E_q[\nabla^2 \log p] = E_q\big[\Lambda \delta\, g(z)^\top\big], \qquad g = \nabla \log p .

Its variance is reduced by pairs :math:`m \pm \delta`, and by the linear function :math:`-G_i \delta` as control variate, with the
Gauss-Newton matrix :math:`G_i` of each example at a fixed point:

.. math:: -E_q[\nabla^2 \log p] \approx \sum_i G_i + \mathrm{sym}\,\Lambda \delta_i r_i^\top, \qquad
          r_i = \tfrac12 \big(g_i(m - \delta_i) - g_i(m + \delta_i)\big) - G_i \delta_i .
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowbnn.batches import halve_rows_on_oom, repeat, take
from flowbnn.methods.variational.block_gaussian import BlockGaussian, average, factorize_or
from flowbnn.methods.variational.noisy_network import NoisyNetwork


@dataclass
class PairEstimate:
    """Estimate of the ELBO and its derivatives from pairs of a draw and its mirror image.

    Args:
        log_likelihood: Log-likelihood of all data for each draw, ``[draws]``.
        gradient: Expected gradient of the log-likelihood, ``[D]``.
        blocks: Expected Hessian of the negative log-likelihood, in the blocks of the Gaussian.
    """

    log_likelihood: Tensor
    gradient: Tensor
    blocks: list[Tensor]


class HessianRefinement:
    """Steps to the maximum of the ELBO by the exact Hessian. A learned noise scale of a regression stays as it is.

    Args:
        network: Network with noise.
        inputs: Inputs of all examples.
        targets: Targets of all examples.
        q: Gaussian from a fit by Gauss-Newton matrices, without links between its blocks.
        seed: Seed of the draws.
        steps: Number of steps.
    """

    def __init__(
        self,
        network: NoisyNetwork,
        inputs: Any,
        targets: Tensor,
        q: BlockGaussian,
        seed: int,
        steps: int = 16,
    ) -> None:
        self.steps, self.burn_in = steps, steps // 4  # the Gaussians after the burn-in are averaged
        self.network, self.inputs, self.targets = network, inputs, targets
        self.rows = 2048  # of one pass, halved if memory runs out
        self.generator = torch.Generator(targets.device).manual_seed(seed + 104_729)
        entries = len(q.mean) ** 2
        # with 16 draws for each entry of the covariance their noise costs about 0.02 nats of the ELBO
        pairs = max(2**14, 16 * entries) / (2 * steps)
        self.draws_per_example = max(1, math.ceil(pairs / len(targets)))
        self.roots = halve_rows_on_oom(self, lambda: self._curvature_roots(q.mean, seed))  # [K, N, D]
        flat = self.roots.flatten(0, 1)
        self.curvature = flat.mT @ flat

    def _curvature_roots(self, mean: Tensor, seed: int) -> Tensor:
        """Returns the rows of a root of the Gauss-Newton matrix of each example at a fixed noise vector, ``[K, N, D]``."""
        generator, roots = torch.Generator().manual_seed(seed), []
        for low in range(0, len(self.targets), self.rows):
            inputs, targets = take((self.inputs, self.targets), low, low + self.rows)
            vectors = mean.to(self.network.dtype).expand(len(targets), -1).clone()
            result = self.network.derivatives(inputs, targets, vectors, generator, exact=64, labels=8)
            roots.append(result.roots.double().unflatten(0, (-1, len(targets))))
        return torch.cat(roots, 1)

    @staticmethod
    def suits(q: BlockGaussian) -> bool:
        """Returns True if the number of draws that the refinement of a Gaussian needs is affordable."""
        return len(q.mean) <= 90 and not q.links

    def run(self, q: BlockGaussian, update_prior: Callable[[BlockGaussian], BlockGaussian]) -> BlockGaussian:
        """Returns the refined Gaussian, or ``q`` if the ELBO is not larger.

        Args:
            q: Gaussian.
            update_prior: Function that fits the prior of a Gaussian.
        """
        initial, gaussians = q, list[BlockGaussian]()
        for step in range(self.steps):
            estimate = halve_rows_on_oom(self, partial(self.estimate, q))
            q = update_prior(self.step(q, estimate, 0.5 if step < self.burn_in else 0.3))
            gaussians.append(q)
        refined = average(gaussians[self.burn_in :])
        return refined if self._gain(initial, refined) > 0.0 else initial

    def step(self, q: BlockGaussian, estimate: PairEstimate, size: float) -> BlockGaussian:
        """Takes a step, halved until the precision is positive definite. The Gaussian stays if nothing is finite."""
        gradient = estimate.gradient - (q.mean - q.prior_mean) / q.prior_variance
        if not all(bool(tensor.isfinite().all()) for tensor in (gradient, *estimate.blocks)):
            return q
        direction = torch.linalg.solve(self.curvature + (1.0 / q.prior_variance).diag(), gradient)
        for _ in range(8):
            blocks = [torch.lerp(old, new, size) for old, new in zip(q.blocks, estimate.blocks, strict=True)]
            proposal = factorize_or(replace(q, blocks=blocks, mean=q.mean + size * direction), q)
            if proposal is not q and all(bool(root.isfinite().all()) for root in proposal.roots):
                return proposal
            size *= 0.5
        return q

    def estimate(self, q: BlockGaussian) -> PairEstimate:
        """Estimates the derivatives of the ELBO by one pair of draws, or several, for each example."""
        blocks = [torch.zeros_like(block) for block in q.blocks]
        gradient, totals = torch.zeros_like(q.mean), []
        count = self.draws_per_example
        for _ in range(count):
            total = torch.zeros(2, dtype=torch.float64, device=q.mean.device)
            for low in range(0, len(self.targets), self.rows):
                inputs, targets = take((self.inputs, self.targets), low, low + self.rows)
                deviations, scores = self._draw(q, len(targets))
                vectors = torch.cat([q.mean + deviations, q.mean - deviations])
                result = self.network.row_gradients(repeat(inputs, 2), repeat(targets, 2), vectors)
                plus, minus = result.gradient.double().chunk(2)
                gradient += 0.5 * (plus + minus).sum(0) / count
                roots = self.roots[:, low : low + self.rows]
                curved = torch.einsum("knd,kn->nd", roots, (roots * deviations).sum(-1))
                residual = 0.5 * (minus - plus) - curved
                _add_products(blocks, scores.split(q.sizes, -1), residual.split(q.sizes, -1), 1.0 / count)
                halves = result.log_likelihood.double().chunk(2)
                total += torch.stack([half.sum() for half in halves])
            totals.append(total)
        curvature = self._curvature_blocks(q)
        blocks = [fixed + change for fixed, change in zip(curvature, blocks, strict=True)]
        return PairEstimate(torch.cat(totals), gradient, blocks)

    def _draw(self, q: BlockGaussian, count: int) -> tuple[Tensor, Tensor]:
        """Returns deviations from the mean ``[B, D]``, and the precision times each."""
        normal = torch.randn(
            count, len(q.mean), generator=self.generator, device=q.mean.device, dtype=torch.float64
        )
        scores = []
        for root, values in zip(q.roots, normal.split(q.sizes, -1), strict=True):
            if root.ndim == 1:
                scores.append(values / root)
            else:
                scores.append(torch.linalg.solve_triangular(root, values, upper=False, left=False))
        return q.deviations(normal), torch.cat(scores, -1)

    def _curvature_blocks(self, q: BlockGaussian) -> list[Tensor]:
        """Returns the Gauss-Newton matrix at the fixed point, in the blocks of a Gaussian."""
        if q.blocks[0].ndim == 1:
            return [self.curvature.diagonal()]
        starts = [sum(q.sizes[:number]) for number in range(len(q.sizes))]
        return [
            self.curvature[start : start + size, start : start + size]
            for start, size in zip(starts, q.sizes, strict=True)
        ]

    def _gain(self, initial: BlockGaussian, refined: BlockGaussian) -> float:
        """Returns the ELBO of the refined Gaussian minus that of the initial one, with the same random numbers."""
        elbos = []
        for q in (initial, refined):
            self.generator.manual_seed(7)
            values = [float(self.estimate(q).log_likelihood.mean()) for _ in range(4)]
            elbos.append(sum(values) / len(values) - q.kl())
        gain = elbos[1] - elbos[0]
        return gain if math.isfinite(gain) else -math.inf


def _add_products(
    blocks: list[Tensor], scores: tuple[Tensor, ...], residuals: tuple[Tensor, ...], weight: float
) -> None:
    """Adds the symmetrized products of scores and residuals to the blocks."""
    for block, score, residual in zip(blocks, scores, residuals, strict=True):
        if block.ndim == 1:
            block += weight * (score * residual).sum(0)
        else:
            product = score.mT @ residual
            block += 0.5 * weight * (product + product.mT)
