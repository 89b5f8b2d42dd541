r"""Chains of planar and LU maps by torch's operations. This module defines the formulas; all faster code is tested against it.

.. math:: \text{planar:}\quad x = z + \hat u \tanh(a), \qquad a = w^\top z + b, \qquad
          \log|\det| = \log\left(1 + \tanh'(a)\, w^\top \hat u\right)

.. math:: \text{LU:}\quad x = L U z, \qquad \log|\det| = \sum_i \log U_{ii}

The parameters of all maps of one kind are stacked: ``w`` and ``u`` ``[maps, dim]`` and ``b`` ``[maps]`` of the planar maps,
``factors`` ``[maps, dim, dim]`` of the LU maps. A chain without maps of a kind has no such tensors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.numerics import soft_clamp, solve_triangular, tanh_root, tanh_slope


class ChainShape(NamedTuple):
    r"""Structure of a chain.

    Args:
        dim: Length of the vectors.
        runs: Pairs in the order of application: True for planar maps and False for LU maps, and their number.
        planar: Total number of planar maps.
        linear: Total number of LU maps.
        margin: Smallest value of :math:`1 + w^\top \hat u`.
        bound: Largest absolute value of :math:`\log U_{ii}`.

    >>> from flowbnn.transforms import PlanarLU
    >>> PlanarLU(3, [("planar", 2), ("lu", 1)]).chain_shape.runs
    ((True, 2), (False, 1))
    """

    dim: int
    runs: tuple[tuple[bool, int], ...]
    planar: int
    linear: int
    margin: float
    bound: float


def constrain(w: Tensor, u: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    r"""Returns :math:`\hat u` and :math:`1 + w^\top \hat u` of every planar map, the second without cancellation.

    .. math:: \hat u = u + \left(m(w^\top u) - w^\top u\right) \frac{w}{\lVert w \rVert^2}, \qquad m(t) = -1 + \mathrm{softplus}(t)

    keeps :math:`w^\top \hat u = m > -1`, so that the map is invertible (Rezende & Mohamed 2015, appendix A.1). There are two
    additions for floating-point numbers. ``margin`` bounds :math:`1 + m` from below, because a slope of zero has no logarithm. For
    :math:`\lVert w \rVert^2` below 1e-3 a correction that lowers :math:`m` fades out: it would grow as :math:`1 / \lVert w \rVert`,
    and it is not needed there.

    Args:
        w: Vectors ``[maps, dim]``.
        u: Vectors ``[maps, dim]``.
        margin: Smallest value of :math:`1 + w^\top \hat u`.
    """
    square, product = (w * w).sum(-1), (w * u).sum(-1)
    squeeze = F.softplus(product).clamp(min=margin)
    correction = squeeze - 1 - product
    divisor = torch.where(correction < 0, square.clamp(min=1e-3), square)
    ratio = square / divisor
    u_hat = torch.addcmul(u, (correction / divisor).unsqueeze(-1), w)
    with torch.no_grad():  # a long u loses the digits of w.u_hat to cancellation
        deficit = ratio * (squeeze - 1) + (1 - ratio) * product - (w * u_hat).sum(-1)
        correction_step = (deficit / square.clamp(min=1e-37)).unsqueeze(-1) * w
    return u_hat + correction_step, ratio * squeeze + (1 - ratio) * (1 + product)


def triangles(factors: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns :math:`L` and :math:`U` of every LU map and the logarithms of the diagonal of :math:`U`."""
    root = factors.shape[-1] ** 0.5
    logs = soft_clamp(factors.diagonal(dim1=-2, dim2=-1), bound)
    unit = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    return factors.tril(-1) / root + unit, factors.triu(1) / root + torch.diag_embed(logs.exp()), logs


