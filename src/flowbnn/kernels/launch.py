"""What is launched for the chains of a call, see :mod:`flowbnn.kernels.gpu`.

A chain on at most 32 numbers is one launch. The others go stage by stage, a stage being a run of planar maps or one triangular factor:
all chains whose next stage is of one kind take it in one launch. Gradients to the parameters of all stages come at the end, in one
launch for the planar maps and one for the LU maps. They are sums over rows: many rows are cut into parts with programs of their own,
and one more launch adds up the partial sums, always in the same order.

Kept for the backward pass are, of a chain on at most 32 numbers, the input of each map and the middle of each LU map; of the others the
values between the stages and the activations of the planar maps. The backward pass itself takes as much again until it is done.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.kernels.reference import ChainShape

Arguments = dict[str, Any]

SLOTS = 16  # chains of one launch at most
SMALL_DIM, SMALL_MAPS = 32, 30  # what one program holds; bits of the code of its maps
SMALL_ROWS, SMALL_WARPS = 16, 4  # of a program on 16 numbers: more rows do not fit into its registers
# sums over up to FEW rows are made in one go; over more, in at most PARTS parts of at least PART rows or so
FEW, PART, PARTS = 512, 256, 64
COARSE = 256  # rows from which on time goes into products, so that allow_tf32 ones are worth it
# tiles: for few rows many small ones, which are there sooner; for many large ones, which read less
FEW_ROWS: Arguments = {"ROWS": 16, "COLUMNS": 32, "DEPTH": 32, "BLOCKS": 2, "num_warps": 4, "num_stages": 3}
MANY_ROWS: Arguments = {"ROWS": 64, "COLUMNS": 64, "DEPTH": 32, "BLOCKS": 1, "num_warps": 4, "num_stages": 3}
FACTORS: Arguments = {"SIDE": 64, "DEPTH": 32, "num_warps": 4, "num_stages": 3}


class Stage(NamedTuple):
    """``"planar"`` (``size`` maps from number ``first`` on), ``"upper"`` or ``"lower"`` (of LU map ``first``)."""

    kind: str
    first: int
    size: int


@lru_cache(maxsize=256)
def stages_of(plan: ChainShape) -> tuple[Stage, ...]:
    stages, planar, linear = [], 0, 0
    for is_planar, size in plan.runs:
        if is_planar:
            stages.append(Stage("planar", planar, size))
            planar += size
            continue
        for index in range(linear, linear + size):
            stages += [Stage("upper", index, 1), Stage("lower", index, 1)]
        linear += size
    return tuple(stages)


@lru_cache(maxsize=256)
def schedule(plans: tuple[ChainShape, ...]) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    """Launches as a kind and the (chain, stage) pairs in it; always the kind that most chains wait for."""
    waiting = [0] * len(plans)
    launches: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    while True:
        ready: dict[str, list[tuple[int, int]]] = {"planar": [], "upper": [], "lower": []}
        for chain, stage in enumerate(waiting):
            if stage < len(stages_of(plans[chain])):
                ready[stages_of(plans[chain])[stage].kind].append((chain, stage))
        kind = max(ready, key=lambda kind: len(ready[kind]))
        if not ready[kind]:
            return tuple(launches)
        launches += [(kind, tuple(pairs)) for pairs in chunks(ready[kind])]
        for chain, _ in ready[kind]:
            waiting[chain] += 1


def is_small(plan: ChainShape) -> bool:
    return plan.dim <= SMALL_DIM and plan.planar + plan.linear <= SMALL_MAPS


def kept_numbers(plan: ChainShape) -> int:
    """How many numbers a row a chain keeps for the backward pass."""
    if is_small(plan):
        return 2 * (plan.planar + plan.linear) * plan.dim
    return (len(stages_of(plan)) - 1) * plan.dim + plan.planar


def weight_names(plan: ChainShape) -> list[str]:
    return ["w", "u", "b"] * (plan.planar > 0) + ["f"] * (plan.linear > 0)


def by_chain(plans: Sequence[ChainShape], tensors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    given = iter(tensors)
    return [{name: next(given) for name in weight_names(plan)} for plan in plans]


def flat_order(plans: Sequence[ChainShape]) -> list[int]:
    """The order of the parameters in the one tensor of their gradients: those of small chains first."""
    number = 0
    small: list[int] = []
    large: list[int] = []
    for plan in plans:
        count = len(weight_names(plan))
        (small if is_small(plan) else large).extend(range(number, number + count))
        number += count
    return small + large


def chunks(items: Sequence[Any]) -> Iterator[Any]:
    for start in range(0, len(items), SLOTS):
        yield items[start : start + SLOTS]


def power(number: int, least: int, most: int) -> int:
    """The next power of two, within bounds."""
    return max(least, min(most, 1 << (number - 1).bit_length()))


def row_parts(rows: int) -> tuple[int, int]:
    """In how many parts sums over rows are made, and the rows of each: programs for all of a GPU, and always the same ones.

    >>> row_parts(512), row_parts(513), row_parts(32768)
    ((1, 512), (3, 192), (64, 512))
    """
    if rows <= FEW:
        return 1, rows
    each = -(-rows // min(PARTS, -(-rows // PART)))
    each = -(-each // 64) * 64
    return -(-rows // each), each


@dataclass(eq=False)
class Part:
    """One group of a call: its chains, starts and weights."""

    plans: tuple[ChainShape, ...]
    starts: Tensor  # [rows, numbers]
    all_weights: Sequence[Tensor]
    places: slice  # where these lie among the weights of the call
    log_det: bool
    allow_tf32: bool

    def __post_init__(self) -> None:
        self.rows, self.dims = self.starts.shape[0], [plan.dim for plan in self.plans]
        self.small = [i for i, plan in enumerate(self.plans) if is_small(plan)]
        self.large = [i for i, plan in enumerate(self.plans) if not is_small(plan)]
        self.weights = by_chain(self.plans, self.all_weights)

    @cached_property
    def columns(self) -> Sequence[Tensor]:
        """The starts of each chain."""
        return self.starts.split(self.dims, -1)

    @property
    def precision(self) -> str:
        """Products of a float32's accuracy, or of TF32's, where time goes into them and nobody sees more."""
        return "tf32" if self.allow_tf32 and self.rows >= COARSE else "tf32x3"

    def outputs(self, keep: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Memory for the values, the log-dets and what is kept for the backward pass."""
        empty = self.starts.new_empty
        kept = self.rows * sum(map(kept_numbers, self.plans)) if keep else 0
        lines = (len(self.dims), self.rows) if self.log_det else (0,)
        return empty((self.rows, sum(self.dims))), empty(lines), empty(kept)

    def pieces(self, kept: Tensor) -> list[Tensor]:
        """What each chain keeps."""
        return list(kept.split([kept_numbers(plan) * self.rows for plan in self.plans]))

    def values(self, chain: int, piece: Tensor) -> tuple[list[Tensor], Tensor]:
        """What a large chain keeps: the values between its stages, and the activations of its planar maps."""
        plan = self.plans[chain]
        between = len(stages_of(plan)) - 1
        cut = between * plan.dim * self.rows
        bends = piece[cut:].view(plan.planar, self.rows)
        return list(piece[:cut].view(between, self.rows, plan.dim).unbind()), bends

    def passing(self, chain: int) -> tuple[list[Tensor], Tensor]:
        """The same where nothing need be kept: two places in turn."""
        plan, empty = self.plans[chain], self.starts.new_empty
        places = empty((2, self.rows, plan.dim)).unbind()
        between = len(stages_of(plan)) - 1
        return [places[i % 2] for i in range(between)], empty((plan.planar, self.rows))

    def numbers(self, chains: Sequence[int], *names: str) -> Arguments:
        """The named ones of ``dims``, ``scales``, ``margins`` and ``bounds``, chain by chain."""
        columns = {
            "dims": self.dims,
            "scales": [dim**-0.5 for dim in self.dims],
            "margins": [plan.margin for plan in self.plans],
            "bounds": [plan.bound for plan in self.plans],
        }
        return {name: tuple(columns[name][i] for i in chains) for name in names}

    def width(self, chains: Sequence[int]) -> int:
        return power(max(self.dims[i] for i in chains), 16, 1024)

    def named(self, chains: Sequence[int], name: str) -> tuple[Tensor, ...]:
        """The parameter of each chain; where it has none, any tensor, which is not read."""
        return tuple(self.weights[i].get(name, self.starts) for i in chains)


