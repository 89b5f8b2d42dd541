"""Affine maps with a matrix that is triangular in blocks: what makes a Gaussian of independent numbers a correlated one."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Positive, checked
from flowbnn.transforms.base import Transform, check_vectors

__all__ = ["BlockTriangular"]


class BlockTriangular(Transform):
    r"""Affine map :math:`x = b + M z` of a vector in blocks, :math:`M` lower triangular, :math:`\log|\det M| = \sum_i s_i`.

    Within a block the map is triangular, :math:`D_l (I + N_l)` with a positive diagonal :math:`D_l = e^{s}`, softly bounded.
    Across blocks it is one of

    ============  ==============================================================================================
    ``"none"``    nothing: the blocks of a normal base stay independent
    ``"chain"``   a block is linear in the block before, :math:`y_l = D_l (I + N_l) z_l + A_l y_{l-1}`: a Markov chain
    ``"low-rank"``  linear in all blocks before, through ``rank`` numbers: :math:`y_l = D_l (I + N_l) z_l + U_l \sum_{k<l} V_k^\top z_k`
    ============  ==============================================================================================

    A single block has a full covariance. It starts as :math:`b + s z`, without correlation (``"low-rank"``: with very little).

    Args:
        sizes: lengths of the blocks.
        across: how the blocks depend on each other.
        rank: of ``"low-rank"``.
        loc, scale: shift and diagonal at the start.
        bound: largest size of :math:`s` around its start.

    >>> x, log_det = BlockTriangular((2, 3), "chain")(torch.ones(4, 5))
    >>> x.shape, log_det.shape
    (torch.Size([4, 5]), torch.Size([4]))
    """

    linearity = "affine"

    @checked
    def __init__(
        self,
        sizes: Sequence[Count],
        across: Literal["none", "chain", "low-rank"] = "none",
        rank: Count = 16,
        loc: float = 0.0,
        scale: Positive = 1.0,
        bound: Positive = 8.0,
    ) -> None:
        super().__init__()
        self.sizes, self.across, self.scale, self.bound = tuple(sizes), across, scale, bound
        dim = sum(sizes)
        self.shift = nn.Parameter(torch.full((dim,), float(loc)))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))
        blocks = {str(number): torch.zeros(size, size) for number, size in enumerate(sizes) if size > 1}
        self.within = nn.ParameterDict(blocks)
        self.links, self.readers = nn.ParameterList(), nn.ParameterList()
        if across == "chain":
            self.links.extend(torch.zeros(after, size) for size, after in pairwise(sizes))
        elif across == "low-rank":  # small, but not zero, so that gradients reach both factors
            source = torch.Generator().manual_seed(0)
            start = 0.01 * scale / dim**0.5
            self.links.extend(start * torch.randn(after, rank, generator=source) for after in sizes[1:])
            self.readers.extend(torch.randn(size, rank, generator=source) / rank for size in sizes[:-1])

    @property
    def log_scale(self) -> Tensor:
        return soft_clamp(self.raw_log_scale, self.bound)

    def _blocks(self, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Number, diagonal and unit lower triangle of each block, and its part of a value."""
        scales = (self.log_scale.exp() * self.scale).split(self.sizes)
        for number, (scale, part) in enumerate(zip(scales, value.split(self.sizes, -1), strict=True)):
            unit = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
            yield number, scale, unit + self.within[str(number)].tril(-1) if len(scale) > 1 else unit, part

    def _after(self, number: int, z: Tensor, y: Tensor, before: Tensor | None) -> Tensor | None:
        """What the next block depends on: this one, or what has been read of all so far."""
        if self.across == "chain":
            return y
        if number >= len(self.readers):
            return None
        read = z @ self.readers[number]
        return read if before is None else before + read

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, len(self.shift), self, self.shift)
        results: list[Tensor] = []
        before: Tensor | None = None
        for number, scale, unit, part in self._blocks(z):
            y = (part @ unit.mT) * scale
            y = y if before is None else y + before @ self.links[number - 1].mT
            results.append(y)
            before = self._after(number, part, y, before)
        return torch.cat(results, -1) + self.shift, self._log_det().expand(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, len(self.shift), self, self.shift)
        results: list[Tensor] = []
        before: Tensor | None = None
        for number, scale, unit, y in self._blocks(x - self.shift):
            own = y if before is None else y - before @ self.links[number - 1].mT
            rows = (own / scale).reshape(-1, len(unit))
            z = torch.linalg.solve_triangular(unit.mT, rows, upper=True, left=False).reshape(y.shape)
            results.append(z)
            before = self._after(number, z, y, before)
        return torch.cat(results, -1), -self._log_det().expand(x.shape[:-1])

    def _log_det(self) -> Tensor:
        return self.log_scale.sum() + len(self.shift) * math.log(self.scale)

    def variances(self, scale: Tensor) -> Tensor:
        r"""Variances of :math:`x` where the entries of :math:`z` are independent with deviations ``scale``."""
        results: list[Tensor] = []
        before: Tensor | None = None  # the covariance of what the next block depends on
        for number, own, unit, width in self._blocks(scale):
            factor = unit * width * own[:, None]
            link = None if before is None else self.links[number - 1]
            shared = 0.0 if link is None else link @ before
            results.append(factor.square().sum(-1) + (0.0 if link is None else (shared * link).sum(-1)))
            if self.across == "chain":
                before = factor @ factor.mT + (0.0 if link is None else shared @ link.mT)
            elif number < len(self.readers):
                read = self.readers[number] * width[:, None]
                before = read.mT @ read + (0.0 if before is None else before)
        return torch.cat(results)

    @torch.no_grad()
    def match(self, mean: Tensor, covariance: Tensor) -> None:
        """Become the map of standard normal numbers to a Gaussian, or to one as near to it as the structure allows.

        Args:
            mean: ``[D]``.
            covariance: ``[D, D]``, positive definite.
        """
        factor = torch.linalg.cholesky(covariance.double())
        starts = torch.tensor((0, *self.sizes)).cumsum(0).tolist()
        roots: list[Tensor] = []
        maps: list[Tensor] = []
        for low, high in pairwise(starts):
            root = factor[low:high, low:high]
            if self.across == "none" and len(self.sizes) > 1:
                # the Gaussian nearest to the whole as an ELBO measures it has the blocks of the precision
                precision = torch.cholesky_inverse(factor)[low:high, low:high]
                root = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(precision)))
            elif self.across == "chain" and low:
                last = low - len(roots[-1])
                beside, own = covariance[last:low, low:high].double(), covariance[low:high, low:high].double()
                maps.append(torch.linalg.solve(covariance[last:low, last:low].double(), beside).mT)
                root = torch.linalg.cholesky(own - maps[-1] @ beside)
            roots.append(root)
        assign(self, mean, roots, maps)
        if self.across == "low-rank" and len(self.sizes) > 1:
            self._match_low_rank(factor, starts)

    def _match_low_rank(self, factor: Tensor, starts: list[int]) -> None:
        """The leading directions of what lies below the blocks."""
        below = factor - torch.block_diag(*(factor[low:high, low:high] for low, high in pairwise(starts)))
        left, size, right = torch.linalg.svd(below, full_matrices=False)
        keep = min(self.readers[0].shape[1], len(size))
        root = size[:keep].sqrt()
        for number, (low, high) in enumerate(pairwise(starts)):
            if number:
                self.links[number - 1].zero_()[:, :keep] = left[low:high, :keep] * root
            if number < len(self.readers):
                self.readers[number].zero_()[:, :keep] = right[:keep, low:high].mT * root


@torch.no_grad()
def assign(
    map_: BlockTriangular, mean: Tensor, roots: Sequence[Tensor], links: Sequence[Tensor] = ()
) -> None:
    """Give a map its values: the shift, the lower triangular matrix of each block, and the links of a chain."""
    map_.shift.copy_(mean)
    for number, root in enumerate(roots):
        if len(root) > 1:
            map_.within[str(number)].copy_((root / root.diagonal()[:, None]).tril(-1))
    for own, link in zip(map_.links, links, strict=False):
        own.copy_(link)
    logs = (torch.cat([root.diagonal() for root in roots]) / map_.scale).log()
    limit = 0.99 * map_.bound
    map_.raw_log_scale.copy_(map_.bound * torch.atanh(logs.clamp(-limit, limit) / map_.bound))
