r"""The flows of many layers on a GPU, in few launches.

A flow of document 000 on a layer of a few hundred channels is some hundred tiny operations, each of which takes a GPU longer to start
than to do. :func:`push_many` evaluates the :class:`~flowbnn.transforms.PlanarLU` flows of all layers together, with kernels written
in Triton: a flow on at most 32 numbers is one launch, and the stages of longer ones (a run of planar maps, one triangular factor) are
one launch each for all layers. Gradients are written by hand, of first order, and the same from run to run to the last bit.
Products are as good as float32 (three passes of TF32, or plain float32 where they are small), unless the caller allows less.

``torch.compile`` sees one operator, without a graph break, and a CUDA graph captures it.
"""

import os
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.transforms.chain import PlanarLU, _forward
from flowbnn.transforms.fused_ops import thirds
from flowbnn.transforms.fused_plan import write

__all__ = ["Group", "available", "push_groups", "push_many", "push_packed"]

WIDEST = 1024  # numbers that a program holds a row of
_FOUND = find_spec("triton") is not None
_INTERPRETED = (
    os.environ.get("TRITON_INTERPRET") == "1"
)  # Triton's kernels then run on a processor, for tests


def available(z: Tensor) -> bool:
    """Whether :func:`push_many` has kernels for such a tensor: float32 on a CUDA device, Triton installed, outside ``torch.func``.

    >>> available(torch.zeros(3, 2, dtype=torch.float64))
    False
    """
    if not _FOUND or z.dtype != torch.float32 or not (z.is_cuda or _INTERPRETED):
        return False
    return torch.compiler.is_compiling() or torch._C._functorch.maybe_current_level() is None


def push_many(
    flows: Sequence[PlanarLU], starts: Sequence[Tensor], log_det: bool, coarse: bool = False
) -> tuple[list[Tensor], list[Tensor] | None]:
    """Every flow applied to its own rows: ``flow.push(start, log_det)`` for each pair, all at once where that is possible.

    Args:
        flows: the flows.
        starts: ``[rows, dim]`` for each, with one number of rows; columns of one wide tensor are welcome.
        log_det: whether the log-dets are wanted.
        coarse: the values will be rounded to half precision anyway: the products of some hundred rows and more may be made in one pass
            of TF32, with errors of about a thousandth, instead of three.

    Returns:
        ``[rows, dim]`` for each flow, columns of one wide tensor where the flows went together; and the log-dets ``[rows]`` or None.

    >>> flow = PlanarLU(3, [("planar", 2)], generator=torch.Generator().manual_seed(0))
    >>> (x,), (log_det,) = push_many([flow], [torch.zeros(5, 3)], log_det=True)
    >>> x.shape, log_det.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """
    if len(flows) != len(starts):
        raise FlowBNNError(
            f"there are {len(flows)} flows and {len(starts)} starts; give one start for each flow"
        )
    for flow, start in zip(flows, starts, strict=True):
        if start.dim() != 2 or start.shape[1] != flow.dim or start.shape[0] != starts[0].shape[0]:
            raise FlowBNNError(
                f"a start has the shape {tuple(start.shape)}; give [rows, {flow.dim}], with as many rows as the others have"
            )
    ends: list[Any] = [None] * len(flows)
    totals: list[Any] = [None] * len(flows)
    together = [i for i in range(len(flows)) if _served(flows[i], starts[i], starts[0])]
    if together:
        _together(flows, starts, (log_det, coarse), together, ends, totals)
    for i, (flow, start) in enumerate(zip(flows, starts, strict=True)):
        if ends[i] is None:
            weights = flow._weights()
            ends[i], totals[i] = _forward(flow.plan, log_det, start, weights) if weights else (start, None)
            if log_det and totals[i] is None:
                totals[i] = start.new_zeros(start.shape[0])
    return ends, totals if log_det else None


def _served(flow: PlanarLU, start: Tensor, first: Tensor) -> bool:
    if not available(start) or start.device != first.device or not start.shape[0] or flow.dim > WIDEST:
        return False
    weights = flow._weights()
    return len(weights) > 0 and all(w.dtype == start.dtype and w.device == start.device for w in weights)