def forward(part: Part, keep: bool, x: Tensor, totals: Tensor, kept: Tensor) -> None:
    """Fill ``x`` ``[rows, numbers]``, ``totals`` ``[chains, rows]`` and, if ``keep``, ``kept`` with what :func:`backward` needs."""
    # with the first launch: importing Triton takes its time
    from flowbnn.kernels import triton_kernels, triton_small

    count = len(part.plans)
    ends = x.split(part.dims, -1)
    lines = totals.unbind() if part.log_det else [x] * count
    pieces = part.pieces(kept) if keep else [x] * count
    for chains in chunks(part.small):
        triton_small.small_forward[(-(-part.rows // SMALL_ROWS), len(chains))](
            **_matrices("z", _some(part.columns, chains)), **_matrices("x", _some(ends, chains)),
            **_small_arguments(part, chains), bs=part.named(chains, "b"),
            kept=_some(pieces, chains), totals=_some(lines, chains), rows_in_all=part.rows,
            LOG_DET=part.log_det, KEEP=keep,
        )  # fmt: skip
    values = {i: part.values(i, pieces[i]) if keep else part.passing(i) for i in part.large}
    places = {i: [part.columns[i], *values[i][0], ends[i]] for i in part.large}
    for kind, pairs in schedule(tuple(part.plans[i] for i in part.large)):
        chains = [part.large[i] for i, _ in pairs]
        steps = [(i, s) for i, (_, s) in zip(chains, pairs, strict=True)]
        stages = [stages_of(part.plans[i])[s] for i, s in steps]
        common = {
            **_matrices("z", [places[i][s] for i, s in steps]), **_matrices("x", [places[i][s + 1] for i, s in steps]),
            "totals": _some(lines, chains), "fresh": tuple(int(s == 0) for _, s in steps), "LOG_DET": part.log_det,
        }  # fmt: skip
        if kind == "planar":
            tile, shared = _planar_arguments(part, chains, stages, values)
            biases = tuple(part.weights[i]["b"][s.first :] for i, s in zip(chains, stages, strict=True))
            grid = (-(-part.rows // tile["ROWS"]), len(chains))
            triton_kernels.planar_forward[grid](**common, **shared, bs=biases, **tile)
        else:
            _triangle(part, chains, stages, common, kind == "upper", False)


def backward(
    part: Part, kept: Tensor, of_x: Tensor, of_totals: Tensor | None, of_starts: Tensor, of_weights: Tensor
) -> None:
    """Fill the gradients to the starts ``[rows, numbers]`` and to all parameters, end to end in the order of :func:`flat_order`."""
    from flowbnn.kernels import triton_small

    of_x = of_x if of_x.stride(1) == 1 else of_x.contiguous()
    gs, of_zs = of_x.split(part.dims, -1), of_starts.split(part.dims, -1)
    log_det = of_totals is not None
    lines = [of_x] * len(part.plans) if of_totals is None else of_totals.unbind()
    stride = 0 if of_totals is None else of_totals.stride(1)
    pieces = part.pieces(kept)
    # sums over rows, part by part of the rows; then those of the parts
    copies, (parts_of_rows, each) = -(-part.rows // SMALL_ROWS), row_parts(part.rows)
    length = sum(weight.numel() for i in part.small for weight in part.weights[i].values())
    sums = [
        flat[None] if number == 1 else flat.new_empty(number, len(flat))
        for flat, number in ((of_weights[:length], copies), (of_weights[length:], parts_of_rows))
    ]
    into = _shaped(part, sums[0][0], sums[1][0])
    if part.small:
        for chains in chunks(part.small):
            triton_small.small_backward[(copies, len(chains))](
                **_matrices("g", _some(gs, chains)), **_matrices("of_z", _some(of_zs, chains)),
                **_small_arguments(part, chains), kept=_some(pieces, chains), totals=_some(lines, chains),
                **{f"of_{name}s": tuple(into[i].get(name, of_x) for i in chains) for name in "wub"},
                of_factors=tuple(into[i].get("f", of_x) for i in chains),
                planars=tuple(part.plans[i].planar for i in chains),
                rows_in_all=part.rows, total_stride=stride, part_stride=length,
                LOG_DET=log_det,
            )  # fmt: skip
        if copies > 1:
            torch.sum(sums[0], 0, out=of_weights[:length])
    if part.large:
        ends = {i: (of_zs[i], gs[i]) for i in part.large}
        log = {"lines": lines, "total_stride": stride, "LOG_DET": log_det}
        _large_backward(part, pieces, ends, into, log, (parts_of_rows, each, len(of_weights) - length))
        if parts_of_rows > 1:
            torch.sum(sums[1], 0, out=of_weights[length:])


def _large_backward(
    part: Part, pieces: Any, ends: Any, into: Any, log: Arguments, cut: tuple[int, int, int]
) -> None:
    """Stage by stage from the end; then the parameters, for which the gradients between the stages are kept.

    ``cut`` has the number of parts of the rows, the rows of each, and the distance of their sums in memory.
    """
    from flowbnn.kernels import triton_kernels

    rows_cut = {"rows_each": cut[1], "part_stride": cut[2]}
    values = {i: part.values(i, pieces[i]) for i in part.large}
    places = {i: [part.columns[i], *values[i][0]] for i in part.large}
    between = {i: pieces[i].new_empty((len(places[i]) - 1, part.rows, part.dims[i])) for i in part.large}
    slopes = {i: [ends[i][0], *between[i].unbind(), ends[i][1]] for i in part.large}
    rest = {"LOG_DET": log["LOG_DET"], "total_stride": log["total_stride"]}
    scalars: dict[tuple[int, int], Tensor] = {}
    for kind, pairs in reversed(schedule(tuple(part.plans[i] for i in part.large))):
        chains = [part.large[i] for i, _ in pairs]
        steps = [(i, s) for i, (_, s) in zip(chains, pairs, strict=True)]
        stages = [stages_of(part.plans[i])[s] for i, s in steps]
        gs, of_zs = [slopes[i][s + 1] for i, s in steps], [slopes[i][s] for i, s in steps]
        if kind != "planar":
            common = {
                **_matrices("z", gs), **_matrices("x", of_zs),
                "totals": tuple(gs), "fresh": (0,) * len(gs), "LOG_DET": False,
            }  # fmt: skip
            _triangle(part, chains, stages, common, kind == "upper", True)
            continue
        for step, stage in zip(steps, stages, strict=True):
            scalars[step] = gs[0].new_empty((3, stage.size, part.rows))
        tile, shared = _planar_arguments(part, chains, stages, values)
        triton_kernels.planar_backward[(-(-part.rows // tile["ROWS"]), len(chains))](
            **_matrices("g", gs), **_matrices("of_z", of_zs), **shared, **rest, totals=_some(log["lines"], chains),
            scalars=tuple(scalars[step] for step in steps), **tile,
        )  # fmt: skip
    every = [(i, s, stage) for i in part.large for s, stage in enumerate(stages_of(part.plans[i]))]
    for some in chunks([one for one in every if one[2].kind == "planar"]):
        chains, stages = [i for i, _, _ in some], [stage for _, _, stage in some]
        _, shared = _planar_arguments(part, chains, stages, values)
        widest, deepest = max(part.dims[i] for i in chains), max(stage.size for stage in stages)
        triton_kernels.planar_weights[(-(-widest // 64), cut[0], deepest * len(some))](
            **_matrices("g", [slopes[i][s + 1] for i, s, _ in some]), **_matrices("z", [places[i][s] for i, s, _ in some]),
            **shared, **rows_cut, scalars=tuple(scalars[i, s] for i, s, _ in some), LOG_DET=log["LOG_DET"],
            **{f"of_{name}s": tuple(into[i][name][stage.first :] for i, _, stage in some) for name in "wub"},
            deepest=deepest, ROWS=32 if cut[0] == 1 else 64, COLUMNS=64, num_warps=4,
        )  # fmt: skip
    for some in chunks([one for one in every if one[2].kind == "upper"]):
        chains = [i for i, _, _ in some]
        side = -(-max(part.dims[i] for i in chains) // FACTORS["SIDE"])
        triton_kernels.factors_backward[(side * side, cut[0], 2 * len(some))](
            **_matrices("z", [places[i][s] for i, s, _ in some]), **_matrices("g", [slopes[i][s + 2] for i, s, _ in some]),
            middles=tuple(places[i][s + 1] for i, s, _ in some), of_middles=tuple(slopes[i][s + 1] for i, s, _ in some),
            factors=tuple(part.weights[i]["f"][stage.first] for i, _, stage in some),
            of_factors=tuple(into[i]["f"][stage.first] for i, _, stage in some), totals=_some(log["lines"], chains),
            **part.numbers(chains, "dims", "scales", "bounds"), **rest, **rows_cut, rows_in_all=part.rows, side=side,
            COUNT=len(some), PRECISION=part.precision, **FACTORS,
        )  # fmt: skip


def _triangle(
    part: Part, chains: Sequence[int], stages: Sequence[Stage], common: Arguments, upper: bool, back: bool
) -> None:
    from flowbnn.kernels import triton_kernels

    widest = max(part.dims[i] for i in chains)
    tile = MANY_ROWS if row_parts(part.rows)[0] > 1 else FEW_ROWS
    triton_kernels.triangle[(-(-widest // tile["COLUMNS"]), -(-part.rows // tile["ROWS"]), len(chains))](
        **common, factors=tuple(part.weights[i]["f"][s.first] for i, s in zip(chains, stages, strict=True)),
        **part.numbers(chains, "dims", "scales", "bounds"), rows_in_all=part.rows, COUNT=len(chains),
        WIDTH=part.width(chains), UPPER=upper, BACKWARD=back, PRECISION=part.precision, **tile,
    )  # fmt: skip


def _planar_arguments(
    part: Part, chains: Sequence[int], stages: Sequence[Stage], values: Any
) -> tuple[Arguments, Arguments]:
    """How many rows a program takes, more where there are programs enough; and what all three kernels of a planar run are given."""
    pairs, width = list(zip(chains, stages, strict=True)), part.width(chains)
    rows = min(max(1, 2048 // width), power(part.rows, 1, 16))
    rows = max(rows, min(8192 // width, power(part.rows // 512, 1, 64)))
    return {"ROWS": rows, "num_warps": 8 if rows * width > 4096 else 4}, {
        "ws": tuple(part.weights[i]["w"][s.first :] for i, s in pairs),
        "us": tuple(part.weights[i]["u"][s.first :] for i, s in pairs),
        "bends": tuple(values[i][1][s.first :] for i, s in pairs),
        "sizes": tuple(stage.size for stage in stages),
        **part.numbers(chains, "dims", "margins"),
        "rows_in_all": part.rows,
        "COUNT": len(chains),
        "WIDTH": width,
    }


def _small_arguments(part: Part, chains: Sequence[int]) -> Arguments:
    bits = [[int(planar) for planar, n in part.plans[i].runs for _ in range(n)] for i in chains]
    width = part.width(chains)
    return {
        **part.numbers(chains, "dims", "scales", "margins", "bounds"),
        "ws": part.named(chains, "w"),
        "us": part.named(chains, "u"),
        "factors": part.named(chains, "f"),
        "codes": tuple(sum(bit << m for m, bit in enumerate(one)) for one in bits),
        "lengths": tuple(len(one) for one in bits),
        "COUNT": len(chains),
        "WIDTH": width,
        "ROWS": SMALL_ROWS,
        "num_warps": SMALL_WARPS * width // 16,
        # plain float32 products of wider ones do not fit into the registers either
        "PRECISION": "ieee" if width == 16 else "tf32x3",
    }


def _some(items: Sequence[Tensor], chains: Sequence[int]) -> tuple[Tensor, ...]:
    return tuple(items[i] for i in chains)


def _matrices(name: str, tensors: Sequence[Tensor]) -> Arguments:
    """Matrices and the distances of their rows."""
    return {f"{name}s": tuple(tensors), f"{name}_strides": tuple(tensor.stride(0) for tensor in tensors)}


def _shaped(part: Part, small: Tensor, large: Tensor) -> list[dict[str, Tensor]]:
    """Each chain's places in the flat tensors of the small chains and of the large ones."""
    weights, begin = part.all_weights, 0
    shaped: dict[int, Tensor] = {}
    for place in flat_order(part.plans):
        flat, offset = (small, 0) if begin < len(small) else (large, len(small))
        end = begin + weights[place].numel()
        shaped[place] = flat[begin - offset : end - offset].view(weights[place].shape)
        begin = end
    return by_chain(part.plans, [shaped[place] for place in range(len(weights))])
