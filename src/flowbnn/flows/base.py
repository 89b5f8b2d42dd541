"""Any flow as a module; what the named ones have in common, and those of vectors."""

import math
from collections.abc import Sequence
from dataclasses import InitVar, field
from typing import Any, Literal, TypeVar, dataclass_transform

import torch
from torch import Tensor

from flowbnn import transforms
from flowbnn.distributions import Base, CircularBase, Flow, NormalBase
from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_context
from flowbnn.options import Count, Positive, checked, options
from flowbnn.transforms import AffineMap, Autoregressive, Compose, Coupling, SplineMap, Transform, Univariate
from flowbnn.transforms.surjective import AtLeastTwo

Widths = Sequence[Count]
Cheap = Literal["forward", "inverse"]
Kind = TypeVar("Kind", bound=type)


class FlowModel(torch.nn.Module):
    """Any flow as a module: the base and the transform it owns, and the distribution they make when it is called.

    Args:
        base: the owner of the base distribution.
        transform: from the base to the sample.
        context_dim: length of the context vectors that the transform reads; 0 for none.

    >>> from flowbnn.transforms import Radial
    >>> FlowModel(NormalBase(2, 0.0, 1.0), Radial(2))().event_shape
    torch.Size([2])
    """

    @checked
    def __init__(self, base: Base, transform: Transform, context_dim: Length = 0) -> None:
        super().__init__()
        self.base, self.transform, self.context_dim = base, transform, context_dim

    @property
    def capturable(self) -> bool:
        """Whether a density decides nothing on the host, so that a training step may be recorded as a CUDA graph."""
        return self.transform.solver in ("none", "forward") and self.transform.log_det_kind == "exact"

    def forward(self, context: Tensor | None = None) -> Flow:
        """The distribution, one for each context vector ``(..., context_dim)``."""
        if context is not None or self.context_dim:
            check_context(context, self.context_dim, type(self).__name__)
        return Flow(self.base.distribution(), self.transform, context)


@dataclass_transform(field_specifiers=(field,))
def recipe(kind: Kind) -> Kind:
    """Make the annotated attributes of a subclass of :class:`Named` its checked arguments, as a dataclass does."""
    made: Any = options(kind, frozen=False, eq=False, repr=False)
    made.__init__.__wrapped__.__annotations__["base"] = Base | None  # what users read and hand over
    if "base" in vars(made):
        made.__annotations__["base"] = Base | None
        del made.base  # a default that would hide the module
    return made


@recipe
class Named(FlowModel):
    """A flow by name: arguments as attributes, and :meth:`parts`, which makes the transforms of them.

    Args:
        dim: length of the vectors; of some flows also the shape of images.
        context_dim: length of the context; 0 for none.
        base: of the same length; a standard normal one unless :meth:`own_base` says another.
    """

    dim: Count
    context_dim: Length = 0
    base: InitVar[Base | None] = field(default=None, kw_only=True)

    def __post_init__(self, base: Base | None) -> None:
        transform = Compose(*self.parts())
        size = transform.inverse_shape([self.dim] if isinstance(self.dim, int) else self.dim)[-1]
        own = self.own_base(size)
        if base is not None and (base.dim, base.value_kind) != (size, own.value_kind):
            wanted = f"needs a base of {size} {own.value_kind}, not of {base.dim} {base.value_kind}"
            raise FlowBNNError(f"{type(self).__name__}({self.dim}) {wanted}", kind="shape", argument="base")
        super().__init__(base or own, transform, self.context_dim)

    def parts(self) -> Sequence[Transform]:
        """The transforms, from the base to the sample."""
        raise NotImplementedError

    def own_base(self, size: int) -> Base:
        """The base where none is given."""
        return NormalBase(size, 0.0, 1.0)


