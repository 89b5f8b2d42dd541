"""Recipes for vectors."""

import math
from typing import Any, Literal

from flowbnn.distributions import Base, CircularBase
from flowbnn.flows.base import Bins, Named, Widths
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Positive, checked
from flowbnn.transforms import (
    Affine,
    AffineMap,
    Amortized,
    Autoregressive,
    CircularSplineMap,
    Coupling,
    Inverse,
    LULinear,
    NeuralODE,
    PlanarLU,
    ShiftMap,
    SigmoidalMap,
    SplineMap,
    Transform,
    Univariate,
)
from flowbnn.transforms import Householder as Reflections
from flowbnn.transforms import Radial as RadialMap
from flowbnn.transforms import Sylvester as SylvesterMap


def coupled(dim: int, univariate: Univariate, step: int, hidden: Widths, context_dim: int) -> Transform:
    """A coupling; one entry has no other to read, and is moved alone."""
    if dim == 1:
        return Autoregressive(1, univariate, hidden=hidden, context_dim=context_dim)
    return Coupling(dim, univariate, "half", bool(step % 2), hidden, context_dim=context_dim)


def _orders(dim: int, length: int) -> list[range]:
    """Every second one backwards, so that each entry comes early and late."""
    return [range(dim - 1, -1, -1) if step % 2 else range(dim) for step in range(length)]


class NICE(Named):
    """Additive couplings, then a scale for each entry (Dinh, Krueger & Bengio 2015, https://arxiv.org/abs/1410.8516).

    Args:
        dim, context_dim: lengths of the vectors and of the context; at least 2 and 0.
        length: number of couplings, which keep the halves in turn.
        hidden: widths of their networks.
        base: standard normal by default.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        base: Base | None = None,
    ) -> None:
        parts = [coupled(dim, ShiftMap(), step, hidden, context_dim) for step in range(length)]
        super().__init__(dim, context_dim, base, *parts, Affine(dim))


class RealNVP(Named):
    """Affine couplings that keep the halves in turn (Dinh, Sohl-Dickstein & Bengio 2017, https://arxiv.org/abs/1605.08803).

    Args: as in :class:`NICE`.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        base: Base | None = None,
    ) -> None:
        parts = [coupled(dim, AffineMap(), step, hidden, context_dim) for step in range(length)]
        super().__init__(dim, context_dim, base, *parts)


class MAF(Named):
    """Autoregressive maps with cheap densities (Papamakarios, Pavlakou & Murray 2017, https://arxiv.org/abs/1705.07057).

    A draw costs ``dim`` passes, a density one; for noise and posteriors take :class:`IAF`.

    Args:
        dim, context_dim: lengths of the vectors and of the context.
        length: number of maps, every second one in the reversed order.
        hidden: widths of their masked networks.
        univariate: the map of each entry.
        base: standard normal by default.
    """

    cheap: Literal["forward", "inverse"] = "inverse"

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        univariate: Univariate = AffineMap(),  # noqa: B008
        base: Base | None = None,
    ) -> None:
        settings: dict[str, Any] = {"cheap": self.cheap, "hidden": hidden, "context_dim": context_dim}
        parts = [Autoregressive(dim, univariate, order=order, **settings) for order in _orders(dim, length)]
        super().__init__(dim, context_dim, base, *parts)


class IAF(MAF):
    """The same maps with cheap draws (Kingma et al. 2016, https://arxiv.org/abs/1606.04934).

    Draws and their own densities cost one pass, which is what noise and posteriors want; the density of another point costs
    ``dim`` passes. Arguments as in :class:`MAF`.
    """

    cheap = "forward"


