"""What the flows of a call consist of, and where everything lies. See :mod:`flowbnn.kernels.planar_lu`."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from flowbnn.kernels.planar_lu_numpy import Plan

__all__ = [
    "Call",
    "Stage",
    "by_flow",
    "chunks",
    "flat_order",
    "kept_numbers",
    "power",
    "read",
    "row_parts",
    "schedule",
    "stages_of",
    "write",
]

SLOTS = 16  # flows of one launch at most
SMALL_DIM, SMALL_MAPS = 32, 30  # what one program holds; bits of the code of its maps
# sums over up to FEW rows are made in one go; over more, in at most PARTS parts of at least PART rows or so
FEW, PART, PARTS = 512, 256, 64
COARSE = 256  # rows from which on time goes into products, so that coarse ones are worth it


class Stage(NamedTuple):
    """``"planar"`` (``size`` maps from number ``first`` on), ``"upper"`` or ``"lower"`` (of LU map ``first``)."""

    kind: str
    first: int
    size: int


def write(plans: Sequence[Plan]) -> tuple[list[int], list[float]]:
    """Plans as numbers, which torch's operators can be given: runs of planar maps above zero, of LU maps below, ended by zero."""
    runs, limits = [], []
    for plan in plans:
        runs += [size if planar else -size for planar, size in plan.runs] + [0]
        limits += [plan.margin, plan.bound]
    return runs, limits


@lru_cache(maxsize=256)
def read(runs: tuple[int, ...], limits: tuple[float, ...]) -> tuple[Plan, ...]:
    """The plans of :func:`write`.

    >>> read((2, -3, 0), (0.001, 4.0))
    (Plan(runs=((True, 2), (False, 3)), planar=2, margin=0.001, bound=4.0),)
    """
    plans: list[Plan] = []
    some: list[tuple[bool, int]] = []
    for size in runs:
        if size:
            some.append((size > 0, abs(size)))
            continue
        margin, bound = limits[2 * len(plans) : 2 * len(plans) + 2]
        plans.append(Plan(tuple(some), sum(n for planar, n in some if planar), margin, bound))
        some = []
    return tuple(plans)


def maps_of(plan: Plan) -> int:
    return sum(n for _, n in plan.runs)


def is_small(plan: Plan, dim: int) -> bool:
    return dim <= SMALL_DIM and maps_of(plan) <= SMALL_MAPS


@lru_cache(maxsize=256)
def stages_of(plan: Plan) -> tuple[Stage, ...]:
    stages, planar, linear = [], 0, 0
    for is_planar, n in plan.runs:
        if is_planar:
            stages.append(Stage("planar", planar, n))
            planar += n
            continue
        for index in range(linear, linear + n):
            stages += [Stage("upper", index, 1), Stage("lower", index, 1)]
        linear += n
    return tuple(stages)


@lru_cache(maxsize=256)
def schedule(plans: tuple[Plan, ...]) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    """Launches as a kind and the (flow, stage) pairs in it; always the kind that most flows wait for."""
    waiting = [0] * len(plans)
    launches: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    while True:
        now = {
            kind: [
                (flow, stage)
                for flow, stage in enumerate(waiting)
                if stage < len(stages_of(plans[flow])) and stages_of(plans[flow])[stage].kind == kind
            ]
            for kind in ("planar", "upper", "lower")
        }
        kind = max(now, key=lambda kind: len(now[kind]))
        if not now[kind]:
            return tuple(launches)
        for some in chunks(now[kind]):
            launches.append((kind, tuple(some)))
        for flow, _ in now[kind]:
            waiting[flow] += 1


def chunks(items: Sequence[Any]) -> Iterator[Any]:
    for start in range(0, len(items), SLOTS):
        yield items[start : start + SLOTS]


def power(number: int, least: int, most: int) -> int:
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


def kept_numbers(plans: Sequence[Plan], dims: Sequence[int]) -> list[int]:
    """How many numbers a row each flow leaves for the way back."""
    return [
        2 * maps_of(plan) * dim if is_small(plan, dim) else (len(stages_of(plan)) - 1) * dim + plan.planar
        for plan, dim in zip(plans, dims, strict=True)
    ]


class Call:
    """The tensors and numbers of one call, flow by flow."""

    def __init__(
        self, plans: tuple[Plan, ...], starts: Sequence[Tensor], weights: Sequence[Tensor], coarse: bool
    ) -> None:
        self.plans, self.starts = plans, starts
        self.rows, self.dims = starts[0].shape[0], [start.shape[1] for start in starts]
        self.small = [i for i, plan in enumerate(self.plans) if is_small(plan, self.dims[i])]
        self.large = [i for i, plan in enumerate(self.plans) if not is_small(plan, self.dims[i])]
        self.weights = by_flow(self.plans, weights)
        self.many = row_parts(self.rows)[0] > 1
        # of a float32's accuracy, or of TF32's, where time goes into products and nobody sees more
        self.precision = "tf32" if coarse and self.rows >= COARSE else "tf32x3"

    def parts(self, kept: Tensor) -> list[Tensor]:
        numbers = [n * self.rows for n in kept_numbers(self.plans, self.dims)]
        return list(kept.split(numbers))

    def values(self, flow: int, part: Tensor) -> tuple[list[Tensor], Tensor]:
        """What a large flow keeps: the values between its stages, and the bends of its planar maps."""
        between, dim = len(stages_of(self.plans[flow])) - 1, self.dims[flow]
        cut = between * dim * self.rows
        bends = part[cut:].view(self.plans[flow].planar, self.rows)
        return list(part[:cut].view(between, self.rows, dim).unbind()), bends

    def passing(self, flow: int, like: Tensor) -> tuple[list[Tensor], Tensor]:
        """The same where nothing need be kept: two places in turn."""
        places = like.new_empty((2, self.rows, self.dims[flow])).unbind()
        between = len(stages_of(self.plans[flow])) - 1
        bends = like.new_empty((self.plans[flow].planar, self.rows))
        return [places[i % 2] for i in range(between)], bends

    def numbers(self, flows: Sequence[int], *names: str) -> dict[str, Any]:
        """The named ones of ``dims``, ``scales``, ``margins`` and ``bounds``, flow by flow."""
        found = {
            "dims": self.dims,
            "scales": [dim**-0.5 for dim in self.dims],
            "margins": [plan.margin for plan in self.plans],
            "bounds": [plan.bound for plan in self.plans],
        }
        return {name: tuple(found[name][i] for i in flows) for name in names}

    def width(self, flows: Sequence[int]) -> int:
        return power(max(self.dims[i] for i in flows), 16, 1024)


def by_flow(plans: Sequence[Plan], tensors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    given = iter(tensors)
    found = []
    for plan in plans:
        names = ["w", "u", "b"] * bool(plan.planar) + ["f"] * (maps_of(plan) > plan.planar)
        found.append({name: next(given) for name in names})
    return found


def flat_order(plans: Sequence[Plan], dims: Sequence[int]) -> list[int]:
    """The order of the parameters in the one tensor of their gradients: those of small flows first."""
    number = 0
    small: list[int] = []
    large: list[int] = []
    for plan, dim in zip(plans, dims, strict=True):
        count = 3 * bool(plan.planar) + (maps_of(plan) > plan.planar)
        (small if is_small(plan, dim) else large).extend(range(number, number + count))
        number += count
    return small + large
