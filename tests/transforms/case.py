"""Cases of the contract suite: one ``Case`` for each transform under test.

A ``cases_*.py`` file of this folder holds a list ``CASES``; ``cases.py`` joins the lists and ``test_base.py`` runs
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
        name: Name of the test.
        covers: Public class that the case covers.
        build: Function that makes the transform for vectors of a given length, in float32 and in ``eval()``. Transforms that
            initialize from data have seen data. The suite seeds torch before the call and casts after it.
        dim: Length of the vectors. Maps of numbers (``event_dim`` 0) are tested on one number as an event.
        to_domain: Map from scaled standard normal noise to points where ``forward`` is defined.
        to_range: Map from scaled standard normal noise to points where ``inverse`` is defined.
        quadrature: Dimensions in which the density can be integrated on a grid.
        no_quadrature: Reason why 1 or 2 is missing in ``quadrature``.
        spread: Standard deviation of the noise that is added to every parameter to imitate training.
        zero_gradient_at_start: Fragments of the names of parameters whose first gradient is zero, as before a last layer of zeros.
            After training it must not be zero.
        solver_error: Accuracy in float32 and in float64 of a transform that solves both directions numerically.
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
    zero_gradient_at_start: tuple[str, ...] = ()
    solver_error: tuple[float, float] = (0.0, 0.0)

    def __post_init__(self) -> None:
        if set(self.quadrature) != {1, 2} and not self.no_quadrature:
            raise ValueError(f"{self.name}: no_quadrature must give the reason why 1 or 2 is missing")
