"""Linear transforms: matrices in LU factors, block-triangular matrices, reflections and permutations."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.kernels.reference import solve, triangles
from flowbnn.nets.mlp import check_order
from flowbnn.numerics import soft_clamp, solve_triangular
from flowbnn.options import Count, Dim, NonNegative, Positive, checked
from flowbnn.transforms.base import BidirectionalTransform, Transform, check_vectors


class LULinear(BidirectionalTransform):
    r"""Linear map in factored form, :math:`x = P L U z + b`, with :math:`\log|\det| = \sum_i d_i`.

    :math:`P` is a fixed permutation, :math:`L` unit lower triangular, and :math:`U` upper triangular with the positive diagonal
    :math:`e^{d}`, where :math:`d` is bounded softly (Kingma & Dhariwal 2018, equation 10). The product :math:`W = PLU` is never
    formed: forward takes two triangular products, inverse two triangular solves, and the log-determinant one sum. On the last axis of
    ``(B, H, W, C)`` it is Glow's invertible 1x1 convolution.

    Both factors are stored in one ``dim x dim`` parameter, as in LAPACK. Its strict triangles are those of :math:`L` and :math:`U`
    times :math:`\sqrt D`, so that the effect of an optimizer step does not depend on :math:`D`. Its diagonal holds :math:`d` before
    the bound. The map starts at the identity, except for small random entries off the diagonal.

    Args:
        dim: Length of the vectors.
        bias: If True, adds a shift :math:`b`.
        permute: If True, draws a random :math:`P`, which is saved in the ``state_dict``. Otherwise :math:`P = I`.
        bound: Largest absolute value of :math:`d`.
        init_std: Standard deviation of the initial off-diagonal entries of the parameter; 0 starts exactly at :math:`P`.
        generator: Generator of the random start; torch's global one by default.

    >>> linear = LULinear(3, generator=torch.Generator().manual_seed(0))
    >>> x, log_det = linear(torch.eye(3))
    >>> torch.allclose(x, torch.eye(3), atol=0.05), log_det.detach()
    (True, tensor([0., 0., 0.]))
    """

    linearity = "affine"
    order: Tensor
    restore: Tensor

    @checked
    def __init__(
        self,
        dim: Dim,
        bias: bool = False,
        permute: bool = False,
        bound: Positive = 4.0,
        init_std: NonNegative = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.bound, self.permute = dim, bound, permute
        factors = torch.randn(dim, dim, generator=generator) * init_std
        self.factors = nn.Parameter(factors.fill_diagonal_(0.0))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        order = torch.randperm(dim, generator=generator) if permute else torch.arange(dim)
        self.register_buffer("order", order)
        self.register_buffer("restore", torch.argsort(order))

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, self.factors)
        lower, upper, logs = triangles(self.factors, self.bound)
        log_det = logs.sum().expand(value.shape[:-1])
        if inverse:
            x = value if self.bias is None else value - self.bias
            x = x.index_select(-1, self.restore) if self.permute else x
            return solve(lower, upper, x.reshape(-1, self.dim)).reshape(value.shape), -log_det
        x = torch.matmul(torch.matmul(value, upper.mT), lower.mT)
        x = x.index_select(-1, self.order) if self.permute else x
        return x if self.bias is None else x + self.bias, log_det


class Householder(BidirectionalTransform):
    r"""Product of Householder reflections, :math:`x = H_K \cdots H_1 z` with :math:`H_k = I - 2 v_k v_k^\top / \lVert v_k \rVert^2`.

    The map is orthogonal, so that :math:`\log|\det| = 0`. After a Gaussian with independent entries it gives one with a full
    covariance (Tomczak and Welling 2016, https://arxiv.org/abs/1611.09630). A zero vector :math:`v_k` reflects nothing.

    Args:
        dim: Length of the vectors.
        reflections: Number :math:`K` of reflections; :math:`D` of them reach every orthogonal matrix.
        generator: Generator of the random start. Reflections start in nearly equal pairs, which cancel.

    >>> x, log_det = Householder(3, reflections=2)(torch.tensor([3.0, 0.0, 4.0]))
    >>> round(x.norm().item(), 4), log_det.item()
    (5.0, 0.0)
    """

    linearity = "affine"

    @checked
    def __init__(self, dim: Dim, reflections: Count = 2, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.dim = dim
        pairs = torch.randn((reflections + 1) // 2, dim, generator=generator).repeat_interleave(2, 0)
        noise = 0.05 * torch.randn(reflections, dim, generator=generator)
        self.vectors = nn.Parameter(pairs[:reflections] + noise)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, self.vectors)
        units = normalize_rows(self.vectors)
        return reflect(value, units.flip(0) if inverse else units), value.new_zeros(value.shape[:-1])


def reflect(value: Tensor, units: Tensor) -> Tensor:
    r"""Reflects vectors by the unit vectors :math:`u_1, \dots, u_K`, one after the other.

    All reflections are applied at once by the compact form of their product (Schreiber and Van Loan 1989):

    .. math:: H_1 \cdots H_K = I - U^\top S\, U, \qquad S^{-1} = \tfrac12 I + \mathrm{triu}(U U^\top, 1)

    Args:
        value: Vectors ``(..., dim)``.
        units: Unit vectors, the rows of a matrix ``(K, dim)``.

    >>> reflect(torch.tensor([3.0, 4.0]), torch.eye(2))
    tensor([-3., -4.])
    """
    half = 0.5 * torch.eye(len(units), dtype=units.dtype, device=units.device)
    s_inverse = torch.matmul(units, units.mT).triu(1) + half
    weighted = solve_triangular(s_inverse, units, upper=True)  # S U
    return value - torch.matmul(torch.matmul(value, units.mT), weighted)


def normalize_rows(rows: Tensor) -> Tensor:
    """Divides each row by its length. Rows of zeros stay unchanged."""
    square = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(square > 0, square, 1.0).rsqrt()


class Permutation(BidirectionalTransform):
    r"""Fixed permutation, :math:`x_i = z_{\mathrm{order}(i)}`, with :math:`\log|\det| = 0`.

    The order is saved in the ``state_dict``.

    Args:
        order: Every index from 0 to ``dim - 1`` once.

    >>> Permutation([2, 0, 1])(torch.tensor([10.0, 11.0, 12.0]))
    (tensor([12., 10., 11.]), tensor(0.))
    """

    linearity = "affine"
    order: Tensor
    restore: Tensor

    @checked
    def __init__(self, order: Sequence[int] | Tensor) -> None:
        super().__init__()
        index = torch.as_tensor(order)
        check_order(index.tolist(), index.numel())
        self.register_buffer("order", index.to(torch.long, copy=True))
        self.register_buffer("restore", torch.argsort(index))

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.order.numel(), self)
        index = self.restore if inverse else self.order
        return value.index_select(-1, index), value.new_zeros(value.shape[:-1])


class Reverse(Permutation):
    """Reversal of the entries, :math:`x_i = z_{D - 1 - i}`. Between couplings it swaps the halves.

    Args:
        dim: Length :math:`D` of the vectors.

    >>> Reverse(3)(torch.tensor([1.0, 2.0, 3.0]))[0]
    tensor([3., 2., 1.])
    """

    @checked
    def __init__(self, dim: Dim) -> None:
        super().__init__(torch.arange(dim - 1, -1, -1))


class Shuffle(Permutation):
    """Random permutation that is drawn once, at construction.

    Args:
        dim: Length of the vectors.
        generator: Generator of the permutation; torch's global one by default.

    >>> x, _ = Shuffle(4, torch.Generator().manual_seed(0))(torch.arange(4.0))
    >>> x.sort().values
    tensor([0., 1., 2., 3.])
    """

    @checked
    def __init__(self, dim: Dim, generator: torch.Generator | None = None) -> None:
        super().__init__(torch.randperm(dim, generator=generator))


class BlockTriangular(Transform):
    r"""Block lower triangular affine map :math:`x = b + M z`, with :math:`\log|\det M| = \sum_i s_i`.

    Within a block the map is triangular, :math:`D_l (I + N_l)` with a positive diagonal :math:`D_l = e^{s}` that is bounded softly.
    ``coupling`` determines the dependence between blocks:

    ==============  ============================================================================================
    ``"none"``      No dependence: the blocks of a normal base stay independent.
    ``"chain"``     Each block is linear in the block before it, :math:`y_l = D_l (I + N_l) z_l + A_l y_{l-1}`: a Markov chain.
    ``"low-rank"``  Each block is linear in all blocks before it through ``rank`` numbers,
                    :math:`y_l = D_l (I + N_l) z_l + U_l \sum_{k<l} V_k^\top z_k`.
    ==============  ============================================================================================

    A single block has a full covariance. The map starts as :math:`b + s z` without correlation (``"low-rank"``: with very little).

    Args:
        sizes: Lengths of the blocks.
        coupling: Dependence between the blocks.
        rank: Rank of the ``"low-rank"`` coupling.
        loc: Initial shift.
        scale: Initial diagonal.
        bound: Largest distance of :math:`s` from its start, the logarithm of the buffer ``scale``.

    >>> x, log_det = BlockTriangular((2, 3), "chain")(torch.ones(4, 5))
    >>> x.shape, log_det.shape
    (torch.Size([4, 5]), torch.Size([4]))
    """

    linearity = "affine"
    scale: Tensor

    @checked
    def __init__(
        self,
        sizes: Sequence[Count],
        coupling: Literal["none", "chain", "low-rank"] = "none",
        rank: Count = 16,
        loc: float = 0.0,
        scale: Positive = 1.0,
        bound: Positive = 8.0,
    ) -> None:
        super().__init__()
        self.sizes, self.coupling, self.bound = tuple(sizes), coupling, bound
        dim = sum(sizes)
        self.register_buffer("scale", torch.full((dim,), float(scale)))
        self.shift = nn.Parameter(torch.full((dim,), float(loc)))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))
        blocks = {str(index): torch.zeros(size, size) for index, size in enumerate(sizes) if size > 1}
        self.triangles = nn.ParameterDict(blocks)
        self.links, self.projections = nn.ParameterList(), nn.ParameterList()
        if coupling == "chain":
            self.links.extend(torch.zeros(after, size) for size, after in pairwise(sizes))
        elif coupling == "low-rank":  # small but not zero, so that gradients reach both factors
            source = torch.Generator().manual_seed(0)
            init_std = 0.01 * scale / dim**0.5
            self.links.extend(init_std * torch.randn(after, rank, generator=source) for after in sizes[1:])
            self.projections.extend(torch.randn(size, rank, generator=source) / rank for size in sizes[:-1])

    @property
    def log_scale(self) -> Tensor:
        """Logarithms of the diagonal, relative to the buffer ``scale``."""
        return soft_clamp(self.raw_log_scale, self.bound)

    def _blocks(self, value: Tensor) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Yields the index, the diagonal and the unit lower triangle of each block, and the entries of a value in it."""
        scales = (self.log_scale.exp() * self.scale).split(self.sizes)
        for index, (scale, block) in enumerate(zip(scales, value.split(self.sizes, -1), strict=True)):
            unit = torch.eye(len(scale), dtype=scale.dtype, device=scale.device)
            yield index, scale, unit + self.triangles[str(index)].tril(-1) if len(scale) > 1 else unit, block

    def _next_state(self, index: int, z: Tensor, y: Tensor, state: Tensor | None) -> Tensor | None:
        """Returns the vector that the next block depends on."""
        if self.coupling == "chain":
            return y
        if index >= len(self.projections):
            return None
        projection = z @ self.projections[index]
        return projection if state is None else state + projection

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, len(self.shift), self, self.shift)
        results: list[Tensor] = []
        state: Tensor | None = None
        for index, scale, unit, block in self._blocks(z):
            y = (block @ unit.mT) * scale
            y = y if state is None else y + state @ self.links[index - 1].mT
            results.append(y)
            state = self._next_state(index, block, y, state)
        return torch.cat(results, -1) + self.shift, self._log_det().expand(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, len(self.shift), self, self.shift)
        results: list[Tensor] = []
        state: Tensor | None = None
        for index, scale, unit, y in self._blocks(x - self.shift):
            residual = y if state is None else y - state @ self.links[index - 1].mT
            rows = (residual / scale).reshape(-1, len(unit))
            z = solve_triangular(unit.mT, rows, upper=True, left=False).reshape(y.shape)
            results.append(z)
            state = self._next_state(index, z, y, state)
        return torch.cat(results, -1), -self._log_det().expand(x.shape[:-1])

    def _log_det(self) -> Tensor:
        """Returns the log-determinant of the map."""
        return self.log_scale.sum() + self.scale.log().sum()

    def variances(self, scale: Tensor) -> Tensor:
        """Returns the variances of :math:`x` for independent entries of :math:`z`.

        Args:
            scale: Standard deviations of the entries of :math:`z`.
        """
        results: list[Tensor] = []
        covariance: Tensor | None = None  # of the state that the next block depends on
        for index, diagonal, unit, deviation in self._blocks(scale):
            factor = unit * deviation * diagonal[:, None]
            link = None if covariance is None else self.links[index - 1]
            product = 0.0 if link is None else link @ covariance
            results.append(factor.square().sum(-1) + (0.0 if link is None else (product * link).sum(-1)))
            if self.coupling == "chain":
                covariance = factor @ factor.mT + (0.0 if link is None else product @ link.mT)
            elif index < len(self.projections):
                projection = self.projections[index] * deviation[:, None]
                covariance = projection.mT @ projection + (0.0 if covariance is None else covariance)
        return torch.cat(results)

    @torch.no_grad()
    def assign(self, mean: Tensor, roots: Sequence[Tensor], links: Sequence[Tensor] = ()) -> None:
        """Sets the parameters.

        Args:
            mean: New shift.
            roots: New lower triangular matrix of each block.
            links: New links :math:`A_l` of a chain.
        """
        self.shift.copy_(mean)
        for index, root in enumerate(roots):
            if len(root) > 1:
                self.triangles[str(index)].copy_((root / root.diagonal()[:, None]).tril(-1))
        for parameter, link in zip(self.links, links, strict=False):
            parameter.copy_(link)
        # In the buffer, which has no bound.
        self.scale.copy_(torch.cat([root.diagonal() for root in roots]))
        self.raw_log_scale.zero_()
