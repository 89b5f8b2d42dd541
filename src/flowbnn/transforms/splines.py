"""Monotone rational-quadratic splines, as maps of one number and as functions of their knots."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.numerics import soft_clamp
from flowbnn.options import Bounds, Ge, Positive, check, options
from flowbnn.transforms.univariate import Univariate


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
        return _bin_image(value, inside, self._bin(inside, parameters, 0))

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        inside = value.clamp(-self.bound, self.bound)
        return _bin_preimage(value, inside, self._bin(inside, parameters, 1))

    def knots(self, parameters: Tensor, entries: int) -> Tensor:
        """Returns positions, heights and slopes at the knots, ``(..., entries, 3, bins + 1)``, for :func:`spline_forward`.

        Args:
            parameters: Parameters ``(..., params_per_entry * entries)``.
            entries: Number of entries of a vector.

        >>> SplineMap(bins=2, bound=1.0).knots(torch.zeros(5), 1)[0]
        tensor([[-1.,  0.,  1.],
                [-1.,  0.,  1.],
                [ 1.,  1.,  1.]])
        """
        table = self._table(parameters, entries)
        slopes = soft_clamp(table[..., 2:, :], -math.log(self.min_size)).exp()
        return torch.cat([table[..., :2, :], slopes], -2)

    def _knot_slopes(self, raw: Tensor) -> Tensor:
        """Returns the raw log-slopes at all knots. They are zero at the ends, which is a slope of one."""
        return F.pad(raw, (1, 1))

    def _table(self, parameters: Tensor, entries: int) -> Tensor:
        """Returns positions, heights and raw log-slopes at the knots, ``(..., entries, 3, bins + 1)``."""
        bins = self.bins
        parameters = parameters.unflatten(-1, (entries, -1))
        sizes = F.softmax(parameters[..., : 2 * bins].unflatten(-1, (2, bins)), -1)
        sizes = 2.0 * self.bound * (self.min_size + (1.0 - self.min_size * bins) * sizes[..., :-1])
        # The ends are exact, so that the slopes outside are one.
        knots = F.pad(sizes.cumsum(-1) - self.bound, (1, 0), value=-self.bound)
        knots = F.pad(knots, (0, 1), value=self.bound)
        return torch.cat([knots, self._knot_slopes(parameters[..., 2 * bins :]).unsqueeze(-2)], -2)

    def _bin(self, value: Tensor, parameters: Tensor, side: int) -> Any:
        """Returns the left end and width, the bottom and height, and both relative slopes of the bin of each value.

        Args:
            value: Values inside the interval.
            parameters: Parameters of the spline.
            side: 0 to find bins by their widths, 1 to find them by their heights.
        """
        (x0, w), (y0, h), logs = _select_bin(value, self._table(parameters, value.shape[-1]), side)
        d0, d1 = (soft_clamp(log, -math.log(self.min_size)).exp() * (w / h) for log in logs)
        return x0, w, y0, h, d0, d1


def _select_bin(value: Tensor, table: Tensor, side: int) -> Any:
    """Returns left end and width, bottom and height, and the last row of a table at both ends, of the bin of each value."""
    index = (value.unsqueeze(-1) >= table[..., side, 1:-1]).sum(-1)
    index = torch.stack([index, index + 1], -1).unsqueeze(-2).expand(*index.shape, 3, 2)
    (x0, x1), (y0, y1), ends = (row.unbind(-1) for row in table.gather(-1, index).unbind(-2))
    return (x0, x1 - x0), (y0, y1 - y0), ends


def _bin_forward(xi: Tensor, d0: Tensor, d1: Tensor) -> tuple[Tensor, Tensor]:
    r"""Returns :math:`\eta` and :math:`\log d\eta / d\xi` of :class:`SplineMap`."""
    complement = 1.0 - xi
    beta = 1.0 + (d0 + d1 - 2.0) * xi * complement
    slope = d1 * xi * xi + 2.0 * xi * complement + d0 * complement * complement
    return xi * (xi + d0 * complement) / beta, torch.log(slope) - 2.0 * torch.log(beta)


def _bin_image(value: Tensor, inside: Tensor, selected: Any) -> tuple[Tensor, Tensor]:
    """Returns the images of values by their bins, and the log-slopes."""
    x0, w, y0, h, d0, d1 = selected
    xi = ((inside - x0) / w).clamp(0.0, 1.0)
    eta, log_slope = _bin_forward(xi, d0, d1)
    return torch.addcmul(y0, h, eta) + (value - inside), log_slope + torch.log(h / w)


def _bin_preimage(value: Tensor, inside: Tensor, selected: Any) -> tuple[Tensor, Tensor]:
    """Returns the preimages of values by their bins, and the log-slopes of the inverse."""
    x0, w, y0, h, d0, d1 = selected
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


def spline_forward(value: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the images of values under splines, and the log-slopes.

    Args:
        value: Values ``(...)``.
        knots: Knots ``(..., 3, bins + 1)`` of :meth:`SplineMap.knots`, whose first axes broadcast to those of the values.

    >>> spline_forward(torch.tensor([0.25]), SplineMap(bins=2).knots(torch.zeros(5), 1))[0]
    tensor([0.2500])
    """
    return _bin_image(*_known_bin(value, knots, 0))


def spline_inverse(value: Tensor, knots: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the preimages of values under splines, and the log-slopes of the inverse.

    Args:
        value: Values ``(...)``.
        knots: Knots ``(..., 3, bins + 1)`` of :meth:`SplineMap.knots`, whose first axes broadcast to those of the values.

    >>> spline_inverse(torch.tensor([7.0]), SplineMap(bins=2).knots(torch.ones(5), 1))[0]
    tensor([7.])
    """
    return _bin_preimage(*_known_bin(value, knots, 1))


def _known_bin(value: Tensor, knots: Tensor, side: int) -> tuple[Tensor, Tensor, Any]:
    """Returns values, the values inside the interval, and their bins."""
    inside = torch.minimum(torch.maximum(value, knots[..., 0, 0]), knots[..., 0, -1])
    (x0, w), (y0, h), slopes = _select_bin(inside, knots.expand(*value.shape, *knots.shape[-2:]), side)
    d0, d1 = (slope * (w / h) for slope in slopes)
    return value, inside, (x0, w, y0, h, d0, d1)


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
