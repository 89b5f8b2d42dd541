"""The operator by which torch sees the Triton kernels: many chains of planar and LU maps in one call.

``torch.compile`` traces it without a graph break, autograd knows its derivative, and a CUDA graph captures it. What it launches is in
:mod:`flowbnn.kernels.launch`.
"""

from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.kernels import launch, reference
from flowbnn.kernels.launch import Part, by_chain, flat_order, weight_names
from flowbnn.kernels.reference import ChainShape


class OperatorLists(NamedTuple):
    """What lies where in the operator's lists, as numbers, which is what torch's operators can be given."""

    counts: Sequence[int]  # how many chains each group has
    dims: Sequence[int]  # of all chains
    runs: Sequence[int]  # of all chains: of planar maps above zero, of LU maps below, ended by zero
    limits: Sequence[float]  # margin and bound of all chains
    log_dets: Sequence[bool]  # of each group
    allow_tf32: Sequence[bool]


LAYOUT = "int[] counts, int[] dims, int[] runs, float[] limits, bool[] log_dets, bool[] allow_tf32"


def write(plans: Sequence[ChainShape]) -> tuple[list[int], list[int], list[float]]:
    """Plans as ``dims``, ``runs`` and ``limits``."""
    dims = [plan.dim for plan in plans]
    runs = [n for plan in plans for n in (*(size if planar else -size for planar, size in plan.runs), 0)]
    return dims, runs, [limit for plan in plans for limit in (plan.margin, plan.bound)]


@lru_cache(maxsize=256)
def read(dims: tuple[int, ...], runs: tuple[int, ...], limits: tuple[float, ...]) -> tuple[ChainShape, ...]:
    """The plans of :func:`write`.

    >>> read((5,), (2, -3, 0), (0.001, 4.0))
    (ChainShape(dim=5, runs=((True, 2), (False, 3)), planar=2, linear=3, margin=0.001, bound=4.0),)
    """
    plans: list[ChainShape] = []
    sizes: list[int] = []
    for size in runs:
        if size:
            sizes.append(size)
            continue
        plans.append(
            ChainShape(
                dims[len(plans)],
                tuple((n > 0, abs(n)) for n in sizes),
                sum(n for n in sizes if n > 0),
                -sum(n for n in sizes if n < 0),
                *limits[2 * len(plans) : 2 * len(plans) + 2],
            )
        )
        sizes = []
    return tuple(plans)


def _parts(layout: OperatorLists, starts: Sequence[Tensor], weights: Sequence[Tensor]) -> list[Part]:
    plans, first, place = read(tuple(layout.dims), tuple(layout.runs), tuple(layout.limits)), 0, 0
    parts = []
    for index, count in enumerate(layout.counts):
        own = plans[first : first + count]
        places = slice(place, place + sum(len(weight_names(plan)) for plan in own))
        parts.append(
            Part(
                own, starts[index], weights[places], places, layout.log_dets[index], layout.allow_tf32[index]
            )
        )
        first, place = first + count, places.stop
    return parts


def push(groups: Sequence[Any]) -> list[tuple[Tensor, Tensor | None]]:
    """For each :class:`flowbnn.kernels.Group` the values ``[rows, numbers]`` and the log-dets ``[chains, rows]`` or None."""
    chains = [chain for group in groups for chain in group.chains]
    starts = [z if z.stride(1) == 1 else z.contiguous() for z in (group.starts for group in groups)]
    weights = [weight.contiguous() for chain in chains for weight in chain.weights]
    keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (*starts, *weights))
    outputs = torch.ops.flowbnn.push_chains(
        starts, weights, keep, [len(group.chains) for group in groups], *write([chain.plan for chain in chains]),
        [group.log_det for group in groups], [group.allow_tf32 for group in groups],
    )  # fmt: skip
    xs, lines, _ = _thirds(outputs)
    return [(x, line if group.log_det else None) for x, line, group in zip(xs, lines, groups, strict=True)]


