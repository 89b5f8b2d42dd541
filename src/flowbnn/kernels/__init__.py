r"""Speed in a box: chains of planar and LU maps, by the fastest code that the device has.

A chain on a layer of a few hundred channels is some hundred tiny operations, each of which takes longer to start than to do.
:func:`evaluate` takes one chain, :func:`evaluate_many` the chains of all layers at once. Which code serves is decided here:

==============================  ===============================================================================
float32 on a CUDA device        Triton kernels for many chains in few launches (:mod:`flowbnn.kernels.gpu`)
few numbers on a CPU            numpy with explicit derivatives (:mod:`flowbnn.kernels.cpu`)
anything else                   torch's own operations (:mod:`flowbnn.kernels.reference`)
==============================  ===============================================================================

All three compute the same values, log-dets and gradients up to rounding. Those of the Triton kernels are the same from run to run to
the last bit; ``torch.compile`` sees them as one operator, without a graph break, and a CUDA graph captures it.
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

WIDEST = 1024  # numbers of a row that a Triton program holds
_TRITON = find_spec("triton") is not None
_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"  # Triton's kernels then run on a CPU, for tests


class Chain(NamedTuple):
    """Planar and LU maps, one after the other.

    Args:
        plan: what the chain consists of.
        weights: ``w``, ``u``, ``b`` of its planar maps and ``factors`` of its LU maps, see :mod:`flowbnn.kernels.reference`.
    """

    plan: ChainShape
    weights: tuple[Tensor, ...]


class Group(NamedTuple):
    """Chains on the same rows.

    Args:
        chains: the chains.
        starts: the vectors that they are applied to, end to end in ``[rows, sum of their lengths]``.
        log_det: whether the log-dets are wanted.
        allow_tf32: the values will be rounded to half precision anyway: products of some hundred rows and more may be made in one
            pass of TF32, with errors of about a thousandth, instead of three.
    """

    chains: Sequence[Chain]
    starts: Tensor
    log_det: bool
    allow_tf32: bool = False


def available(z: Tensor) -> bool:
    """Whether there are kernels that evaluate many chains at once: float32 on a CUDA device, Triton installed, outside ``torch.func``.

    >>> available(torch.zeros(3, 2, dtype=torch.float64))
    False
    """
    if not _TRITON or z.dtype != torch.float32 or not (z.is_cuda or _INTERPRETED):
        return False
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None


def evaluate(
    chain: Chain, z: Tensor, log_det: bool = True, allow_tf32: bool = False
) -> tuple[Tensor, Tensor | None]:
    """A chain applied to the rows ``z`` ``[rows, dim]``: the values, and the log-dets ``[rows]`` or None.

    >>> plan = ChainShape(dim=2, runs=((True, 1),), planar=1, linear=0, margin=1e-3, bound=4.0)
    >>> chain = Chain(plan, (torch.ones(1, 2), torch.zeros(1, 2), torch.zeros(1)))
    >>> x, log_det = evaluate(chain, torch.tensor([[0.0, 0.0], [1.0, -1.0]]))
    >>> x.shape, log_det
    (torch.Size([2, 2]), tensor([-0.3665, -0.3665]))
    """
    if _on_gpu(chain, z, z):
        x, log_dets = gpu.push([Group([chain], z, log_det, allow_tf32)])[0]
        return x, None if log_dets is None else log_dets[0]
    if chain.weights and cpu.serves(z):
        return cpu.ChainFunction.apply(chain.plan, log_det, z, *chain.weights)
    return reference.forward(chain.plan, chain.weights, z, log_det)


def evaluate_many(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor | None]]:
    """The chains of all groups, side by side where the device can: for each group the values end to end, and the log-dets
    ``[chains, rows]`` or None."""
    first = groups[0].starts
    together = [
        group for group in groups if all(_on_gpu(chain, group.starts, first) for chain in group.chains)
    ]
    launched = iter(gpu.push(together) if together else [])
    return [
        next(launched) if any(group is one for one in together) else _one_by_one(group) for group in groups
    ]


def _on_gpu(chain: Chain, z: Tensor, first: Tensor) -> bool:
    """Whether the Triton kernels serve a chain in a call that begins with the tensor ``first``."""
    if not available(z) or z.device != first.device or not z.shape[0] or chain.plan.dim > WIDEST:
        return False
    weights = chain.weights
    return len(weights) > 0 and all(w.dtype == z.dtype and w.device == z.device for w in weights)


def _one_by_one(group: Group) -> tuple[Tensor, Tensor | None]:
    starts = group.starts.split([chain.plan.dim for chain in group.chains], -1)
    ends = [
        evaluate(chain, start, group.log_det, group.allow_tf32)
        for chain, start in zip(group.chains, starts, strict=True)
    ]
    log_dets = [log_det for _, log_det in ends if log_det is not None]
    return torch.cat([x for x, _ in ends], -1), torch.stack(log_dets) if group.log_det else None
