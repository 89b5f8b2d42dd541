r"""What a decoder says of an example: the distribution :math:`p(x \mid z)` made of a network's outputs.

All numbers of an example are independent given the outputs, of which each takes ``per_number``, stacked along the first axis of an
example.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.options import Ge, checked

LEAST = -7.0  # of the logarithm of a scale, so that no pixel that is always black takes over


class Decoder(nn.Module, ABC):
    """Each number of an example is independent of the others given ``per_number`` outputs of the network."""

    per_number: int = 1

    @abstractmethod
    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        """The log-probability or -density of each example, ``[B]``."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """What a reconstruction shows."""

    @abstractmethod
    def sample(self, outputs: Tensor) -> Tensor:
        """A draw of each example."""

    def read(self, x: Tensor) -> Tensor:
        """Examples as the encoder reads them."""
        return x

    def problem(self, x: Tensor) -> str:
        """What is wrong with data that this decoder cannot give; empty where it can."""
        return ""

    def check(self, x: Tensor) -> None:
        """Refuse data that this decoder cannot give."""
        if problem := self.problem(x):
            raise FlowBNNError(problem, kind="data", argument="x")


class BernoulliDecoder(Decoder):
    r"""Binary numbers: :math:`\log p(x \mid z) = \sum_i x_i \log\sigma(f_i) + (1 - x_i) \log\sigma(-f_i)`.

    Grey values between 0 and 1 are taken as well, as many papers do; the sum is then no log-probability any more.

    >>> BernoulliDecoder().log_prob(torch.zeros(1, 2), torch.tensor([[0.0, 1.0]])) / math.log(2.0)
    tensor([-2.])
    """

    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        return (
            -F.binary_cross_entropy_with_logits(outputs, x.to(outputs.dtype), reduction="none")
            .flatten(1)
            .sum(1)
        )

    def mean(self, outputs: Tensor) -> Tensor:
        return torch.sigmoid(outputs)

    def sample(self, outputs: Tensor) -> Tensor:
        return torch.bernoulli(torch.sigmoid(outputs))

    def problem(self, x: Tensor) -> str:
        if bool(((x < 0) | (x > 1)).any()):
            return (
                f"a Bernoulli decoder takes numbers from 0 to 1, not from {float(x.min()):g} to {float(x.max()):g}; divide them, or "
                "say decoder='gaussian'"
            )
        return ""


class GaussianDecoder(Decoder):
    r"""Real numbers: :math:`x_i \sim \mathcal N(f_i, \sigma^2)`, one learned :math:`\sigma` for all.

    >>> decoder = GaussianDecoder()
    >>> round(decoder.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)).item(), 4)  # -log(2 pi) / 2
    -0.9189
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        log_scale = self.log_scale.clamp(min=LEAST)
        error = ((x - outputs) * (-log_scale).exp()).square()
        return -0.5 * (error + 2.0 * log_scale + math.log(2.0 * math.pi)).flatten(1).sum(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def sample(self, outputs: Tensor) -> Tensor:
        return outputs + self.log_scale.clamp(min=LEAST).exp() * torch.randn_like(outputs)


class LogisticDecoder(Decoder):
    r"""Integers from 0 to ``levels - 1``, such as bytes: a logistic distribution cut into bins (Kingma et al. 2016).

    .. math:: P(x \mid z) = \sigma\left(\frac{x + \frac12 - \mu}{s}\right) - \sigma\left(\frac{x - \frac12 - \mu}{s}\right)

    with the tails in the first and the last bin. A network gives :math:`\mu` and :math:`\log s` in units of half the range, around its
    middle, and the encoder reads examples in these units, from -1 to 1.

    >>> decoder = LogisticDecoder(levels=4)
    >>> outputs = torch.tensor([[0.3, -1.0]]).expand(4, 2)
    >>> round(decoder.log_prob(outputs, torch.arange(4)[:, None]).exp().sum().item(), 5)
    1.0
    """

    per_number = 2

    @checked
    def __init__(self, levels: Annotated[int, Ge(2)] = 256) -> None:
        super().__init__()
        self.levels = levels

    def read(self, x: Tensor) -> Tensor:
        return x / (0.5 * (self.levels - 1)) - 1.0

    def _located(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_scale = outputs.chunk(2, 1)
        half = 0.5 * (self.levels - 1)
        return half * (1.0 + mean), log_scale.clamp(LEAST, 5.0) + math.log(half)

    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        mean, log_scale = self._located(outputs)
        x = x.to(mean.dtype)
        inverse = (-log_scale).exp()
        upper, lower = (x + 0.5 - mean) * inverse, (x - 0.5 - mean) * inverse
        # sigmoid(u) - sigmoid(l) = sigmoid(u) sigmoid(-l) (1 - exp(l - u)), without cancellation
        inside = F.logsigmoid(upper) + F.logsigmoid(-lower) + torch.log(-torch.expm1(-inverse))
        ends = torch.where(x < 0.5, F.logsigmoid(upper), F.logsigmoid(-lower))
        edge = (x < 0.5) | (x > self.levels - 1.5)
        return torch.where(edge, ends, inside).flatten(1).sum(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._located(outputs)[0].clamp(0.0, self.levels - 1.0)

    def sample(self, outputs: Tensor) -> Tensor:
        mean, log_scale = self._located(outputs)
        uniform = torch.rand_like(mean).clamp(1e-6, 1.0 - 1e-6)
        drawn = mean + log_scale.exp() * torch.logit(uniform)
        return drawn.round().clamp(0.0, self.levels - 1.0)

    def problem(self, x: Tensor) -> str:
        if bool((x != x.round()).any()) or bool(((x < 0) | (x > self.levels - 1.0)).any()):
            return f"a logistic decoder takes integers from 0 to {self.levels - 1}; multiply and round, or say decoder='gaussian'"
        return ""

    def extra_repr(self) -> str:
        return f"levels={self.levels}"
