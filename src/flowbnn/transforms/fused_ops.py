r"""The operators behind :mod:`flowbnn.transforms.fused`: groups of flows, each group with rows of its own, and their gradients.

Noise at every position of a feature map has many rows in an early layer and few in a late one, and the launches of few rows leave most
of a GPU idle. So every group has a stream of its own, on which it runs beside the largest; a CUDA graph keeps them side by side.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.transforms.by_hand import Plan
from flowbnn.transforms.fused_plan import flat_order, kept_numbers, read

__all__ = ["thirds"]


def thirds(found: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Values, log-dets and what is kept of every group, of all that the operator gives."""
    number = len(found) // 3
    return found[:number], found[number : 2 * number], found[2 * number :]


class Layout(NamedTuple):
    """What lies where in the operators' lists, as numbers, which is what torch's operators can be given.

    Args:
        given: how many starts each group has: one for each flow, or one for all of them.
        counts: how many flows each group has.
        dims: of all flows.
        runs, limits: their plans, see :func:`~flowbnn.transforms.fused_plan.write`.
        log_dets, coarse: of each group.
    """

    given: Sequence[int]
    counts: Sequence[int]
    dims: Sequence[int]
    runs: Sequence[int]
    limits: Sequence[float]
    log_dets: Sequence[bool]
    coarse: Sequence[bool]


LAYOUT = "int[] given, int[] counts, int[] dims, int[] runs, float[] limits, bool[] log_dets, bool[] coarse"


class Part(NamedTuple):
    """One group: its starts, plans, sizes and weights, and where the weights lie among all."""

    starts: Sequence[Tensor]
    plans: tuple[Plan, ...]
    dims: Sequence[int]
    weights: Sequence[Tensor]
    places: slice
    log_det: bool
    coarse: bool

    @property
    def rows(self) -> int:
        return self.starts[0].shape[0]

    def cut(self) -> Sequence[Tensor]:
        """A start for each flow."""
        return (
            self.starts if len(self.starts) == len(self.dims) else self.starts[0].split(list(self.dims), -1)
        )

    def rooms(self, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Room for the values, the log-dets and what is kept for the way back."""
        empty = self.starts[0].new_empty
        kept = self.rows * sum(kept_numbers(self.plans, self.dims)) if keep else 0
        lines = (len(self.dims), self.rows) if self.log_det else (0,)
        return empty((self.rows, sum(self.dims))), empty(lines), empty(kept)


def _parts(layout: Layout, starts: Sequence[Tensor], weights: Sequence[Tensor]) -> Iterator[Part]:
    plans, begin, flow, place = read(tuple(layout.runs), tuple(layout.limits)), 0, 0, 0
    for index, (given, count) in enumerate(zip(layout.given, layout.counts, strict=True)):
        some = plans[flow : flow + count]
        number = sum(3 * bool(p.planar) + any(not planar for planar, _ in p.runs) for p in some)
        places = slice(place, place + number)
        yield Part(
            starts[begin : begin + given],
            some,
            layout.dims[flow : flow + count],
            weights[places],
            places,
            layout.log_dets[index],
            layout.coarse[index],
        )
        begin, flow, place = begin + given, flow + count, place + number


@cache
def _streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Of a device, as many as were ever needed at once."""
    return []


class _SideBySide:
    """Streams for the groups: the largest stays on the current one, which waits for the others in the end."""

    def __init__(self, parts: Sequence[Part]) -> None:
        like, sizes = parts[0].starts[0], [part.rows * sum(part.dims) for part in parts]
        self.largest = max(range(len(sizes)), key=sizes.__getitem__)
        # the largest last: the others begin beside it
        self.order = [index for index in range(len(sizes)) if index != self.largest] + [self.largest]
        self.device = torch.cuda.device(like.device) if like.is_cuda else nullcontext()
        several = like.is_cuda and len(sizes) > 1
        self.home = torch.cuda.current_stream(like.device) if several else None
        self.others = _streams(like.device) if several else []
        self.others += [torch.cuda.Stream(like.device) for _ in range(len(self.others), len(sizes) * several)]

    def of(self, index: int) -> AbstractContextManager[Any]:
        if self.home is None or index == self.largest:
            return nullcontext()
        self.others[index].wait_stream(self.home)
        return torch.cuda.stream(self.others[index])

    def __enter__(self) -> "_SideBySide":
        self.device.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        """Also after an error: memory that the others still write to is not given away."""
        if self.home is not None:
            for index in self.order[:-1]:
                self.home.wait_stream(self.others[index])
        self.device.__exit__(*exc)


@torch.library.custom_op(
    "flowbnn::push_flows",
    mutates_args=(),
    schema=f"(Tensor[] starts, Tensor[] weights, bool keep, {LAYOUT}) -> Tensor[]",
)
def _push(starts: Sequence[Tensor], weights: Sequence[Tensor], keep: bool, *numbers: Any) -> list[Tensor]:
    from flowbnn.transforms.fused_launch import forward  # Triton is loaded when it is first used

    parts = list(_parts(Layout(*numbers), starts, weights))
    found = [part.rooms(keep) for part in parts]  # made on the stream that goes on to use them
    with _SideBySide(parts) as side:
        for index in side.order:
            part = parts[index]
            with side.of(index):
                forward(part.plans, part.log_det, keep, part.coarse, part.cut(), part.weights, *found[index])
    return [room for third in zip(*found, strict=True) for room in third]


@_push.register_fake
def _(starts: Any, weights: Any, keep: bool, *numbers: Any) -> Any:
    found = [part.rooms(keep) for part in _parts(Layout(*numbers), starts, weights)]
    return [room for third in zip(*found, strict=True) for room in third]


@torch.library.custom_op(
    "flowbnn::push_flows_backward",
    mutates_args=(),
    schema=f"(Tensor[] starts, Tensor[] weights, Tensor[] kept, Tensor[] of_x, Tensor[] of_totals, {LAYOUT}) -> Tensor[]",
)
def _push_backward(
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    kept: Sequence[Tensor],
    of_x: Sequence[Tensor],
    of_totals: Sequence[Tensor],
    *numbers: Any,
) -> list[Tensor]:
    from flowbnn.transforms.fused_launch import backward

    parts = list(_parts(Layout(*numbers), starts, weights))
    found = _gradients(parts, of_x)
    with _SideBySide(parts) as side:
        for index in side.order:
            part = parts[index]
            lines = of_totals[index] if len(of_totals[index]) else None
            rooms = found[index], found[len(parts) + index]
            with side.of(index):
                backward(
                    part.plans, part.coarse, part.cut(), part.weights, kept[index], of_x[index], lines, *rooms
                )
    return found


def _gradients(parts: Sequence[Part], of_x: Sequence[Tensor]) -> list[Tensor]:
    """Room for the gradients to the starts of every group, then to its parameters, end to end."""
    of_starts = [torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in of_x]
    numbers = [sum(weight.numel() for weight in part.weights) for part in parts]
    return of_starts + [g.new_empty(number) for g, number in zip(of_x, numbers, strict=True)]


@_push_backward.register_fake
def _(starts: Any, weights: Any, kept: Any, of_x: Any, of_totals: Any, *numbers: Any) -> Any:
    return _gradients(list(_parts(Layout(*numbers), starts, weights)), of_x)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    starts, weights, _, *ctx.numbers = inputs
    ctx.sizes = len(starts), len(weights)
    ctx.set_materialize_grads(False)
    kept = thirds(output)[2]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*starts, *weights, *kept)


