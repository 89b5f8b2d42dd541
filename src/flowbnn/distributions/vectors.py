"""Distributions of vectors: independent numbers (:class:`DiagonalNormal` and others) and mixtures of normals."""

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Normal, constraints
from torch.nn import functional as F

from flowbnn.distributions.draws import draw_components, select_normal, standard_normal
from flowbnn.errors import FlowBNNError, check_shape
from flowbnn.options import Bounds, Positive, check

DegreesOfFreedom = Annotated[float, Bounds(gt=2)]  # of a Student-t distribution with a finite variance


class _VectorDistribution(Distribution):
    """Base class for reparameterized distributions of real vectors that accept a generator. ``axes`` is the number of parameter
    axes.
    """

    axes: int
    loc: Tensor
    scale: Tensor
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    @property
    def arg_constraints(self) -> dict[str, Any]:
        scalars = {"loc": constraints.real, "scale": constraints.positive}
        return {name: constraints.independent(kind, self.axes) for name, kind in scalars.items()}

    def __init__(self, loc: Tensor, scale: Tensor | float, validate_args: bool | None = False) -> None:
        name = type(self).__name__
        if not isinstance(loc, Tensor) or loc.ndim < self.axes:
            check_shape("loc", loc, ("...", *("any",) * self.axes), owner=name)
        if not isinstance(loc, Tensor) or not loc.is_floating_point() or loc.layout is not torch.strided:
            check("loc", loc, Tensor, name)
            loc = loc.to(torch.promote_types(loc.dtype, torch.get_default_dtype()))  # of integers
        if not isinstance(validate_args, bool | None):
            check("validate_args", validate_args, bool | None, name)
        if not (isinstance(scale, Tensor) and scale.is_floating_point()):
            check("scale", scale, Tensor | Positive, name)
            scale = torch.as_tensor(scale, dtype=loc.dtype, device=loc.device)
        if scale.ndim and scale.device != loc.device:
            raise FlowBNNError(f"{name}: scale is on {scale.device}, loc on {loc.device}", argument="scale")
        try:  # sums over the last axis would be wrong for a scale that only broadcasts
            equal = loc.shape == scale.shape
            self.loc, self.scale = (loc, scale) if equal else torch.broadcast_tensors(loc, scale)
        except RuntimeError:
            text = f"{name}(scale=...) must have shape {tuple(loc.shape)}, got {tuple(scale.shape)}"
            raise FlowBNNError(text, kind="shape", argument="scale") from None
        super().__init__(self.loc.shape[: -self.axes], self.loc.shape[-1:], validate_args=validate_args)

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        shape = torch.Size(batch_shape) + self.loc.shape[-self.axes :]
        return self.like(self.loc.expand(shape), self.scale.expand(shape))

    def like(self, loc: Tensor, scale: Tensor) -> Any:
        """Returns a distribution of the same kind with other locations and scales."""
        return type(self)(loc, scale, self._validate_args)

    def sample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        with torch.no_grad():
            return self.rsample(sample_shape, generator)  # type: ignore[call-arg]


class Diagonal(_VectorDistribution):
    """Base class for independent numbers on the last axis: ``loc`` plus ``scale`` times a symmetric standard variable."""

    axes, periodic = 1, False
    standard_variance: float = 1.0
    standard_entropy: float
    standard: Callable[[torch.Size, torch.Generator | None], Tensor]  # draws the standard variable
    standard_log_prob: Callable[[Tensor], Tensor]  # returns its log-density

    @property
    def mean(self) -> Tensor:
        return self.loc

    mode = mean

    @property
    def variance(self) -> Tensor:
        return self.scale.square() * self.standard_variance

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        noise = self.standard(torch.Size(sample_shape) + self.loc.shape, generator)
        return torch.addcmul(self.loc, noise, self.scale)

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        return self.standard_log_prob((value - self.loc) / self.scale).sum(-1) - self.scale.log().sum(-1)

    def entropy(self) -> Tensor:
        return self.loc.shape[-1] * self.standard_entropy + self.scale.log().sum(-1)

    def _uniform(self, shape: Sequence[int], generator: torch.Generator | None) -> Tensor:
        """Returns uniform numbers in the open interval (0, 1)."""
        margin = 0.5 * torch.finfo(self.loc.dtype).eps
        option: dict[str, Any] = {} if generator is None else {"generator": generator}
        uniform = torch.rand(tuple(shape), dtype=self.loc.dtype, device=self.loc.device, **option)
        return uniform.clamp(margin, 1.0 - margin)


