r"""Increasing maps of one number, whose parameters a network computes: couplings and autoregressive maps take any of them.

To write one, subclass :class:`Univariate`: say how many parameters an entry takes, and give both directions for values
``(..., D)`` and parameters ``(..., params_per_entry * D)``. Each returns the new values and the *logarithms of the slopes of the map it
applied*, both ``(..., D)``. With all parameters zero the map should be the identity or next to it: networks start there.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import check_net
from flowbnn.numerics import monotone_root, soft_clamp
from flowbnn.options import Count, Ge, Positive, options
from flowbnn.transforms.base import BidirectionalTransform, check_vectors


class Univariate(ABC):
    """The contract is at the top of this file."""

    interleaved: bool = False
    """The parameters of one entry lie side by side; else the first of every entry, then the second, and so on."""
    inverse_kind: Literal["exact", "numerical"] = "exact"
    width: int = 1
    """How many numbers of a vector are one entry, side by side."""
    features: int = 1
    """How many numbers a network reads of one entry."""

    @property
    @abstractmethod
    def params_per_entry(self) -> int:
        """How many parameters a number takes."""

    def read(self, value: Tensor) -> Tensor:
        r"""What networks read of values: :math:`q(z) = z / (1 + |z| / 5)`; :class:`~flowbnn.transforms.Coupling` says why."""
        return value / torch.rsub(value.abs(), 1.0, alpha=-0.2)

    @abstractmethod
    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The map and the logarithms of its slopes."""

    @abstractmethod
    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse map for the same parameters and the logarithms of its slopes."""


class ConditionedTransform(BidirectionalTransform):
    """What couplings and autoregressive maps share: a univariate map, and a net that computes its parameters."""

    net: Any

    def __init__(self, dim: int, univariate: Univariate, net: nn.Module, compress: bool) -> None:
        super().__init__()
        check_net(net, type(self).__name__)
        self.dim, self.univariate, self.net, self.compress = dim, univariate, net, compress
        self.inverse_kind = univariate.inverse_kind
        self.event_dim = int(getattr(net, "event_dim", 1))
        self.interleaved = bool(getattr(net, "interleaved", univariate.interleaved))
        # where the first parameter is, once and for all: looking for it takes as long as a layer does
        places = ((part, name) for part in net.modules() for name, _ in part.named_parameters(recurse=False))
        self.first = next(places, None)

    def _check(self, value: Tensor) -> None:
        """Refuse vectors of another length or precision."""
        check_vectors(value, self.dim, self, getattr(*self.first) if self.first else None)

    def _parameters_for(self, known: Tensor, context: Tensor | None, count: int) -> Tensor:
        """Those of ``count`` entries, from what is known."""
        parameters = self.net(self.univariate.read(known) if self.compress else known, context)
        wanted = (*known.shape[:-1], self.univariate.params_per_entry * count)
        if parameters.shape != wanted:
            text = f"the net of {type(self).__name__} must give {wanted} here, not {tuple(parameters.shape)}"
            raise FlowBNNError(text, kind="shape")
        if self.interleaved == self.univariate.interleaved:
            return parameters
        entries = count // self.univariate.width
        return parameters.unflatten(-1, (entries, -1) if self.interleaved else (-1, entries)).mT.flatten(-2)


@options
class ShiftMap(Univariate):
    r""":math:`x = z + t`.

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
    r""":math:`x = e^{s} z + t` with :math:`s = b \tanh(a / b)`; first all :math:`a`, then all :math:`t`.

    The bound is soft: an unbounded log-scale multiplies along a stack until it overflows, in float64 as well.

    Args:
        bound: largest size :math:`b` of the log-scale.
        positive_log_scale: :math:`s = b \tanh(\mathrm{softplus}(a - 2) / b) > 0`, much as in Glow. On the way from data to the base
            numbers only shrink, so that no stack of steps carries an unusual image off to infinity. It does not start at the identity.
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
        raw, shift = parameters.split_with_sizes([parameters.shape[-1] // 2] * 2, -1)  # chunk takes longer
        return F.softplus(raw - 2.0) if self.positive_log_scale else raw, shift


@options
class SigmoidalMap(Univariate):
    r"""A deep sigmoidal flow, :math:`x = \mathrm{logit}\left(\sum_k w_k\, \sigma(a_k z + b_k)\right)`, of :math:`a_k, w_k > 0` and
    :math:`\sum_k w_k = 1` (Huang, Krueger, Lacoste & Courville 2018, equation 8, https://arxiv.org/abs/1804.00779).

    A mixture of logistic distribution functions seen through the logit, computed in logarithms; enough units reach every
    increasing map. The inverse is numerical: :math:`x` lies between the smallest and the largest :math:`a_k z + b_k`, which
    brackets :math:`z`. Its last two Newton steps are differentiable, so that gradients and Hessians are those of the implicit
    function.

    Args:
        units: number of sigmoids; an entry takes ``3 * units`` numbers: slopes, offsets and weights.
        bound: largest size of :math:`\log a_k`, kept by :math:`\log a = b \tanh(\cdot / b)`.

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
        return _mixture(value, *_units(parameters.unflatten(-1, (value.shape[-1], -1)), self.bound))

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _unmixed(value, *_units(parameters.unflatten(-1, (value.shape[-1], -1)), self.bound))


def _units(each: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-slopes, offsets and log-weights of raw numbers ``(..., D, 3 * units)``."""
    raw, b, logits = each.unflatten(-1, (3, -1)).unbind(-2)
    # units that start apart, or they would stay together
    b = b + torch.linspace(-1.0, 1.0, b.shape[-1], dtype=b.dtype, device=b.device)
    return soft_clamp(raw, bound), b, F.log_softmax(logits, -1)


def _mixture(z: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.addcmul(b, log_a.exp(), z.unsqueeze(-1))
    below, above = log_w + F.logsigmoid(s), log_w + F.logsigmoid(-s)
    # shares of the distribution function and of the rest: far out, where those vanish, no large logarithms are subtracted
    log_slopes = log_a - log_w + F.log_softmax(below, -1) + F.log_softmax(above, -1)
    return torch.logsumexp(below, -1) - torch.logsumexp(above, -1), torch.logsumexp(log_slopes, -1)


def _unmixed(x: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`_mixture`, by a bracketed root and two Newton steps."""

    def newton(z: Tensor) -> tuple[Tensor, Tensor]:
        found, log_slope = _mixture(z, log_a, b, log_w)
        return found - x, log_slope.exp()

    with torch.no_grad():
        ends = (x.unsqueeze(-1) - b) * (-log_a).exp()
    z = monotone_root(newton, ends.amin(-1), ends.amax(-1))
    for _ in range(2):
        error, slope = newton(z)
        z = z - error / slope
    return z, -_mixture(z, log_a, b, log_w)[1]


@options
class LogisticMixtureMap(Univariate):
    r"""The map of Flow++: a mixture of logistic distribution functions seen through the logit, scaled and shifted (Ho et al. 2019).

    On the way to the base, which costs one evaluation, :math:`z = e^s\, \mathrm{logit}(\sum_k w_k\, \sigma(a_k x + b_k)) + t`
    (https://arxiv.org/abs/1902.00275, equation 15). Draws invert it as :class:`SigmoidalMap` inverts itself, with implicit gradients.

    Args:
        components: of the mixture; an entry takes ``3 * components + 2`` numbers.
        bound: largest size of :math:`s` and of :math:`\log a_k`.

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
        each = parameters.unflatten(-1, (value.shape[-1], self.params_per_entry))
        return soft_clamp(each[..., 0], self.bound), each[..., 1], _units(each[..., 2:], self.bound)

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        x, log_slope = _unmixed((value - shift) * (-log_scale).exp(), *units)
        return x, log_slope - log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        y, log_slope = _mixture(value, *units)
        return y * log_scale.exp() + shift, log_slope + log_scale


@options
class SplineMap(Univariate):
    r"""A monotone rational-quadratic spline on :math:`[-B, B]` with the identity outside (Durkan, Bekasov, Murray & Papamakarios 2019).

    Between two knots, with :math:`\xi, \eta \in [0, 1]` the shares of the bin's width :math:`w` and height :math:`h` that lie
    below :math:`z` and :math:`x`, and :math:`\delta_0, \delta_1` the slopes at the knots over :math:`h / w`,

    .. math:: \eta = \frac{\xi (\xi + \delta_0 (1 - \xi))}{\beta}, \qquad
              \frac{d\eta}{d\xi} = \frac{\delta_1 \xi^2 + 2 \xi (1 - \xi) + \delta_0 (1 - \xi)^2}{\beta^2}, \qquad
              \beta = 1 + (\delta_0 + \delta_1 - 2) \xi (1 - \xi) .

    In these units the discriminant of the inverse is a sum of positive numbers, :math:`t^2 + 4 \eta (1 - \eta)` with
    :math:`t = \delta_0 (1 - \eta) - \delta_1 \eta`, and no rounding makes it negative, as it can the usual :math:`b^2 - 4ac`. Values
    are clamped to the interval before the arithmetic, and what was clamped off is added again: there is no boolean index that may be
    empty and no gradient of a branch not taken.

    Args:
        bins: number :math:`K` of bins; an entry takes ``3 * bins - 1`` numbers: widths, heights, and slopes at the inner knots.
        bound: half the width :math:`B` of the interval.
        min_size: least width and height of a bin, as a share of the interval; slopes are between ``min_size`` and its reciprocal.

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
        if self.min_size * self.bins >= 1:
            text = f"{self.bins} bins of at least {self.min_size} of the interval do not fit into it"
            raise FlowBNNError(text, argument="smallest")

    @property
    def params_per_entry(self) -> int:
        return 3 * self.bins - 1

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        inside = value.clamp(-self.bound, self.bound)
        x0, w, y0, h, d0, d1 = self._bin(inside, parameters, 0)
        at = ((inside - x0) / w).clamp(0.0, 1.0)
        share, log_slope = _bin_forward(at, d0, d1)
        return torch.addcmul(y0, h, share) + (value - inside), log_slope + torch.log(h / w)

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        inside = value.clamp(-self.bound, self.bound)
        x0, w, y0, h, d0, d1 = self._bin(inside, parameters, 1)
        share = ((inside - y0) / h).clamp(0.0, 1.0)
        rest = 1.0 - share
        t = d0 * rest - d1 * share
        root = torch.sqrt(t * t + 4.0 * share * rest) + t.abs()
        rising = t >= 0
        # of two equal quotients the one that adds positive numbers
        above = torch.where(rising, 2.0 * share, root)
        at = above / (above + torch.where(rising, root, 2.0 * rest))
        log_slope = -_bin_forward(at, d0, d1)[1] - torch.log(h / w)
        return torch.addcmul(x0, w, at) + (value - inside), log_slope

    def _slopes(self, raw: Tensor) -> Tensor:
        """The raw log-slopes at all knots: zero, which is a slope of one, at the ends."""
        return F.pad(raw, (1, 1))

    def _bin(self, value: Tensor, parameters: Tensor, side: int) -> Any:
        """Left and width, bottom and height, and the relative slopes of the bin that a value is in; ``side`` 1: by its heights."""
        bins = self.bins
        parameters = parameters.unflatten(-1, (value.shape[-1], -1))
        sizes = F.softmax(parameters[..., : 2 * bins].unflatten(-1, (2, bins)), -1)
        sizes = 2.0 * self.bound * (self.min_size + (1.0 - self.min_size * bins) * sizes[..., :-1])
        # the ends are exact, so that the slopes outside are
        knots = F.pad(sizes.cumsum(-1) - self.bound, (1, 0), value=-self.bound)
        knots = F.pad(knots, (0, 1), value=self.bound)
        index = (value.unsqueeze(-1) >= knots[..., side, 1:-1]).sum(-1)
        table = torch.cat([knots, self._slopes(parameters[..., 2 * bins :]).unsqueeze(-2)], -2)
        index = torch.stack([index, index + 1], -1).unsqueeze(-2).expand(*index.shape, 3, 2)
        (x0, x1), (y0, y1), logs = (part.unbind(-1) for part in table.gather(-1, index).unbind(-2))
        w, h = x1 - x0, y1 - y0
        d0, d1 = (soft_clamp(log, -math.log(self.min_size)).exp() * (w / h) for log in logs)
        return x0, w, y0, h, d0, d1


def _bin_forward(at: Tensor, d0: Tensor, d1: Tensor) -> tuple[Tensor, Tensor]:
    rest = 1.0 - at
    below = 1.0 + (d0 + d1 - 2.0) * at * rest
    slope = d1 * at * at + 2.0 * at * rest + d0 * rest * rest
    return at * (at + d0 * rest) / below, torch.log(slope) - 2.0 * torch.log(below)


@options
class CircularSplineMap(SplineMap):
    r"""A rational-quadratic spline of the circle :math:`[-B, B)` onto itself, turned by a learned angle (Rezende et al. 2020).

    The slopes at both ends are one parameter, so that densities are continuous where the circle closes. Values are taken modulo
    :math:`2B`. Networks read :math:`\cos` and :math:`\sin` of the angle.

    Args:
        bins: number of bins; an entry takes ``3 * bins + 1`` numbers: widths, heights, slopes and the angle of the turn.
        bound: :math:`B`; the default is for angles in radians.
        min_size: as in :class:`SplineMap`.

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
        parameters, turn = self._turn(value, parameters)
        value, log_slope = super().forward(self._wrapped(value), parameters)
        return self._wrapped(value + turn), log_slope

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        parameters, turn = self._turn(value, parameters)
        value, log_slope = super().inverse(self._wrapped(value - turn), parameters)
        return self._wrapped(value), log_slope

    def _turn(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        parameters = parameters.unflatten(-1, (value.shape[-1], -1))
        return parameters[..., :-1].flatten(-2), parameters[..., -1]

    def _wrapped(self, value: Tensor) -> Tensor:
        return torch.remainder(value + self.bound, 2.0 * self.bound) - self.bound

    def _slopes(self, raw: Tensor) -> Tensor:
        return torch.cat([raw, raw[..., :1]], -1)
