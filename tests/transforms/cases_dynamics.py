"""Cases: residual blocks and continuous-time flows."""

from case import Case

from flowbnn.transforms.continuous import NeuralODE
from flowbnn.transforms.residual import Residual

__all__ = ["CASES"]

CASES: list[Case] = [
    Case(
        "neural-ode",
        NeuralODE,
        lambda dim: NeuralODE(dim, hidden=(4,), rtol=1e-10, atol=1e-10),
        dim=2,
        spread=0.1,
        solver_error=(1e-4, 1e-8),
        quadrature=(1,),
        no_quadrature="covered by test_continuous.py with a lower accuracy, because of the many points",
    ),
    Case("residual", Residual, lambda dim: Residual(dim, hidden=(8, 8))),
]
