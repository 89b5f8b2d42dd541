"""Targets of several heads as one tensor.

The targets of a batch may be a dictionary or a tuple of tensors. All of the library handles them as one tensor ``[B, K]`` in float64.
Each of its rows begins with a header: a magic number, a checksum of the names (0 for a tuple), and the length of the header. For each
tensor follow a flag for integers, the number of axes, and their sizes. Then the values follow. The tensor thus describes itself, and
can be selected, concatenated and moved like any other.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple
from zlib import crc32

import torch
from torch import Tensor

from flowbnn.errors import check_shape
from flowbnn.options import NonEmpty, check

MAGIC = 7_340_033.0  # first number of packed targets, which float32 represents


class TargetLayout(NamedTuple):
    """Header of packed targets.

    Args:
        checksum: Checksum of the names, or 0 for a tuple.
        integers: True for each tensor of integers.
        shapes: Shape of one row of each tensor.
        start: Index of the first value.
    """

    checksum: int
    integers: tuple[bool, ...]
    shapes: tuple[tuple[int, ...], ...]
    start: int


def checksum_of(names: Sequence[str]) -> int:
    """Returns a checksum of names in any order, which float32 represents."""
    return crc32("\n".join(sorted(names)).encode()) % 2**20 + 1


def pack_targets(targets: Any) -> Tensor:
    """Returns a dictionary or a tuple of tensors as one tensor ``[B, K]``.

    Args:
        targets: Dictionary or tuple of tensors with the examples on the first axis. A dictionary is packed in the order of its names.

    Raises:
        FlowBNNError: If an entry is no tensor, or if the entries differ in length.

    >>> packed = pack_targets({"class": torch.tensor([2, 0]), "value": torch.tensor([[0.5], [1.5]])})
    >>> unpack_targets(packed, read_layout(packed))
    [tensor([2, 0]), tensor([[0.5000],
            [1.5000]], dtype=torch.float64)]
    """
    check("targets", targets, Annotated[Mapping[Any, Tensor] | Sequence[Tensor], NonEmpty()], kind="targets")
    by_name = isinstance(targets, Mapping)
    names = sorted(targets) if by_name else range(len(targets))
    values, rows = [targets[name] for name in names], -1
    layout: list[int] = []
    for value in values:
        check_shape("targets", value, ("examples" if rows < 0 else rows, "..."), kind="targets")
        rows = len(value)
        layout += [not value.is_floating_point(), value.ndim - 1, *value.shape[1:]]
    checksum, device = checksum_of([str(name) for name in names]) if by_name else 0, values[0].device
    header = [MAGIC, checksum, 3 + len(layout), *layout]
    start = torch.tensor(header, dtype=torch.float64, device=device).expand(rows, -1)
    return torch.cat([start, *(value.to(device).double().reshape(rows, -1) for value in values)], 1)


def read_layout(packed: Tensor) -> TargetLayout | None:
    """Returns the layout of packed targets, or None for other tensors."""
    is_candidate = packed.ndim == 2 and packed.shape[1] > 3 and len(packed) and packed.is_floating_point()
    if not is_candidate or packed[0, 0].item() != MAGIC:
        return None
    checksum, start = (int(number) for number in packed[0, 1:3].tolist())
    numbers = [int(number) for number in packed[0, 3:start].tolist()]
    integers, shapes, place = list[bool](), list[tuple[int, ...]](), 0
    while place < len(numbers):
        axes = numbers[place + 1]
        integers.append(bool(numbers[place]))
        shapes.append(tuple(numbers[place + 2 : place + 2 + axes]))
        place += 2 + axes
    return TargetLayout(checksum, tuple(integers), tuple(shapes), start)


def unpack_targets(packed: Tensor, layout: TargetLayout) -> list[Tensor]:
    """Returns the tensors of packed targets. Integers are of type int64.

    Args:
        packed: Packed targets ``[B, K]``.
        layout: Layout of the targets.
    """
    sizes = [int(torch.Size(shape).numel()) for shape in layout.shapes]
    parts = packed[:, layout.start :].split(sizes, 1)
    return [
        (part.long() if integer else part).reshape(len(packed), *shape)
        for part, integer, shape in zip(parts, layout.integers, layout.shapes, strict=True)
    ]