@recipe
class Steps(Named):
    """A named flow of so many steps, which :meth:`step` makes, and whose networks have layers of these widths."""

    length: Count = 4
    hidden: Widths = (64, 64)

    def parts(self) -> Sequence[Transform]:
        return [self.step(self.dim, number) for number in range(self.length)]

    def step(self, size: int, number: int) -> Transform:
        """One of the steps, for vectors (or so many channels of images)."""
        raise NotImplementedError

    def net(self, size: int, number: int, univariate: Univariate) -> dict[str, Any]:
        """The network of a coupling, and what it keeps: the halves in turn."""
        return {"flip": bool(number % 2), "hidden": self.hidden, "context_dim": self.context_dim}

    def coupling(self, size: int, number: int, univariate: Univariate) -> Transform:
        """A coupling; one entry has no other to read, and is moved alone."""
        if size == 1:
            return self.ordered(1, number, univariate)
        return Coupling(size, univariate, **self.net(size, number, univariate))

    def ordered(self, size: int, number: int, univariate: Univariate, cheap: Cheap = "inverse") -> Transform:
        """An autoregressive map, every second one backwards, so that each entry comes early and late."""
        order = range(size)[:: -1 if number % 2 else 1]
        return Autoregressive(size, univariate, cheap, self.hidden, order, context_dim=self.context_dim)


@recipe
class NICE(Steps):
    """Additive couplings, then a scale for each entry (Dinh, Krueger & Bengio 2015, https://arxiv.org/abs/1410.8516).

    Args:
        dim, context_dim: lengths of the vectors and of the context.
        length: number of couplings, which keep the halves in turn.
        hidden: widths of their networks.
        base: standard normal by default.

    >>> round(NICE(3)().log_prob(torch.zeros(3)).item(), 4)  # at first that of the base
    -2.7568
    """

    def step(self, size: int, number: int) -> Transform:
        return self.coupling(size, number, transforms.ShiftMap())

    def parts(self) -> Sequence[Transform]:
        return [*super().parts(), transforms.Affine(self.dim)]


@recipe
class RealNVP(Steps):
    """Affine couplings (Dinh, Sohl-Dickstein & Bengio 2017, https://arxiv.org/abs/1605.08803); arguments as in :class:`NICE`.

    >>> RealNVP(3, context_dim=2)(torch.ones(5, 2)).sample().shape
    torch.Size([5, 3])
    """

    def step(self, size: int, number: int) -> Transform:
        return self.coupling(size, number, AffineMap())


@recipe
class MAF(Steps):
    """Autoregressive maps with cheap densities (Papamakarios, Pavlakou & Murray 2017, https://arxiv.org/abs/1705.07057).

    A draw costs ``dim`` passes, a density one; for noise and posteriors take :class:`IAF`.

    Args:
        length, hidden: number of maps, every second one in the reversed order, and widths of their masked networks.
        univariate: the map of each entry; with a :class:`~flowbnn.transforms.CircularSplineMap` the base is uniform.
        dim, context_dim, base: as in :class:`NICE`.

    >>> MAF(3, univariate=SplineMap())().sample((5,)).shape, MAF(3).transform.cheap
    (torch.Size([5, 3]), 'inverse')
    """

    univariate: Univariate = AffineMap()

    def step(self, size: int, number: int) -> Transform:
        return self.ordered(size, number, self.univariate, "inverse")

    def own_base(self, size: int) -> Base:
        if isinstance(self.univariate, transforms.CircularSplineMap):
            return CircularBase(size, self.univariate.bound)
        return super().own_base(size)


@recipe
class IAF(MAF):
    """The same maps with cheap draws (Kingma et al. 2016, https://arxiv.org/abs/1606.04934).

    Draws and their own densities cost one pass, which is what noise and posteriors want; the density of another point costs
    ``dim`` passes. Arguments as in :class:`MAF`.

    >>> x, log_prob = IAF(3, context_dim=2)(torch.ones(5, 2)).rsample_and_log_prob()
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
        circular: the entries are angles between minus ``bound`` and ``bound``, by default pi, and others are taken modulo a turn: for
            degrees say ``bound=180``; the base is uniform.
        dim, context_dim, length, hidden, base: as in :class:`NICE`.

    >>> NSF(2, circular=True)().log_prob(torch.tensor([[0.5, -3.0]])).shape
    torch.Size([1])
    """

    bins: AtLeastTwo = 8
    bound: Positive | None = None
    autoregressive: bool = False
    circular: bool = False

    def step(self, size: int, number: int) -> Transform:
        kind = transforms.CircularSplineMap if self.circular else SplineMap
        spline = kind(self.bins, self.bound or (math.pi if self.circular else 5.0))
        made = self.ordered(size, 0, spline) if self.autoregressive else self.coupling(size, number, spline)
        return made if self.circular else Compose(transforms.LULinear(size), made)

    def own_base(self, size: int) -> Base:
        return CircularBase(size, self.bound or math.pi) if self.circular else super().own_base(size)


