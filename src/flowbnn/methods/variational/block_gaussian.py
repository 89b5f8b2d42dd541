"""Gaussians over the noise of all layers, represented by blocks of their precision."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class BlockGaussian:
    r"""Gaussian with a block diagonal precision, or a block tridiagonal one (a chain) if there are links.

    The precision is the sum of a likelihood part (blocks and links) and the diagonal precision of the prior.

    Args:
        mean: Mean ``[D]``.
        blocks: Diagonal blocks of the likelihood part: matrices, or one vector if it is diagonal.
        links: Blocks below the diagonal blocks.
        prior_mean: Mean of the prior ``[D]``.
        prior_variance: Variance of the prior ``[D]``.
        maps: Matrices from the deviation of a block to the conditional mean of the next; set by :meth:`factorize`.
        roots: Triangular or diagonal roots of the conditional covariances; set by :meth:`factorize`.

    >>> ones = torch.ones(2)
    >>> BlockGaussian(ones, [3.0 * torch.eye(2)], [], ones, ones).factorize().covariance()
    tensor([[0.2500, 0.0000],
            [0.0000, 0.2500]])
    """

    mean: Tensor
    blocks: list[Tensor]
    links: list[Tensor]
    prior_mean: Tensor
    prior_variance: Tensor
    maps: list[Tensor] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        """Dimensions of the blocks."""
        return [len(block) for block in self.blocks]

    def factorize(self) -> "BlockGaussian":
        """Computes the conditional distribution of each block given the previous one, from the last to the first."""
        self.maps, self.roots = [], []
        prior_precisions = (1.0 / self.prior_variance).split(self.sizes)
        correction: Tensor | float = 0.0
        for number in reversed(range(len(self.blocks))):
            block, prior_precision = self.blocks[number], prior_precisions[number]
            if block.ndim == 1:
                self.roots.insert(0, (block + prior_precision).rsqrt())
                continue
            factor = torch.linalg.cholesky(block + prior_precision.diag() - correction)
            # the lower triangular root of the inverse
            self.roots.insert(0, torch.linalg.cholesky(torch.cholesky_inverse(factor)))
            if number and self.links:
                solution = torch.cholesky_solve(self.links[number - 1], factor)
                self.maps.insert(0, -solution)
                correction = self.links[number - 1].mT @ solution
        return self

    def with_draw_dtype(self, dtype: torch.dtype) -> "BlockGaussian":
        """Returns a copy whose mean and :meth:`deviations` have this dtype. Blocks and prior keep theirs."""
        roots, maps = ([matrix.to(dtype) for matrix in group] for group in (self.roots, self.maps))
        return replace(self, mean=self.mean.to(dtype), roots=roots, maps=maps)

    def deviations(self, normal: Tensor) -> Tensor:
        """Transforms standard normal numbers ``[..., D]`` to deviations from the mean."""
        deviations: list[Tensor] = []
        for number, (root, values) in enumerate(zip(self.roots, normal.split(self.sizes, -1), strict=True)):
            deviation = values @ root.mT if root.ndim == 2 else values * root
            if number and self.maps:
                deviation = deviation + deviations[-1] @ self.maps[number - 1].mT
            deviations.append(deviation)
        return torch.cat(deviations, -1)

    def multiply_covariance(self, vector: Tensor) -> Tensor:
        """Returns the covariance times a vector ``[D]``."""
        products, carry = list(vector.split(self.sizes)), None
        for number in reversed(range(len(products))):
            value = products[number] if carry is None else products[number] + carry
            root = self.roots[number]
            products[number] = value @ root if root.ndim == 2 else value * root
            carry = self.maps[number - 1].mT @ value if number and self.maps else None
        return self.deviations(torch.cat(products))

    def variances(self) -> Tensor:
        """Returns the variances ``[D]``."""
        if not self.maps:
            squares = [root.square() for root in self.roots]
            return torch.cat([square.sum(-1) if square.ndim == 2 else square for square in squares])
        return torch.cat([covariance.diagonal() for covariance in self._marginal_covariances()])

    def _marginal_covariances(self) -> list[Tensor]:
        """Returns the covariance of each block of a chain."""
        covariances = [self.roots[0] @ self.roots[0].mT]
        for forward_map, root in zip(self.maps, self.roots[1:], strict=True):
            covariances.append(root @ root.mT + forward_map @ covariances[-1] @ forward_map.mT)
        return covariances

    def backward_maps(self) -> list[Tensor]:
        """Returns matrices from the deviation of a block of a chain to the conditional mean of the previous block."""
        covariances = self._marginal_covariances()
        return [
            torch.linalg.solve(after, forward_map @ before).mT
            for forward_map, before, after in zip(self.maps, covariances, covariances[1:], strict=False)
        ]

    def kl(self) -> float:
        """Returns the KL divergence from the prior in nats."""
        second_moments = self.variances() + (self.mean - self.prior_mean).square()
        diagonals = [root.diagonal() if root.ndim == 2 else root for root in self.roots]
        log_det = float(torch.cat(diagonals).log().sum())
        terms = second_moments / self.prior_variance + self.prior_variance.log() - 1.0
        return 0.5 * float(terms.sum()) - log_det

    def covariance(self) -> Tensor:
        """Returns the covariance ``[D, D]``."""
        columns = self.deviations(torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device))
        return columns.mT @ columns


def factorize_or(q: BlockGaussian, fallback: BlockGaussian) -> BlockGaussian:
    """Factorizes a Gaussian and returns it, or the fallback if its precision is not positive definite."""
    try:
        return q.factorize()
    except torch.linalg.LinAlgError:
        return fallback


def average(gaussians: Sequence[BlockGaussian]) -> BlockGaussian:
    """Returns the Gaussian with the average mean and precision, under the prior of the last one."""
    last, count = gaussians[-1], len(gaussians)
    mean = torch.stack([q.mean for q in gaussians]).mean(0)
    blocks = [sum(group[1:], group[0]) / count for group in zip(*(q.blocks for q in gaussians), strict=True)]
    links = [sum(group[1:], group[0]) / count for group in zip(*(q.links for q in gaussians), strict=True)]
    return factorize_or(replace(last, mean=mean, blocks=blocks, links=links), last)
