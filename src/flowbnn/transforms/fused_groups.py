r"""Several calls of :mod:`flowbnn.transforms.fused` at once, each with rows of its own.

Noise at every position of a feature map has many rows in an early layer and few in a late one, and the launches of few rows leave most
of a GPU idle. :func:`push_groups` gives every group of flows a stream of its own, so that small groups run beside the large one; a
CUDA graph keeps them side by side.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.transforms.by_hand import Plan
from flowbnn.transforms.chain import PlanarLU
from flowbnn.transforms.fused import _cut, _on, _refuse, _served, push_many, push_packed
from flowbnn.transforms.fused_plan import flat_order, kept_numbers, read, write

__all__ = ["Group", "push_groups"]


class Group(NamedTuple):
    """Flows on the same rows.

    Args:
        flows: the flows.
        wide: their starts end to end, ``[rows, numbers]``.
        log_det: whether the log-dets are wanted.
        coarse: as in :func:`flowbnn.transforms.fused.push_many`.
    """

    flows: Sequence[PlanarLU]
    wide: Tensor
    log_det: bool
    coarse: bool = False


def push_groups(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor | None]]:
    """:func:`~flowbnn.transforms.fused.push_packed` for every group, the groups side by side where the device can.

    Returns:
        For each group ``[rows, numbers]``, and the log-dets ``[flows, rows]`` or None.

    >>> flows = [PlanarLU(dim, [("planar", 2)]) for dim in (3, 4)]
    >>> few, many = push_groups([Group(flows[:1], torch.zeros(2, 3), True), Group(flows[1:], torch.zeros(9, 4), False)])
    >>> few[0].shape, few[1].shape, many[0].shape, many[1]
    (torch.Size([2, 3]), torch.Size([1, 2]), torch.Size([9, 4]), None)
    """
    first = groups[0].wide
    if len(groups) < 2 or not all(_served(flow, g.wide, first) for g in groups for flow in g.flows):
        return [_alone(group) for group in groups]
    given = [g.wide if g.wide.stride(1) == 1 else g.wide.contiguous() for g in groups]
    flows = [flow for group in groups for flow in group.flows]
    weights = [weight.contiguous() for flow in flows for weight in flow._weights()]
    runs, limits = write([flow.plan for flow in flows])
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*given, *weights))
    found = torch.ops.flowbnn.push_flow_groups(
        given, weights, [len(g.flows) for g in groups], [flow.dim for flow in flows], runs, limits,
        [g.log_det for g in groups], [g.coarse for g in groups], keep,
    )  # fmt: skip
    return [
        (x, lines if g.log_det else None) for g, x, lines in zip(groups, *_thirds(found)[:2], strict=True)
    ]


def _alone(group: Group) -> tuple[Tensor, Tensor | None]:
    if not group.coarse:
        return push_packed(group.flows, group.wide, group.log_det)
    starts = group.wide.split([flow.dim for flow in group.flows], -1)
    ends, lines = push_many(group.flows, starts, group.log_det, group.coarse)
    return torch.cat(ends, -1), None if lines is None else torch.stack(lines)


def _thirds(found: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Values, log-dets and what is kept, of what the operator gives."""
    number = len(found) // 3
    return found[:number], found[number : 2 * number], found[2 * number :]


class _Part(NamedTuple):
    """One group within the operator's lists: its plans, sizes, weights, and where the weights lie among all."""

    plans: tuple[Plan, ...]
    dims: Sequence[int]
    weights: Sequence[Tensor]
    places: slice


def _parts(
    counts: Sequence[int], dims: Sequence[int], runs: Sequence[int], limits: Sequence[float], weights: Any
) -> Iterator[_Part]:
    plans, flow, place = read(tuple(runs), tuple(limits)), 0, 0
    for count in counts:
        some = plans[flow : flow + count]
        number = sum(3 * bool(p.planar) + any(not planar for planar, _ in p.runs) for p in some)
        places = slice(place, place + number)
        yield _Part(some, dims[flow : flow + count], weights[places], places)
        flow, place = flow + count, place + number


@cache
def _streams(device: torch.device, number: int) -> list[torch.cuda.Stream]:
    return [torch.cuda.Stream(device) for _ in range(number)]


class _SideBySide:
    """Streams for the groups: the largest stays on the current one, which waits for the others in the end."""

    def __init__(self, sizes: Sequence[int], like: Tensor) -> None:
        self.home = torch.cuda.current_stream(like.device) if like.is_cuda else None
        self.largest = max(range(len(sizes)), key=sizes.__getitem__)
        self.others = _streams(like.device, len(sizes)) if like.is_cuda else []

    def of(self, index: int) -> AbstractContextManager[Any]:
        if self.home is None or index == self.largest:
            return nullcontext()
        self.others[index].wait_stream(self.home)
        return torch.cuda.stream(self.others[index])

    def join(self) -> None:
        if self.home is not None:
            for index, stream in enumerate(self.others):
                if index != self.largest:
                    self.home.wait_stream(stream)


def _order(side: _SideBySide, number: int) -> list[int]:
    """The largest last: the others begin beside it."""
    return [index for index in range(number) if index != side.largest] + [side.largest]