class NSF(Named):
    """Neural spline flow: rational-quadratic splines after linear maps (Durkan et al. 2019, https://arxiv.org/abs/1906.04032).

    Args:
        bins, bound: of the splines; outside ``[-bound, bound]``, by default 5, they are the identity.
        autoregressive: autoregressive maps with cheap densities in place of couplings, which are cheap in both directions;
            with cheap draws they are ``IAF(dim, univariate=SplineMap(bins, bound))``.
        circular: the entries are angles between minus ``bound`` and ``bound``, by default pi; the base is uniform.
        dim, context_dim, length, hidden, base: as in :class:`MAF`.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        bins: Bins = 8,
        bound: Positive | None = None,
        autoregressive: bool = False,
        circular: bool = False,
        base: Base | None = None,
    ) -> None:
        settings: dict[str, Any] = {"hidden": hidden, "context_dim": context_dim}
        parts: list[Transform] = []
        bound = bound or (math.pi if circular else 5.0)
        spline = CircularSplineMap(bins, bound) if circular else SplineMap(bins, bound)
        for step in range(length):
            own = (
                Autoregressive(dim, spline, **settings)
                if autoregressive
                else coupled(dim, spline, step, **settings)
            )
            parts += [own] if circular else [LULinear(dim), own]
        if base is None and circular:
            base = CircularBase(dim, bound)
        super().__init__(dim, context_dim, base, *parts)


class NAF(Named):
    """Neural autoregressive flow: autoregressive maps by deep sigmoidal units (Huang et al. 2018, https://arxiv.org/abs/1804.00779).

    Args:
        units: sigmoids of each map.
        cheap: the direction that costs one pass; the other costs ``dim`` passes, each with a numerical root.
        dim, context_dim, length, hidden, base: as in :class:`MAF`.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 2,
        hidden: Widths = (64, 64),
        units: Count = 16,
        cheap: Literal["forward", "inverse"] = "inverse",
        base: Base | None = None,
    ) -> None:
        parts: list[Transform] = [
            Autoregressive(dim, SigmoidalMap(units), "forward", hidden, order, context_dim=context_dim)
            for order in _orders(dim, length)
        ]
        # the formula is that of the cheap direction
        parts = [Inverse(part) for part in parts] if cheap == "inverse" else parts
        super().__init__(dim, context_dim, base, *parts)


def _conditioned(transform: Transform, context_dim: int) -> Transform:
    """With a context, a transform without networks has parameters of its own for each."""
    return Amortized(transform, context_dim) if context_dim else transform


class Planar(Named):
    """Planar flows, each along one direction (Rezende & Mohamed 2015, https://arxiv.org/abs/1505.05770).

    Their inverse, which densities need, is found numerically.

    Args:
        dim, context_dim: lengths of the vectors and of the context; with one, all parameters are linear functions of it.
        length: number of flows.
        base: standard normal by default.
    """

    @checked
    def __init__(
        self, dim: Count, context_dim: Length = 0, length: Count = 10, base: Base | None = None
    ) -> None:
        super().__init__(
            dim, context_dim, base, _conditioned(PlanarLU(dim, [("planar", length)]), context_dim)
        )


class Sylvester(Named):
    """Sylvester flows: planar ones in all directions at once (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649).

    Args:
        reflections: Householder reflections of each; at most ``dim`` are used.
        dim, context_dim, length, base: as in :class:`Planar`.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 4,
        reflections: Count = 8,
        base: Base | None = None,
    ) -> None:
        parts = [SylvesterMap(dim, "householder", min(reflections, dim)) for _ in range(length)]
        super().__init__(dim, context_dim, base, *(_conditioned(part, context_dim) for part in parts))


class Radial(Named):
    """Radial flows, each around one centre (Rezende & Mohamed 2015).

    Args: as in :class:`Planar`.
    """

    @checked
    def __init__(
        self, dim: Count, context_dim: Length = 0, length: Count = 10, base: Base | None = None
    ) -> None:
        parts = [_conditioned(RadialMap(dim), context_dim) for _ in range(length)]
        super().__init__(dim, context_dim, base, *parts)


class Householder(Named):
    """A scale and a shift for each entry, then reflections (Tomczak & Welling 2016, https://arxiv.org/abs/1611.09630).

    Alone it is a Gaussian with a full covariance; as the posterior of an autoencoder, one for each example.

    Args:
        length: number of pairs of reflections.
        dim, context_dim, base: as in :class:`Planar`.
    """

    @checked
    def __init__(
        self, dim: Count, context_dim: Length = 0, length: Count = 4, base: Base | None = None
    ) -> None:
        parts = Affine(dim), _conditioned(Reflections(dim, 2 * length), context_dim)
        super().__init__(dim, context_dim, base, *parts)


class FFJORD(Named):
    """The flow of a neural vector field (Grathwohl et al. 2019, https://arxiv.org/abs/1810.01367).

    Both directions cost a numerical solution; :func:`~flowbnn.transforms.flow_matching_loss` trains one field without any.

    Args:
        length: number of vector fields, one after the other.
        trace, rtol, atol: of each :class:`~flowbnn.transforms.NeuralODE`.
        dim, context_dim, hidden, base: as in :class:`MAF`.
    """

    @checked
    def __init__(
        self,
        dim: Count,
        context_dim: Length = 0,
        length: Count = 1,
        hidden: Widths = (64, 64),
        trace: Literal["exact", "hutchinson"] | None = None,
        rtol: Positive = 1e-5,
        atol: Positive = 1e-5,
        base: Base | None = None,
    ) -> None:
        parts = [NeuralODE(dim, hidden, context_dim, trace, rtol, atol) for _ in range(length)]
        super().__init__(dim, context_dim, base, *parts)
