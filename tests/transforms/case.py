"""What the contract suite needs to know of a transform: one ``Case`` each.

A ``cases_*.py`` file of this folder holds a list ``CASES``; ``cases.py`` joins the lists and ``test_contract.py`` runs
every check of the contract over every case. Every public class of ``flowbnn.transforms`` needs at least one.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from flowbnn.transforms.base import Transform

__all__ = ["Case", "same"]


def same(value: Tensor) -> Tensor:
    return value


@dataclass(frozen=True)
class Case:
    """A transform under test.

    Args:
        name: the test's id.
        covers: the public class this case stands for.
        build: makes the transform for vectors of a given length, in float32, ready for use: whatever starts from
            data has seen data, and the module is in ``eval()``. The suite seeds torch before the call and casts after.
        dim: length of the vectors (maps of numbers, ``event_dim`` 0, are tried on one number as an event).
        to_domain: carries standard normal noise, scaled by 1, 10 or 100, to points where ``forward`` is defined.
        to_range: the same for points where ``inverse`` is defined.
        quadrature: the dimensions in which the density can be integrated on a grid ...
        no_quadrature: ... and why 1 or 2 is missing from it.
        spread: standard deviation of the noise added to every parameter to imitate training.
        wakes_later: parts of the names of parameters that get no gradient at the start, as those behind a last layer
            of zeros; after training they must get one.
        solver_error: accuracy, in float32 and in float64, of a transform whose directions are both found by a solver.
    """

    name: str
    covers: type[Transform]
    build: Callable[[int], Transform]
    dim: int = 3
    to_domain: Callable[[Tensor], Tensor] = same
    to_range: Callable[[Tensor], Tensor] = same
    quadrature: tuple[int, ...] = (1, 2)
    no_quadrature: str = ""
    spread: float = 0.5
    wakes_later: tuple[str, ...] = ()
    solver_error: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if set(self.quadrature) != {1, 2} and not self.no_quadrature:
            raise ValueError(f"{self.name}: say in no_quadrature why not both 1-d and 2-d integrate")
