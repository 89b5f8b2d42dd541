"""Cases: couplings and autoregressive maps over the univariate maps."""

from case import Case

from flowbnn.transforms import AffineMap, Amortized, Autoregressive, Coupling, Householder, Radial, SplineMap

__all__ = ["CASES"]

COUPLED = "a coupling needs at least 2 dimensions"
HIDDEN = ("layers.0.", "layers.2.")
SPLINE = SplineMap(bins=4, bound=4.0)
# at 0.5 the slopes of a spline reach e^20, and float32 cannot come back: a stated limit, not a bound that was moved
SPREAD = 0.15


class AmortizedAtOne(Amortized):
    """With the context that the suite does not give."""

    def forward(self, z, context=None):
        return super().forward(z, z.new_ones(self.context_dim) if context is None else context)

    def inverse(self, x, context=None):
        return super().inverse(x, x.new_ones(self.context_dim) if context is None else context)


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
        wakes_later=HIDDEN,
    ),
    *(
        Case(
            f"autoregressive-{name}",
            Autoregressive,
            lambda dim, univariate=univariate, cheap=cheap: Autoregressive(
                dim, univariate, cheap, hidden=(16, 16), order=range(dim - 1, -1, -1)
            ),
            spread=spread,
            wakes_later=HIDDEN,
        )
        for name, univariate, cheap, spread in [
            ("affine", AffineMap(), "inverse", 0.5),
            ("spline", SPLINE, "forward", SPREAD),
        ]
    ),
]
