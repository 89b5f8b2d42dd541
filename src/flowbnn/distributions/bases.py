r"""Bases: where the noise starts, before any transform.

Two kinds of object stand side by side. A *distribution* (:class:`DiagonalNormal`, :class:`NormalMixture`) is a
``torch.distributions`` citizen made of tensors. A *base* (:class:`NormalBase`, :class:`MixtureBase`) is the ``nn.Module``
that owns those tensors, moves with the model and is saved with it; calling it gives the distribution.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints

from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import FlowBNNError

__all__ = ["Base", "DiagonalNormal", "MixtureBase", "NormalBase", "NormalMixture"]

_LOG_2PI = math.log(2.0 * math.pi)


class DiagonalNormal(Distribution):
    r"""Independent normals on the last axis, :math:`\prod_i \mathcal N(x_i; \mu_i, \sigma_i^2)`.

    As ``Independent(Normal(loc, scale), 1)``, with an optional generator in ``rsample``.

    >>> q = DiagonalNormal(torch.zeros(3), torch.ones(3))
    >>> q.rsample((2,), generator=torch.Generator().manual_seed(0)).shape, round(q.entropy().item(), 4)
    (torch.Size([2, 3]), 4.2568)
    """

    arg_constraints = {  # noqa: RUF012
        "loc": constraints.independent(constraints.real, 1),
        "scale": constraints.independent(constraints.positive, 1),
    }
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = False) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape[:-1], loc.shape[-1:], validate_args=validate_args)

    @property
    def mean(self) -> Tensor:
        return self.loc

    @property
    def variance(self) -> Tensor:
        return self.scale.square()

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DiagonalNormal":
        shape = torch.Size(batch_shape) + self.event_shape
        return DiagonalNormal(self.loc.expand(shape), self.scale.expand(shape))

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        shape = torch.Size(sample_shape) + self.loc.shape
        noise = standard_normal(shape, self.loc.dtype, self.loc.device, generator)
        return torch.addcmul(self.loc, noise, self.scale)

    def log_prob(self, value: Tensor) -> Tensor:
        standard = (value - self.loc) / self.scale
        return -0.5 * (standard.square() + _LOG_2PI).sum(-1) - self.scale.log().sum(-1)

    def entropy(self) -> Tensor:
        return 0.5 * self.loc.shape[-1] * (1.0 + _LOG_2PI) + self.scale.log().sum(-1)


class NormalMixture(Distribution):
    r"""Equal mixture of :math:`K` diagonal normals, :math:`\tfrac1K \sum_k \mathcal N(x; \mu_k, \sigma_k^2)`.

    The weights are fixed and equal, as in the implicit Bayesian network of Trinh et al. (2020), so that drawing a
    component and then its normal is an exact reparameterization: the pathwise gradient reaches every mean and scale
    without bias.

    Args:
        loc, scale: shape ``(components, dim)``.
    """

    arg_constraints = {  # noqa: RUF012
        "loc": constraints.independent(constraints.real, 2),
        "scale": constraints.independent(constraints.positive, 2),
    }
    support = constraints.independent(constraints.real, 1)
    has_rsample = True

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool | None = False) -> None:
        self.loc, self.scale = loc, scale
        super().__init__(loc.shape[:-2], loc.shape[-1:], validate_args=validate_args)

    @property
    def components(self) -> int:
        return self.loc.shape[-2]

    @property
    def mean(self) -> Tensor:
        return self.loc.mean(-2)

    @property
    def variance(self) -> Tensor:
        return self.scale.square().mean(-2) + self.loc.var(-2, correction=0)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "NormalMixture":
        shape = torch.Size(batch_shape) + self.loc.shape[-2:]
        return NormalMixture(self.loc.expand(shape), self.scale.expand(shape))

    def rsample(self, sample_shape: Any = torch.Size(), generator: torch.Generator | None = None) -> Tensor:
        shape = torch.Size(sample_shape) + self.batch_shape
        device = self.loc.device
        which = torch.randint(self.components, shape, generator=generator, device=device)
        noise = torch.randn(
            shape + self.event_shape, generator=generator, dtype=self.loc.dtype, device=device
        )
        index = which[..., None, None].expand(*shape, 1, self.event_shape[0])
        full = shape + self.loc.shape[-2:]
        loc = self.loc.expand(full).gather(-2, index).squeeze(-2)
        scale = self.scale.expand(full).gather(-2, index).squeeze(-2)
        return loc + scale * noise

    def log_prob(self, value: Tensor) -> Tensor:
        standard = (value.unsqueeze(-2) - self.loc) / self.scale
        each = -0.5 * (standard.square() + _LOG_2PI).sum(-1) - self.scale.log().sum(-1)
        return torch.logsumexp(each, -1) - math.log(self.components)


class Base(nn.Module):
    """The owner of a base distribution's tensors. Subclasses set ``dim`` and define ``distribution()``."""

    dim: int

    def distribution(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define distribution()")

    def forward(self) -> Any:
        return self.distribution()


def _check(dim: int, scale: float) -> None:
    if dim < 1:
        raise FlowBNNError(f"a base needs at least one dimension, not {dim}")
    if not scale > 0:
        raise FlowBNNError(f"the scale of a normal must be above 0, not {scale}; document 000 uses 0.5")


class NormalBase(Base):
    r"""A fixed diagonal normal; document 000 starts its noise, and sets its prior, at :math:`\mathcal N(1, 0.5^2)`.

    >>> NormalBase(2).distribution().mean
    tensor([1., 1.])
    """

    loc: Tensor
    scale: Tensor

    def __init__(self, dim: int, loc: float = 1.0, scale: float = 0.5) -> None:
        super().__init__()
        _check(dim, scale)
        self.dim = dim
        self.register_buffer("loc", torch.full((dim,), float(loc)))
        self.register_buffer("scale", torch.full((dim,), float(scale)))

    def distribution(self) -> DiagonalNormal:
        return DiagonalNormal(self.loc, self.scale)


class MixtureBase(Base):
    r"""An equal mixture of ``components`` diagonal normals whose means and scales are learned.

    The means start spread around ``loc`` by ``spread`` so that the components can part; each starts at ``scale``.

    >>> MixtureBase(4, components=3).distribution().components
    3
    """

    def __init__(
        self,
        dim: int,
        components: int = 4,
        loc: float = 1.0,
        scale: float = 0.5,
        spread: float = 0.1,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        _check(dim, scale)
        if components < 1:
            raise FlowBNNError(f"a mixture needs at least one component, not {components}")
        self.dim = dim
        self.loc = nn.Parameter(loc + spread * torch.randn(components, dim, generator=generator))
        self.log_scale = nn.Parameter(torch.full((components, dim), math.log(scale)))

    def distribution(self) -> NormalMixture:
        return NormalMixture(self.loc, self.log_scale.clamp(-8.0, 8.0).exp())
