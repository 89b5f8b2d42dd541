"""Groups of chains as the launches of the Triton kernels see them: their stages, and the memory of their values and parameters."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torch import Tensor

from flowbnn.kernels.reference import ChainShape

Arguments = dict[str, Any]


class Stage(NamedTuple):
    """Stage of a chain.

    Args:
        kind: ``"planar"`` for a run of planar maps, ``"upper"`` or ``"lower"`` for a factor of an LU map.
        first: Index of the first planar map, or of the LU map.
        size: Number of planar maps, or 1.
    """

    kind: str
    first: int
    size: int


@lru_cache(maxsize=256)
def stages_of(shape: ChainShape) -> tuple[Stage, ...]:
    """Returns the stages of a chain."""
    stages, planar, linear = [], 0, 0
    for is_planar, size in shape.runs:
        if is_planar:
            stages.append(Stage("planar", planar, size))
            planar += size
            continue
        for index in range(linear, linear + size):
            stages += [Stage("upper", index, 1), Stage("lower", index, 1)]
        linear += size
    return tuple(stages)


@lru_cache(maxsize=256)
def schedule(shapes: tuple[ChainShape, ...]) -> tuple[tuple[str, tuple[tuple[int, int], ...]], ...]:
    """Returns the launches of some chains, each as a kind and (chain, stage) pairs.

    The next launch is always of the kind that most chains wait for.
    """
    next_stage = [0] * len(shapes)
    launches: list[tuple[str, tuple[tuple[int, int], ...]]] = []
    while True:
        pending: dict[str, list[tuple[int, int]]] = {"planar": [], "upper": [], "lower": []}
        for chain, stage in enumerate(next_stage):
            if stage < len(stages_of(shapes[chain])):
                pending[stages_of(shapes[chain])[stage].kind].append((chain, stage))
        kind = max(pending, key=lambda kind: len(pending[kind]))
        if not pending[kind]:
            return tuple(launches)
        launches += [(kind, tuple(pairs)) for pairs in chunks(pending[kind])]
        for chain, _ in pending[kind]:
            next_stage[chain] += 1


def is_small(shape: ChainShape) -> bool:
    """Returns True if one program can hold a row of the chain."""
    # A program holds 32 numbers of its rows in registers, and 30 bits for the kinds of its maps.
    return shape.dim <= 32 and shape.planar + shape.linear <= 30


def saved_size(shape: ChainShape) -> int:
    """Returns the count of numbers that a chain saves for the backward pass of each row."""
    if is_small(shape):
        return 2 * (shape.planar + shape.linear) * shape.dim
    return (len(stages_of(shape)) - 1) * shape.dim + shape.planar


def weight_names(shape: ChainShape) -> list[str]:
    """Returns the names of the parameters of a chain."""
    return ["w", "u", "b"] * (shape.planar > 0) + ["f"] * (shape.linear > 0)


def by_chain(shapes: Sequence[ChainShape], tensors: Sequence[Tensor]) -> list[dict[str, Tensor]]:
    """Returns the parameters of each chain by name."""
    iterator = iter(tensors)
    return [{name: next(iterator) for name in weight_names(shape)} for shape in shapes]


def flat_order(shapes: Sequence[ChainShape]) -> list[int]:
    """Returns the order of the parameters in the tensor of all gradients: those of small chains come first."""
    number = 0
    small: list[int] = []
    large: list[int] = []
    for shape in shapes:
        count = len(weight_names(shape))
        (small if is_small(shape) else large).extend(range(number, number + count))
        number += count
    return small + large


def chunks(items: Sequence[Any], size: int = 16) -> Iterator[Any]:
    """Yields the items of one launch after the other.

    Args:
        items: The items.
        size: Largest number of items of a launch, because every program searches for its own item.
    """
    for start in range(0, len(items), size):
        yield items[start : start + size]


def next_power_of_two(number: int, minimum: int, maximum: int) -> int:
    """Returns the next power of two, clamped to bounds."""
    return max(minimum, min(maximum, 1 << (number - 1).bit_length()))


@dataclass(eq=False)
class GroupTask:
    """One group of a call: its chains, vectors and weights.

    Args:
        shapes: Structures of the chains.
        vectors: Vectors ``[rows, numbers]``.
        all_weights: Parameters of all chains.
        weight_slice: Position of these parameters among those of the call.
        log_det: If True, log-determinants are computed.
        allow_tf32: If True, allows products in TF32.
    """

    shapes: tuple[ChainShape, ...]
    vectors: Tensor  # [rows, numbers]
    all_weights: Sequence[Tensor]
    weight_slice: slice  # position of these weights among those of the call
    log_det: bool
    allow_tf32: bool

    def __post_init__(self) -> None:
        self.rows, self.dims = self.vectors.shape[0], [shape.dim for shape in self.shapes]
        self.small = [i for i, shape in enumerate(self.shapes) if is_small(shape)]
        self.large = [i for i, shape in enumerate(self.shapes) if not is_small(shape)]
        self.weights = by_chain(self.shapes, self.all_weights)

    @cached_property
    def columns(self) -> Sequence[Tensor]:
        """Vectors of each chain."""
        return self.vectors.split(self.dims, -1)

    @property
    def precision(self) -> str:
        """Precision of matrix products: three passes of TF32, or one if that is allowed and there are many rows."""
        # Below 256 rows products take little of the time.
        return "tf32" if self.allow_tf32 and self.rows >= 256 else "tf32x3"

    def outputs(self, save: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns memory for the values, the log-determinants, and what the backward pass needs."""
        empty = self.vectors.new_empty
        saved = self.rows * sum(map(saved_size, self.shapes)) if save else 0
        log_det_rows = (len(self.dims), self.rows) if self.log_det else (0,)
        return empty((self.rows, sum(self.dims))), empty(log_det_rows), empty(saved)

    def saved_chunks(self, saved: Tensor) -> list[Tensor]:
        """Splits saved memory into that of each chain."""
        return list(saved.split([saved_size(shape) * self.rows for shape in self.shapes]))

    def values(self, chain: int, saved_chunk: Tensor) -> tuple[list[Tensor], Tensor]:
        """Returns what a large chain saves: the values between its stages, and the activations of its planar maps."""
        shape = self.shapes[chain]
        between = len(stages_of(shape)) - 1
        size = between * shape.dim * self.rows
        activations = saved_chunk[size:].view(shape.planar, self.rows)
        return list(saved_chunk[:size].view(between, self.rows, shape.dim).unbind()), activations

    def scratch_values(self, chain: int) -> tuple[list[Tensor], Tensor]:
        """Returns the same as :meth:`values` if nothing is saved, with two buffers in turn."""
        shape, empty = self.shapes[chain], self.vectors.new_empty
        places = empty((2, self.rows, shape.dim)).unbind()
        between = len(stages_of(shape)) - 1
        return [places[i % 2] for i in range(between)], empty((shape.planar, self.rows))

    def chain_numbers(self, chains: Sequence[int], *names: str) -> Arguments:
        """Returns ``dims``, ``scales``, ``margins`` or ``bounds`` of some chains, by name."""
        columns = {
            "dims": self.dims,
            "scales": [dim**-0.5 for dim in self.dims],
            "margins": [shape.margin for shape in self.shapes],
            "bounds": [shape.bound for shape in self.shapes],
        }
        return {name: tuple(columns[name][i] for i in chains) for name in names}

    def width(self, chains: Sequence[int]) -> int:
        """Returns the padded length of the longest row of some chains."""
        return next_power_of_two(max(self.dims[i] for i in chains), 16, 1024)

    def chain_weights(self, chains: Sequence[int], name: str) -> tuple[Tensor, ...]:
        """Returns one parameter of each chain. If a chain lacks it, another tensor takes its place and is not read."""
        return tuple(self.weights[i].get(name, self.vectors) for i in chains)
