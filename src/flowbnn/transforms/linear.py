"""Full linear maps, reflections and permutations."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.kernels.reference import solve, triangles
from flowbnn.options import Count, NonNegative, Positive, checked
from flowbnn.transforms.base import Transform, check_vectors


class LULinear(Transform):
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
        spread: standard deviation of the parameter's first off-diagonal entries; 0 starts exactly at :math:`P`.
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
        spread: NonNegative = 0.01,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.bound = bound
        self.permute = permute
        factors = torch.randn(dim, dim, generator=generator) * spread
        self.factors = nn.Parameter(factors.fill_diagonal_(0.0))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        order = torch.randperm(dim, generator=generator) if permute else torch.arange(dim)
        self.register_buffer("order", order)
        self.register_buffer("restore", torch.argsort(order))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim, self, self.factors)
        lower, upper, logs = triangles(self.factors, self.bound)
        x = torch.matmul(torch.matmul(z, upper.mT), lower.mT)
        if self.permute:
            x = x.index_select(-1, self.order)
        if self.bias is not None:
            x = x + self.bias
        return x, logs.sum().expand(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.dim, self, self.factors)
        lower, upper, logs = triangles(self.factors, self.bound)
        z = x if self.bias is None else x - self.bias
        if self.permute:
            z = z.index_select(-1, self.restore)
        return solve(lower, upper, z.reshape(-1, self.dim)).reshape(x.shape), -logs.sum().expand(x.shape[:-1])


class Householder(Transform):
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

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._reflect(z, range(len(self.mirrors)))

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._reflect(x, range(len(self.mirrors) - 1, -1, -1))

    def _reflect(self, value: Tensor, order: range) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, self.mirrors)
        units = unit_rows(self.mirrors)
        for index in order:
            value = value - 2.0 * (value * units[index]).sum(-1, keepdim=True) * units[index]
        return value, value.new_zeros(value.shape[:-1])


def unit_rows(rows: Tensor) -> Tensor:
    """Each row divided by its length; a row of zeros stays."""
    square = rows.square().sum(-1, keepdim=True)
    return rows * torch.where(square > 0, square, 1.0).rsqrt()


class Permutation(Transform):
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
        index = index.to(torch.long)
        self.register_buffer("order", index.clone())
        self.register_buffer("restore", torch.argsort(index))

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._pick(z, self.order)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self._pick(x, self.restore)

    def _pick(self, value: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.order.numel(), self)
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
