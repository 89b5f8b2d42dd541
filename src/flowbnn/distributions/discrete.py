"""Distributions of integers and of categories, on which discrete flows stand. They are held in floats, which gradients pass."""

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
from flowbnn.options import Count, Positive, checked


def _categories(logits: Tensor, sample_shape: Any) -> Tensor:
    """Drawn categories: where a logit and a Gumbel variable together are largest."""
    waits = torch.empty(torch.Size(sample_shape) + logits.shape, dtype=logits.dtype, device=logits.device)
    return (logits - waits.exponential_().log()).argmax(-1)


class DiscretizedLogistic(Distribution):
    r"""Independent integers, each from a mixture of rounded logistic variables.

    .. math:: P(z) = \sum_k \pi_k \left[\sigma\!\left(\frac{z + 1/2 - \mu_k}{s_k}\right)
              - \sigma\!\left(\frac{z - 1/2 - \mu_k}{s_k}\right)\right]

    Salimans et al. 2017, https://arxiv.org/abs/1701.05517; computed in logarithms, so that no tail underflows.

    Args:
        loc, scale, logits: shape ``(..., dim, components)``.

    >>> integers = DiscretizedLogistic(torch.zeros(1, 1), torch.ones(1, 1), torch.zeros(1, 1))
    >>> integers.log_prob(torch.arange(-30.0, 31.0).unsqueeze(-1)).exp().sum()
    tensor(1.)
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)  # integers, which are not checked

    def __init__(self, loc: Tensor, scale: Tensor, logits: Tensor) -> None:
        self.loc, self.scale, self.logits = torch.broadcast_tensors(loc, scale, logits)
        super().__init__(self.loc.shape[:-2], self.loc.shape[-2:-1], validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "DiscretizedLogistic":
        shape = torch.Size(batch_shape) + self.loc.shape[-2:]
        return DiscretizedLogistic(*(part.expand(shape) for part in (self.loc, self.scale, self.logits)))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            which = _categories(self.logits, sample_shape).unsqueeze(-1)
            shape = which.shape[:-1] + self.loc.shape[-1:]
            loc, scale = (p.expand(shape).gather(-1, which).squeeze(-1) for p in (self.loc, self.scale))
            tiny = torch.finfo(loc.dtype).eps
            return (loc + scale * torch.logit(torch.rand_like(loc).clamp(tiny, 1.0 - tiny))).round()

    def log_prob(self, value: Tensor) -> Tensor:
        return torch.logsumexp(self.joint(value), -1).sum(-1)

    def joint(self, value: Tensor) -> Tensor:
        """Log-probabilities of each integer together with each component, ``(..., dim, components)``."""
        above = (value.unsqueeze(-1) + 0.5 - self.loc) / self.scale
        below = above - 1.0 / self.scale
        each = F.logsigmoid(above) + F.logsigmoid(-below) + torch.log(-torch.expm1(-1.0 / self.scale))
        return each + F.log_softmax(self.logits, -1)


class _FirstBatch(DiscretizedLogistic):
    """What a base gives before it has seen data: the first that are scored are where it starts."""

    def __init__(self, made: DiscretizedLogistic, start: Callable[[Tensor], DiscretizedLogistic]) -> None:
        super().__init__(made.loc, made.scale, made.logits)
        self.start = start

    def expand(self, batch_shape: Any, _instance: Any = None) -> "_FirstBatch":
        return _FirstBatch(super().expand(batch_shape), self.start)

    def log_prob(self, value: Tensor) -> Tensor:
        return self.start(value).log_prob(value)


OUTLIER_WEIGHT = 2.0**-12  # the share of integers that may be anything
MIN_SCALE = 1 / 16  # least scale: the integer at a centre then costs a thousandth of a bit
RATE_FACTOR = 30.0  # how much faster than its places a base learns its widths and weights, which go far


def discretized_logistic(raw: Tensor, components: int, values: float, pace: float = 1) -> DiscretizedLogistic:
    """That of numbers ``(..., 3 * components * dim)``, spread at zero over 0 to ``values``; widths vary at ``pace``.

    A fixed share, spread over all values, is added: without it an integer that no component expects costs its distance in units
    of their scales, thousands of bits, and the gradients of a few such integers drown all others.
    """
    loc, log_scale, logits = raw.unflatten(-1, (-1, 3, components)).unbind(-2)
    places = (torch.arange(components, dtype=loc.dtype, device=loc.device) + 0.5) / components
    scale = MIN_SCALE + values / (6.0 * components) * soft_clamp(pace * log_scale, 8.0).exp()
    weights = F.log_softmax(pace * logits, -1) + math.log(1.0 - OUTLIER_WEIGHT)
    loc = values * (loc + places)
    stray = (loc, values / 2.0), (scale, values / 6.0), (weights, math.log(OUTLIER_WEIGHT))
    return DiscretizedLogistic(*(F.pad(each, (0, 1), value=broad) for each, broad in stray))


class DiscretizedLogisticBase(Base):
    """A learned :class:`DiscretizedLogistic`, which starts spread over the integers from 0 to ``values``, or at data.

    Args:
        dim: number of integers.
        components, values: of each mixture, and about the number of values of an integer.
        data_init: in training mode, the first batch moves the mixtures by expectation maximisation.

    >>> DiscretizedLogisticBase(3)().sample((2,)).shape
    torch.Size([2, 3])
    """

    initialized: Tensor

    @checked
    def __init__(
        self, dim: Count, components: Count = 5, values: Positive = 256.0, data_init: bool = False
    ) -> None:
        super().__init__()
        self.dim, self.components, self.values, self.value_kind = dim, components, values, "integers"
        self.raw = nn.Parameter(torch.zeros(dim * 3 * components))
        register_data_init(self, data_init)

    def distribution(self, moved: Tensor | None = None) -> DiscretizedLogistic:
        """With numbers that a net adds for images, channels last, of ``dim`` integers."""
        raw = self.raw if moved is None else self.raw.view(moved.shape[-3:]) + moved
        made = discretized_logistic(raw, self.components, self.values, RATE_FACTOR)
        return (
            made
            if self.is_initialized or not self.training
            else _FirstBatch(made, partial(self._start, moved))
        )

    @torch.no_grad()
    def _start(self, moved: Tensor | None, value: Tensor) -> DiscretizedLogistic:
        """Expectation maximisation, in which each component has one observation, and half a one for its weight, as it is."""
        rows, k = value.reshape(-1, self.dim), self.components
        z = rows.unsqueeze(-1)
        made = discretized_logistic(self.raw, k, self.values, RATE_FACTOR)
        loc, scale, logits = (each[..., :-1] for each in (made.loc, made.scale, made.logits))
        start = loc - self.values * self.raw.view(-1, 3, k)[:, 0]
        for _ in range(20):
            share = DiscretizedLogistic(loc, scale, logits).joint(rows).softmax(-1)
            count = share.sum(0)
            logits = (count + 0.5).log()
            loc = (loc + (share * z).sum(0)) / (1.0 + count)
            far = (share * (z - loc).abs()).sum(0) / (2.0 * math.log(2.0))
            scale = MIN_SCALE + (scale + far) / (1.0 + count)
        width = inverse_soft_clamp(((scale - MIN_SCALE) * 6.0 * k / self.values).log(), 8.0, 0.95)
        self.raw.copy_(
            torch.stack([(loc - start) / self.values, width / RATE_FACTOR, logits / RATE_FACTOR], 1).flatten()
        )
        self.initialized.fill_(True)
        self.is_initialized = True
        with torch.enable_grad():
            return self.distribution(moved)


class OneHotVectors(Distribution):
    r"""Independent categories, their one-hot codes one after the other: :math:`\log P(z) = \sum_{d,k} z_{dk} \log \pi_{dk}`.

    Args:
        logits: shape ``(..., dim, categories)``; an event has ``dim * categories`` numbers.

    >>> OneHotVectors(torch.zeros(2, 4)).log_prob(torch.tensor([1.0, 0, 0, 0, 0, 0, 1, 0]))
    tensor(-2.7726)
    """

    arg_constraints: dict[str, Any] = {}  # noqa: RUF012
    support = constraints.independent(constraints.real, 1)  # one-hot codes, which are not checked

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits
        super().__init__(logits.shape[:-2], torch.Size([math.prod(logits.shape[-2:])]), validate_args=False)

    def expand(self, batch_shape: Any, _instance: Any = None) -> "OneHotVectors":
        return OneHotVectors(self.logits.expand(torch.Size(batch_shape) + self.logits.shape[-2:]))

    def sample(self, sample_shape: Any = torch.Size()) -> Tensor:
        with torch.no_grad():
            which = _categories(self.logits, sample_shape)
            return F.one_hot(which, self.logits.shape[-1]).to(self.logits.dtype).flatten(-2)

    def log_prob(self, value: Tensor) -> Tensor:
        return (value * F.log_softmax(self.logits, -1).flatten(-2)).sum(-1)


class CategoricalBase(Base):
    """Learned independent categories as one-hot codes; ``dim`` is the length of the codes together.

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
