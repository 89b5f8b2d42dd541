"""Linear maps: full matrices in factors, matrices that are triangular in blocks, reflections and permutations."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.kernels.reference import solve, triangles
from flowbnn.numerics import soft_clamp, solve_triangular
from flowbnn.options import Count, NonNegative, Positive, checked
from flowbnn.transforms.base import BidirectionalTransform, Transform, check_vectors


class LULinear(BidirectionalTransform):
    r"""Linear map in factored form, :math:`x = P L U z + b`, with :math:`\log|\det| = \sum_i d_i`.

    :math:`P` is a fixed permutation, :math:`L` unit lower triangular and :math:`U` upper triangular with the positive
    diagonal :math:`e^{d}`, :math:`d` bounded softly (Kingma & Dhariwal 2018, equation 10). The product
    :math:`W = PLU` is never formed: forward is two triangular products, inverse two triangular solves, and the
    log-det costs one sum. On the last axis of ``(B, H, W, C)`` it is Glow's invertible 1x1 convolution.

    Both factors live in one ``dim x dim`` parameter, as in LAPACK: its strict triangles are those of :math:`L` and :math:`U` times
    :math:`\sqrt D`, so that a step of one size in every entry turns the map by one amount, whatever :math:`D`; its diagonal holds
    :math:`d` before the bound. It starts at the identity but for small random entries off the diagonal.

    Args:
        dim: length of the vectors.
        bias: add a shift :math:`b`.
        permute: draw a random :math:`P`, kept in the ``state_dict``; by default :math:`P = I`.
        bound: largest size of :math:`d`.
        init_std: standard deviation of the parameter's first off-diagonal entries; 0 starts exactly at :math:`P`.
        generator: where the draws come from; torch's own by default.

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
        dim: Count,
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
    r"""Reflections one after the other, :math:`x = H_K \cdots H_1 z` with :math:`H_k = I - 2 v_k v_k^\top / \lVert v_k \rVert^2`.

    An orthogonal map, so that :math:`\log|\det| = 0`; after a Gaussian with independent entries it gives one with a full covariance
    (Tomczak and Welling 2016, https://arxiv.org/abs/1611.09630). A vector :math:`v_k` of zero reflects nothing.

    Args:
        dim: length of the vectors.
        reflections: number :math:`K`; :math:`D` of them reach every orthogonal matrix.
        generator: source of the random start. Reflections start in nearly equal pairs, which cancel.

    >>> x, log_det = Householder(3, reflections=2)(torch.tensor([3.0, 0.0, 4.0]))
    >>> round(x.norm().item(), 4), log_det.item()
    (5.0, 0.0)
    """

    linearity = "affine"

    @checked
    def __init__(self, dim: Count, reflections: Count = 2, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.dim = dim
        pairs = torch.randn((reflections + 1) // 2, dim, generator=generator).repeat_interleave(2, 0)
        noise = 0.05 * torch.randn(reflections, dim, generator=generator)
        self.mirrors = nn.Parameter(pairs[:reflections] + noise)

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, self.mirrors)
        units = normalize_rows(self.mirrors)
        return reflect(value, units.flip(0) if inverse else units), value.new_zeros(value.shape[:-1])


def reflect(value: Tensor, units: Tensor) -> Tensor:
    r"""Vectors reflected by one unit vector after the other: the rows :math:`u_1, \dots, u_K` of ``units``.

    All at once, by the compact form of a product of reflections (Schreiber and Van Loan 1989):

    .. math:: H_1 \cdots H_K = I - U^\top S\, U, \qquad S^{-1} = \tfrac12 I + \mathrm{triu}(U U^\top, 1)

    >>> reflect(torch.tensor([3.0, 4.0]), torch.eye(2))
    tensor([-3., -4.])
    """
    half = 0.5 * torch.eye(len(units), dtype=units.dtype, device=units.device)
    inverse = torch.matmul(units, units.mT).triu(1) + half
    weighted = solve_triangular(inverse, units, upper=True)  # S U
    return value - torch.matmul(torch.matmul(value, units.mT), weighted)


def normalize_rows(rows: Tensor) -> Tensor:
    """Each row divided by its length; a row of zeros stays."""
    square = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(square > 0, square, 1.0).rsqrt()


class Permutation(BidirectionalTransform):
    r"""A fixed reordering, :math:`x_i = z_{\mathrm{order}(i)}`, with :math:`\log|\det| = 0`.

    The order is kept in the ``state_dict``, so that a shuffle survives saving and loading.

    Args:
        order: every number from 0 to ``dim - 1``, once.

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
        if index.ndim != 1 or index.numel() == 0 or sorted(index.tolist()) != list(range(index.numel())):
            text = "a permutation names every position from 0 to dim - 1 exactly once"
            raise FlowBNNError(text, argument="order")
        self.register_buffer("order", index.to(torch.long, copy=True))
        self.register_buffer("restore", torch.argsort(index))

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.order.numel(), self)
        index = self.restore if inverse else self.order
        return value.index_select(-1, index), value.new_zeros(value.shape[:-1])


class Reverse(Permutation):
    r"""The vector of ``dim`` entries read backwards, :math:`x_i = z_{D - 1 - i}`: between couplings, it swaps the halves.

    >>> Reverse(3)(torch.tensor([1.0, 2.0, 3.0]))[0]
    tensor([3., 2., 1.])
    """

    @checked
    def __init__(self, dim: Count) -> None:
        super().__init__(range(dim - 1, -1, -1))


class Shuffle(Permutation):
    """A permutation of ``dim`` entries drawn once, when it is made, from the generator or torch's own.

    >>> x, _ = Shuffle(4, torch.Generator().manual_seed(0))(torch.arange(4.0))
    >>> x.sort().values
    tensor([0., 1., 2., 3.])
    """

    @checked
    def __init__(self, dim: Count, generator: torch.Generator | None = None) -> None:
        super().__init__(torch.randperm(dim, generator=generator))


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
        bound: largest size of :math:`s` around its start, the buffer ``scale``.

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
        across: Literal["none", "chain", "low-rank"] = "none",
        rank: Count = 16,
        loc: float = 0.0,
        scale: Positive = 1.0,
        bound: Positive = 8.0,
    ) -> None:
        super().__init__()
        self.sizes, self.across, self.bound = tuple(sizes), across, bound
        dim = sum(sizes)
        self.register_buffer("scale", torch.full((dim,), float(scale)))
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
            z = solve_triangular(unit.mT, rows, upper=True, left=False).reshape(y.shape)
            results.append(z)
            before = self._after(number, z, y, before)
        return torch.cat(results, -1), -self._log_det().expand(x.shape[:-1])

    def _log_det(self) -> Tensor:
        return self.log_scale.sum() + self.scale.log().sum()

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
    def assign(self, mean: Tensor, roots: Sequence[Tensor], links: Sequence[Tensor] = ()) -> None:
        """Take these values: the shift, the lower triangular matrix of each block, and the links of a chain."""
        self.shift.copy_(mean)
        for number, root in enumerate(roots):
            if len(root) > 1:
                self.within[str(number)].copy_((root / root.diagonal()[:, None]).tril(-1))
        for own, link in zip(self.links, links, strict=False):
            own.copy_(link)
        # exact, where a bounded logarithm would end
        self.scale.copy_(torch.cat([root.diagonal() for root in roots]))
        self.raw_log_scale.zero_()
