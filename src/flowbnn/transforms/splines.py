"""Rational-quadratic splines of one number, on an interval and on the circle."""

import math
from typing import Annotated, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.numerics import soft_clamp
from flowbnn.options import Ge, Positive, options
from flowbnn.transforms.univariate import Univariate


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
        smallest: least width and height of a bin, as a share of the interval; slopes are between ``smallest`` and its reciprocal.

    >>> spline = SplineMap(bins=4, bound=2.0)
    >>> x, log_slope = spline.forward(torch.tensor([0.5, 7.0]), torch.linspace(-1, 1, 22))
    >>> x, spline.inverse(x, torch.linspace(-1, 1, 22))[0]
    (tensor([0.4965, 7.0000]), tensor([0.5000, 7.0000]))
    """

    bins: Annotated[int, Ge(2)] = 8
    bound: Positive = 3.0
    smallest: Positive = 1e-3
    interleaved = True

    def __post_init__(self) -> None:
        if self.smallest * self.bins >= 1:
            text = f"{self.bins} bins of at least {self.smallest} of the interval do not fit into it"
            raise FlowBNNError(text, argument="smallest")

    @property
    def per_entry(self) -> int:
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
        sizes = 2.0 * self.bound * (self.smallest + (1.0 - self.smallest * bins) * sizes[..., :-1])
        # the ends are exact, so that the slopes outside are
        knots = F.pad(
            F.pad(sizes.cumsum(-1) - self.bound, (1, 0), value=-self.bound), (0, 1), value=self.bound
        )
        index = (value.unsqueeze(-1) >= knots[..., side, 1:-1]).sum(-1)
        table = torch.cat([knots, self._slopes(parameters[..., 2 * bins :]).unsqueeze(-2)], -2)
        index = torch.stack([index, index + 1], -1).unsqueeze(-2)
        (x0, x1), (y0, y1), logs = (
            part.unbind(-1) for part in table.gather(-1, index.expand(*index.shape[:-2], 3, 2)).unbind(-2)
        )
        w, h = x1 - x0, y1 - y0
        d0, d1 = (soft_clamp(log, -math.log(self.smallest)).exp() * (w / h) for log in logs)
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
        smallest: as in :class:`SplineMap`.

    >>> circle = CircularSplineMap(bins=4)
    >>> x, _ = circle.forward(torch.tensor([3.0, 3.0 + 2 * math.pi]), torch.linspace(-1, 1, 13).repeat(2))
    >>> torch.allclose(x[0], x[1], atol=1e-5)
    True
    """

    bound: Positive = math.pi
    features = 2

    @property
    def per_entry(self) -> int:
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
