"""Recipes for vectors."""

import math
from collections.abc import Sequence
from typing import Literal

from flowbnn.distributions import Base, CircularBase
from flowbnn.flows.base import Bins, Named, Steps, recipe
from flowbnn.options import Count, Positive
from flowbnn.transforms import (
    Affine,
    AffineMap,
    Amortized,
    CircularSplineMap,
    Compose,
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


@recipe
class NICE(Steps):
    """Additive couplings, then a scale for each entry (Dinh, Krueger & Bengio 2015, https://arxiv.org/abs/1410.8516).

    Args:
        dim, context_dim: lengths of the vectors and of the context.
        length: number of couplings, which keep the halves in turn.
        hidden: widths of their networks.
        base: standard normal by default.
    """

    def step(self, size: int, number: int) -> Transform:
        return self.coupling(size, number, ShiftMap())

    def parts(self) -> Sequence[Transform]:
        return [*super().parts(), Affine(self.dim)]


@recipe
class RealNVP(Steps):
    """Affine couplings that keep the halves in turn (Dinh, Sohl-Dickstein & Bengio 2017, https://arxiv.org/abs/1605.08803).

    Args: as in :class:`NICE`.
    """

    def step(self, size: int, number: int) -> Transform:
        return self.coupling(size, number, AffineMap())


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

    def step(self, size: int, number: int) -> Transform:
        return self.ordered(size, number, self.univariate, "inverse")


@recipe
class IAF(MAF):
    """The same maps with cheap draws (Kingma et al. 2016, https://arxiv.org/abs/1606.04934).

    Draws and their own densities cost one pass, which is what noise and posteriors want; the density of another point costs
    ``dim`` passes. Arguments as in :class:`MAF`.
    """

    def step(self, size: int, number: int) -> Transform:
        return self.ordered(size, number, self.univariate, "forward")


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

    def step(self, size: int, number: int) -> Transform:
        kind = CircularSplineMap if self.circular else SplineMap
        spline = kind(self.bins, self.bound or (math.pi if self.circular else 5.0))
        made = self.ordered(size, 0, spline) if self.autoregressive else self.coupling(size, number, spline)
        return made if self.circular else Compose(LULinear(size), made)

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

    def step(self, size: int, number: int) -> Transform:
        made = self.ordered(size, number, SigmoidalMap(self.units), "forward")  # the direction of the formula
        return Inverse(made) if self.cheap == "inverse" else made


@recipe
class Maps(Named):
    """A named flow of :meth:`maps` without networks, which with a context have parameters of their own for each."""

    length: Count = 4

    def maps(self) -> Sequence[Transform]:
        raise NotImplementedError

    def parts(self) -> Sequence[Transform]:
        maps = self.maps()
        return [Amortized(each, self.context_dim) for each in maps] if self.context_dim else maps


@recipe
class Planar(Maps):
    """Planar flows, each along one direction (Rezende & Mohamed 2015, https://arxiv.org/abs/1505.05770).

    Their inverse, which densities need, is found numerically.

    Args:
        dim, context_dim: lengths of the vectors and of the context; with one, all parameters are linear functions of it.
        length: number of flows.
        base: standard normal by default.
    """

    length: Count = 10

    def maps(self) -> Sequence[Transform]:
        return [PlanarLU(self.dim, [("planar", self.length)])]


@recipe
class Sylvester(Maps):
    """Sylvester flows: planar ones in all directions at once (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649).

    Args:
        reflections: Householder reflections of each; at most ``dim`` are used.
        dim, context_dim, length, base: as in :class:`Planar`.
    """

    reflections: Count = 8

    def maps(self) -> Sequence[Transform]:
        size = min(self.reflections, self.dim)
        return [SylvesterMap(self.dim, "householder", size) for _ in range(self.length)]


@recipe
class Radial(Maps):
    """Radial flows, each around one centre (Rezende & Mohamed 2015).

    Args: as in :class:`Planar`.
    """

    length: Count = 10

    def maps(self) -> Sequence[Transform]:
        return [RadialMap(self.dim) for _ in range(self.length)]


@recipe
class Householder(Maps):
    """A scale and a shift for each entry, then reflections (Tomczak & Welling 2016, https://arxiv.org/abs/1611.09630).

    Alone it is a Gaussian with a full covariance; as the posterior of an autoencoder, one for each example.

    Args:
        length: number of pairs of reflections.
        dim, context_dim, base: as in :class:`Planar`.
    """

    def maps(self) -> Sequence[Transform]:
        return [Affine(self.dim), Reflections(self.dim, 2 * self.length)]


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

    def step(self, size: int, number: int) -> Transform:
        return NeuralODE(size, self.hidden, self.context_dim, self.trace, self.rtol, self.atol)
