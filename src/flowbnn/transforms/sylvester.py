"""Sylvester flows: planar flows that move along several directions at once."""

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import tanh_root, tanh_slope
from flowbnn.options import Count, checked
from flowbnn.transforms.base import Transform, check_vectors
from flowbnn.transforms.linear import unit_rows

BOUND = 0.995
"""Largest size of a diagonal entry: the product of two stays above -0.991, so that a slope is never below 0.009."""


class _Sylvester(Transform, ABC):
    r"""What the three variants share; each says only what :math:`Q` is.

    The strict triangles of :math:`R` and :math:`\tilde R^\top` live in one square matrix, with the raw diagonal of
    :math:`R` between them, so that no parameter is idle.
    """

    inverse_kind = "numerical"

    def __init__(self, dim: int, hidden: int, generator: torch.Generator | None) -> None:
        super().__init__()
        self.dim = dim
        self.hidden = hidden
        self.triangles = nn.Parameter(0.05 * torch.randn(hidden, hidden, generator=generator))
        self.raw_diagonal = nn.Parameter(1 + 0.05 * torch.randn(hidden, generator=generator))
        self.bias = nn.Parameter(0.05 * torch.randn(hidden, generator=generator))

    @abstractmethod
    def _basis(self) -> Tensor | None:
        """:math:`Q`, with orthonormal columns; ``None`` for the identity."""

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        r""":math:`R`, :math:`\tilde R` and the slopes at zero, :math:`1 + R_{ii} \tilde R_{ii}`."""
        diagonal = BOUND * torch.tanh(self.triangles.diagonal())
        other = BOUND * torch.tanh(self.raw_diagonal)
        right = self.triangles.triu(1) + torch.diag(diagonal)
        left = self.triangles.tril(-1).mT + torch.diag(other)
        return right, left, 1 + diagonal * other

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim, self, self.bias)
        right, left, slopes = self._factors()
        basis = self._basis()
        a = _down(z, basis) @ left.mT + self.bias
        tanh = torch.tanh(a)
        return z + _up(tanh @ right.mT, basis), _log_slopes(a, tanh, slopes)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.dim, self, self.bias)
        right, left, slopes = self._factors()
        basis = self._basis()
        # row i of v + R tanh(left v + b) = Q'x holds v_i, v_{i+1}, ...: solve from the last row upwards
        rest = _down(x, basis)
        known = self.bias.expand_as(rest)
        rows: list[Tensor] = []
        for i in reversed(range(self.hidden)):
            a = tanh_root(left[i, i] * rest[..., i] + known[..., i], slopes[i])
            step = torch.tanh(a).unsqueeze(-1) * right[:, i]
            v = rest[..., i] - step[..., i]
            rest = rest - step
            known = known + v.unsqueeze(-1) * left[:, i]
            rows.append(a)
        a = torch.stack(rows[::-1], -1)
        tanh = torch.tanh(a)
        return x - _up(tanh @ right.mT, basis), -_log_slopes(a, tanh, slopes)


def _down(vectors: Tensor, basis: Tensor | None) -> Tensor:
    return vectors if basis is None else vectors @ basis


def _up(vectors: Tensor, basis: Tensor | None) -> Tensor:
    return vectors if basis is None else vectors @ basis.mT


def _log_slopes(a: Tensor, tanh: Tensor, slopes: Tensor) -> Tensor:
    return torch.log(tanh * tanh + tanh_slope(a) * slopes).sum(-1)


