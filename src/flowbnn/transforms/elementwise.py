r"""Monotone maps of single numbers, without parameters.

All have ``event_dim = 0``: the log-det has the shape of the value. What a float cannot hold is saturated, not passed
on as infinity: inverses move values on the border of the image to the nearest number inside it, so that a
sample that was rounded onto the border (``tanh(10)`` is exactly 1 in float32) still has a finite inverse and log-det.
Values beyond the border are refused where they can be looked at; a compiled graph takes them for the border.
"""

import math
from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.nn import functional as F

from flowbnn.numerics import inverse_softplus
from flowbnn.options import checked
from flowbnn.transforms.base import Transform, check_range, check_tensor
from flowbnn.transforms.compose import Inverse


def _below_one(value: Tensor) -> float:
    """The largest number of the value's type that is less than one."""
    return 1.0 - 0.5 * torch.finfo(value.dtype).eps


def _positive(value: Tensor) -> Tensor:
    limits = torch.finfo(value.dtype)
    return value.clamp(limits.tiny, limits.max)


class _Monotone(Transform):
    """A map of the line onto an interval; a subclass gives both directions and the interval."""

    event_dim = 0
    onto: Any
    inverse_name = ""

    @abstractmethod
    def _there(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """What ``forward`` returns."""

    @abstractmethod
    def _back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What ``inverse`` returns, for numbers of the interval."""

    def ends(self) -> tuple[Any, Any]:
        return constraints.real, self.onto

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(z, self)
        return self._there(z)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_tensor(x, self)
        low, high = self.onto.lower_bound, getattr(self.onto, "upper_bound", math.inf)
        check_range(x, low, high, self.inverse_name or f"the inverse of {type(self).__name__}")
        return self._back(x)


class Tanh(_Monotone):
    r""":math:`x = \tanh z`, with :math:`\log|dx/dz| = 2(\log 2 - z + \log\mathrm{sigmoid}(2z))`, onto :math:`(-1, 1)`.

    >>> Tanh()(torch.tensor([0.0, 50.0]))
    (tensor([0., 1.]), tensor([  0.0000, -98.6137]))
    """

    onto = constraints.interval(-1.0, 1.0)

    def _there(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(z), self._log_slope(z)

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        limit = _below_one(x)
        z = torch.atanh(x.clamp(-limit, limit))
        return z, -self._log_slope(z)

    @staticmethod
    def _log_slope(z: Tensor) -> Tensor:
        return 2.0 * (math.log(2.0) - z + F.logsigmoid(2.0 * z))


class Sigmoid(_Monotone):
    r""":math:`x = 1 / (1 + e^{-z})`, with :math:`\log|dx/dz| = \log x + \log(1 - x)`, onto :math:`(0, 1)`.

    >>> Sigmoid()(torch.tensor([0.0, -50.0]))
    (tensor([5.0000e-01, 1.9287e-22]), tensor([ -1.3863, -50.0000]))
    """

    onto = constraints.unit_interval
    inverse_name = "Logit (the inverse of Sigmoid)"

    def _there(self, z: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(z), F.logsigmoid(z) + F.logsigmoid(-z)

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.clamp(torch.finfo(x.dtype).tiny, _below_one(x))
        log_x, log_rest = torch.log(x), torch.log1p(-x)
        return log_x - log_rest, -(log_x + log_rest)


class Logit(Inverse):
    r""":math:`x = \log z - \log(1 - z)` from :math:`(0, 1)` onto the line: :class:`Sigmoid` run backwards.

    >>> Logit()(torch.tensor([0.5]))
    (tensor([0.]), tensor([1.3863]))
    """

    @checked
    def __init__(self) -> None:
        super().__init__(Sigmoid())


class Softplus(_Monotone):
    r""":math:`x = \log(1 + e^z)`, with :math:`\log|dx/dz| = \log\mathrm{sigmoid}(z)`, onto :math:`(0, \infty)`.

    >>> Softplus()(torch.tensor([0.0, 90.0]))
    (tensor([ 0.6931, 90.0000]), tensor([-6.9315e-01, -8.1940e-40]))
    """

    onto = constraints.positive

    def _there(self, z: Tensor) -> tuple[Tensor, Tensor]:
        # torch's softplus turns into the identity at 20, an error of 2e-9 that float64 would show
        return -F.logsigmoid(-z), F.logsigmoid(z)

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = _positive(x)
        return inverse_softplus(x), -torch.log(-torch.expm1(-x))


class Exp(_Monotone):
    r""":math:`x = e^z`, with :math:`\log|dx/dz| = z`, onto :math:`(0, \infty)`.

    Saturates where the type would overflow or lose its last digits: at :math:`z = 88.7` and :math:`-87.3` in float32.

    >>> Exp()(torch.tensor([0.0, 1.0]))
    (tensor([1.0000, 2.7183]), tensor([0., 1.]))
    """

    onto = constraints.positive

    def _there(self, z: Tensor) -> tuple[Tensor, Tensor]:
        limits = torch.finfo(z.dtype)
        # a few roundings inside the logarithm of the largest number, so that exp cannot round up to infinity
        z = z.clamp(math.log(limits.tiny), math.log(limits.max) * (1.0 - 4.0 * limits.eps))
        return z.exp(), z

    def _back(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = _positive(x).log()
        return z, -z
