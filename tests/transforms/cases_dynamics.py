"""Cases: residual blocks and flows in continuous time."""

from case import Case

from flowbnn.transforms.compose import Inverse
from flowbnn.transforms.residual import Residual

__all__ = ["CASES"]

CASES: list[Case] = [
    Case("residual", Residual, lambda dim: Residual(dim, hidden=(8, 8))),
    Case("residual-backwards", Inverse, lambda dim: Inverse(Residual(dim, hidden=(8,), lipschitz=0.7))),
]