class OrthogonalSylvester(_Sylvester):
    r"""Sylvester flow :math:`x = z + Q R \tanh(\tilde R Q^\top z + b)` in :math:`M` directions, :math:`M \le D`.

    .. math:: \log|\det| = \sum_{i=1}^{M} \log\left(1 + \tanh'(a_i)\, R_{ii} \tilde R_{ii}\right), \qquad
              a = \tilde R Q^\top z + b

    :math:`R` and :math:`\tilde R` are upper triangular with diagonals in :math:`(-1, 1)`, which makes the map invertible
    (van den Berg et al., *Sylvester normalizing flows for variational inference*, 2018). The columns of the
    :math:`D \times M` matrix :math:`Q` are orthonormal to rounding, by a QR decomposition of a free matrix. The inverse
    solves one increasing equation in one unknown for each direction, last to first, and carries gradients.

    Args:
        dim: length :math:`D` of the vectors.
        hidden: number :math:`M` of directions.
        generator: source of the random start, which is near the identity.

    >>> flow = OrthogonalSylvester(5, hidden=2, generator=torch.Generator().manual_seed(0))
    >>> z = torch.arange(5.0)
    >>> x, log_det = flow(z)
    >>> torch.allclose(flow.inverse(x)[0], z, atol=1e-5)
    True
    """

    @checked
    def __init__(self, dim: Count, hidden: Count, generator: torch.Generator | None = None) -> None:
        if hidden > dim:
            raise FlowBNNError(
                f"OrthogonalSylvester has between 1 and {dim} (its dim) hidden directions, not {hidden}",
                argument="hidden",
            )
        super().__init__(dim, hidden, generator)
        self.frame = nn.Parameter(torch.linalg.qr(torch.randn(dim, hidden, generator=generator)).Q)

    def _basis(self) -> Tensor:
        return torch.linalg.qr(self.frame).Q


class HouseholderSylvester(_Sylvester):
    r"""Sylvester flow in all :math:`D` directions, with :math:`Q` a product of Householder reflections.

    .. math:: x = z + Q R \tanh(\tilde R Q^\top z + b), \qquad
              Q = \prod_{k=1}^{K} \left(I - 2 \frac{v_k v_k^\top}{\lVert v_k \rVert^2}\right)

    :class:`OrthogonalSylvester` has the rest. A vector :math:`v_k` of zero reflects nothing.

    Args:
        dim: length of the vectors.
        reflections: number :math:`K` of reflections; :math:`D` of them reach every orthogonal matrix.
        generator: source of the random start, which is near the identity.

    >>> x, log_det = HouseholderSylvester(4, reflections=2)(torch.zeros(6, 4))
    >>> x.shape, log_det.shape
    (torch.Size([6, 4]), torch.Size([6]))
    """

    @checked
    def __init__(self, dim: Count, reflections: Count, generator: torch.Generator | None = None) -> None:
        super().__init__(dim, dim, generator)
        self.mirrors = nn.Parameter(torch.randn(reflections, dim, generator=generator))

    def _basis(self) -> Tensor:
        units = unit_rows(self.mirrors)
        basis = torch.eye(self.dim, dtype=units.dtype, device=units.device)
        for unit in units:
            basis = basis - 2 * torch.outer(basis @ unit, unit)
        return basis


class TriangularSylvester(_Sylvester):
    r"""Sylvester flow in all :math:`D` directions, with :math:`Q` the identity or the reversal of the order.

    .. math:: x = z + Q R \tanh(\tilde R Q^\top z + b)

    Alternate ``reverse`` along a chain, so that every coordinate gets to see every other. :class:`OrthogonalSylvester`
    has the rest.

    Args:
        dim: length of the vectors.
        reverse: run through the coordinates from last to first.
        generator: source of the random start, which is near the identity.

    >>> x, log_det = TriangularSylvester(4, reverse=True)(torch.zeros(6, 4))
    >>> x.shape, log_det.shape
    (torch.Size([6, 4]), torch.Size([6]))
    """

    @checked
    def __init__(self, dim: Count, reverse: bool = False, generator: torch.Generator | None = None) -> None:
        super().__init__(dim, dim, generator)
        self.reverse = reverse

    def _basis(self) -> Tensor | None:
        if not self.reverse:
            return None
        return torch.eye(self.dim, dtype=self.bias.dtype, device=self.bias.device).flip(0)
