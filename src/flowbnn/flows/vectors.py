"""Named flows of vectors."""

import math
from collections.abc import Sequence
from typing import Literal

from flowbnn import transforms
from flowbnn.distributions import Base, CircularBase
from flowbnn.flows.base import Direction, ParametricFlow, StackedFlow, Widths
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, Depth, Dim, Positive, checked
from flowbnn.transforms import AffineMap, Compose, SplineMap, Transform, Univariate
from flowbnn.transforms.surjective import AtLeastTwo


class NICE(StackedFlow):
    """NICE: additive couplings, then a scale for each entry (Dinh, Krueger & Bengio 2015, https://arxiv.org/abs/1410.8516).

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of couplings. They keep the halves of the vector in turn.
        hidden: Widths of the hidden layers of their networks.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> round(NICE(3)().log_prob(torch.zeros(3)).item(), 4)  # starts at the density of the base
    -2.7568
    """

    def make_step(self, size: int, index: int) -> Transform:
        return self.make_coupling(size, index, transforms.ShiftMap())

    def make_transforms(self) -> Sequence[Transform]:
        return [*super().make_transforms(), transforms.Affine(self.dim)]


class RealNVP(StackedFlow):
    """RealNVP: affine couplings (Dinh, Sohl-Dickstein & Bengio 2017, https://arxiv.org/abs/1605.08803).

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of couplings. They keep the halves of the vector in turn.
        hidden: Widths of the hidden layers of their networks.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> RealNVP(3, context_dim=2)(torch.ones(5, 2)).sample().shape
    torch.Size([5, 3])
    """

    def make_step(self, size: int, index: int) -> Transform:
        return self.make_coupling(size, index, AffineMap())


class MAF(StackedFlow):
    """Masked autoregressive flow with cheap densities (Papamakarios, Pavlakou & Murray 2017, https://arxiv.org/abs/1705.07057).

    A draw costs ``dim`` passes, a density one. For noise and posteriors use :class:`IAF`.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of autoregressive transforms. Every second one has the reversed order.
        hidden: Widths of the hidden layers of their masked networks.
        univariate: Map of each entry. With a :class:`~flowbnn.transforms.CircularSplineMap` the default base is uniform.
        base: Base of the same length; standard normal by default.

    >>> MAF(3, univariate=SplineMap())().sample((5,)).shape, MAF(3).transform.cheap
    (torch.Size([5, 3]), 'inverse')
    """

    cheap: Direction = "inverse"

    @checked
    def __init__(
        self,
        dim: Dim,
        context_dim: Length = 0,
        length: Depth = 4,
        hidden: Widths = (64, 64),
        univariate: Univariate = AffineMap(),  # noqa: B008
        *,
        base: Base | None = None,
    ) -> None:
        self.univariate = univariate
        super().__init__(dim, context_dim, length, hidden, base=base)

    def make_step(self, size: int, index: int) -> Transform:
        return self.make_autoregressive(size, index, self.univariate, self.cheap)

    def default_base(self, size: int) -> Base:
        if isinstance(self.univariate, transforms.CircularSplineMap):
            return CircularBase(size, self.univariate.bound)
        return super().default_base(size)


class IAF(MAF):
    """Inverse autoregressive flow with cheap draws (Kingma et al. 2016, https://arxiv.org/abs/1606.04934).

    Draws and their own densities cost one pass. The density of another point costs ``dim`` passes. Use it for noise and posteriors.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of autoregressive transforms. Every second one has the reversed order.
        hidden: Widths of the hidden layers of their masked networks.
        univariate: Map of each entry. With a :class:`~flowbnn.transforms.CircularSplineMap` the default base is uniform.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> x, log_prob = IAF(3, context_dim=2)(torch.ones(5, 2)).rsample_and_log_prob()
    >>> x.shape, log_prob.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    cheap: Direction = "forward"


class NSF(StackedFlow):
    """Neural spline flow: linear maps and rational-quadratic splines (Durkan et al. 2019, https://arxiv.org/abs/1906.04032).

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of steps.
        hidden: Widths of the hidden layers of the networks.
        bins: Number of bins of the splines.
        bound: Half width of the interval of the splines, by default 5; they are the identity outside.
        autoregressive: If True, the transforms are autoregressive with cheap densities instead of couplings. For cheap draws use
            ``IAF(dim, univariate=SplineMap(bins, bound))``.
        circular: If True, the entries are angles between ``-bound`` and ``bound``, by default pi. Angles are taken modulo one turn.
            For degrees use ``bound=180``. The default base is uniform.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> NSF(2, circular=True)().log_prob(torch.tensor([[0.5, -3.0]])).shape
    torch.Size([1])
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        context_dim: Length = 0,
        length: Depth = 4,
        hidden: Widths = (64, 64),
        bins: AtLeastTwo = 8,
        bound: Positive | None = None,
        autoregressive: bool = False,
        circular: bool = False,
        *,
        base: Base | None = None,
    ) -> None:
        self.bins, self.autoregressive, self.circular = bins, autoregressive, circular
        self.bound = bound or (math.pi if circular else 5.0)
        super().__init__(dim, context_dim, length, hidden, base=base)

    def make_step(self, size: int, index: int) -> Transform:
        kind = transforms.CircularSplineMap if self.circular else SplineMap
        spline = kind(self.bins, self.bound)
        if self.autoregressive:
            transform = self.make_autoregressive(size, 0, spline)
        else:
            transform = self.make_coupling(size, index, spline)
        return transform if self.circular else Compose(transforms.LULinear(size), transform)

    def default_base(self, size: int) -> Base:
        return CircularBase(size, self.bound) if self.circular else super().default_base(size)