def _thirds(outputs: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Values, log-dets and what is kept of every group, of all that the operator gives."""
    number = len(outputs) // 3
    return outputs[:number], outputs[number : 2 * number], outputs[2 * number :]


@torch.library.custom_op(
    "flowbnn::push_chains",
    mutates_args=(),
    schema=f"(Tensor[] starts, Tensor[] weights, bool keep, {LAYOUT}) -> Tensor[]",
)
def _push(starts: Sequence[Tensor], weights: Sequence[Tensor], keep: bool, *numbers: Any) -> list[Tensor]:
    parts = _parts(OperatorLists(*numbers), starts, weights)
    outputs = [part.outputs(keep) for part in parts]  # allocated on the stream that goes on to use them
    _side_by_side(parts, lambda index: launch.forward(parts[index], keep, *outputs[index]))
    return [tensor for third in zip(*outputs, strict=True) for tensor in third]


@_push.register_fake
def _(starts: Any, weights: Any, keep: bool, *numbers: Any) -> Any:
    outputs = [part.outputs(keep) for part in _parts(OperatorLists(*numbers), starts, weights)]
    return [tensor for third in zip(*outputs, strict=True) for tensor in third]


@torch.library.custom_op(
    "flowbnn::push_chains_backward",
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
    parts = _parts(OperatorLists(*numbers), starts, weights)
    outputs = _gradients(parts, of_x)

    def work(index: int) -> None:
        lines = of_totals[index] if len(of_totals[index]) else None
        memory = outputs[index], outputs[len(parts) + index]
        launch.backward(parts[index], kept[index], of_x[index], lines, *memory)

    _side_by_side(parts, work)
    return outputs


def _gradients(parts: Sequence[Part], of_x: Sequence[Tensor]) -> list[Tensor]:
    """Memory for the gradients to the starts of every group, then to its parameters."""
    of_starts = [torch.empty(g.shape, dtype=g.dtype, device=g.device) for g in of_x]
    numbers = [sum(weight.numel() for weight in part.all_weights) for part in parts]
    return of_starts + [g.new_empty(number) for g, number in zip(of_x, numbers, strict=True)]


@_push_backward.register_fake
def _(starts: Any, weights: Any, kept: Any, of_x: Any, of_totals: Any, *numbers: Any) -> Any:
    return _gradients(_parts(OperatorLists(*numbers), starts, weights), of_x)


def _set_up(ctx: Any, inputs: Any, output: Any) -> None:
    starts, weights, _, *ctx.numbers = inputs
    ctx.sizes = len(starts), len(weights)
    ctx.set_materialize_grads(False)
    kept = _thirds(output)[2]
    ctx.mark_non_differentiable(*kept)
    ctx.save_for_backward(*starts, *weights, *kept)


def _back(ctx: Any, slopes: Sequence[Tensor | None]) -> Any:
    tensors, (first, second) = list(ctx.saved_tensors), ctx.sizes
    starts, weights, kept = tensors[:first], tensors[first : first + second], tensors[first + second :]
    parts, nothing = _parts(OperatorLists(*ctx.numbers), starts, weights), (None,) * (1 + len(ctx.numbers))
    if torch.is_grad_enabled():  # gradients that will be differentiated again
        again = reference.gradients(partial(_plain, parts, first), (*starts, *weights), slopes[: 2 * first])
        return again[:first], again[first:], *nothing
    of_x, of_totals, _ = (list(third) for third in _thirds(slopes))
    for index, part in enumerate(parts):
        zeros = part.starts.new_zeros
        if of_x[index] is None:
            of_x[index] = zeros((part.rows, sum(part.dims)))
        if of_totals[index] is None or not part.log_det:  # none that count
            of_totals[index] = zeros(0)
    outputs = torch.ops.flowbnn.push_chains_backward(starts, weights, kept, of_x, of_totals, *ctx.numbers)
    of_weights: list[Any] = [None] * len(weights)
    for part, flat in zip(parts, outputs[len(parts) :], strict=True):
        order = flat_order(part.plans)
        pieces = flat.split([part.all_weights[place].numel() for place in order])
        for place, piece in zip(order, pieces, strict=True):
            of_weights[part.places.start + place] = piece.view(part.all_weights[place].shape)
    return list(outputs[: len(parts)]), of_weights, *nothing


def _plain(parts: Sequence[Part], first: int, *tensors: Tensor) -> list[Any]:
    """Values and log-dets of every part by torch's own operations, which know their derivatives."""
    xs: list[Any] = []
    lines: list[Any] = []
    for part, starts in zip(parts, tensors[:first], strict=True):
        weights = by_chain(part.plans, tensors[first:][part.places])
        columns = zip(part.plans, weights, starts.split(part.dims, -1), strict=True)
        ends = [reference.forward(plan, list(own.values()), z, part.log_det) for plan, own, z in columns]
        xs.append(torch.cat([x for x, _ in ends], -1))
        lines.append(torch.stack([line for _, line in ends if line is not None]) if part.log_det else None)
    return xs + lines


_push.register_autograd(_back, setup_context=_set_up)


@cache
def _side_streams(device: torch.device) -> list[torch.cuda.Stream]:
    """Of a device, as many as were ever needed at once."""
    return []


def _side_by_side(parts: Sequence[Part], work: Callable[[int], None]) -> None:
    """Launch every part, the largest on the current stream, which waits in the end for those of the others."""
    like, sizes = parts[0].starts, [part.rows * sum(part.dims) for part in parts]
    largest = max(range(len(sizes)), key=sizes.__getitem__)
    others = [index for index in range(len(sizes)) if index != largest]
    if not like.is_cuda:
        for index in (*others, largest):
            work(index)
        return
    with torch.cuda.device(like.device):
        home, streams = torch.cuda.current_stream(like.device), _side_streams(like.device)
        streams += [torch.cuda.Stream(like.device) for _ in range(len(streams), len(sizes) * bool(others))]
        try:
            for index in others:  # they begin beside the largest
                streams[index].wait_stream(home)
                with torch.cuda.stream(streams[index]):
                    work(index)
            work(largest)
        finally:  # also after an error: memory that the others still write to is not given away
            for index in others:
                home.wait_stream(streams[index])
