r"""Chains of planar and LU maps: their evaluation by the best code for the device, and the code for a CPU.

A chain on a layer of a few hundred channels consists of about a hundred tiny operations. Each takes longer to start than to compute.
:func:`evaluate` evaluates one chain, :func:`evaluate_many` the chains of all layers at once. They choose between three
implementations:

==============================  ===============================================================================
float32 on a CUDA device        Triton kernels for many chains in few launches (:mod:`flowbnn.kernels.gpu`)
few numbers on a CPU            numpy with explicit derivatives (:class:`ChainFunction`)
other cases                     torch's operations (:mod:`flowbnn.kernels.reference`)
==============================  ===============================================================================

All three compute the same values, log-determinants and gradients up to rounding. Results of the Triton kernels are bitwise
reproducible. ``torch.compile`` traces them as one operator without a graph break, and a CUDA graph can capture it.

numpy starts a small operation faster than torch, and autograd adds a node and two operations for each. Its formulas are those of
:mod:`flowbnn.kernels.reference`. Names that begin with ``grad_`` are gradients.
"""

import os
from collections.abc import Sequence
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._functorch import maybe_current_level
from torch.autograd import forward_ad
from torch.compiler import is_compiling

from flowbnn.kernels import reference
from flowbnn.kernels.reference import ChainShape

_TRITON = find_spec("triton") is not None
if _TRITON:  # registering the operator takes a twentieth of the time of importing flowbnn
    from flowbnn.kernels import gpu
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # tests run Triton's kernels on a CPU

Array = NDArray[Any]


class Chain(NamedTuple):
    """Planar and LU maps, one after the other.

    Args:
        shape: Structure of the chain.
        weights: ``w``, ``u``, ``b`` of the planar maps and ``factors`` of the LU maps, as in :mod:`flowbnn.kernels.reference`.

    >>> from flowbnn.transforms import PlanarLU
    >>> chain = PlanarLU(3, [("planar", 2), ("lu", 1)]).chain
    >>> [tuple(weight.shape) for weight in chain.weights]
    [(2, 3), (2, 3), (2,), (1, 3, 3)]
    """

    shape: ChainShape
    weights: tuple[Tensor, ...]

    @classmethod
    def of(cls, maps: Any) -> "Chain":
        """Returns the chain of a :class:`~flowbnn.transforms.PlanarLU`, which stacks the parameters of its maps."""
        shape = maps.chain_shape
        planar = (maps.w, maps.u, maps.b) if shape.planar else ()
        return cls(shape, (*planar, maps.factors) if shape.linear else planar)


class Group(NamedTuple):
    """Chains on the same rows.

    Args:
        chains: The chains.
        vectors: Vectors that the chains are applied to, concatenated in ``[rows, sum of lengths]``.
        log_det: If True, log-determinants are computed.
        allow_tf32: If True, allows products of many rows in one pass of TF32 instead of three, with errors of about 1e-3. Use it if the
            values are rounded to half precision afterwards.
    """

    chains: Sequence[Chain]
    vectors: Tensor
    log_det: bool
    allow_tf32: bool = False


def available(z: Tensor) -> bool:
    """Returns True if Triton kernels can evaluate many chains at once.

    They need float32 on a CUDA device and an installed Triton. ``torch.func`` is not supported.

    >>> available(torch.zeros(3, 2, dtype=torch.float64))
    False
    """
    if not _TRITON or z.dtype != torch.float32 or not (z.is_cuda or _INTERPRETED):
        return False
    return is_compiling() or maybe_current_level() is None


