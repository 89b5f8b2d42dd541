"""Base distributions, from which flows start.

There are two kinds of objects. A *distribution* (:class:`DiagonalNormal`, :class:`NormalMixture` and so on) is a
``torch.distributions`` distribution made of tensors. A *base* (:class:`NormalBase`, :class:`MixtureBase`) is the ``nn.Module`` that
owns these tensors, moves with the model and is saved with it. Calling a base returns its distribution.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.distributions.vectors import (
    CircularUniform,
    DegreesOfFreedom,
    Diagonal,
    DiagonalLaplace,
    DiagonalLogistic,
    DiagonalNormal,
    DiagonalStudent,
    NormalMixture,
)
from flowbnn.options import Count, Dim, NonNegative, Positive, checked


class Base(nn.Module, ABC):
    """Base class for modules that own the tensors of a base distribution.

    Subclasses set ``dim``, the length of the vectors, and ``value_kind``, a description of their numbers, and define
    :meth:`distribution`.

    >>> NormalBase(2)()
    DiagonalNormal(loc: torch.Size([2]), scale: torch.Size([2]))
    """

    dim: int
    value_kind: str = "real numbers"

    @abstractmethod
    def distribution(self) -> Any:
        """Returns the distribution of the current tensors."""

    def forward(self) -> Any:
        return self.distribution()


class _FixedBase(Base):
    """Base class for bases of independent numbers with one location and one scale, which are not learned.

    Args:
        dim: Length of the vectors.
        loc: Location of every number.
        scale: Scale of every number.
    """

    kind: type[Diagonal]
    loc: Tensor
    scale: Tensor

    @checked
    def __init__(self, dim: Dim, loc: float = 1.0, scale: Positive = 0.5) -> None:
        super().__init__()
        self.dim = dim
        self.register_buffer("loc", torch.full((dim,), float(loc)))
        self.register_buffer("scale", torch.full((dim,), float(scale)))

    def distribution(self) -> Any:
        return self.kind(self.loc, self.scale)


class NormalBase(_FixedBase):
    r"""Fixed diagonal normal. Xiong's report on flows for implicit Bayesian networks uses :math:`\mathcal N(1, 0.5^2)` as base and as
    prior.

    Args:
        dim: Length of the vectors.
        loc: Location of every number.
        scale: Scale of every number.

    >>> NormalBase(2).distribution().mean
    tensor([1., 1.])
    """

    kind = DiagonalNormal


class LaplaceBase(_FixedBase):
    r"""Fixed Laplace distribution of every number, with standard deviation :math:`\sqrt 2 b`.

    Args:
        dim: Length of the vectors.
        loc: Location of every number.
        scale: Scale of every number.

    >>> LaplaceBase(2, scale=2.0).distribution().stddev
    tensor([2.8284, 2.8284])
    """

    kind = DiagonalLaplace


class LogisticBase(_FixedBase):
    r"""Fixed logistic distribution of every number, with standard deviation :math:`\pi s / \sqrt 3`.

    Args:
        dim: Length of the vectors.
        loc: Location of every number.
        scale: Scale of every number.

    >>> LogisticBase(2, scale=1.0).distribution().stddev
    tensor([1.8138, 1.8138])
    """

    kind = DiagonalLogistic


class CircularBase(_FixedBase):
    """Uniform angles between ``-bound`` and ``bound``.

    Args:
        dim: Number of angles.
        bound: Half of one turn, by default in radians.

    >>> CircularBase(2).distribution().log_prob(torch.zeros(2))
    tensor(-3.6758)
    """

    kind = CircularUniform

    @checked
    def __init__(self, dim: Dim, bound: Positive = math.pi) -> None:
        super().__init__(dim, 0.0, bound)
        self.value_kind = f"angles up to {bound:g}"


class StudentBase(_FixedBase):
    r"""Fixed Student-t distribution of every number, with standard deviation :math:`\sigma \sqrt{\nu / (\nu - 2)}`.

    Args:
        dim: Length of the vectors.
        loc: Location of every number.
        scale: Scale of every number.
        df: Degrees of freedom :math:`\nu`, above 2.

    >>> StudentBase(2, df=4.0).distribution().stddev
    tensor([0.7071, 0.7071])
    """

    @checked
    def __init__(self, dim: Dim, loc: float = 1.0, scale: Positive = 0.5, df: DegreesOfFreedom = 4.0) -> None:
        super().__init__(dim, loc, scale)
        self.df = df

    def distribution(self) -> DiagonalStudent:
        return DiagonalStudent(self.loc, self.scale, self.df)


class MixtureBase(Base):
    """Mixture of diagonal normals with equal weights and learned means and scales.

    Args:
        dim: Length of the vectors.
        components: Number of components.
        loc: Location around which the means start.
        scale: Initial standard deviation of each component.
        init_std: Standard deviation of the initial means, which lets the components separate.
        generator: Generator of the initial means; torch's global one by default.

    >>> MixtureBase(4, components=3).distribution().components
    3
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        components: Count = 4,
        loc: float = 1.0,
        scale: Positive = 0.5,
        init_std: NonNegative = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        self.loc = nn.Parameter(loc + init_std * torch.randn(components, dim, generator=generator))
        self.log_scale = nn.Parameter(torch.full((components, dim), math.log(scale)))

    @staticmethod
    def bounded(log_scale: Tensor) -> Tensor:
        """Clamps log-scales to a range in which their exponentials neither overflow nor vanish."""
        return log_scale.clamp(-8.0, 8.0)

    def distribution(self) -> NormalMixture:
        return NormalMixture(self.loc, self.bounded(self.log_scale).exp())