def _back(ctx: Any, gradients: Sequence[Tensor | None]) -> Any:
    tensors, (first, second) = list(ctx.saved_tensors), ctx.sizes
    starts, weights, kept = tensors[:first], tensors[first : first + second], tensors[first + second :]
    parts = list(_parts(Layout(*ctx.numbers), starts, weights))
    of_x, of_totals, _ = (list(third) for third in thirds(gradients))
    for index, part in enumerate(parts):
        empty = part.starts[0].new_zeros
        if of_x[index] is None:
            of_x[index] = empty((part.rows, sum(part.dims)))
        if of_totals[index] is None or not part.log_det:  # none that count
            of_totals[index] = empty(0)
    found = torch.ops.flowbnn.push_flows_backward(starts, weights, kept, of_x, of_totals, *ctx.numbers)
    of_starts: list[Any] = []
    of_weights: list[Any] = [None] * len(weights)
    for part, whole, flat in zip(parts, found[: len(parts)], found[len(parts) :], strict=True):
        of_starts += [whole] if len(part.starts) == 1 else whole.split(list(part.dims), -1)
        order = flat_order(part.plans, part.dims)
        pieces = flat.split([part.weights[place].numel() for place in order])
        for place, piece in zip(order, pieces, strict=True):
            of_weights[part.places.start + place] = piece.view(part.weights[place].shape)
    return of_starts, of_weights, *(None,) * (1 + len(ctx.numbers))


def _refuse(ctx: Any, *gradients: Any) -> Any:
    raise FlowBNNError(
        "the fused flows have first derivatives only; for a gradient of a gradient call each flow by itself"
    )


_push.register_autograd(_back, setup_context=_set_up)
_push_backward.register_autograd(_refuse)
