"""Sylvester flows: planar flows that move along several directions at once."""

from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import tanh_root, tanh_slope
from flowbnn.options import Count, checked
from flowbnn.transforms.base import Transform, check_vectors
from flowbnn.transforms.linear import unit_rows

BOUND = 0.995
"""Largest size of a diagonal entry: the product of two stays above -0.991, so that a slope is never below 0.009."""


class Sylvester(Transform):
    r"""Sylvester flow :math:`x = z + Q R \tanh(\tilde R Q^\top z + b)` in :math:`M` directions (van den Berg et al. 2018).

    .. math:: \log|\det| = \sum_{i=1}^{M} \log\left(1 + \tanh'(a_i)\, R_{ii} \tilde R_{ii}\right), \qquad
              a = \tilde R Q^\top z + b

    :math:`R` and :math:`\tilde R` are upper triangular with diagonals in :math:`(-1, 1)`, which makes the map invertible
    (https://arxiv.org/abs/1803.05649). The inverse solves one increasing equation in one unknown for each direction, last to first, and
    carries gradients. Their strict triangles live in one square matrix, with the raw diagonal of :math:`R` between them. The columns
    of the :math:`D \times M` matrix :math:`Q` are orthonormal:

    - ``"householder"``: a product of ``size`` reflections :math:`I - 2 v_k v_k^\top / \lVert v_k \rVert^2`, by default :math:`D`, which
      reach every orthogonal matrix; a vector :math:`v_k` of zero reflects nothing.
    - ``"orthogonal"``: the QR decomposition of a free matrix of ``size`` columns, by default :math:`D`.
    - ``"identity"`` and ``"reversal"`` of the order: alternate them, so that every coordinate gets to see every other.

    Args:
        dim: length :math:`D` of the vectors.
        basis: what :math:`Q` is.
        size: of the basis, at most ``dim`` columns.
        generator: source of the random start, which is near the identity.

    >>> flow = Sylvester(5, "orthogonal", size=2, generator=torch.Generator().manual_seed(0))
    >>> z = torch.arange(5.0)
    >>> x, log_det = flow(z)
    >>> torch.allclose(flow.inverse(x)[0], z, atol=1e-5)
    True
    """

    inverse_kind = "numerical"

    @checked
    def __init__(
        self,
        dim: Count,
        basis: Literal["householder", "orthogonal", "identity", "reversal"] = "householder",
        size: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        size = size or dim
        if basis == "orthogonal" and size > dim:
            text = f"an orthogonal basis has between 1 and {dim} (its dim) columns, not {size}"
            raise FlowBNNError(text, argument="size")
        self.dim, self.basis = dim, basis
        self.hidden = hidden = size if basis == "orthogonal" else dim
        self.triangles = nn.Parameter(0.05 * torch.randn(hidden, hidden, generator=generator))
        self.raw_diagonal = nn.Parameter(1 + 0.05 * torch.randn(hidden, generator=generator))
        self.bias = nn.Parameter(0.05 * torch.randn(hidden, generator=generator))
        if basis == "orthogonal":
            self.frame = nn.Parameter(torch.linalg.qr(torch.randn(dim, hidden, generator=generator)).Q)
        elif basis == "householder":
            self.mirrors = nn.Parameter(torch.randn(size, dim, generator=generator))

    def _basis(self) -> Tensor | None:
        """:math:`Q`; ``None`` for the identity."""
        if self.basis == "orthogonal":
            return torch.linalg.qr(self.frame).Q
        if self.basis == "identity":
            return None
        basis = torch.eye(self.dim, dtype=self.bias.dtype, device=self.bias.device)
        if self.basis == "reversal":
            return basis.flip(0)
        for unit in unit_rows(self.mirrors):
            basis = basis - 2 * torch.outer(basis @ unit, unit)
        return basis

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