def _together(
    flows: Sequence[PlanarLU],
    starts: Sequence[Tensor],
    options: tuple[bool, bool],
    some: list[int],
    ends: list[Any],
    totals: list[Any],
) -> None:
    ((x, lines),) = _launch([([flows[i] for i in some], [starts[i] for i in some], *options)])
    for i, end in zip(some, x.split([flows[i].dim for i in some], -1), strict=True):
        ends[i] = end
    if lines is not None:
        for i, line in zip(some, lines.unbind(), strict=True):
            totals[i] = line


def push_packed(flows: Sequence[PlanarLU], wide: Tensor, log_det: bool) -> tuple[Tensor, Tensor | None]:
    """:func:`push_many` on vectors laid end to end in ``[rows, numbers]``, which spares cutting and joining them.

    Returns:
        ``[rows, numbers]``, and the log-dets ``[flows, rows]`` or None.

    >>> flows = [PlanarLU(dim, [("planar", 2)]) for dim in (3, 4)]
    >>> x, log_dets = push_packed(flows, torch.zeros(5, 7), log_det=True)
    >>> x.shape, log_dets.shape
    (torch.Size([5, 7]), torch.Size([2, 5]))
    """
    dims = [flow.dim for flow in flows]
    if wide.dim() != 2 or wide.shape[1] != sum(dims) or not flows:
        raise FlowBNNError(
            f"the starts have the shape {tuple(wide.shape)}; give [rows, {sum(dims)}], a column for each number of the flows"
        )
    if all(_served(flow, wide, wide) for flow in flows):
        return _launch([(flows, [wide], log_det, False)])[0]
    ends, totals = push_many(flows, wide.split(dims, -1), log_det)
    return torch.cat(ends, -1), None if totals is None else torch.stack(totals)


class Group(NamedTuple):
    """Flows on the same rows.

    Args:
        flows: the flows.
        wide: their starts end to end, ``[rows, numbers]``.
        log_det: whether the log-dets are wanted.
        coarse: as in :func:`push_many`.
    """

    flows: Sequence[PlanarLU]
    wide: Tensor
    log_det: bool
    coarse: bool = False


def push_groups(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor | None]]:
    """:func:`push_packed` for every group, the groups side by side where the device can.

    Returns:
        For each group ``[rows, numbers]``, and the log-dets ``[flows, rows]`` or None.

    >>> flows = [PlanarLU(dim, [("planar", 2)]) for dim in (3, 4)]
    >>> few, many = push_groups([Group(flows[:1], torch.zeros(2, 3), True), Group(flows[1:], torch.zeros(9, 4), False)])
    >>> few[0].shape, few[1].shape, many[0].shape, many[1]
    (torch.Size([2, 3]), torch.Size([1, 2]), torch.Size([9, 4]), None)
    """
    first = groups[0].wide
    served = [group for group in groups if all(_served(flow, group.wide, first) for flow in group.flows)]
    launched = iter(_launch([(g.flows, [g.wide], g.log_det, g.coarse) for g in served]) if served else [])
    return [next(launched) if any(g is one for one in served) else _alone(g) for g in groups]


def _alone(group: Group) -> tuple[Tensor, Tensor | None]:
    starts = group.wide.split([flow.dim for flow in group.flows], -1)
    ends, lines = push_many(group.flows, starts, group.log_det, group.coarse)
    return torch.cat(ends, -1), None if lines is None else torch.stack(lines)


def _launch(
    groups: Sequence[tuple[Sequence[PlanarLU], Sequence[Tensor], bool, bool]],
) -> list[tuple[Tensor, Tensor | None]]:
    """Groups of flows, their starts (one for each flow, or one for all of them), ``log_det`` and ``coarse``."""
    all_flows, all_starts, log_dets, coarse = zip(*groups, strict=True)
    flows = [flow for some in all_flows for flow in some]
    given = [z if z.stride(1) == 1 else z.contiguous() for some in all_starts for z in some]
    weights = [weight.contiguous() for flow in flows for weight in flow._weights()]
    runs, limits = write([flow.plan for flow in flows])
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*given, *weights))
    found = torch.ops.flowbnn.push_flows(
        given, weights, keep, [len(some) for some in all_starts], [len(some) for some in all_flows],
        [flow.dim for flow in flows], runs, limits, list(log_dets), list(coarse),
    )  # fmt: skip
    xs, lines, _ = thirds(found)
    return [(x, line if wanted else None) for x, line, wanted in zip(xs, lines, log_dets, strict=True)]
