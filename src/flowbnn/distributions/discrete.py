"""Distributions of integers and categories, the bases of discrete flows. Their values are floats, so that gradients can pass."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution, constraints
from torch.nn import functional as F

from flowbnn.distributions.bases import Base
from flowbnn.nets.mlp import register_data_init
from flowbnn.numerics import inverse_soft_clamp, soft_clamp
from flowbnn.options import Count, Dim, Positive, checked


def _draw_categories(logits: Tensor, sample_shape: Any) -> Tensor:
    """Returns drawn categories, by the largest sum of a logit and a Gumbel variable."""
    exponential = torch.empty(
        torch.Size(sample_shape) + logits.shape, dtype=logits.dtype, device=logits.device
    )
    return (logits - exponential.exponential_().log()).argmax(-1)


class DiscretizedLogistic(Distribution):
    r"""Independent integers, each from a mixture of rounded logistic variables.

    .. math:: P(z) = \sum_k \pi_k \left[\sigma\!\left(\frac{z + 1/2 - \mu_k}{s_k}\right)
              - \sigma\!\left(\frac{z - 1/2 - \mu_k}{s_k}\right)\right]

    Salimans et al. 2017, https://arxiv.org/abs/1701.05517. Probabilities are computed in logarithms, so that no tail underflows.

    Args:
        loc: Locations :math:`\mu` of shape ``(..., dim, components)``.
        scale: Scales :math:`s` of the same shape.
        logits: Logits of the weights :math:`\pi`, of the same shape.

    >>> integers = DiscretizedLogistic(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
    >>> integers.log_prob(torch.arange(-30.0, 31.0).unsqueeze(-1)).exp().sum()
    tensor(1.)
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)  # integers are not checked

    def __init__(self, loc: Tensor, scale: Tensor, logits: Tensor) -> None:
        self.loc, self.scale, self.logits = torch.broadcast_tensors(loc, scale, logits)
        super().__init__(self.loc.shape[:-2], self.loc.shape[-2:-1], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DiscretizedLogistic":
        shape = torch.Size(batch_shape) + self.loc.shape[-2:]
        return DiscretizedLogistic(*(each.expand(shape) for each in (self.loc, self.scale, self.logits)))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            component = _draw_categories(self.logits, sample_shape).unsqueeze(-1)
            shape = component.shape[:-1] + self.loc.shape[-1:]
            loc, scale = (p.expand(shape).gather(-1, component).squeeze(-1) for p in (self.loc, self.scale))
            tiny = torch.finfo(loc.dtype).eps
            return (loc + scale * torch.logit(torch.rand_like(loc).clamp(tiny, 1.0 - tiny))).round()

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.logsumexp(self.joint(value), -1).sum(-1)

    def joint(self, value: Tensor) -> Tensor:
        """Returns the joint log-probability of each integer and each component, ``(..., dim, components)``."""
        upper = (value.unsqueeze(-1) + 0.5 - self.loc) / self.scale
        lower = upper - 1.0 / self.scale
        log_prob = F.logsigmoid(upper) + F.logsigmoid(-lower) + torch.log(-torch.expm1(-1.0 / self.scale))
        return log_prob + F.log_softmax(self.logits, -1)


class _DataInitLogistic(DiscretizedLogistic):
    """Distribution of a base that is not initialized: the first values whose density is computed initialize it."""

    def __init__(
        self, initial: DiscretizedLogistic, initialize: Callable[[Tensor], DiscretizedLogistic]
    ) -> None:
        super().__init__(initial.loc, initial.scale, initial.logits)
        self.initialize = initialize

    def expand(self, batch_shape: Any, _instance: Any = None) -> "_DataInitLogistic":
        return _DataInitLogistic(super().expand(batch_shape), self.initialize)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.initialize(value).log_prob(value)


def discretized_logistic(
    raw: Tensor, components: int, values: float, rate_factor: float = 1
) -> DiscretizedLogistic:
    """Returns a discretized logistic mixture for unconstrained parameters.

    A broad component of a fixed small weight covers all values. Without it an unexpected integer costs its distance in units of the
    scales, thousands of bits. The gradients of a few such integers would dominate all others.

    Args:
        raw: Parameters ``(..., 3 * components * dim)``. Zeros spread the components over 0 to ``values``.
        components: Number of components.
        values: Approximate number of values of an integer.
        rate_factor: Factor of the parameters of scales and weights, relative to those of locations.
    """
    broad_weight = 2.0**-12  # an unexpected integer then costs about 22 bits at most
    loc, log_scale, logits = raw.unflatten(-1, (-1, 3, components)).unbind(-2)
    centers = (torch.arange(components, dtype=loc.dtype, device=loc.device) + 0.5) / components
    min_scale = DiscretizedLogisticBase.min_scale
    scale = min_scale + values / (6.0 * components) * soft_clamp(rate_factor * log_scale, 8.0).exp()
    weights = F.log_softmax(rate_factor * logits, -1) + math.log(1.0 - broad_weight)
    loc = values * (loc + centers)
    pairs = (loc, values / 2.0), (scale, values / 6.0), (weights, math.log(broad_weight))
    return DiscretizedLogistic(*(F.pad(each, (0, 1), value=broad) for each, broad in pairs))


class DiscretizedLogisticBase(Base):
    """Learned :class:`DiscretizedLogistic`. Its components start spread over the integers from 0 to ``values``, or at data.

    Args:
        dim: Number of integers.
        components: Number of components of each mixture.
        values: Approximate number of values of an integer.
        data_init: If True, the mixtures are fitted to the first training batch by expectation maximization.

    >>> DiscretizedLogisticBase(3)().sample((2,)).shape
    torch.Size([2, 3])
    """

    initialized: Tensor
    min_scale = 1 / 16  # the integer at the centre of a component then costs a thousandth of a bit
    rate_factor = 30.0  # scales and weights have to move farther than locations

    @checked
    def __init__(
        self, dim: Dim, components: Count = 5, values: Positive = 256.0, data_init: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.components, self.values, self.value_kind = dim, components, values, "integers"
        self.raw = nn.Parameter(torch.zeros(dim * 3 * components))
        register_data_init(self, data_init)

    def distribution(self, offset: Tensor | None = None) -> DiscretizedLogistic:
        """Returns the distribution.

        Args:
            offset: Numbers that a net adds to the parameters, for images of ``dim`` integers with channels last.
        """
        raw = self.raw if offset is None else self.raw.view(offset.shape[-3:]) + offset
        distribution = discretized_logistic(raw, self.components, self.values, self.rate_factor)
        if self.is_initialized or not self.training:
            return distribution
        return _DataInitLogistic(distribution, partial(self._initialize, offset))

    @torch.no_grad()
    def _initialize(self, offset: Tensor | None, value: Tensor) -> DiscretizedLogistic:
        """Fits the mixtures to values by expectation maximization and returns the new distribution.

        Each component has one prior observation of its location and scale, and half a one of its weight.
        """
        rows, k = value.reshape(-1, self.dim), self.components
        z = rows.unsqueeze(-1)
        initial = discretized_logistic(self.raw, k, self.values, self.rate_factor)
        loc, scale, logits = (each[..., :-1] for each in (initial.loc, initial.scale, initial.logits))
        centers = loc - self.values * self.raw.view(-1, 3, k)[:, 0]
        for _ in range(20):
            responsibility = DiscretizedLogistic(loc, scale, logits).joint(rows).softmax(-1)
            count = responsibility.sum(0)
            logits = (count + 0.5).log()
            loc = (loc + (responsibility * z).sum(0)) / (1.0 + count)
            distance = (responsibility * (z - loc).abs()).sum(0) / (2.0 * math.log(2.0))
            scale = self.min_scale + (scale + distance) / (1.0 + count)
        log_scale = inverse_soft_clamp(((scale - self.min_scale) * 6.0 * k / self.values).log(), 8.0, 0.95)
        raw = [(loc - centers) / self.values, log_scale / self.rate_factor, logits / self.rate_factor]
        self.raw.copy_(torch.stack(raw, 1).flatten())
        self.initialized.fill_(True)
        self.is_initialized = True
        with torch.enable_grad():
            return self.distribution(offset)


class OneHotVectors(Distribution):
    r"""Independent categories as adjacent one-hot codes: :math:`\log P(z) = \sum_{d,k} z_{dk} \log \pi_{dk}`.

    Args:
        logits: Logits ``(..., dim, categories)``. An event has ``dim * categories`` numbers.

    >>> OneHotVectors(torch.zeros(2, 4)).log_prob(torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 0]))
    tensor(-2.7726)
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)  # one-hot codes are not checked

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        super().__init__(logits.shape[:-2], torch.Size([math.prod(logits.shape[-2:])]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "OneHotVectors":
        return OneHotVectors(self.logits.expand(torch.Size(batch_shape) + self.logits.shape[-2:]))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            category = _draw_categories(self.logits, sample_shape)
            return F.one_hot(category, self.logits.shape[-1]).to(self.logits.dtype).flatten(-2)

    def log_prob(self, value: Tensor) -> Tensor:
        return (value * F.log_softmax(self.logits, -1).flatten(-2)).sum(-1)


class CategoricalBase(Base):
    """Learned independent categories as one-hot codes. ``dim`` is the total length of the codes.

    Args:
        variables: Number of variables.
        categories: Number of categories of each variable.

    >>> CategoricalBase(2, categories=3)().sample().shape
    torch.Size([6])
    """

    @checked
    def __init__(self, variables: Count, categories: Count) -> None:
        super().__init__()
        self.dim = variables * categories
        self.logits = nn.Parameter(torch.zeros(variables, categories))

    def distribution(self) -> OneHotVectors:
        return OneHotVectors(self.logits)