def evaluate(
    chain: Chain, z: Tensor, log_det: bool = True, allow_tf32: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Applies a chain.

    Args:
        chain: The chain.
        z: Rows ``[rows, dim]``.
        log_det: If True, log-determinants are computed.
        allow_tf32: If True, allows products in TF32, as in :class:`Group`.

    Returns:
        The values ``[rows, dim]``, and the log-determinants ``[rows]`` or None.

    >>> shape = ChainShape(dim=2, runs=((True, 1),), planar=1, linear=0, margin=1e-3, bound=4.0)
    >>> chain = Chain(shape, (torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1)))
    >>> x, log_det = evaluate(chain, torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
    >>> x.shape, log_det
    (torch.Size([2, 2]), tensor([-0.3665, -0.3665]))
    """
    if available(z) and _fits_kernels(chain, z):
        x, log_dets = gpu.evaluate_groups([Group([chain], z, log_det, allow_tf32)])[0]
        return x, None if log_dets is None else log_dets[0]
    # numpy uses one thread, so torch is faster for many numbers; transforms and traces of torch need its own operations
    few = z.is_cpu and 0 < z.numel() <= 2**16 and z.dtype in (torch.float32, torch.float64)
    plain = not is_compiling() and maybe_current_level() is None and forward_ad._current_level < 0
    if few and plain and chain.weights:
        return ChainFunction.apply(chain.shape, log_det, z, *chain.weights)
    return reference.forward(chain.shape, chain.weights, z, log_det)


def evaluate_many(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor | None]]:
    """Applies the chains of all groups, at once if the device allows it.

    Args:
        groups: The groups.

    Returns:
        For each group the values, concatenated as its vectors, and the log-determinants ``[chains, rows]`` or None.

    >>> from flowbnn.transforms import Planar
    >>> group = Group([Planar(2).chain, Planar(3).chain], torch.zeros(4, 5), log_det=True)
    >>> x, log_dets = evaluate_many([group])[0]
    >>> x.shape, log_dets.shape
    (torch.Size([4, 5]), torch.Size([2, 4]))
    """
    first = groups[0].vectors
    on_gpu = [
        available(group.vectors)
        and group.vectors.device == first.device
        and all(_fits_kernels(chain, group.vectors) for chain in group.chains)
        for group in groups
    ]
    gpu_groups = [group for group, selected in zip(groups, on_gpu, strict=True) if selected]
    results = iter(gpu.evaluate_groups(gpu_groups) if gpu_groups else [])
    return [
        next(results) if selected else _evaluate_group(group)
        for group, selected in zip(groups, on_gpu, strict=True)
    ]


def _fits_kernels(chain: Chain, z: Tensor) -> bool:
    """Returns True if the Triton kernels support a chain on these vectors."""
    max_dim = 1024  # the registers of a Triton program hold no longer row
    if not z.shape[0] or chain.shape.dim > max_dim:
        return False
    weights = chain.weights
    return len(weights) > 0 and all(w.dtype == z.dtype and w.device == z.device for w in weights)


def _evaluate_group(group: Group) -> tuple[Tensor, Tensor | None]:
    """Applies the chains of a group one by one."""
    columns = group.vectors.split([chain.shape.dim for chain in group.chains], -1)
    results = [
        evaluate(chain, z, group.log_det, group.allow_tf32)
        for chain, z in zip(group.chains, columns, strict=True)
    ]
    log_dets = [log_det for _, log_det in results if log_det is not None]
    return torch.cat([x for x, _ in results], -1), torch.stack(log_dets) if group.log_det else None


# -------------------- numpy


def _product(a: Array, b: Array) -> Array:
    """Returns the matrix product ``a @ b``.

    Torch computes large products. The threads of numpy's library ignore ``torch.set_num_threads``, and a product on a busy machine
    waits for them: a training step took up to fifteen times as long.
    """
    if a.size * b.shape[-1] <= 2**18:  # numpy uses one thread
        return a @ b
    return (torch.from_numpy(a) @ torch.from_numpy(b)).numpy()


def _constrain(w: Array, u: Array, margin: float) -> tuple[Array, Array, tuple[Any, ...]]:
    """Computes :func:`flowbnn.kernels.reference.constrain`; also returns what its derivative needs."""
    square, product = (w * w).sum(-1), (w * u).sum(-1)
    soft = np.logaddexp(product, 0.0).astype(w.dtype, copy=False)
    squeeze = np.maximum(soft, margin)
    correction = squeeze - 1.0 - product
    divisor = np.where(correction < 0, np.maximum(square, 1e-3), square)
    ratio, step = square / divisor, correction / divisor
    u_hat = u + step[:, None] * w
    remainder = (1.0 - ratio) * product
    deficit = ratio * (squeeze - 1.0) + remainder - (w * u_hat).sum(-1)
    u_hat += (deficit / np.maximum(square, 1e-37))[:, None] * w
    total = ratio * squeeze + (1.0 - ratio) + remainder
    return u_hat, total, (square, product, soft, correction, divisor, ratio, step)


def _constrain_backward(
    w: Array, u: Array, margin: float, saved: tuple[Any, ...], grad_u_hat: Array, grad_total: Array
) -> tuple[Array, Array]:
    """Returns the gradients to ``w`` and ``u`` of :func:`_constrain`."""
    square, product, soft, correction, divisor, ratio, step = saved
    grad_step = (grad_u_hat * w).sum(-1)
    grad_correction = grad_step / divisor
    grad_ratio = grad_total * correction
    grad_divisor = (grad_step * step + grad_ratio * ratio) / divisor
    unclamped = (correction >= 0) | (square >= 1e-3)
    grad_square = grad_ratio / divisor - grad_divisor * unclamped
    grad_squeeze = (grad_total * ratio + grad_correction) * (soft >= margin)
    grad_product = grad_total * (1.0 - ratio) - grad_correction
    grad_product += grad_squeeze * 0.5 * (1.0 + np.tanh(0.5 * product))
    column = grad_product[:, None]
    grad_w = step[:, None] * grad_u_hat + column * u + (2.0 * grad_square)[:, None] * w
    return grad_w, grad_u_hat + column * w


def _triangles(factors: Array, bound: float) -> tuple[Array, Array, Array]:
    """Computes :func:`flowbnn.kernels.reference.triangles`."""
    lower_mask, upper_mask = _masks(factors.shape[-1], factors.dtype)
    lower, upper = factors * lower_mask, factors * upper_mask
    logs = bound * np.tanh(_diagonal(factors) / bound)
    _diagonal(lower)[:] = 1.0
    _diagonal(upper)[:] = np.exp(logs)
    return lower, upper, logs


@lru_cache(maxsize=64)
def _masks(size: int, dtype: Any) -> tuple[Array, Array]:
    """Returns masks of the strict lower and upper triangle, times the scale of their entries."""
    ones = np.full((size, size), size**-0.5, dtype)
    return np.tril(ones, -1), np.triu(ones, 1)


def _diagonal(matrices: Array) -> Array:
    """Returns a view of the diagonals of contiguous matrices."""
    return matrices.reshape(len(matrices), -1)[:, :: matrices.shape[-1] + 1]


def _triangles_backward(
    bound: float, logs: Array, grad_lower: Array, grad_upper: Array, grad_log_det: Array | None
) -> Array:
    """Returns the gradient to the factors of :func:`_triangles`."""
    lower_mask, upper_mask = _masks(logs.shape[-1], logs.dtype)
    grad_logs = _diagonal(grad_upper) * np.exp(logs)
    if grad_log_det is not None:
        grad_logs += grad_log_det.sum()
    grad_factors = grad_lower * lower_mask
    grad_factors += grad_upper * upper_mask
    _diagonal(grad_factors)[:] = grad_logs * (1.0 - np.square(logs / bound))
    return grad_factors


def _planar_forward(
    z: Array, w: Array, u_hat: Array, b: Array, squeeze: Array, log_det: bool
) -> tuple[Array, Array | None, tuple[Any, ...]]:
    """Applies a run of planar maps.

    Returns:
        The values, the log-determinants or None, and what the derivative needs.
    """
    interaction = _product(w, u_hat.T)
    a = _product(w, z.T)
    a += b[:, None]
    tanh = np.empty_like(a)
    for k in range(len(a)):
        if k:
            a[k] += interaction[k, :k] @ tanh[:k]
        np.tanh(a[k], out=tanh[k])
    decay = np.exp(-2.0 * np.abs(a))
    slope = 4.0 * decay / np.square(1.0 + decay)  # tanh', exact in the tails
    inner = log_slopes = None
    if log_det:
        inner = tanh * tanh + slope * squeeze[:, None]
        log_slopes = np.log(inner).sum(0)
    return z + _product(tanh.T, u_hat), log_slopes, (z, interaction, tanh, slope, inner)


def _planar_backward(
    saved: tuple[Any, ...], w: Array, u_hat: Array, squeeze: Array, grad_x: Array, grad_log_det: Array | None
) -> tuple[Array, Array, Array, Array, Array | None]:
    """Returns the gradients of a run of planar maps to ``z``, ``w``, ``u_hat``, ``b`` and ``squeeze``."""
    z, interaction, tanh, slope, inner = saved
    grad_a = _product(u_hat, grad_x.T)
    grad_a *= slope
    grad_u_hat, grad_squeeze = _product(tanh, grad_x), None
    if grad_log_det is not None:
        ratio = grad_log_det * slope / inner
        grad_squeeze = ratio.sum(-1)
        grad_a += ratio * tanh * (2.0 - 2.0 * squeeze[:, None])
    grad_interaction = np.zeros_like(interaction)
    for k in range(len(tanh) - 1, 0, -1):
        grad_interaction[k, :k] = tanh[:k] @ grad_a[k]
        grad_a[:k] += interaction[k, :k, None] * grad_a[k] * slope[:k]
    grad_u_hat += grad_interaction.T @ w
    grad_w = _product(grad_interaction, u_hat) + _product(grad_a, z)
    return grad_x + _product(grad_a.T, w), grad_w, grad_u_hat, grad_a.sum(-1), grad_squeeze


class ChainFunction(torch.autograd.Function):
    """Applies a chain to rows ``[rows, dim]`` and returns the values, and the log-determinants ``[rows]`` or None.

    Second derivatives use torch's operations.
    """

    @staticmethod
    def forward(ctx: Any, shape: ChainShape, log_det: bool, rows: Tensor, *weights: Tensor) -> Any:
        ctx.shape, ctx.arrays, ctx.stages = shape, {}, []
        ctx.save_for_backward(rows, *weights)
        z, total = rows.detach().numpy(), None
        if shape.planar:
            w, u, b = weights[0].detach().numpy(), weights[1].detach().numpy(), weights[2].detach().numpy()
            u_hat, squeeze, constraint = _constrain(w, u, shape.margin)
            ctx.arrays |= {"w": w, "u": u, "u_hat": u_hat, "squeeze": squeeze, "constraint": constraint}
        if shape.linear:
            lower, upper, logs = _triangles(weights[-1].detach().numpy(), shape.bound)
            ctx.arrays |= {"lower": lower, "upper": upper, "logs": logs}
            if log_det:
                total = np.full(len(z), logs.sum(), z.dtype)
        planar_index = linear_index = 0
        for planar, size in shape.runs:
            if planar:
                run = slice(planar_index, planar_index + size)
                z, log_slopes, stage = _planar_forward(z, w[run], u_hat[run], b[run], squeeze[run], log_det)
                ctx.stages.append(stage)
                if log_slopes is not None:
                    total = log_slopes if total is None else total + log_slopes
                planar_index += size
                continue
            for index in range(linear_index, linear_index + size):
                middle = _product(z, upper[index].T)
                ctx.stages.append((z, middle))
                z = _product(middle, lower[index].T)
            linear_index += size
        return torch.from_numpy(z), None if total is None else torch.from_numpy(total)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        shape, arrays = ctx.shape, ctx.arrays
        tensors = ctx.saved_tensors  # torch checks that no weight has changed
        if torch.is_grad_enabled():
            log_det = grads[1] is not None
            function = lambda z, *weights: reference.forward(shape, weights, z, log_det)  # noqa: E731
            return None, None, *reference.gradients(function, tensors, grads)
        grad_x, grad_log_det = grads[0].numpy(), None if grads[1] is None else grads[1].numpy()
        stages, planar_index, linear_index = list(ctx.stages), shape.planar, shape.linear
        if shape.planar:
            w, u_hat, squeeze = arrays["w"], arrays["u_hat"], arrays["squeeze"]
            grad_w, grad_u_hat = np.empty_like(w), np.empty_like(w)
            grad_b, grad_squeeze = np.empty_like(squeeze), np.zeros_like(squeeze)
        if shape.linear:
            lower, upper = arrays["lower"], arrays["upper"]
            grad_lower, grad_upper = np.empty_like(lower), np.empty_like(upper)
        for planar, size in reversed(shape.runs):
            if planar:
                planar_index -= size
                run = slice(planar_index, planar_index + size)
                run_grads = _planar_backward(
                    stages.pop(), w[run], u_hat[run], squeeze[run], grad_x, grad_log_det
                )
                grad_x, grad_w[run], grad_u_hat[run], grad_b[run], run_squeeze = run_grads
                if run_squeeze is not None:
                    grad_squeeze[run] = run_squeeze
                continue
            for _ in range(size):
                linear_index -= 1
                z, middle = stages.pop()
                grad_lower[linear_index] = _product(grad_x.T, middle)
                grad_middle = _product(grad_x, lower[linear_index])
                grad_upper[linear_index] = _product(grad_middle.T, z)
                grad_x = _product(grad_middle, upper[linear_index])
        grad_weights: list[Array] = []
        if shape.planar:
            constraint = arrays["constraint"]
            extra, grad_u = _constrain_backward(
                w, arrays["u"], shape.margin, constraint, grad_u_hat, grad_squeeze
            )
            grad_weights += [grad_w + extra, grad_u, grad_b]
        if shape.linear:
            logs = arrays["logs"]
            grad_weights.append(_triangles_backward(shape.bound, logs, grad_lower, grad_upper, grad_log_det))
        return None, None, torch.from_numpy(grad_x), *map(torch.from_numpy, grad_weights)