@torch.library.custom_op(
    "flowbnn::push_flow_groups",
    mutates_args=(),
    schema="(Tensor[] starts, Tensor[] weights, int[] counts, int[] dims, int[] runs, float[] limits, bool[] log_dets,"
    " bool[] coarse, bool keep) -> Tensor[]",
)
def _push(
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    counts: Sequence[int],
    dims: Sequence[int],
    runs: Sequence[int],
    limits: Sequence[float],
    log_dets: Sequence[bool],
    coarse: Sequence[bool],
    keep: bool,
) -> list[Tensor]:
    from flowbnn.transforms.fused_launch import forward

    parts = list(_parts(counts, dims, runs, limits, weights))
    # made on the stream that goes on to use them
    found = [_rooms(*one, keep) for one in zip(starts, parts, log_dets, strict=True)]
    side = _SideBySide([start.numel() for start in starts], starts[0])
    with _on(starts[0]):
        for index in _order(side, len(parts)):
            part, (x, totals, kept) = parts[index], found[index]
            with side.of(index):
                forward(
                    part.plans, log_dets[index], keep, coarse[index], _cut([starts[index]], part.dims),
                    part.weights, x, totals, kept,
                )  # fmt: skip
        side.join()
    return [room for third in zip(*found, strict=True) for room in third]


def _rooms(start: Tensor, part: _Part, log_det: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
    rows = start.shape[0]
    kept = rows * sum(kept_numbers(part.plans, part.dims)) if keep else 0
    lines = (len(part.dims), rows) if log_det else (0,)
    return start.new_empty((rows, sum(part.dims))), start.new_empty(lines), start.new_empty(kept)


@_push.register_fake
def _(
    starts: Any,
    weights: Any,
    counts: Any,
    dims: Any,
    runs: Any,
    limits: Any,
    log_dets: Any,
    coarse: Any,
    keep: bool,
) -> Any:
    parts = _parts(counts, dims, runs, limits, weights)
    found = [_rooms(*one, keep) for one in zip(starts, parts, log_dets, strict=True)]
    return [room for third in zip(*found, strict=True) for room in third]


@torch.library.custom_op(
    "flowbnn::push_flow_groups_backward",
    mutates_args=(),
    schema="(Tensor[] starts, Tensor[] weights, Tensor[] kept, Tensor[] of_x, Tensor[] of_totals, int[] counts, int[] dims,"
    " int[] runs, float[] limits, bool[] log_dets, bool[] coarse) -> Tensor[]",
)
def _push_backward(
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    of_x: Sequence[Tensor],
    of_totals: Sequence[Tensor],
    counts: Sequence[int],
    dims: Sequence[int],
    runs: Sequence[int],
    limits: Sequence[float],
    log_dets: Sequence[bool],
    coarse: Sequence[bool],
) -> list[Tensor]:
    from flowbnn.transforms.fused_launch import backward

    parts = list(_parts(counts, dims, runs, limits, weights))
    side = _SideBySide([start.numel() for start in starts], starts[0])
    found: list[Any] = [None] * len(parts)
    with _on(starts[0]):
        for index in _order(side, len(parts)):
            part = parts[index]
            lines = of_totals[index] if log_dets[index] else None
            with side.of(index):
                found[index] = backward(
                    part.plans, coarse[index], _cut([starts[index]], part.dims), part.weights, kept[index],
                    of_x[index], lines,
                )  # fmt: skip
        side.join()
    return [*(of_start for of_start, _ in found), *(flat for _, flat in found)]


@_push_backward.register_fake
def _(
    starts: Any,
    weights: Any,
    kept: Any,
    of_x: Any,
    of_totals: Any,
    counts: Any,
    dims: Any,
    runs: Any,
    limits: Any,
    log_dets: Any,
    coarse: Any,
) -> Any:
    flat = [
        start.new_empty(sum(weight.numel() for weight in part.weights))
        for start, part in zip(starts, _parts(counts, dims, runs, limits, weights), strict=True)
    ]
    return [*(start.new_empty(start.shape) for start in starts), *flat]


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    starts, weights, *ctx.rest, _ = inputs
    ctx.count = len(starts)
    ctx.set_materialize_grads(False)
    kept = _thirds(output)[2]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*starts, *weights, *kept)


def _back(ctx: Any, of_output: Sequence[Tensor | None]) -> Any:
    number = ctx.count
    tensors = ctx.saved_tensors
    starts, weights, kept = tensors[:number], tensors[number:-number], tensors[-number:]
    counts, dims, runs, limits, log_dets, coarse = ctx.rest
    parts = list(_parts(counts, dims, runs, limits, weights))
    given_x, given_lines, _ = _thirds(of_output)
    of_x = [_or_zeros(g, start, start.shape) for g, start in zip(given_x, starts, strict=True)]
    of_totals = [
        _or_zeros(g, start, (len(part.dims), start.shape[0]) if wanted else (0,))
        for g, start, part, wanted in zip(given_lines, starts, parts, log_dets, strict=True)
    ]
    found = torch.ops.flowbnn.push_flow_groups_backward(
        starts, weights, kept, of_x, of_totals, counts, dims, runs, limits, log_dets, coarse
    )
    of_weights: list[Any] = [None] * len(weights)
    for part, flat in zip(parts, found[number:], strict=True):
        order = flat_order(part.plans, part.dims)
        pieces = flat.split([part.weights[place].numel() for place in order])
        for place, piece in zip(order, pieces, strict=True):
            of_weights[part.places.start + place] = piece.view(part.weights[place].shape)
    return list(found[:number]), of_weights, None, None, None, None, None, None, None


def _or_zeros(gradient: Tensor | None, like: Tensor, shape: Any) -> Tensor:
    return like.new_zeros(shape) if gradient is None else gradient


_push.register_autograd(_back, setup_context=_set_up)
_push_backward.register_autograd(_refuse)
