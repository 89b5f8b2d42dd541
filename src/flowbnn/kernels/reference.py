r"""A chain of planar and LU maps by torch's own operations: the formulas, once. Everything faster is tested against them.

.. math:: \text{planar:}\quad x = z + \hat u \tanh(a), \qquad a = w^\top z + b, \qquad
          \log|\det| = \log\left(1 + \tanh'(a)\, w^\top \hat u\right)

.. math:: \text{LU:}\quad x = L U z, \qquad \log|\det| = \sum_i \log U_{ii}

The parameters of all maps of one kind lie side by side: ``w``, ``u`` ``[maps, dim]`` and ``b`` ``[maps]`` of the planar maps,
``factors`` ``[maps, dim, dim]`` of the LU maps. A chain without maps of a kind leaves their tensors out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.numerics import soft_clamp, solve_triangular, tanh_root, tanh_slope


class ChainShape(NamedTuple):
    """What a chain consists of.

    Args:
        dim: length of the vectors.
        runs: whether the maps of a run are planar, and how many they are, in the order of application.
        planar, linear: how many maps of each kind there are in all.
        margin: least value of :math:`1 + w^\\top \\hat u`.
        bound: largest size of :math:`\\log U_{ii}`.
    """

    dim: int
    runs: tuple[tuple[bool, int], ...]
    planar: int
    linear: int
    margin: float
    bound: float


def constrain(w: Tensor, u: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    r""":math:`\hat u` and :math:`1 + w^\top \hat u` of every planar map, the second computed without cancellation.

    .. math:: \hat u = u + \left(m(w^\top u) - w^\top u\right) \frac{w}{\lVert w \rVert^2}, \qquad m(t) = -1 + \mathrm{softplus}(t)

    keeps :math:`w^\top \hat u = m > -1`, so that the map is invertible (Rezende & Mohamed 2015, appendix A.1). Two things are added for
    floating-point numbers. ``margin`` bounds :math:`1 + m` from below, because a slope of zero has no logarithm. And for
    :math:`\lVert w \rVert^2` < 1e-3 a correction that lowers :math:`m` fades out: it would grow as :math:`1 / \lVert w \rVert`, and it
    is not needed there.
    """
    square, product = (w * w).sum(-1), (w * u).sum(-1)
    squeeze = F.softplus(product).clamp(min=margin)
    correction = squeeze - 1 - product
    divisor = torch.where(correction < 0, square.clamp(min=1e-3), square)
    share = square / divisor
    u_hat = torch.addcmul(u, (correction / divisor).unsqueeze(-1), w)
    with torch.no_grad():  # a long u loses the digits of w.u_hat to cancellation: put them back
        lost = share * (squeeze - 1) + (1 - share) * product - (w * u_hat).sum(-1)
        restored = (lost / square.clamp(min=1e-37)).unsqueeze(-1) * w
    return u_hat + restored, share * squeeze + (1 - share) * (1 + product)


def triangles(factors: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`L` and :math:`U` of every LU map and the logarithms of :math:`U`'s diagonal."""
    root = factors.shape[-1] ** 0.5
    logs = soft_clamp(factors.diagonal(dim1=-2, dim2=-1), bound)
    unit = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    return factors.tril(-1) / root + unit, factors.triu(1) / root + torch.diag_embed(logs.exp()), logs


def forward(
    plan: ChainShape, weights: Sequence[Tensor], z: Tensor, log_det: bool
) -> tuple[Tensor, Tensor | None]:
    r"""The chain applied to ``z`` ``[rows, dim]``, and the log-dets ``[rows]`` where they are wanted.

    :math:`K` planar maps in a row, :math:`x = z + \sum_k \hat u_k \tanh(a_k)`, take two matrix products however many they are, because
    each :math:`a_k` follows from products that are known beforehand:

    .. math:: a_k = w_k^\top z + b_k + \sum_{j<k} (w_k^\top \hat u_j) \tanh(a_j) .
    """
    total: Tensor | None = None
    if plan.planar:
        w, u, b = weights[:3]
        u_hat, squeeze = constrain(w, u, plan.margin)
    if plan.linear:
        lower, upper, logs = triangles(weights[-1], plan.bound)
        if log_det:
            total = logs.sum().expand(z.shape[0])
    first, linear = 0, 0
    for planar, size in plan.runs:
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


def inverse(plan: ChainShape, weights: Sequence[Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    r"""The chain undone on ``x`` ``[rows, dim]``, and the log-dets of that.

    Of a planar map, :math:`a + w^\top \hat u \tanh(a) = w^\top x + b` is an increasing function of one number; its root gives
    :math:`z = x - \hat u \tanh(a)`. It carries gradients to ``x`` and to the parameters. An LU map takes two triangular solves.
    """
    total = x.new_zeros(x.shape[0])
    if plan.planar:
        w, u, b = weights[:3]
        u_hat, squeeze = constrain(w, u, plan.margin)
    if plan.linear:
        lower, upper, logs = triangles(weights[-1], plan.bound)
    k, index = plan.planar, plan.linear
    for planar, size in reversed(plan.runs):
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
    """The rows ``z`` with ``x = z U^T L^T``."""
    x = solve_triangular(lower.mT, x, upper=True, left=False, unitriangular=True)
    return solve_triangular(upper.mT, x, upper=False, left=False)


def gradients(function: Callable[..., Any], inputs: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Gradients of a function's tensors that can be differentiated again: what the fast paths give for second derivatives.

    Args:
        function: by torch's own operations.
        inputs: its tensors, or None where there is none.
        given: the gradients of its outputs; None where there is none.
    """
    tensors = [one if one is None or one.requires_grad else one.detach().requires_grad_() for one in inputs]
    pairs = zip(function(*tensors), given, strict=True)
    ends, slopes = zip(*[pair for pair in pairs if pair[0] is not None and pair[1] is not None], strict=True)
    wanted = [one for one in tensors if one is not None]
    computed = iter(torch.autograd.grad(ends, wanted, slopes, create_graph=True, allow_unused=True))
    return [None if one is None else next(computed) for one in tensors]


def _activations(lines: Tensor, w: Tensor, u_hat: Tensor) -> tuple[Tensor, Tensor]:
    r""":math:`a_k` and :math:`\tanh(a_k)` of a run, ``[maps, rows]``, from :math:`w_k^\top z + b_k`."""
    if len(lines) == 1:
        return lines, torch.tanh(lines)
    # each tanh is added to all lines after it at once: as many operations as maps, forward and back
    columns = (w @ u_hat.mT).unbind(1)
    a, tanh = [], []
    for k in range(len(lines) - 1, -1, -1):
        first, lines = lines.split([1, k])
        a.append(first)
        tanh.append(torch.tanh(first))
        lines = torch.addcmul(lines, columns[len(a) - 1][len(a) :, None], tanh[-1])
    return torch.cat(a), torch.cat(tanh)


def _log_slope(a: Tensor, tanh: Tensor, squeeze: Tensor) -> Tensor:
    r""":math:`\log(1 + \tanh'(a) m)` as :math:`\log(\tanh^2 a + \tanh'(a) (1 + m))`, a sum of positive terms."""
    return torch.addcmul(tanh * tanh, tanh_slope(a), squeeze).log()
