"""Increasing maps of one number whose parameters a network computes, for couplings and autoregressive transforms.

To write one, subclass :class:`Univariate`. Set the number of parameters of an entry, and define both directions for values
``(..., D)`` and parameters ``(..., params_per_entry * D)``. Each direction returns the new values and the logarithms of the slopes of
the map it applies, both ``(..., D)``. With all parameters zero the map should be the identity or close to it, because networks start
there.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import check_net, check_output
from flowbnn.numerics import monotone_root, soft_clamp
from flowbnn.options import Bounds, Count, Ge, Positive, check, options
from flowbnn.transforms.base import BidirectionalTransform, check_vectors


class Univariate(ABC):
    """Base class for increasing maps of one number. The docstring of this module states the contract.

    >>> AffineMap().params_per_entry, SplineMap(bins=8).params_per_entry
    (2, 23)
    """

    interleaved: bool = False
    """True if the parameters of one entry are adjacent; otherwise the first ones of all entries come first, and so on."""
    inverse_kind: Literal["exact", "numerical"] = "exact"
    width: int = 1
    """Number of adjacent numbers of a vector that form one entry."""
    features: int = 1
    """Number of inputs that a network reads for one entry."""

    @property
    @abstractmethod
    def params_per_entry(self) -> int:
        """Number of parameters of one entry."""

    def read(self, value: Tensor) -> Tensor:
        """Returns the inputs of networks, :math:`q(z) = z / (1 + |z| / 5)`. :class:`~flowbnn.transforms.Coupling` gives the
        reason.
        """
        return value / torch.rsub(value.abs(), 1.0, alpha=-0.2)

    @abstractmethod
    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the images of values and the logarithms of the slopes.

        Args:
            value: Values ``(..., D)``.
            parameters: Parameters ``(..., params_per_entry * D)``.
        """

    @abstractmethod
    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the preimages of values and the logarithms of the slopes of the inverse.

        Args:
            value: Values ``(..., D)``.
            parameters: Parameters ``(..., params_per_entry * D)``.
        """


class ConditionedTransform(BidirectionalTransform):
    """Base class for couplings and autoregressive transforms: a univariate map and a net that computes its parameters.

    Args:
        dim: Length of the vectors.
        univariate: Map of single entries.
        net: Module that is called as ``net(value, context)``.
        compress: If True, the net reads ``univariate.read(value)`` instead of the values.
    """

    net: Any

    def __init__(self, dim: int, univariate: Univariate, net: nn.Module, compress: bool) -> None:
        super().__init__()
        check_net(net, type(self).__name__)
        self.dim, self.univariate, self.net, self.compress = dim, univariate, net, compress
        self.inverse_kind = univariate.inverse_kind
        self.event_dim = int(getattr(net, "event_dim", 1))
        self.interleaved = bool(getattr(net, "interleaved", univariate.interleaved))
        # Location of the first parameter, found once because the search takes as long as a layer.
        places = (
            (module, name) for module in net.modules() for name, _ in module.named_parameters(recurse=False)
        )
        self._first_parameter = next(places, None)

    def _check(self, value: Tensor) -> None:
        """Raises FlowBNNError for vectors of another length or dtype."""
        parameter = getattr(*self._first_parameter) if self._first_parameter else None
        check_vectors(value, self.dim, self, parameter)

    def _entry_parameters(self, inputs: Tensor, context: Tensor | None, count: int) -> Tensor:
        """Returns the parameters of some entries.

        Args:
            inputs: Values that the net reads.
            context: Context vectors.
            count: Number of entries.
        """
        parameters = self.net(self.univariate.read(inputs) if self.compress else inputs, context)
        check_output(parameters, (*inputs.shape[:-1], self.univariate.params_per_entry * count))
        if self.interleaved == self.univariate.interleaved:
            return parameters
        entries = count // self.univariate.width
        return parameters.unflatten(-1, (entries, -1) if self.interleaved else (-1, entries)).mT.flatten(-2)


@options
class ShiftMap(Univariate):
    """Shift :math:`x = z + t`.

    >>> ShiftMap().forward(torch.ones(2), torch.tensor([1.0, 2.0]))[0]
    tensor([2., 3.])
    """

    params_per_entry = 1

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return value + parameters, torch.zeros_like(value)

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return value - parameters, torch.zeros_like(value)


@options
class AffineMap(Univariate):
    r"""Affine map :math:`x = e^{s} z + t` with :math:`s = b \tanh(a / b)`. The parameters are first all :math:`a`, then all
    :math:`t`.

    The bound is soft. Without it, log-scales add up along a stack of maps until it overflows, even in float64.

    Args:
        bound: Largest absolute value :math:`b` of the log-scale.
        positive_log_scale: If True, :math:`s = b \tanh(\mathrm{softplus}(a - 2) / b) > 0`, much as in Glow. Numbers then only shrink
            on the way from data to the base, so that no unusual image diverges. The map does not start at the identity.

    >>> AffineMap().forward(torch.ones(1), torch.tensor([0.0, 2.0]))
    (tensor([3.]), tensor([0.]))
    """

    bound: Positive = 2.0
    positive_log_scale: bool = False
    params_per_entry = 2

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self._read(parameters)
        log_scale = soft_clamp(raw, self.bound)
        return value * log_scale.exp() + shift, log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self._read(parameters)
        log_scale = -self.bound * torch.tanh(raw * (1.0 / self.bound))
        return (value - shift) * log_scale.exp(), log_scale

    def _read(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the raw log-scales and the shifts."""
        raw, shift = parameters.split_with_sizes([parameters.shape[-1] // 2] * 2, -1)  # faster than chunk
        return F.softplus(raw - 2.0) if self.positive_log_scale else raw, shift


@options
class SigmoidalMap(Univariate):
    r"""Deep sigmoidal flow, :math:`x = \mathrm{logit}\left(\sum_k w_k\, \sigma(a_k z + b_k)\right)`, with :math:`a_k, w_k > 0` and
    :math:`\sum_k w_k = 1` (Huang, Krueger, Lacoste & Courville 2018, equation 8, https://arxiv.org/abs/1804.00779).

    It is the logit of a mixture of logistic distribution functions, computed in logarithms. Enough units approximate every increasing
    map. The inverse is numerical: :math:`x` lies between the smallest and the largest :math:`a_k z + b_k`, which brackets :math:`z`.
    Its last two Newton steps are differentiable, so that gradients and Hessians are those of the implicit function.

    Args:
        units: Number of sigmoids. An entry has ``3 * units`` parameters: slopes, offsets and weights.
        bound: Largest absolute value of :math:`\log a_k`, by :math:`\log a = b \tanh(\cdot / b)`.

    >>> sigmoids = SigmoidalMap(units=4)
    >>> x, _ = sigmoids.forward(torch.tensor([0.5, -7.0]), torch.linspace(-1, 1, 24))
    >>> sigmoids.inverse(x, torch.linspace(-1, 1, 24))[0]
    tensor([ 0.5000, -7.0000])
    """

    units: Count = 8
    bound: Positive = 3.0
    interleaved = True
    inverse_kind = "numerical"

    @property
    def params_per_entry(self) -> int:
        return 3 * self.units

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _mixture(
            value, *_mixture_parameters(parameters.unflatten(-1, (value.shape[-1], -1)), self.bound)
        )

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _mixture_inverse(
            value, *_mixture_parameters(parameters.unflatten(-1, (value.shape[-1], -1)), self.bound)
        )


def _mixture_parameters(raw: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-slopes, offsets and log-weights of a mixture for raw numbers ``(..., D, 3 * units)``."""
    log_slopes, b, logits = raw.unflatten(-1, (3, -1)).unbind(-2)
    # Offsets start apart, because equal units would stay equal.
    b = b + torch.linspace(-1.0, 1.0, b.shape[-1], dtype=b.dtype, device=b.device)
    return soft_clamp(log_slopes, bound), b, F.log_softmax(logits, -1)


def _mixture(z: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logit of a mixture of logistic distribution functions and the logarithm of its slope."""
    s = torch.addcmul(b, log_a.exp(), z.unsqueeze(-1))
    log_cdf, log_survival = log_w + F.logsigmoid(s), log_w + F.logsigmoid(-s)
    # Softmax weights below and above: far out, where both vanish, no large logarithms are subtracted.
    log_slopes = log_a - log_w + F.log_softmax(log_cdf, -1) + F.log_softmax(log_survival, -1)
    return torch.logsumexp(log_cdf, -1) - torch.logsumexp(log_survival, -1), torch.logsumexp(log_slopes, -1)


def _mixture_inverse(x: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the inverse of :func:`_mixture` and the logarithm of its slope, by a bracketed root and two Newton steps."""

    def newton(z: Tensor) -> tuple[Tensor, Tensor]:
        value, log_slope = _mixture(z, log_a, b, log_w)
        return value - x, log_slope.exp()

    with torch.no_grad():
        bracket = (x.unsqueeze(-1) - b) * (-log_a).exp()
    z = monotone_root(newton, bracket.amin(-1), bracket.amax(-1))
    for _ in range(2):
        error, slope = newton(z)
        z = z - error / slope
    return z, -_mixture(z, log_a, b, log_w)[1]


@options
class LogisticMixtureMap(Univariate):
    r"""Map of Flow++: logit of a mixture of logistic distribution functions, scaled and shifted (Ho et al. 2019).

    The direction to the base costs one evaluation, :math:`z = e^s\, \mathrm{logit}(\sum_k w_k\, \sigma(a_k x + b_k)) + t`
    (https://arxiv.org/abs/1902.00275, equation 15). Draws invert it numerically, as :class:`SigmoidalMap` does, with implicit
    gradients.

    Args:
        components: Number of components of the mixture. An entry has ``3 * components + 2`` parameters.
        bound: Largest absolute value of :math:`s` and of :math:`\log a_k`.

    >>> mixture = LogisticMixtureMap(components=4)
    >>> z, _ = mixture.inverse(torch.tensor([0.5, -7.0]), torch.linspace(-1, 1, 28))
    >>> mixture.forward(z, torch.linspace(-1, 1, 28))[0]
    tensor([ 0.5000, -7.0000])
    """

    components: Count = 8
    bound: Positive = 3.0
    interleaved = True
    inverse_kind = "numerical"

    @property
    def params_per_entry(self) -> int:
        return 3 * self.components + 2

    def _read(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Returns the log-scales, the shifts and the parameters of the mixtures."""
        raw = parameters.unflatten(-1, (value.shape[-1], self.params_per_entry))
        return soft_clamp(raw[..., 0], self.bound), raw[..., 1], _mixture_parameters(raw[..., 2:], self.bound)

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        x, log_slope = _mixture_inverse((value - shift) * (-log_scale).exp(), *units)
        return x, log_slope - log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        y, log_slope = _mixture(value, *units)
        return y * log_scale.exp() + shift, log_slope + log_scale


@options
class SplineMap(Univariate):
    r"""Monotone rational-quadratic spline on :math:`[-B, B]` with the identity outside (Durkan, Bekasov, Murray & Papamakarios 2019).

    Between two knots, with :math:`\xi, \eta \in [0, 1]` the fractions of the bin's width :math:`w` and height :math:`h` that lie
    below :math:`z` and :math:`x`, and :math:`\delta_0, \delta_1` the slopes at the knots over :math:`h / w`,

    .. math:: \eta = \frac{\xi (\xi + \delta_0 (1 - \xi))}{\beta}, \qquad
              \frac{d\eta}{d\xi} = \frac{\delta_1 \xi^2 + 2 \xi (1 - \xi) + \delta_0 (1 - \xi)^2}{\beta^2}, \qquad
              \beta = 1 + (\delta_0 + \delta_1 - 2) \xi (1 - \xi) .

    In these units the discriminant of the inverse is a sum of positive numbers, :math:`t^2 + 4 \eta (1 - \eta)` with
    :math:`t = \delta_0 (1 - \eta) - \delta_1 \eta`. Rounding cannot make it negative, unlike the usual :math:`b^2 - 4ac`. Values are
    clamped to the interval first, and the clamped-off distance is added at the end. There is no boolean index that may be empty, and
    no gradient of a branch that is not taken.

    Args:
        bins: Number :math:`K` of bins. An entry has ``3 * bins - 1`` parameters: widths, heights, and slopes at the inner knots.
        bound: Half width :math:`B` of the interval.
        min_size: Smallest width and height of a bin as a fraction of the interval. Slopes lie between ``min_size`` and its
            reciprocal.

    >>> spline = SplineMap(bins=4, bound=2.0)
    >>> x, log_slope = spline.forward(torch.tensor([0.5, 7.0]), torch.linspace(-1, 1, 22))
    >>> x, spline.inverse(x, torch.linspace(-1, 1, 22))[0]
    (tensor([0.4965, 7.0000]), tensor([0.5000, 7.0000]))
    """

    bins: Annotated[int, Ge(2)] = 8
    bound: Positive = 3.0
    min_size: Positive = 1e-3
    interleaved = True

    def __post_init__(self) -> None:
        limit = Bounds(lt=1 / self.bins)
        check("min_size", self.min_size, Annotated[float, limit], type(self).__name__)

    @property
    def params_per_entry(self) -> int:
        return 3 * self.bins - 1

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        inside = value.clamp(-self.bound, self.bound)
        x0, w, y0, h, d0, d1 = self._bin(inside, parameters, 0)
        xi = ((inside - x0) / w).clamp(0.0, 1.0)
        eta, log_slope = _bin_forward(xi, d0, d1)
        return torch.addcmul(y0, h, eta) + (value - inside), log_slope + torch.log(h / w)

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        inside = value.clamp(-self.bound, self.bound)
        x0, w, y0, h, d0, d1 = self._bin(inside, parameters, 1)
        eta = ((inside - y0) / h).clamp(0.0, 1.0)
        complement = 1.0 - eta
        t = d0 * complement - d1 * eta
        root = torch.sqrt(t * t + 4.0 * eta * complement) + t.abs()
        positive = t >= 0
        # The one of two equal quotients that adds positive numbers.
        numerator = torch.where(positive, 2.0 * eta, root)
        xi = numerator / (numerator + torch.where(positive, root, 2.0 * complement))
        log_slope = -_bin_forward(xi, d0, d1)[1] - torch.log(h / w)
        return torch.addcmul(x0, w, xi) + (value - inside), log_slope

    def _knot_slopes(self, raw: Tensor) -> Tensor:
        """Returns the raw log-slopes at all knots. They are zero at the ends, which is a slope of one."""
        return F.pad(raw, (1, 1))

    def _bin(self, value: Tensor, parameters: Tensor, side: int) -> Any:
        """Returns the left end and width, the bottom and height, and both relative slopes of the bin of each value.

        Args:
            value: Values inside the interval.
            parameters: Parameters of the spline.
            side: 0 to find bins by their widths, 1 to find them by their heights.
        """
        bins = self.bins
        parameters = parameters.unflatten(-1, (value.shape[-1], -1))
        sizes = F.softmax(parameters[..., : 2 * bins].unflatten(-1, (2, bins)), -1)
        sizes = 2.0 * self.bound * (self.min_size + (1.0 - self.min_size * bins) * sizes[..., :-1])
        # The ends are exact, so that the slopes outside are one.
        knots = F.pad(sizes.cumsum(-1) - self.bound, (1, 0), value=-self.bound)
        knots = F.pad(knots, (0, 1), value=self.bound)
        index = (value.unsqueeze(-1) >= knots[..., side, 1:-1]).sum(-1)
        table = torch.cat([knots, self._knot_slopes(parameters[..., 2 * bins :]).unsqueeze(-2)], -2)
        index = torch.stack([index, index + 1], -1).unsqueeze(-2).expand(*index.shape, 3, 2)
        (x0, x1), (y0, y1), logs = (row.unbind(-1) for row in table.gather(-1, index).unbind(-2))
        w, h = x1 - x0, y1 - y0
        d0, d1 = (soft_clamp(log, -math.log(self.min_size)).exp() * (w / h) for log in logs)
        return x0, w, y0, h, d0, d1


def _bin_forward(xi: Tensor, d0: Tensor, d1: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns :math:`\eta` and :math:`\log d\eta / d\xi` of :class:`SplineMap`."""
    complement = 1.0 - xi
    beta = 1.0 + (d0 + d1 - 2.0) * xi * complement
    slope = d1 * xi * xi + 2.0 * xi * complement + d0 * complement * complement
    return xi * (xi + d0 * complement) / beta, torch.log(slope) - 2.0 * torch.log(beta)


@options
class CircularSplineMap(SplineMap):
    """Rational-quadratic spline of the circle :math:`[-B, B)` onto itself, followed by a learned rotation (Rezende et al. 2020).

    The slopes at both ends are one parameter, so that densities are continuous where the circle closes. Values are taken modulo
    :math:`2B`. Networks read the cosine and the sine of the angle.

    Args:
        bins: Number of bins. An entry has ``3 * bins + 1`` parameters: widths, heights, slopes and the angle of the rotation.
        bound: Half circumference :math:`B`; the default is for angles in radians.
        min_size: Smallest size of a bin, as in :class:`SplineMap`.

    >>> circle = CircularSplineMap(bins=4)
    >>> x, _ = circle.forward(torch.tensor([3.0, 3.0 + 2 * math.pi]), torch.linspace(-1, 1, 13).repeat(2))
    >>> torch.allclose(x[0], x[1], atol=1e-5)
    True
    """

    bound: Positive = math.pi
    features = 2

    @property
    def params_per_entry(self) -> int:
        return 3 * self.bins + 1

    def read(self, value: Tensor) -> Tensor:
        angle = value * (math.pi / self.bound)
        return torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        parameters, angle = self._split_angle(value, parameters)
        value, log_slope = super().forward(self._wrap(value), parameters)
        return self._wrap(value + angle), log_slope

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        parameters, angle = self._split_angle(value, parameters)
        value, log_slope = super().inverse(self._wrap(value - angle), parameters)
        return self._wrap(value), log_slope

    def _split_angle(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the parameters of the splines and the angles of the rotations."""
        parameters = parameters.unflatten(-1, (value.shape[-1], -1))
        return parameters[..., :-1].flatten(-2), parameters[..., -1]

    def _wrap(self, value: Tensor) -> Tensor:
        """Returns values modulo one turn."""
        return torch.remainder(value + self.bound, 2.0 * self.bound) - self.bound

    def _knot_slopes(self, raw: Tensor) -> Tensor:
        return torch.cat([raw, raw[..., :1]], -1)
