"""Cases: couplings and autoregressive transforms with each univariate map."""

import torch
from case import Case, same
from torch import Tensor

from flowbnn.transforms import (
    AffineMap,
    Amortized,
    Autoregressive,
    CircularSplineMap,
    Coupling,
    Householder,
    Inverse,
    LogisticMixtureMap,
    Radial,
    SigmoidalMap,
    SplineMap,
)

__all__ = ["CASES"]

COUPLED = "a coupling needs at least 2 dimensions"
HIDDEN = ("layers.0.", "layers.2.")
SPLINE = SplineMap(bins=4, bound=4.0)
# At 0.5 the slopes of a spline reach e^20, where float32 round trips fail.
SPREAD = 0.15


class AmortizedAtOne(Amortized):
    """Amortized transform with a constant context, because the suite passes none."""

    def forward(self, z, context=None):
        return super().forward(z, z.new_ones(self.context_dim) if context is None else context)

    def inverse(self, x, context=None):
        return super().inverse(x, x.new_ones(self.context_dim) if context is None else context)


def angles(value: Tensor) -> Tensor:
    return 3.0 * torch.tanh(value)


CASES: list[Case] = [
    Case("amortized-radial", Amortized, lambda dim: AmortizedAtOne(Radial(dim), 2)),
    Case("householder", Householder, lambda dim: Householder(dim, 3)),
    Case(
        "spline-coupling",
        Coupling,
        lambda dim: Coupling(dim, SPLINE, hidden=(16, 16)),
        quadrature=(2,),
        no_quadrature=COUPLED,
        spread=SPREAD,
        zero_gradient_at_start=HIDDEN,
    ),
    Case(
        "mixture-coupling",
        Coupling,
        lambda dim: Coupling(dim, LogisticMixtureMap(components=2), hidden=(8, 8)),
        dim=2,
        quadrature=(2,),
        no_quadrature=COUPLED,
        spread=SPREAD,
        zero_gradient_at_start=HIDDEN,
    ),
    *(
        Case(
            f"autoregressive-{name}",
            Autoregressive,
            lambda dim, univariate=univariate, cheap=cheap: Autoregressive(
                dim, univariate, cheap, hidden=(16, 16), order=range(dim - 1, -1, -1)
            ),
            spread=spread,
            zero_gradient_at_start=HIDDEN,
            to_domain=carry,
            to_range=carry,
            quadrature=() if name == "circle" else (1, 2),
            no_quadrature="angles have no normal base" if name == "circle" else "",
        )
        for name, univariate, cheap, spread, carry in [
            ("affine", AffineMap(), "inverse", 0.5, same),
            ("spline", SPLINE, "forward", SPREAD, same),
            ("circle", CircularSplineMap(bins=3), "inverse", SPREAD, angles),
        ]
    ),
    Case(
        "autoregressive-sigmoids",
        Inverse,
        lambda dim: Inverse(Autoregressive(dim, SigmoidalMap(units=3), "forward", hidden=(16, 16))),
        dim=2,
        spread=SPREAD,
        zero_gradient_at_start=HIDDEN,
    ),
]
