"""Gaussians over the noise of all layers, by the blocks of their precision."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


@dataclass
class BlockGaussian:
    r"""A Gaussian whose precision is block diagonal, or block tridiagonal where ``links`` has what lies beside the diagonal.

    Args:
        mean: ``[D]``.
        blocks: the diagonal blocks of the precision, without the prior's part: matrices, or one vector where it is diagonal.
        links: the blocks below them.
        loc, variance: of the prior, ``[D]``.
    """

    mean: Tensor
    blocks: list[Tensor]
    links: list[Tensor]
    loc: Tensor
    variance: Tensor
    maps: list[Tensor] = field(default_factory=list)  # from the deviation of a block to that of the next
    # of the conditional covariances: triangular, or diagonal
    roots: list[Tensor] = field(default_factory=list)

    @property
    def sizes(self) -> list[int]:
        return [len(block) for block in self.blocks]

    def factorize(self) -> "BlockGaussian":
        """Conditional covariances of the blocks given the one before, from the last to the first."""
        self.maps, self.roots = [], []
        added = (1.0 / self.variance).split(self.sizes)
        taken: Tensor | float = 0.0
        for number in reversed(range(len(self.blocks))):
            if self.blocks[number].ndim == 1:
                self.roots.insert(0, (self.blocks[number] + added[number]).rsqrt())
                continue
            inner = self.blocks[number] + added[number].diag() - taken
            factor = torch.linalg.cholesky(inner)
            # the root of the inverse that is lower triangular
            self.roots.insert(0, torch.linalg.cholesky(torch.cholesky_inverse(factor)))
            if number and self.links:
                solved = torch.cholesky_solve(self.links[number - 1], factor)
                self.maps.insert(0, -solved)
                taken = self.links[number - 1].mT @ solved
        return self

    def deviations(self, normal: Tensor) -> Tensor:
        """What standard normal numbers ``[..., D]`` become, less the mean."""
        parts: list[Tensor] = []
        for number, (root, some) in enumerate(zip(self.roots, normal.split(self.sizes, -1), strict=True)):
            part = some @ root.mT if root.ndim == 2 else some * root
            parts.append(part + parts[-1] @ self.maps[number - 1].mT if number and self.maps else part)
        return torch.cat(parts, -1)

    def covariance_times(self, vector: Tensor) -> Tensor:
        """The covariance times a vector ``[D]``."""
        parts, carried = list(vector.split(self.sizes)), None
        for number in reversed(range(len(parts))):
            whole = parts[number] if carried is None else parts[number] + carried
            root = self.roots[number]
            parts[number] = whole @ root if root.ndim == 2 else whole * root
            carried = self.maps[number - 1].mT @ whole if number and self.maps else None
        return self.deviations(torch.cat(parts))

    def variances(self) -> Tensor:
        """Of every number, ``[D]``."""
        if not self.maps:
            squares = [root.square() for root in self.roots]
            return torch.cat([square.sum(-1) if square.ndim == 2 else square for square in squares])
        return torch.cat([covariance.diagonal() for covariance in self._marginals()])

    def _marginals(self) -> list[Tensor]:
        """The covariance of each block of a chain."""
        found = [self.roots[0] @ self.roots[0].mT]
        for way, root in zip(self.maps, self.roots[1:], strict=True):
            found.append(root @ root.mT + way @ found[-1] @ way.mT)
        return found

    def backward_maps(self) -> list[Tensor]:
        """From the deviation of a block of a chain to the mean of that of the block before."""
        marginals = self._marginals()
        return [
            torch.linalg.solve(after, way @ before).mT
            for way, before, after in zip(self.maps, marginals, marginals[1:], strict=False)
        ]

    def kl(self) -> float:
        """To the prior, in nats."""
        away = self.variances() + (self.mean - self.loc).square()
        diagonals = [root.diagonal() if root.ndim == 2 else root for root in self.roots]
        log_det = float(torch.cat(diagonals).log().sum())
        return 0.5 * float((away / self.variance + self.variance.log() - 1.0).sum()) - log_det

    def covariance(self) -> Tensor:
        """``[D, D]``."""
        columns = self.deviations(torch.eye(len(self.mean), dtype=self.mean.dtype, device=self.mean.device))
        return columns.mT @ columns


def factorized(q: BlockGaussian, instead: BlockGaussian) -> BlockGaussian:
    """The Gaussian, or another where its precision is not positive definite."""
    try:
        return q.factorize()
    except torch.linalg.LinAlgError:
        return instead


def average(some: Sequence[BlockGaussian]) -> BlockGaussian:
    """The mean of means and precisions, with the last prior."""
    center = torch.stack([q.mean for q in some]).mean(0)
    blocks = [sum(parts[1:], parts[0]) / len(some) for parts in zip(*(q.blocks for q in some), strict=True)]
    links = [sum(parts[1:], parts[0]) / len(some) for parts in zip(*(q.links for q in some), strict=True)]
    return factorized(replace(some[-1], mean=center, blocks=blocks, links=links), some[-1])
