"""Increasing maps of one number whose parameters a network computes, for couplings and autoregressive transforms.

To write one, subclass :class:`Univariate`. Set the number of parameters of an entry, and define both directions for values
``(..., D)`` and parameters ``(..., params_per_entry * D)``. Each direction returns the new values and the logarithms of the slopes of
the map it applies, both ``(..., D)``. With all parameters zero the map should be the identity or close to it, because networks start
there.
"""

from abc import ABC, abstractmethod
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.nets.mlp import check_net, check_output
from flowbnn.numerics import monotone_root, soft_clamp
from flowbnn.options import Count, Positive, options
from flowbnn.transforms.base import BidirectionalTransform, check_vectors


class Univariate(ABC):
    """Base class for increasing maps of one number. The docstring of this module states the contract.

    >>> AffineMap().params_per_entry, ShiftMap().params_per_entry
    (2, 1)
    """

    interleaved: bool = False
    """True if the parameters of one entry are adjacent; otherwise the first ones of all entries come first, and so on."""
    inverse_kind: Literal["exact", "numerical"] = "exact"
    width: int = 1
    """Number of adjacent numbers of a vector that form one entry."""
    features: int = 1
    """Number of inputs that a network reads for one entry."""

    @property
    @abstractmethod
    def params_per_entry(self) -> int:
        """Number of parameters of one entry."""

    def read(self, value: Tensor) -> Tensor:
        """Returns the inputs of networks, :math:`q(z) = z / (1 + |z| / 5)`. :class:`~flowbnn.transforms.Coupling` gives the
        reason.
        """
        return value / torch.rsub(value.abs(), 1.0, alpha=-0.2)

    @abstractmethod
    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the images of values and the logarithms of the slopes.

        Args:
            value: Values ``(..., D)``.
            parameters: Parameters ``(..., params_per_entry * D)``.
        """

    @abstractmethod
    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the preimages of values and the logarithms of the slopes of the inverse.

        Args:
            value: Values ``(..., D)``.
            parameters: Parameters ``(..., params_per_entry * D)``.
        """


class ConditionedTransform(BidirectionalTransform):
    """Base class for couplings and autoregressive transforms: a univariate map and a net that computes its parameters.

    Args:
        dim: Length of the vectors.
        univariate: Map of single entries.
        net: Module that is called as ``net(value, context)``.
        compress: If True, the net reads ``univariate.read(value)`` instead of the values.
    """

    net: Any

    def __init__(self, dim: int, univariate: Univariate, net: nn.Module, compress: bool) -> None:
        super().__init__()
        check_net(net, type(self).__name__)
        self.dim, self.univariate, self.net, self.compress = dim, univariate, net, compress
        self.inverse_kind = univariate.inverse_kind
        self.event_dim = int(getattr(net, "event_dim", 1))
        self.interleaved = bool(getattr(net, "interleaved", univariate.interleaved))
        # Location of the first parameter, found once because the search takes as long as a layer.
        places = (
            (module, name) for module in net.modules() for name, _ in module.named_parameters(recurse=False)
        )
        self._first_parameter = next(places, None)

    def _check(self, value: Tensor) -> None:
        """Raises FlowBNNError for vectors of another length or dtype."""
        parameter = getattr(*self._first_parameter) if self._first_parameter else None
        check_vectors(value, self.dim, self, parameter)

    def _entry_parameters(self, inputs: Tensor, context: Tensor | None, count: int) -> Tensor:
        """Returns the parameters of some entries.

        Args:
            inputs: Values that the net reads.
            context: Context vectors.
            count: Number of entries.
        """
        parameters = self.net(self.univariate.read(inputs) if self.compress else inputs, context)
        check_output(parameters, (*inputs.shape[:-1], self.univariate.params_per_entry * count))
        if self.interleaved == self.univariate.interleaved:
            return parameters
        entries = count // self.univariate.width
        return parameters.unflatten(-1, (entries, -1) if self.interleaved else (-1, entries)).mT.flatten(-2)


@options
class ShiftMap(Univariate):
    """Shift :math:`x = z + t`.

    >>> ShiftMap().forward(torch.ones(2), torch.tensor([1.0, 2.0]))[0]
    tensor([2., 3.])
    """

    params_per_entry = 1

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return value + parameters, torch.zeros_like(value)

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return value - parameters, torch.zeros_like(value)