class DiagonalNormal(Diagonal):
    r"""Independent normal variables on the last axis, :math:`\prod_i \mathcal N(x_i; \mu_i, \sigma_i^2)`.

    It equals ``Independent(Normal(loc, scale), 1)``, and its ``rsample`` and ``sample`` accept a generator.

    Args:
        loc: Locations ``(..., dim)``.
        scale: Scales ``(..., dim)``, or one number.
        validate_args: If True, checks arguments and values, as in ``torch.distributions``.

    >>> q = DiagonalNormal(torch.zeros(3), torch.ones(3))
    >>> q.rsample((2,), generator=torch.Generator().manual_seed(0)).shape, round(q.entropy().item(), 4)
    (torch.Size([2, 3]), 4.2568)
    """

    standard_entropy = 0.5 * (1.0 + math.log(2.0 * math.pi))

    def standard(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return standard_normal(shape, self.loc.dtype, self.loc.device, generator)

    def standard_log_prob(self, value: Tensor) -> Tensor:
        return -0.5 * (value.square() + math.log(2.0 * math.pi))


class DiagonalStudent(Diagonal):
    r"""Independent Student-t variables on the last axis, :math:`x_i = \mu_i + \sigma_i t_i`, with ``df`` degrees of freedom each.

    Draws use Bailey's formula (1994): :math:`t = \sqrt{\nu (u^{-2/\nu} - 1)} \cos 2 \pi v` with uniform :math:`u` and :math:`v`.

    Args:
        loc: Locations ``(..., dim)``.
        scale: Scales ``(..., dim)``, or one number.
        df: Degrees of freedom, above 0. The variance is finite above 2.
        validate_args: If True, checks arguments and values, as in ``torch.distributions``.

    >>> p = DiagonalStudent(torch.zeros(1), torch.ones(1), df=3.0)
    >>> round(p.log_prob(torch.zeros(1)).item(), 4), p.variance.item()
    (-1.0009, 3.0)
    """

    def __init__(
        self, loc: Tensor, scale: Tensor | Positive, df: Positive, validate_args: bool | None = False
    ) -> None:
        if not torch.compiler.is_compiling():  # in a graph a base passes its own arguments
            check("df", df, Positive, "DiagonalStudent")
        self.df = float(df)
        self.standard_variance = self.df / (self.df - 2.0) if self.df > 2.0 else math.inf
        super().__init__(loc, scale, validate_args)

    def like(self, loc: Tensor, scale: Tensor) -> "DiagonalStudent":
        return DiagonalStudent(loc, scale, self.df, self._validate_args)

    entropy = Distribution.entropy  # raises NotImplementedError

    def standard(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        u, v = self._uniform((2, *shape), generator)
        radius = (self.df * torch.expm1(-2.0 / self.df * torch.log1p(-u))).sqrt()
        return radius * torch.cos(2.0 * math.pi * v)

    def standard_log_prob(self, value: Tensor) -> Tensor:
        half = 0.5 * (self.df + 1.0)
        constant = math.lgamma(half) - math.lgamma(0.5 * self.df) - 0.5 * math.log(self.df * math.pi)
        return constant - half * torch.log1p(value.square() / self.df)


class DiagonalLaplace(Diagonal):
    r"""Independent Laplace variables on the last axis, :math:`\prod_i e^{-|x_i - \mu_i| / b_i} / 2 b_i`.

    Args:
        loc: Locations ``(..., dim)``.
        scale: Scales ``(..., dim)``, or one number.
        validate_args: If True, checks arguments and values, as in ``torch.distributions``.

    >>> p = DiagonalLaplace(torch.zeros(1), torch.ones(1))
    >>> round(p.log_prob(torch.zeros(1)).item(), 4), p.variance.item()
    (-0.6931, 2.0)
    """

    standard_variance, standard_entropy = 2.0, 1.0 + math.log(2.0)

    def standard(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        u = self._uniform(shape, generator) - 0.5
        return -u.sign() * torch.log1p(-2.0 * u.abs())

    def standard_log_prob(self, value: Tensor) -> Tensor:
        return -value.abs() - math.log(2.0)


class DiagonalLogistic(Diagonal):
    r"""Independent logistic variables on the last axis: :math:`x_i = \mu_i + s_i\, \mathrm{logit}(u_i)` with uniform :math:`u_i`.

    Args:
        loc: Locations ``(..., dim)``.
        scale: Scales ``(..., dim)``, or one number.
        validate_args: If True, checks arguments and values, as in ``torch.distributions``.

    >>> p = DiagonalLogistic(torch.zeros(1), torch.ones(1))
    >>> round(p.log_prob(torch.zeros(1)).exp().item(), 4), round(p.variance.item(), 4)
    (0.25, 3.2899)
    """

    standard_variance, standard_entropy = math.pi**2 / 3.0, 2.0

    def standard(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return torch.logit(self._uniform(shape, generator))

    def standard_log_prob(self, value: Tensor) -> Tensor:
        return F.logsigmoid(value) + F.logsigmoid(-value)


class CircularUniform(Diagonal):
    r"""Independent uniform angles on the last axis, drawn from :math:`[\mu_i - s_i, \mu_i + s_i)`, one full turn.

    Angles are taken modulo one turn, so that the density is constant.

    Args:
        loc: Locations ``(..., dim)``.
        scale: Scales ``(..., dim)``, or one number.
        validate_args: If True, checks arguments and values, as in ``torch.distributions``.

    >>> CircularUniform(torch.zeros(1), torch.full((1,), math.pi)).log_prob(torch.tensor([7.0]))
    tensor(-1.8379)
    """

    periodic = True
    standard_variance, standard_entropy = 1.0 / 3.0, math.log(2.0)

    def standard(self, shape: torch.Size, generator: torch.Generator | None) -> Tensor:
        return 2.0 * self._uniform(shape, generator) - 1.0

    def standard_log_prob(self, value: Tensor) -> Tensor:
        return torch.full_like(value, -math.log(2.0))


class NormalMixture(_VectorDistribution):
    r"""Mixture of :math:`K` diagonal normals with equal weights, :math:`\tfrac1K \sum_k \mathcal N(x; \mu_k, \sigma_k^2)`.

    The weights are fixed and equal, as in the implicit Bayesian network of Trinh et al. (2020). Drawing a component and then its
    normal is therefore an exact reparameterization.

    Args:
        loc: Means ``(..., components, dim)``.
        scale: Standard deviations ``(..., components, dim)``, or one number.
        validate_args: If True, checks arguments and values, as in ``torch.distributions``.

    >>> mixture = NormalMixture(torch.tensor([[-2.0], [2.0]]), 0.5)
    >>> mixture.mean, mixture.variance
    (tensor([0.]), tensor([4.2500]))
    """

    axes = 2

    @property
    def components(self) -> int:
        """Number of components."""
        return self.loc.shape[-2]

    @property
    def mean(self) -> Tensor:
        return self.loc.mean(-2)

    @property
    def variance(self) -> Tensor:
        return self.scale.square().mean(-2) + self.loc.var(-2, correction=0)

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        device = self.loc.device
        component = draw_components(self.components, shape, device, generator)
        noise = standard_normal(shape + self.event_shape, self.loc.dtype, device, generator)
        if not self.batch_shape:
            return select_normal(self.loc, self.scale, component, noise)
        index = component[..., None, None].expand(*shape, 1, self.event_shape[0])
        full = shape + self.loc.shape[-2:]
        loc, scale = (t.expand(full).gather(-2, index).squeeze(-2) for t in (self.loc, self.scale))
        return loc + scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        if self._validate_args:
            self._validate_sample(value)
        log_probs = DiagonalNormal(self.loc, self.scale).log_prob(value.unsqueeze(-2))
        return torch.logsumexp(log_probs, -1) - math.log(self.components)


def unwrap_independent(distribution: Any) -> Any:
    """Returns the innermost distribution of torch's ``Independent``."""
    return (
        unwrap_independent(distribution.base_dist) if isinstance(distribution, Independent) else distribution
    )


def as_diagonal_normal(distribution: Any, event_axes: int = 0) -> DiagonalNormal | None:
    """Returns a distribution as :class:`DiagonalNormal`, or None if it is not one.

    Args:
        distribution: A ``torch.distributions`` distribution.
        event_axes: 1 to treat the last axis of a plain ``Normal`` as an event axis.

    >>> as_diagonal_normal(Independent(Normal(torch.zeros(3), torch.ones(3)), 1))
    DiagonalNormal(loc: torch.Size([3]), scale: torch.Size([3]))
    """
    if isinstance(distribution, DiagonalNormal):
        return distribution if event_axes <= 1 else None
    scalar = unwrap_independent(distribution)
    if type(scalar) is not Normal or max(len(distribution.event_shape), event_axes) != 1:
        return None
    return DiagonalNormal(scalar.loc, scalar.scale)
