r"""Increasing maps of one number, whose parameters a network computes: couplings and autoregressive maps take any of them.

To write one, subclass :class:`Univariate`: say how many parameters an entry takes, and give both directions for values
``(..., D)`` and parameters ``(..., per_entry * D)``. Each returns the new values and the *logarithms of the slopes of the map it
applied*, both ``(..., D)``. With all parameters zero the map should be the identity or next to it: networks start there.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import first_parameter
from flowbnn.numerics import soft_clamp
from flowbnn.options import Positive, options
from flowbnn.transforms.base import Transform, check_vectors

Direction = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


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
    def per_entry(self) -> int:
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


class Conditioned(Transform):
    """What couplings and autoregressive maps share: a univariate map, and a net that computes its parameters."""

    def __init__(self, dim: int, univariate: Univariate, net: nn.Module, compress: bool) -> None:
        super().__init__()
        self.dim, self.univariate, self.net, self.compress = dim, univariate, net, compress
        self.inverse_kind = univariate.inverse_kind
        self.first = first_parameter(net)

    def _check(self, value: Tensor) -> None:
        """Refuse vectors of another length or precision."""
        check_vectors(value, self.dim, self, getattr(*self.first) if self.first else None)

    def _parameters_for(self, known: Tensor, context: Tensor | None, count: int) -> Tensor:
        """Those of ``count`` entries, from what is known."""
        parameters = self.net(self.univariate.read(known) if self.compress else known, context)
        wanted = (*known.shape[:-1], self.univariate.per_entry * count)
        if parameters.shape != wanted:
            raise FlowBNNError(
                f"the net of {type(self).__name__} must give {wanted} here, not {tuple(parameters.shape)}",
                kind="shape",
            )
        return parameters


@options
class ShiftMap(Univariate):
    r""":math:`x = z + t`.

    >>> ShiftMap().forward(torch.ones(2), torch.tensor([1.0, 2.0]))[0]
    tensor([2., 3.])
    """

    per_entry = 1

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

    >>> AffineMap().forward(torch.ones(1), torch.tensor([0.0, 2.0]))
    (tensor([3.]), tensor([0.]))
    """

    bound: Positive = 2.0
    per_entry = 2

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = parameters.chunk(2, dim=-1)
        log_scale = soft_clamp(raw, self.bound)
        return value * log_scale.exp() + shift, log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = parameters.chunk(2, dim=-1)
        log_scale = -self.bound * torch.tanh(raw / self.bound)
        return (value - shift) * log_scale.exp(), log_scale