@options
class AffineMap(Univariate):
    r"""Affine map :math:`x = e^{s} z + t` with :math:`s = b \tanh(a / b)`. The parameters are first all :math:`a`, then all
    :math:`t`.

    The bound is soft. Without it, log-scales add up along a stack of maps until it overflows, even in float64.

    Args:
        bound: Largest absolute value :math:`b` of the log-scale.
        positive_log_scale: If True, :math:`s = b \tanh(\mathrm{softplus}(a - 2) / b) > 0`, much as in Glow. Numbers then only shrink
            on the way from data to the base, so that no unusual image diverges. The map does not start at the identity.

    >>> AffineMap().forward(torch.ones(1), torch.tensor([0.0, 2.0]))
    (tensor([3.]), tensor([0.]))
    """

    bound: Positive = 2.0
    positive_log_scale: bool = False
    params_per_entry = 2

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self._read(parameters)
        log_scale = soft_clamp(raw, self.bound)
        return value * log_scale.exp() + shift, log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        raw, shift = self._read(parameters)
        log_scale = -self.bound * torch.tanh(raw * (1.0 / self.bound))
        return (value - shift) * log_scale.exp(), log_scale

    def _read(self, parameters: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the raw log-scales and the shifts."""
        raw, shift = parameters.split_with_sizes([parameters.shape[-1] // 2] * 2, -1)  # faster than chunk
        return F.softplus(raw - 2.0) if self.positive_log_scale else raw, shift


@options
class SigmoidalMap(Univariate):
    r"""Deep sigmoidal flow, :math:`x = \mathrm{logit}\left(\sum_k w_k\, \sigma(a_k z + b_k)\right)`, with :math:`a_k, w_k > 0` and
    :math:`\sum_k w_k = 1` (Huang, Krueger, Lacoste & Courville 2018, equation 8, https://arxiv.org/abs/1804.00779).

    It is the logit of a mixture of logistic distribution functions, computed in logarithms. Enough units approximate every increasing
    map. The inverse is numerical: :math:`x` lies between the smallest and the largest :math:`a_k z + b_k`, which brackets :math:`z`.
    Its last two Newton steps are differentiable, so that gradients and Hessians are those of the implicit function.

    Args:
        units: Number of sigmoids. An entry has ``3 * units`` parameters: slopes, offsets and weights.
        bound: Largest absolute value of :math:`\log a_k`, by :math:`\log a = b \tanh(\cdot / b)`.

    >>> sigmoids = SigmoidalMap(units=4)
    >>> x, _ = sigmoids.forward(torch.tensor([0.5, -7.0]), torch.linspace(-1, 1, 24))
    >>> sigmoids.inverse(x, torch.linspace(-1, 1, 24))[0]
    tensor([ 0.5000, -7.0000])
    """

    units: Count = 8
    bound: Positive = 3.0
    interleaved = True
    inverse_kind = "numerical"

    @property
    def params_per_entry(self) -> int:
        return 3 * self.units

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _mixture(
            value, *_mixture_parameters(parameters.unflatten(-1, (value.shape[-1], -1)), self.bound)
        )

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _mixture_inverse(
            value, *_mixture_parameters(parameters.unflatten(-1, (value.shape[-1], -1)), self.bound)
        )


def _mixture_parameters(raw: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns log-slopes, offsets and log-weights of a mixture for raw numbers ``(..., D, 3 * units)``."""
    log_slopes, b, logits = raw.unflatten(-1, (3, -1)).unbind(-2)
    # Offsets start apart, because equal units would stay equal.
    b = b + torch.linspace(-1.0, 1.0, b.shape[-1], dtype=b.dtype, device=b.device)
    return soft_clamp(log_slopes, bound), b, F.log_softmax(logits, -1)


def _mixture(z: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logit of a mixture of logistic distribution functions and the logarithm of its slope."""
    s = torch.addcmul(b, log_a.exp(), z.unsqueeze(-1))
    log_cdf, log_survival = log_w + F.logsigmoid(s), log_w + F.logsigmoid(-s)
    # Softmax weights below and above: far out, where both vanish, no large logarithms are subtracted.
    log_slopes = log_a - log_w + F.log_softmax(log_cdf, -1) + F.log_softmax(log_survival, -1)
    return torch.logsumexp(log_cdf, -1) - torch.logsumexp(log_survival, -1), torch.logsumexp(log_slopes, -1)


def _mixture_inverse(x: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the inverse of :func:`_mixture` and the logarithm of its slope, by a bracketed root and two Newton steps."""

    def newton(z: Tensor) -> tuple[Tensor, Tensor]:
        value, log_slope = _mixture(z, log_a, b, log_w)
        return value - x, log_slope.exp()

    with torch.no_grad():
        bracket = (x.unsqueeze(-1) - b) * (-log_a).exp()
        low, high = bracket.amin(-1), bracket.amax(-1)
    z = monotone_root(newton, low, high)
    # between distant components the slope underflows, and the rounding of x alone would move z out of its bracket
    smallest = torch.finfo(x.dtype).eps ** 2
    for _ in range(2):
        error, slope = newton(z)
        step = error / slope.clamp(min=smallest)
        z = torch.where(step.abs() <= high - low + 1e-3 * (1.0 + z.abs()), z - step, z)
    return z, -_mixture(z, log_a, b, log_w)[1]


@options
class LogisticMixtureMap(Univariate):
    r"""Map of Flow++: logit of a mixture of logistic distribution functions, scaled and shifted (Ho et al. 2019).

    The direction to the base costs one evaluation, :math:`z = e^s\, \mathrm{logit}(\sum_k w_k\, \sigma(a_k x + b_k)) + t`
    (https://arxiv.org/abs/1902.00275, equation 15). Draws invert it numerically, as :class:`SigmoidalMap` does, with implicit
    gradients.

    Args:
        components: Number of components of the mixture. An entry has ``3 * components + 2`` parameters.
        bound: Largest absolute value of :math:`s` and of :math:`\log a_k`.

    >>> mixture = LogisticMixtureMap(components=4)
    >>> z, _ = mixture.inverse(torch.tensor([0.5, -7.0]), torch.linspace(-1, 1, 28))
    >>> mixture.forward(z, torch.linspace(-1, 1, 28))[0]
    tensor([ 0.5000, -7.0000])
    """

    components: Count = 8
    bound: Positive = 3.0
    interleaved = True
    inverse_kind = "numerical"

    @property
    def params_per_entry(self) -> int:
        return 3 * self.components + 2

    def _read(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Returns the log-scales, the shifts and the parameters of the mixtures."""
        raw = parameters.unflatten(-1, (value.shape[-1], self.params_per_entry))
        return soft_clamp(raw[..., 0], self.bound), raw[..., 1], _mixture_parameters(raw[..., 2:], self.bound)

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        x, log_slope = _mixture_inverse((value - shift) * (-log_scale).exp(), *units)
        return x, log_slope - log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        y, log_slope = _mixture(value, *units)
        return y * log_scale.exp() + shift, log_slope + log_scale
