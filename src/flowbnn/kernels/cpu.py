r"""A chain of planar and LU maps on a CPU: numpy, with explicit derivatives.

numpy starts a small operation sooner than torch does, and autograd adds a node and two operations for each. A chain on vectors of a few
hundred numbers is nothing but such operations. The formulas are those of :mod:`flowbnn.kernels.reference`.
"""

from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flowbnn.kernels import reference
from flowbnn.kernels.reference import ChainShape

Array = NDArray[Any]
_DTYPES = (torch.float32, torch.float64)


def serves(z: Tensor) -> bool:
    """Whether numpy is the fastest: a CPU, few numbers (torch has more threads for many), no tracing by torch.compile, torch.func or
    forward-mode derivatives."""
    return (
        z.is_cpu
        and 0 < z.numel() <= 2**16
        and z.dtype in _DTYPES
        and not is_compiling()
        and maybe_current_level() is None
        and forward_ad._current_level < 0
    )


def _constrain(w: Array, u: Array, margin: float) -> tuple[Array, Array, tuple[Any, ...]]:
    square, product = (w * w).sum(-1), (w * u).sum(-1)
    soft = np.logaddexp(product, 0.0).astype(w.dtype, copy=False)
    squeeze = np.maximum(soft, margin)
    correction = squeeze - 1.0 - product
    divisor = np.where(correction < 0, np.maximum(square, 1e-3), square)
    share, step = square / divisor, correction / divisor
    u_hat = u + step[:, None] * w
    rest = (1.0 - share) * product
    lost = share * (squeeze - 1.0) + rest - (w * u_hat).sum(-1)
    u_hat += (lost / np.maximum(square, 1e-37))[:, None] * w
    total = share * squeeze + (1.0 - share) + rest
    return u_hat, total, (square, product, soft, correction, divisor, share, step)


def _constrain_back(
    w: Array, u: Array, margin: float, kept: tuple[Any, ...], of_u_hat: Array, of_total: Array
) -> tuple[Array, Array]:
    square, product, soft, correction, divisor, share, step = kept
    of_step = (of_u_hat * w).sum(-1)
    of_correction = of_step / divisor
    of_share = of_total * correction
    of_divisor = (of_step * step + of_share * share) / divisor
    free = (correction >= 0) | (square >= 1e-3)
    of_square = of_share / divisor - of_divisor * free
    of_squeeze = (of_total * share + of_correction) * (soft >= margin)
    of_product = of_total * (1.0 - share) - of_correction
    of_product += of_squeeze * 0.5 * (1.0 + np.tanh(0.5 * product))
    along = of_product[:, None]
    of_w = step[:, None] * of_u_hat + along * u + (2.0 * of_square)[:, None] * w
    return of_w, of_u_hat + along * w


def _triangles(factors: Array, bound: float) -> tuple[Array, Array, Array]:
    below, above = _masks(factors.shape[-1], factors.dtype)
    lower, upper = factors * below, factors * above
    logs = bound * np.tanh(_diagonal(factors) / bound)
    _diagonal(lower)[:] = 1.0
    _diagonal(upper)[:] = np.exp(logs)
    return lower, upper, logs


@lru_cache(maxsize=64)
def _masks(size: int, dtype: Any) -> tuple[Array, Array]:
    """The strict triangles, times the scale of their entries."""
    ones = np.full((size, size), size**-0.5, dtype)
    return np.tril(ones, -1), np.triu(ones, 1)


def _diagonal(matrices: Array) -> Array:
    """A view of the diagonals of contiguous matrices."""
    return matrices.reshape(len(matrices), -1)[:, :: matrices.shape[-1] + 1]


def _triangles_back(
    plan: ChainShape, logs: Array, lower: Array, upper: Array, of_total: Array | None
) -> Array:
    below, above = _masks(logs.shape[-1], logs.dtype)
    of_logs = _diagonal(upper) * np.exp(logs)
    if of_total is not None:
        of_logs += of_total.sum()
    factors = lower * below
    factors += upper * above
    _diagonal(factors)[:] = of_logs * (1.0 - np.square(logs / plan.bound))
    return factors


