"""Recipes for vectors."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

from flowbnn.distributions import Base, CircularBase
from flowbnn.flows.base import Bins, Named, Steps, recipe
from flowbnn.options import Count, Positive
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


def couplings(flow: Steps, univariate: Univariate) -> Iterator[Transform]:
    """Couplings that keep the halves in turn; one entry has no other to read, and is moved alone."""
    given: dict[str, Any] = {"hidden": flow.hidden, "context_dim": flow.context_dim}
    for step in range(flow.length):
        one = flow.dim == 1
        yield (
            Autoregressive(1, univariate, **given)
            if one
            else Coupling(flow.dim, univariate, flip=bool(step % 2), **given)
        )


def _ordered(flow: Steps, univariate: Univariate, cheap: Literal["forward", "inverse"]) -> list[Transform]:
    """Autoregressive maps, every second one backwards, so that each entry comes early and late."""
    orders = range(flow.dim), range(flow.dim - 1, -1, -1)
    given: dict[str, Any] = {"hidden": flow.hidden, "context_dim": flow.context_dim}
    return [
        Autoregressive(flow.dim, univariate, cheap, order=orders[step % 2], **given)
        for step in range(flow.length)
    ]


@recipe
class NICE(Steps):
    """Additive couplings, then a scale for each entry (Dinh, Krueger & Bengio 2015, https://arxiv.org/abs/1410.8516).

    Args:
        dim, context_dim: lengths of the vectors and of the context.
        length: number of couplings, which keep the halves in turn.
        hidden: widths of their networks.
        base: standard normal by default.
    """

    def parts(self) -> Sequence[Transform]:
        return [*couplings(self, ShiftMap()), Affine(self.dim)]


@recipe
class RealNVP(Steps):
    """Affine couplings that keep the halves in turn (Dinh, Sohl-Dickstein & Bengio 2017, https://arxiv.org/abs/1605.08803).

    Args: as in :class:`NICE`.
    """

    def parts(self) -> Sequence[Transform]:
        return list(couplings(self, AffineMap()))


@recipe
class MAF(Steps):
    """Autoregressive maps with cheap densities (Papamakarios, Pavlakou & Murray 2017, https://arxiv.org/abs/1705.07057).

    A draw costs ``dim`` passes, a density one; for noise and posteriors take :class:`IAF`.

    Args:
        length: number of maps, every second one in the reversed order.
        hidden: widths of their masked networks.
        univariate: the map of each entry.
        dim, context_dim, base: as in :class:`NICE`.
    """

    univariate: Univariate = AffineMap()

    def parts(self) -> Sequence[Transform]:
        return _ordered(self, self.univariate, "inverse")


@recipe
class IAF(MAF):
    """The same maps with cheap draws (Kingma et al. 2016, https://arxiv.org/abs/1606.04934).

    Draws and their own densities cost one pass, which is what noise and posteriors want; the density of another point costs
    ``dim`` passes. Arguments as in :class:`MAF`.
    """

    def parts(self) -> Sequence[Transform]:
        return _ordered(self, self.univariate, "forward")


@recipe
class NSF(Steps):
    """Neural spline flow: rational-quadratic splines after linear maps (Durkan et al. 2019, https://arxiv.org/abs/1906.04032).

    Args:
        bins, bound: of the splines; outside ``[-bound, bound]``, by default 5, they are the identity.
        autoregressive: autoregressive maps with cheap densities in place of couplings, which are cheap in both directions;
            with cheap draws they are ``IAF(dim, univariate=SplineMap(bins, bound))``.
        circular: the entries are angles between minus ``bound`` and ``bound``, by default pi; the base is uniform.
        dim, context_dim, length, hidden, base: as in :class:`NICE`.
    """

    bins: Bins = 8
    bound: Positive | None = None
    autoregressive: bool = False
    circular: bool = False

    def parts(self) -> Sequence[Transform]:
        kind = CircularSplineMap if self.circular else SplineMap
        spline = kind(self.bins, self.bound or (math.pi if self.circular else 5.0))
        given: dict[str, Any] = {"hidden": self.hidden, "context_dim": self.context_dim}
        ordered = (Autoregressive(self.dim, spline, **given) for _ in range(self.length))
        parts: list[Transform] = []
        for step in ordered if self.autoregressive else couplings(self, spline):
            parts += [step] if self.circular else [LULinear(self.dim), step]
        return parts

    def own_base(self, size: int) -> Base:
        return CircularBase(size, self.bound or math.pi) if self.circular else super().own_base(size)


@recipe
class NAF(Steps):
    """Neural autoregressive flow: autoregressive maps by deep sigmoidal units (Huang et al. 2018, https://arxiv.org/abs/1804.00779).

    Args:
        units: sigmoids of each map.
        cheap: the direction that costs one pass; the other costs ``dim`` passes, each with a numerical root.
        dim, context_dim, length, hidden, base: as in :class:`MAF`.
    """

    length: Count = 2
    units: Count = 16
    cheap: Literal["forward", "inverse"] = "inverse"

    def parts(self) -> Sequence[Transform]:
        parts = _ordered(
            self, SigmoidalMap(self.units), "forward"
        )  # the formula is that of the cheap direction
        return [Inverse(part) for part in parts] if self.cheap == "inverse" else parts


def _conditioned(transform: Transform, context_dim: int) -> Transform:
    """With a context, a transform without networks has parameters of its own for each."""
    return Amortized(transform, context_dim) if context_dim else transform


@recipe
class Planar(Named):
    """Planar flows, each along one direction (Rezende & Mohamed 2015, https://arxiv.org/abs/1505.05770).

    Their inverse, which densities need, is found numerically.

    Args:
        dim, context_dim: lengths of the vectors and of the context; with one, all parameters are linear functions of it.
        length: number of flows.
        base: standard normal by default.
    """

    length: Count = 10

    def parts(self) -> Sequence[Transform]:
        return [_conditioned(PlanarLU(self.dim, [("planar", self.length)]), self.context_dim)]


@recipe
class Sylvester(Named):
    """Sylvester flows: planar ones in all directions at once (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649).

    Args:
        reflections: Householder reflections of each; at most ``dim`` are used.
        dim, context_dim, length, base: as in :class:`Planar`.
    """

    length: Count = 4
    reflections: Count = 8

    def parts(self) -> Sequence[Transform]:
        size = min(self.reflections, self.dim)
        parts = [SylvesterMap(self.dim, "householder", size) for _ in range(self.length)]
        return [_conditioned(part, self.context_dim) for part in parts]


@recipe
class Radial(Named):
    """Radial flows, each around one centre (Rezende & Mohamed 2015).

    Args: as in :class:`Planar`.
    """

    length: Count = 10

    def parts(self) -> Sequence[Transform]:
        return [_conditioned(RadialMap(self.dim), self.context_dim) for _ in range(self.length)]


@recipe
class Householder(Named):
    """A scale and a shift for each entry, then reflections (Tomczak & Welling 2016, https://arxiv.org/abs/1611.09630).

    Alone it is a Gaussian with a full covariance; as the posterior of an autoencoder, one for each example.

    Args:
        length: number of pairs of reflections.
        dim, context_dim, base: as in :class:`Planar`.
    """

    length: Count = 4

    def parts(self) -> Sequence[Transform]:
        maps = Affine(self.dim), Reflections(self.dim, 2 * self.length)
        return [_conditioned(each, self.context_dim) for each in maps]


@recipe
class FFJORD(Steps):
    """The flow of a neural vector field (Grathwohl et al. 2019, https://arxiv.org/abs/1810.01367).

    Both directions cost a numerical solution; :func:`~flowbnn.transforms.flow_matching_loss` trains one field without any.

    Args:
        length: number of vector fields, one after the other.
        trace, rtol, atol: of each :class:`~flowbnn.transforms.NeuralODE`.
        dim, context_dim, hidden, base: as in :class:`MAF`.
    """

    length: Count = 1
    trace: Literal["exact", "hutchinson"] | None = None
    rtol: Positive = 1e-5
    atol: Positive = 1e-5

    def parts(self) -> Sequence[Transform]:
        solver = self.trace, self.rtol, self.atol
        return [NeuralODE(self.dim, self.hidden, self.context_dim, *solver) for _ in range(self.length)]
