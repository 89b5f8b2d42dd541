r"""Decoders: the distribution :math:`p(x \mid z)` of an example given the outputs of a network.

The numbers of an example are independent given the outputs. Each of them takes ``outputs_per_number`` outputs, which are stacked along
the first axis of the example.
"""

import math
from abc import ABC, abstractmethod
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import check_entries
from flowbnn.options import Ge, checked


class Decoder(nn.Module, ABC):
    """Base class for decoders: the distribution of examples given the outputs of a network.

    The numbers of an example are independent given the outputs. A subclass implements ``log_prob``, ``mean`` and ``sample``.

    Attributes:
        outputs_per_number: Number of outputs of the network for each number of an example.
        min_log_scale: Smallest logarithm of a scale. Otherwise a pixel that is always black would dominate the likelihood.
    """

    outputs_per_number: int = 1
    min_log_scale: float = -7.0

    @abstractmethod
    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        """Returns the log-probability or log-density of each example, ``[B]``."""

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean of each example, which is its reconstruction."""

    @abstractmethod
    def sample(self, outputs: Tensor) -> Tensor:
        """Draws each example."""

    def encoder_input(self, x: Tensor) -> Tensor:
        """Returns examples in the units in which the encoder reads them."""
        return x

    def check(self, x: Tensor) -> None:
        """Raises FlowBNNError if examples lie outside the support of the decoder."""


class BernoulliDecoder(Decoder):
    r"""Decoder of binary numbers, :math:`\log p(x \mid z) = \sum_i x_i \log\sigma(f_i) + (1 - x_i) \log\sigma(-f_i)`.

    Grey values between 0 and 1 are allowed, as in many papers. The sum is then no log-probability.

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

    def check(self, x: Tensor) -> None:
        hint = "rescale them, or set decoder='gaussian'"
        check_entries("x", x, (x >= 0) & (x <= 1), "from 0 to 1", hint, kind="data")


class GaussianDecoder(Decoder):
    r"""Decoder of real numbers, :math:`x_i \sim \mathcal N(f_i, \sigma^2)`, with one learned :math:`\sigma`.

    >>> decoder = GaussianDecoder()
    >>> round(decoder.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)).item(), 4)  # -log(2 pi) / 2
    -0.9189
    """

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()))

    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        log_scale = self.log_scale.clamp(min=self.min_log_scale)
        error = ((x - outputs) * (-log_scale).exp()).square()
        return -0.5 * (error + 2.0 * log_scale + math.log(2.0 * math.pi)).flatten(1).sum(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return outputs

    def sample(self, outputs: Tensor) -> Tensor:
        return outputs + self.log_scale.clamp(min=self.min_log_scale).exp() * torch.randn_like(outputs)


class LogisticDecoder(Decoder):
    r"""Decoder of integers from 0 to ``levels - 1``, such as bytes: a discretized logistic distribution (Kingma et al. 2016).

    .. math:: P(x \mid z) = \sigma\left(\frac{x + \frac12 - \mu}{s}\right) - \sigma\left(\frac{x - \frac12 - \mu}{s}\right)

    The first and the last bin contain the tails. The network predicts :math:`\mu` and :math:`\log s` in units of half the range, around
    its centre. The encoder reads examples in the same units, from -1 to 1.

    Args:
        levels: Number of integers.

    >>> decoder = LogisticDecoder(levels=4)
    >>> outputs = torch.tensor([[0.3, -1.0]]).expand(4, 2)
    >>> round(decoder.log_prob(outputs, torch.arange(4)[:, None]).exp().sum().item(), 5)
    1.0
    """

    outputs_per_number = 2

    @checked
    def __init__(self, levels: Annotated[int, Ge(2)] = 256) -> None:
        super().__init__()
        self.levels = levels

    def encoder_input(self, x: Tensor) -> Tensor:
        return x / (0.5 * (self.levels - 1)) - 1.0

    def _location_and_log_scale(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the two parameters of the logistic distribution in the units of the data."""
        mean, log_scale = outputs.chunk(2, 1)
        half = 0.5 * (self.levels - 1)
        return half * (1.0 + mean), log_scale.clamp(self.min_log_scale, 5.0) + math.log(half)

    def log_prob(self, outputs: Tensor, x: Tensor) -> Tensor:
        mean, log_scale = self._location_and_log_scale(outputs)
        x = x.to(mean.dtype)
        inverse = (-log_scale).exp()
        upper, lower = (x + 0.5 - mean) * inverse, (x - 0.5 - mean) * inverse
        # sigmoid(u) - sigmoid(l) = sigmoid(u) sigmoid(-l) (1 - exp(l - u)), without cancellation
        inside = F.logsigmoid(upper) + F.logsigmoid(-lower) + torch.log(-torch.expm1(-inverse))
        tail = torch.where(x < 0.5, F.logsigmoid(upper), F.logsigmoid(-lower))
        is_edge = (x < 0.5) | (x > self.levels - 1.5)
        return torch.where(is_edge, tail, inside).flatten(1).sum(1)

    def mean(self, outputs: Tensor) -> Tensor:
        return self._location_and_log_scale(outputs)[0].clamp(0.0, self.levels - 1.0)

    def sample(self, outputs: Tensor) -> Tensor:
        mean, log_scale = self._location_and_log_scale(outputs)
        uniform = torch.rand_like(mean).clamp(1e-6, 1.0 - 1e-6)
        draws = mean + log_scale.exp() * torch.logit(uniform)
        return draws.round().clamp(0.0, self.levels - 1.0)

    def check(self, x: Tensor) -> None:
        valid, hint = (
            (x == x.round()) & (x >= 0) & (x <= self.levels - 1.0),
            "round them, or set decoder='gaussian'",
        )
        check_entries("x", x, valid, f"an integer from 0 to {self.levels - 1}", hint, kind="data")

    def extra_repr(self) -> str:
        return f"levels={self.levels}"