@recipe
class NAF(Steps):
    """Neural autoregressive flow: autoregressive maps by deep sigmoidal units (Huang et al. 2018, https://arxiv.org/abs/1804.00779).

    Args:
        units: sigmoids of each map.
        cheap: the direction that costs one pass; the other costs ``dim`` passes, each with a numerical root.
        dim, context_dim, length, hidden, base: as in :class:`MAF`.

    >>> NAF(2, units=4)().log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    length: Count = 2
    units: Count = 16
    cheap: Literal["forward", "inverse"] = "inverse"

    def step(self, size: int, number: int) -> Transform:
        made = self.ordered(size, number, transforms.SigmoidalMap(self.units), "forward")  # as in the formula
        return transforms.Inverse(made) if self.cheap == "inverse" else made


@recipe
class Maps(Named):
    """A named flow of :meth:`maps` without networks, which with a context have parameters of their own for each."""

    length: Count = 4

    def maps(self) -> Sequence[Transform]:
        raise NotImplementedError

    def parts(self) -> Sequence[Transform]:
        maps = self.maps()
        return [transforms.Amortized(each, self.context_dim) for each in maps] if self.context_dim else maps


@recipe
class Planar(Maps):
    """Planar flows, each along one direction (Rezende & Mohamed 2015, https://arxiv.org/abs/1505.05770).

    Their inverse, which densities need, is found numerically.

    Args:
        dim, context_dim: lengths of the vectors and of the context; with one, all parameters are linear functions of it.
        length: number of flows.
        base: standard normal by default.

    >>> posterior = Planar(3, length=2)().rsample_and_log_prob((5,))
    """

    length: Count = 10

    def maps(self) -> Sequence[Transform]:
        return [transforms.PlanarLU(self.dim, [("planar", self.length)])]


@recipe
class Sylvester(Maps):
    """Sylvester flows: planar ones in all directions at once (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649).

    Args:
        reflections: Householder reflections of each; at most ``dim`` are used.
        dim, context_dim, length, base: as in :class:`Planar`.

    >>> x, log_prob = Sylvester(3, length=2)().rsample_and_log_prob((5,))
    """

    reflections: Count = 8

    def maps(self) -> Sequence[Transform]:
        size = min(self.reflections, self.dim)
        return [transforms.Sylvester(self.dim, "householder", size) for _ in range(self.length)]


@recipe
class Radial(Maps):
    """Radial flows, each around one centre (Rezende & Mohamed 2015); arguments as in :class:`Planar`.

    >>> Radial(2, length=3)().log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    length: Count = 10

    def maps(self) -> Sequence[Transform]:
        return [transforms.Radial(self.dim) for _ in range(self.length)]


@recipe
class Householder(Maps):
    """A scale and a shift for each entry, then reflections (Tomczak & Welling 2016, https://arxiv.org/abs/1611.09630).

    Alone it is a Gaussian with a full covariance; as the posterior of an autoencoder, one for each example.

    Args:
        length: number of pairs of reflections.
        dim, context_dim, base: as in :class:`Planar`.

    >>> Householder(3)().variance.shape
    torch.Size([3])
    """

    def maps(self) -> Sequence[Transform]:
        return [transforms.Affine(self.dim), transforms.Householder(self.dim, 2 * self.length)]


@recipe
class FFJORD(Steps):
    """The flow of a neural vector field (Grathwohl et al. 2019, https://arxiv.org/abs/1810.01367).

    Both directions cost a numerical solution; :func:`~flowbnn.transforms.flow_matching_loss` trains one field without any.

    Args:
        length: number of vector fields, one after the other.
        trace, rtol, atol: of each :class:`~flowbnn.transforms.NeuralODE`.
        dim, context_dim, hidden, base: as in :class:`MAF`.

    >>> flow = FFJORD(2, hidden=(8,))
    >>> transforms.flow_matching_loss(flow.transform, flow.base(), torch.randn(100, 2)).shape
    torch.Size([])
    """

    length: Count = 1
    trace: Literal["exact", "hutchinson"] | None = None
    rtol: Positive = 1e-5
    atol: Positive = 1e-5

    def step(self, size: int, number: int) -> Transform:
        return transforms.NeuralODE(size, self.hidden, self.context_dim, self.trace, self.rtol, self.atol)