class NAF(StackedFlow):
    """Neural autoregressive flow with deep sigmoidal maps (Huang et al. 2018, https://arxiv.org/abs/1804.00779).

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of autoregressive transforms. Every second one has the reversed order.
        hidden: Widths of the hidden layers of their masked networks.
        units: Number of sigmoids of each map.
        cheap: Direction that costs one pass. The other costs ``dim`` passes with a numerical root each.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> NAF(2, units=4)().log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        context_dim: Length = 0,
        length: Depth = 2,
        hidden: Widths = (64, 64),
        units: Count = 16,
        cheap: Direction = "inverse",
        *,
        base: Base | None = None,
    ) -> None:
        self.units, self.cheap = units, cheap
        super().__init__(dim, context_dim, length, hidden, base=base)

    def make_step(self, size: int, index: int) -> Transform:
        sigmoids = transforms.SigmoidalMap(self.units)
        transform = self.make_autoregressive(size, index, sigmoids, "forward")  # as in the formula
        return transforms.Inverse(transform) if self.cheap == "inverse" else transform


class Planar(ParametricFlow):
    """Planar flows, each along one direction (Rezende & Mohamed 2015, https://arxiv.org/abs/1505.05770).

    Densities need the inverse, which is numerical.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors, of which all parameters are linear functions; 0 for none.
        length: Number of planar maps.
        base: Base of the same length; standard normal by default.

    >>> x, log_prob = Planar(3, length=2)().rsample_and_log_prob((5,))
    >>> x.shape, log_prob.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    @checked
    def __init__(
        self, dim: Dim, context_dim: Length = 0, length: Depth = 10, *, base: Base | None = None
    ) -> None:
        super().__init__(dim, context_dim, length, base=base)

    def make_maps(self) -> Sequence[Transform]:
        return [transforms.PlanarLU(self.dim, [("planar", self.length)])]


class Sylvester(ParametricFlow):
    """Sylvester flows: planar flows in all directions at once (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649).

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors, of which all parameters are linear functions; 0 for none.
        length: Number of Sylvester maps.
        reflections: Number of Householder reflections of each map; at most ``dim`` are used.
        base: Base of the same length; standard normal by default.

    >>> x, log_prob = Sylvester(3, length=2)().rsample_and_log_prob((5,))
    >>> x.shape, log_prob.shape
    (torch.Size([5, 3]), torch.Size([5]))
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        context_dim: Length = 0,
        length: Depth = 4,
        reflections: Count = 8,
        *,
        base: Base | None = None,
    ) -> None:
        self.reflections = reflections
        super().__init__(dim, context_dim, length, base=base)

    def make_maps(self) -> Sequence[Transform]:
        size = min(self.reflections, self.dim)
        return [transforms.Sylvester(self.dim, "householder", size) for _ in range(self.length)]


class Radial(ParametricFlow):
    """Radial flows, each around one centre (Rezende & Mohamed 2015, https://arxiv.org/abs/1505.05770).

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors, of which all parameters are linear functions; 0 for none.
        length: Number of radial maps.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> Radial(2, length=3)().log_prob(torch.zeros(5, 2)).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self, dim: Dim, context_dim: Length = 0, length: Depth = 10, *, base: Base | None = None
    ) -> None:
        super().__init__(dim, context_dim, length, base=base)

    def make_maps(self) -> Sequence[Transform]:
        return [transforms.Radial(self.dim) for _ in range(self.length)]


class Householder(ParametricFlow):
    """Householder flow: a scale and a shift for each entry, then reflections (Tomczak & Welling 2016,
    https://arxiv.org/abs/1611.09630).

    On a normal base it is a Gaussian with a full covariance. As the posterior of an autoencoder, each example has its own.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors, of which all parameters are linear functions; 0 for none.
        length: Number of pairs of reflections.
        base: Base of the same length; standard normal by default.

    >>> Householder(3)().variance.shape
    torch.Size([3])
    """

    def make_maps(self) -> Sequence[Transform]:
        return [transforms.Affine(self.dim), transforms.Householder(self.dim, 2 * self.length)]


class FFJORD(StackedFlow):
    """FFJORD: the flow of a neural vector field (Grathwohl et al. 2019, https://arxiv.org/abs/1810.01367).

    Both directions cost a numerical solution. :func:`~flowbnn.transforms.flow_matching_loss` trains one field without a solver.

    Args:
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        length: Number of vector fields, one after the other.
        hidden: Widths of the hidden layers of their networks.
        trace: Computation of the trace, as in :class:`~flowbnn.transforms.NeuralODE`.
        rtol: Relative tolerance of the solver.
        atol: Absolute tolerance of the solver.
        base: Base of the same length; standard normal by default.

    >>> import torch
    >>> flow = FFJORD(2, hidden=(8,))
    >>> transforms.flow_matching_loss(flow.transform, flow.base(), torch.randn(100, 2)).shape
    torch.Size([])
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        context_dim: Length = 0,
        length: Depth = 1,
        hidden: Widths = (64, 64),
        trace: Literal["exact", "hutchinson"] | None = None,
        rtol: Positive = 1e-5,
        atol: Positive = 1e-5,
        *,
        base: Base | None = None,
    ) -> None:
        self.trace, self.rtol, self.atol = trace, rtol, atol
        super().__init__(dim, context_dim, length, hidden, base=base)

    def make_step(self, size: int, index: int) -> Transform:
        return transforms.NeuralODE(size, self.hidden, self.context_dim, self.trace, self.rtol, self.atol)