def forward(
    shape: ChainShape, weights: Sequence[Tensor], z: Tensor, log_det: bool
) -> tuple[Tensor, Tensor | None]:
    r"""Applies a chain.

    :math:`K` planar maps in a row, :math:`x = z + \sum_k \hat u_k \tanh(a_k)`, need two matrix products for any :math:`K`, because
    each :math:`a_k` follows from products that are known beforehand:

    .. math:: a_k = w_k^\top z + b_k + \sum_{j<k} (w_k^\top \hat u_j) \tanh(a_j) .

    Args:
        shape: Structure of the chain.
        weights: Parameters of the chain.
        z: Rows ``[rows, dim]``.
        log_det: If True, log-determinants are computed.

    Returns:
        The values, and the log-determinants ``[rows]`` or None.
    """
    total: Tensor | None = None
    if shape.planar:
        w, u, b = weights[:3]
        u_hat, squeeze = constrain(w, u, shape.margin)
    if shape.linear:
        lower, upper, logs = triangles(weights[-1], shape.bound)
        if log_det:
            total = logs.sum().expand(z.shape[0])
    first, linear = 0, 0
    for planar, size in shape.runs:
        if not planar:
            for index in range(linear, linear + size):
                z = z @ upper[index].mT @ lower[index].mT
            linear += size
            continue
        run = slice(first, first + size)
        a, tanh = _activations(torch.addmm(b[run].unsqueeze(-1), w[run], z.mT), w[run], u_hat[run])
        if log_det:
            log_slopes = _log_slope(a, tanh, squeeze[run].unsqueeze(-1)).sum(0)
            total = log_slopes if total is None else total + log_slopes
        z = torch.addmm(z, tanh.mT, u_hat[run])
        first += size
    if not log_det:
        return z, None
    return z, z.new_zeros(z.shape[0]) if total is None else total


def inverse(shape: ChainShape, weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    r"""Applies the inverse of a chain.

    For a planar map :math:`a + w^\top \hat u \tanh(a) = w^\top x + b` is an increasing function of one number. Its root gives
    :math:`z = x - \hat u \tanh(a)`, with gradients to ``x`` and to the parameters. An LU map takes two triangular solves.

    Args:
        shape: Structure of the chain.
        weights: Parameters of the chain.
        x: Rows ``[rows, dim]``.

    Returns:
        The values, and the log-determinants ``[rows]`` of the inverse.
    """
    total = x.new_zeros(x.shape[0])
    if shape.planar:
        w, u, b = weights[:3]
        u_hat, squeeze = constrain(w, u, shape.margin)
    if shape.linear:
        lower, upper, logs = triangles(weights[-1], shape.bound)
    k, index = shape.planar, shape.linear
    for planar, size in reversed(shape.runs):
        for _ in range(size):
            if planar:
                k -= 1
                a = tanh_root(x @ w[k] + b[k], squeeze[k])
                tanh = torch.tanh(a)
                x = torch.addcmul(x, tanh.unsqueeze(-1), u_hat[k], value=-1)
                total = total - _log_slope(a, tanh, squeeze[k])
            else:
                index -= 1
                x = solve(lower[index], upper[index], x)
                total = total - logs[index].sum()
    return x, total


def solve(lower: Tensor, upper: Tensor, x: Tensor) -> Tensor:
    """Returns the rows ``z`` with ``x = z U^T L^T``."""
    x = solve_triangular(lower.mT, x, upper=True, left=False, unitriangular=True)
    return solve_triangular(upper.mT, x, upper=False, left=False)


def gradients(function: Callable[..., Any], inputs: Sequence[Any], grads: Sequence[Any]) -> list[Any]:
    """Returns gradients that can be differentiated again, for second derivatives of the fast code.

    Args:
        function: Function of the inputs that uses torch's operations.
        inputs: Tensors, or None.
        grads: Gradients of the outputs, or None.
    """
    leaves = [t if t is None or t.requires_grad else t.detach().requires_grad_() for t in inputs]
    pairs = zip(function(*leaves), grads, strict=True)
    outputs, weights = zip(
        *[pair for pair in pairs if pair[0] is not None and pair[1] is not None], strict=True
    )
    sources = [leaf for leaf in leaves if leaf is not None]
    computed = iter(torch.autograd.grad(outputs, sources, weights, create_graph=True, allow_unused=True))
    return [None if leaf is None else next(computed) for leaf in leaves]


def _activations(products: Tensor, w: Tensor, u_hat: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns :math:`a_k` and :math:`\tanh(a_k)` of a run, ``[maps, rows]``, for :math:`w_k^\top z + b_k`."""
    if len(products) == 1:
        return products, torch.tanh(products)
    # Each tanh is added to all later lines at once: one operation for each map, forward and backward.
    columns = (w @ u_hat.mT).unbind(1)
    a, tanh = [], []
    for k in range(len(products) - 1, -1, -1):
        first, products = products.split([1, k])
        a.append(first)
        tanh.append(torch.tanh(first))
        products = torch.addcmul(products, columns[len(a) - 1][len(a) :, None], tanh[-1])
    return torch.cat(a), torch.cat(tanh)


def _log_slope(a: Tensor, tanh: Tensor, squeeze: Tensor) -> Tensor:
    r"""Returns :math:`\log(1 + \tanh'(a) m)` as :math:`\log(\tanh^2 a + \tanh'(a) (1 + m))`, a sum of positive terms."""
    return torch.addcmul(tanh * tanh, tanh_slope(a), squeeze).log()
