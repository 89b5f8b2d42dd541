r"""Fast evaluation of chains of planar and LU maps, by the best code for the device.

A chain on a layer of a few hundred channels consists of about a hundred tiny operations. Each takes longer to start than to compute.
:func:`evaluate` evaluates one chain, :func:`evaluate_many` the chains of all layers at once. They choose between three
implementations:

==============================  ===============================================================================
float32 on a CUDA device        Triton kernels for many chains in few launches (:mod:`flowbnn.kernels.gpu`)
few numbers on a CPU            numpy with explicit derivatives (:mod:`flowbnn.kernels.cpu`)
other cases                     torch's operations (:mod:`flowbnn.kernels.reference`)
==============================  ===============================================================================

All three compute the same values, log-determinants and gradients up to rounding. Results of the Triton kernels are bitwise
reproducible. ``torch.compile`` traces them as one operator without a graph break, and a CUDA graph can capture it.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.kernels import cpu, gpu, reference
from flowbnn.kernels.reference import ChainShape

__all__ = ["Chain", "ChainShape", "Group", "available", "evaluate", "evaluate_many"]

_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # tests run Triton's kernels on a CPU


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
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None


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
    if _on_gpu(chain, z, z):
        x, log_dets = gpu.evaluate_groups([Group([chain], z, log_det, allow_tf32)])[0]
        return x, None if log_dets is None else log_dets[0]
    if chain.weights and cpu.is_supported(z):
        return cpu.ChainFunction.apply(chain.shape, log_det, z, *chain.weights)
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
    on_gpu = [all(_on_gpu(chain, group.vectors, first) for chain in group.chains) for group in groups]
    gpu_groups = [group for group, selected in zip(groups, on_gpu, strict=True) if selected]
    results = iter(gpu.evaluate_groups(gpu_groups) if gpu_groups else [])
    return [
        next(results) if selected else _evaluate_group(group)
        for group, selected in zip(groups, on_gpu, strict=True)
    ]


def _on_gpu(chain: Chain, z: Tensor, first: Tensor) -> bool:
    """Returns True if the Triton kernels support a chain.

    Args:
        chain: The chain.
        z: Vectors that the chain is applied to.
        first: Vectors of the first group of the call, whose device all others must share.
    """
    max_dim = 1024  # the registers of a Triton program hold no longer row
    if not available(z) or z.device != first.device or not z.shape[0] or chain.shape.dim > max_dim:
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
