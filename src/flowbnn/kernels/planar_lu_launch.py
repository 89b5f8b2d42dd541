"""What is launched for the flows of a call. See :mod:`flowbnn.kernels.planar_lu`.

A flow on at most 32 numbers is one launch. The others go stage by stage, a stage being a run of planar maps or one triangular factor:
all flows whose next stage is of one kind take it in one launch. Gradients to the parameters of all stages come at the end, in one
launch for the planar maps and one for the LU maps. They are sums over rows: many rows are cut into parts with programs of their own,
and one more launch adds up what these found, always in the same order.

Kept for the way back are, of a flow on at most 32 numbers, what each map was given and the middle of each LU map; of the others the
values between the stages and the bends of the planar maps. The way back itself takes as much again until it is done.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowbnn.kernels.plan import (
    Call,
    Stage,
    by_flow,
    chunks,
    flat_order,
    power,
    row_parts,
    schedule,
    stages_of,
)
from flowbnn.kernels.planar_lu_numpy import Plan
from flowbnn.kernels.planar_lu_triton import (
    factors_backward,
    planar_backward,
    planar_forward,
    planar_weights,
    small_backward,
    small_forward,
    triangle,
)

__all__ = ["SMALL_ROWS", "backward", "forward"]

Arguments = dict[str, Any]

SMALL_ROWS, SMALL_WARPS = (
    16,
    4,
)  # of a program on 16 numbers or fewer: more rows do not fit into its registers
# tiles: for few rows many small ones, which are there sooner; for many large ones, which read less
FEW_ROWS: Arguments = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 32, "BLOCKS": 2, "num_warps": 4, "num_stages": 3}
MANY_ROWS: Arguments = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "BLOCKS": 1, "num_warps": 4, "num_stages": 3}
FACTORS: Arguments = {"SIDE": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 3}


def forward(
    plans: tuple[Plan, ...],
    log_det: bool,
    keep: bool,
    coarse: bool,
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    x: Tensor,
    totals: Tensor,
    kept: Tensor,
) -> None:
    """Fill ``x`` ``[rows, numbers]``, ``totals`` ``[flows, rows]`` and, if ``keep``, ``kept`` with what :func:`backward` needs."""
    call = Call(plans, starts, weights, coarse)
    ends = x.split(call.dims, -1)
    lines = totals.unbind() if log_det else [x] * len(starts)
    parts = call.parts(kept) if keep else [x] * len(starts)
    for flows in chunks(call.small):
        zs, xs = [call.starts[i] for i in flows], [ends[i] for i in flows]
        small_forward[(-(-call.rows // SMALL_ROWS), len(flows))](
            **_tensors("z", zs), **_tensors("x", xs), **_small_arguments(call, flows), bs=_named(call, flows, "b"),
            kept=_some(parts, flows), totals=_some(lines, flows), rows_in_all=call.rows,
            LOG_DET=log_det, KEEP=keep,
        )  # fmt: skip
    values = {i: call.values(i, parts[i]) if keep else call.passing(i, x) for i in call.large}
    places = {i: [starts[i], *values[i][0], ends[i]] for i in call.large}
    for kind, pairs in schedule(tuple(call.plans[i] for i in call.large)):
        flows = [call.large[i] for i, _ in pairs]
        stages = [stages_of(call.plans[i])[s] for i, (_, s) in zip(flows, pairs, strict=True)]
        zs = [places[i][s] for i, (_, s) in zip(flows, pairs, strict=True)]
        xs = [places[i][s + 1] for i, (_, s) in zip(flows, pairs, strict=True)]
        common = {
            **_tensors("z", zs), **_tensors("x", xs), "totals": _some(lines, flows),
            "fresh": tuple(int(s == 0) for _, s in pairs), "LOG_DET": log_det,
        }  # fmt: skip
        if kind == "planar":
            tile, shared = _planar_arguments(call, flows, stages, values)
            biases = tuple(call.weights[i]["b"][s.first :] for i, s in zip(flows, stages, strict=True))
            planar_forward[(-(-call.rows // tile["ROWS"]), len(flows))](**common, **shared, bs=biases, **tile)
        else:
            _triangle(call, flows, stages, common, kind == "upper", False)


def backward(
    plans: tuple[Plan, ...],
    coarse: bool,
    starts: Sequence[Tensor],
    weights: Sequence[Tensor],
    kept: Tensor,
    of_x: Tensor,
    of_totals: Tensor | None,
    of_starts: Tensor,
    of_weights: Tensor,
) -> None:
    """Fill the gradients to the starts ``[rows, numbers]`` and to all parameters, end to end in the order of :func:`flat_order`."""
    call = Call(plans, starts, weights, coarse)
    of_x = of_x if of_x.stride(1) == 1 else of_x.contiguous()
    order = flat_order(call.plans, call.dims)
    gs, of_zs = of_x.split(call.dims, -1), of_starts.split(call.dims, -1)
    log_det = of_totals is not None
    lines = [of_x] * len(starts) if of_totals is None else of_totals.unbind()
    stride = 0 if of_totals is None else of_totals.stride(1)
    parts = call.parts(kept)
    # sums over rows, part by part of the rows; then those of the parts
    copies, (parts_of_rows, each) = -(-call.rows // SMALL_ROWS), row_parts(call.rows)
    length = sum(weight.numel() for i in call.small for weight in call.weights[i].values())
    sums = [
        flat[None] if number == 1 else flat.new_empty(number, len(flat))
        for flat, number in ((of_weights[:length], copies), (of_weights[length:], parts_of_rows))
    ]
    into = _shaped(call, weights, order, sums[0][0], sums[1][0])
    if call.small:
        for flows in chunks(call.small):
            small_backward[(copies, len(flows))](
                **_tensors("g", [gs[i] for i in flows]), **_tensors("of_z", [of_zs[i] for i in flows]),
                **_small_arguments(call, flows), kept=_some(parts, flows), totals=_some(lines, flows),
                **{f"of_{name}s": tuple(into[i].get(name, of_x) for i in flows) for name in "wub"},
                of_factors=tuple(into[i].get("f", of_x) for i in flows),
                planars=tuple(call.plans[i].planar for i in flows),
                rows_in_all=call.rows, total_stride=stride, part_stride=length,
                LOG_DET=log_det,
            )  # fmt: skip
        if copies > 1:
            torch.sum(sums[0], 0, out=of_weights[:length])
    if call.large:
        ends = {i: (of_zs[i], gs[i]) for i in call.large}
        log = {"lines": lines, "total_stride": stride, "LOG_DET": log_det}
        _large_backward(call, parts, ends, into, log, (parts_of_rows, each, len(of_weights) - length))
        if parts_of_rows > 1:
            torch.sum(sums[1], 0, out=of_weights[length:])


def _large_backward(
    call: Call, parts: Any, ends: Any, into: Any, log: Arguments, cut: tuple[int, int, int]
) -> None:
    """Stage by stage from the end; then the parameters, for which the gradients between the stages are kept.

    ``cut`` has the number of parts of the rows, the rows of each, and the distance of what they give.
    """
    rows_cut = {"rows_each": cut[1], "part_stride": cut[2]}
    values = {i: call.values(i, parts[i]) for i in call.large}
    places = {i: [call.starts[i], *values[i][0]] for i in call.large}
    between = {i: parts[i].new_empty((len(places[i]) - 1, call.rows, call.dims[i])) for i in call.large}
    slopes = {i: [ends[i][0], *between[i].unbind(), ends[i][1]] for i in call.large}
    rest = {"LOG_DET": log["LOG_DET"], "total_stride": log["total_stride"]}
    scalars: dict[tuple[int, int], Tensor] = {}
    for kind, pairs in reversed(schedule(tuple(call.plans[i] for i in call.large))):
        flows = [call.large[i] for i, _ in pairs]
        stages = [stages_of(call.plans[i])[s] for i, (_, s) in zip(flows, pairs, strict=True)]
        gs = [slopes[i][s + 1] for i, (_, s) in zip(flows, pairs, strict=True)]
        of_zs = [slopes[i][s] for i, (_, s) in zip(flows, pairs, strict=True)]
        if kind != "planar":
            nothing = {"totals": tuple(gs), "fresh": (0,) * len(gs), "LOG_DET": False}
            _triangle(
                call,
                flows,
                stages,
                {**_tensors("z", gs), **_tensors("x", of_zs), **nothing},
                kind == "upper",
                True,
            )
            continue
        for i, (_, s), stage in zip(flows, pairs, stages, strict=True):
            scalars[i, s] = gs[0].new_empty((3, stage.size, call.rows))
        tile, shared = _planar_arguments(call, flows, stages, values)
        planar_backward[(-(-call.rows // tile["ROWS"]), len(flows))](
            **_tensors("g", gs), **_tensors("of_z", of_zs), **shared, **rest, totals=_some(log["lines"], flows),
            scalars=tuple(scalars[i, s] for i, (_, s) in zip(flows, pairs, strict=True)), **tile,
        )  # fmt: skip
    every = [(i, s, stage) for i in call.large for s, stage in enumerate(stages_of(call.plans[i]))]
    for some in chunks([one for one in every if one[2].kind == "planar"]):
        flows, stages = [i for i, _, _ in some], [stage for _, _, stage in some]
        _, shared = _planar_arguments(call, flows, stages, values)
        widest, deepest = max(call.dims[i] for i in flows), max(stage.size for stage in stages)
        planar_weights[(-(-widest // 64), cut[0], deepest * len(some))](
            **_tensors("g", [slopes[i][s + 1] for i, s, _ in some]), **_tensors("z", [places[i][s] for i, s, _ in some]),
            **shared, **rows_cut, scalars=tuple(scalars[i, s] for i, s, _ in some), LOG_DET=log["LOG_DET"],
            **{f"of_{name}s": tuple(into[i][name][stage.first :] for i, _, stage in some) for name in "wub"},
            deepest=deepest, ROWS=32 if cut[0] == 1 else 64, COLUMNS=64, num_warps=4,
        )  # fmt: skip
    for some in chunks([one for one in every if one[2].kind == "upper"]):
        flows = [i for i, _, _ in some]
        side = -(-max(call.dims[i] for i in flows) // FACTORS["SIDE"])
        factors_backward[(side * side, cut[0], 2 * len(some))](
            **_tensors("z", [places[i][s] for i, s, _ in some]), **_tensors("g", [slopes[i][s + 2] for i, s, _ in some]),
            middles=tuple(places[i][s + 1] for i, s, _ in some), of_middles=tuple(slopes[i][s + 1] for i, s, _ in some),
            factors=tuple(call.weights[i]["f"][stage.first] for i, _, stage in some),
            of_factors=tuple(into[i]["f"][stage.first] for i, _, stage in some), totals=_some(log["lines"], flows),
            **call.numbers(flows, "dims", "scales", "bounds"), **rest, **rows_cut, rows_in_all=call.rows, side=side,
            COUNT=len(some), PRECISION=call.precision, **FACTORS,
        )  # fmt: skip


def _triangle(
    call: Call, flows: Sequence[int], stages: Sequence[Stage], common: Arguments, upper: bool, back: bool
) -> None:
    widest = max(call.dims[i] for i in flows)
    tile = MANY_ROWS if call.many else FEW_ROWS
    triangle[(-(-widest // tile["COLUMNS"]), -(-call.rows // tile["ROWS"]), len(flows))](
        **common, factors=tuple(call.weights[i]["f"][s.first] for i, s in zip(flows, stages, strict=True)),
        **call.numbers(flows, "dims", "scales", "bounds"), rows_in_all=call.rows, COUNT=len(flows),
        WIDTH=call.width(flows), UPPER=upper, BACKWARD=back, PRECISION=call.precision, **tile,
    )  # fmt: skip


def _planar_arguments(
    call: Call, flows: Sequence[int], stages: Sequence[Stage], values: Any
) -> tuple[Arguments, Arguments]:
    """How many rows a program takes, more where there are programs enough; and what all three kernels of a planar run are given."""
    pairs, width = list(zip(flows, stages, strict=True)), call.width(flows)
    rows = min(max(1, 2048 // width), power(call.rows, 1, 16))
    rows = max(rows, min(8192 // width, power(call.rows // 512, 1, 64)))
    return {"ROWS": rows, "num_warps": 8 if rows * width > 4096 else 4}, {
        "ws": tuple(call.weights[i]["w"][s.first :] for i, s in pairs),
        "us": tuple(call.weights[i]["u"][s.first :] for i, s in pairs),
        "bends": tuple(values[i][1][s.first :] for i, s in pairs),
        "sizes": tuple(stage.size for stage in stages),
        **call.numbers(flows, "dims", "margins"),
        "rows_in_all": call.rows,
        "COUNT": len(flows),
        "WIDTH": width,
    }


def _small_arguments(call: Call, flows: Sequence[int]) -> Arguments:
    bits = [[int(planar) for planar, n in call.plans[i].runs for _ in range(n)] for i in flows]
    width = call.width(flows)
    return {
        **call.numbers(flows, "dims", "scales", "margins", "bounds"),
        "ws": _named(call, flows, "w"),
        "us": _named(call, flows, "u"),
        "factors": _named(call, flows, "f"),
        "codes": tuple(sum(bit << m for m, bit in enumerate(one)) for one in bits),
        "lengths": tuple(len(one) for one in bits),
        "COUNT": len(flows),
        "WIDTH": width,
        "ROWS": SMALL_ROWS,
        "num_warps": SMALL_WARPS * width // 16,
        "PRECISION": "ieee"
        if width == 16
        else "tf32x3",  # plain products of more than that do not fit either
    }


def _named(call: Call, flows: Sequence[int], name: str) -> tuple[Tensor, ...]:
    """The parameter of each flow; where it has none, any tensor, which is not read."""
    return tuple(call.weights[i].get(name, call.starts[i]) for i in flows)


def _some(items: Sequence[Tensor], flows: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(items[i] for i in flows)


def _tensors(name: str, tensors: Sequence[Tensor]) -> Arguments:
    """Matrices and the distances of their rows."""
    return {f"{name}s": tuple(tensors), f"{name}_strides": tuple(tensor.stride(0) for tensor in tensors)}


def _shaped(
    call: Call, weights: Sequence[Tensor], order: Sequence[int], small: Tensor, large: Tensor
) -> list[dict[str, Tensor]]:
    """Each flow's places in the flat tensors of the small flows and of the large ones."""
    found: dict[int, Tensor] = {}
    begin = 0
    for place in order:
        flat, offset = (small, 0) if begin < len(small) else (large, len(small))
        end = begin + weights[place].numel()
        found[place] = flat[begin - offset : end - offset].view(weights[place].shape)
        begin = end
    return by_flow(call.plans, [found[place] for place in range(len(weights))])
