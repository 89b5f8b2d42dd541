r"""The flows of many layers on a GPU, in few launches.

A flow of document 000 on a layer of a few hundred channels is some hundred tiny operations, each of which takes a GPU longer to start
than to do. :func:`push_many` evaluates the :class:`~flowbnn.transforms.PlanarLU` flows of all layers together, with kernels written
in Triton: a flow on at most 32 numbers is one launch, and the stages of longer ones (a run of planar maps, one triangular factor) are
one launch each for all layers. Gradients are written by hand, of first order, and the same from run to run to the last bit.
Products are as good as float32 (three passes of TF32, or plain float32 where they are small), unless the caller allows less.

``torch.compile`` sees one operator, without a graph break, and a CUDA graph captures it.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.kernels.plan import flat_order, kept_numbers, read, write
from flowbnn.kernels.planar_lu_numpy import Plan

__all__ = ["Group", "available", "push_groups", "push_many", "push_packed", "thirds"]


class Chain(Protocol):
    """A chain of planar and LU maps as the kernels see it; :class:`~flowbnn.transforms.PlanarLU` is one."""

    dim: int
    plan: Plan

    def _weights(self) -> tuple[Tensor, ...]: ...

    def plain(self, z: Tensor, log_det: bool) -> tuple[Tensor, Tensor | None]:
        """The chain on rows ``[rows, dim]`` by torch's own operations."""


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
        runs, limits: their plans, see :func:`~flowbnn.kernels.plan.write`.
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
    from flowbnn.kernels.planar_lu_launch import forward

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
    from flowbnn.kernels.planar_lu_launch import backward

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
    flows: Sequence[Chain], starts: Sequence[Tensor], log_det: bool, coarse: bool = False
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

    >>> from flowbnn.transforms import PlanarLU
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
            ends[i], totals[i] = flow.plain(start, log_det)
            if log_det and totals[i] is None:
                totals[i] = start.new_zeros(start.shape[0])
    return ends, totals if log_det else None


def _served(flow: Chain, start: Tensor, first: Tensor) -> bool:
    if not available(start) or start.device != first.device or not start.shape[0] or flow.dim > WIDEST:
        return False
    weights = flow._weights()
    return len(weights) > 0 and all(w.dtype == start.dtype and w.device == start.device for w in weights)


def _together(
    flows: Sequence[Chain],
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


def push_packed(flows: Sequence[Chain], wide: Tensor, log_det: bool) -> tuple[Tensor, Tensor | None]:
    """:func:`push_many` on vectors laid end to end in ``[rows, numbers]``, which spares cutting and joining them.

    Returns:
        ``[rows, numbers]``, and the log-dets ``[flows, rows]`` or None.

    >>> from flowbnn.transforms import PlanarLU
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

    flows: Sequence[Chain]
    wide: Tensor
    log_det: bool
    coarse: bool = False


def push_groups(groups: Sequence[Group]) -> list[tuple[Tensor, Tensor | None]]:
    """:func:`push_packed` for every group, the groups side by side where the device can.

    Returns:
        For each group ``[rows, numbers]``, and the log-dets ``[flows, rows]`` or None.

    >>> from flowbnn.transforms import PlanarLU
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
    groups: Sequence[tuple[Sequence[Chain], Sequence[Tensor], bool, bool]],
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