class ChainFunction(torch.autograd.Function):
    """The chain applied to ``z`` ``[rows, dim]``, and the log-dets ``[rows]`` or None; second derivatives are torch's own."""

    @staticmethod
    def forward(ctx: Any, plan: ChainShape, log_det: bool, start: Tensor, *weights: Tensor) -> Any:
        ctx.plan, ctx.kept, ctx.stages = plan, {}, []
        ctx.save_for_backward(start, *weights)
        z, total = start.detach().numpy(), None
        if plan.planar:
            w, u, b = weights[0].detach().numpy(), weights[1].detach().numpy(), weights[2].detach().numpy()
            u_hat, squeeze, constraint = _constrain(w, u, plan.margin)
            ctx.kept |= {"w": w, "u": u, "u_hat": u_hat, "squeeze": squeeze, "constraint": constraint}
        if plan.linear:
            lower, upper, logs = _triangles(weights[-1].detach().numpy(), plan.bound)
            ctx.kept |= {"lower": lower, "upper": upper, "logs": logs}
            if log_det:
                total = np.full(len(z), logs.sum(), z.dtype)
        first, linear = 0, 0
        for planar, size in plan.runs:
            if not planar:
                for index in range(linear, linear + size):
                    middle = z @ upper[index].T
                    ctx.stages.append((z, middle))
                    z = middle @ lower[index].T
                linear += size
                continue
            run = slice(first, first + size)
            across = w[run] @ u_hat[run].T
            bends = w[run] @ z.T
            bends += b[run, None]
            tanh = np.empty_like(bends)
            for k in range(size):
                if k:
                    bends[k] += across[k, :k] @ tanh[:k]
                np.tanh(bends[k], out=tanh[k])
            decay = np.exp(-2.0 * np.abs(bends))
            slope = 4.0 * decay / np.square(1.0 + decay)  # tanh', exact in the tails
            inner = None
            if log_det:
                inner = tanh * tanh + slope * squeeze[run, None]
                log_slopes = np.log(inner).sum(0)
                total = log_slopes if total is None else total + log_slopes
            ctx.stages.append((z, across, tanh, slope, inner))
            z = z + tanh.T @ u_hat[run]
            first += size
        return torch.from_numpy(z), None if total is None else torch.from_numpy(total)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        plan, kept, saved = ctx.plan, ctx.kept, ctx.saved_tensors  # torch checks that no weight has changed
        if torch.is_grad_enabled():
            log_det = given[1] is not None
            again = reference.gradients(
                lambda z, *weights: reference.forward(plan, weights, z, log_det), saved, given
            )
            return None, None, *again
        of_x, of_total = given[0].numpy(), None if given[1] is None else given[1].numpy()
        stages, first, linear = list(ctx.stages), plan.planar, plan.linear
        of_weights: list[Array] = []
        if plan.planar:
            w, u_hat, squeeze = kept["w"], kept["u_hat"], kept["squeeze"]
            of_w, of_u_hat = np.empty_like(w), np.empty_like(w)
            of_b, of_squeeze = np.empty_like(squeeze), np.zeros_like(squeeze)
        if plan.linear:
            lower, upper = kept["lower"], kept["upper"]
            of_lower, of_upper = np.empty_like(lower), np.empty_like(upper)
        for planar, size in reversed(plan.runs):
            if not planar:
                for _ in range(size):
                    linear -= 1
                    z, middle = stages.pop()
                    np.matmul(of_x.T, middle, out=of_lower[linear])
                    of_middle = of_x @ lower[linear]
                    np.matmul(of_middle.T, z, out=of_upper[linear])
                    of_x = of_middle @ upper[linear]
                continue
            first -= size
            run = slice(first, first + size)
            z, across, tanh, slope, inner = stages.pop()
            of_bends = u_hat[run] @ of_x.T
            of_bends *= slope
            np.matmul(tanh, of_x, out=of_u_hat[run])
            if of_total is not None:
                ratio = of_total * slope / inner
                of_squeeze[run] = ratio.sum(-1)
                of_bends += ratio * tanh * (2.0 - 2.0 * squeeze[run, None])
            of_across = np.zeros_like(across)
            for k in range(size - 1, 0, -1):
                of_across[k, :k] = tanh[:k] @ of_bends[k]
                of_bends[:k] += across[k, :k, None] * of_bends[k] * slope[:k]
            of_u_hat[run] += of_across.T @ w[run]
            of_w[run] = of_across @ u_hat[run] + of_bends @ z
            of_b[run] = of_bends.sum(-1)
            of_x = of_x + of_bends.T @ w[run]
        if plan.planar:
            extra, of_u = _constrain_back(w, kept["u"], plan.margin, kept["constraint"], of_u_hat, of_squeeze)
            of_w += extra
            of_weights += [of_w, of_u, of_b]
        if plan.linear:
            of_weights.append(_triangles_back(plan, kept["logs"], of_lower, of_upper, of_total))
        return None, None, torch.from_numpy(of_x), *map(torch.from_numpy, of_weights)
