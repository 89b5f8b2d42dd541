"""The univariate map of neural autoregressive flows."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.numerics import monotone_root, soft_clamp
from flowbnn.options import Count, Positive, options
from flowbnn.transforms.univariate import Univariate


@options
class SigmoidalMap(Univariate):
    r"""A deep sigmoidal flow, :math:`x = \mathrm{logit}\left(\sum_k w_k\, \sigma(a_k z + b_k)\right)`, of :math:`a_k, w_k > 0` and
    :math:`\sum_k w_k = 1` (Huang, Krueger, Lacoste & Courville 2018, equation 8, https://arxiv.org/abs/1804.00779).

    A mixture of logistic distribution functions seen through the logit, computed in logarithms; enough units reach every
    increasing map. The inverse is numerical: :math:`x` lies between the smallest and the largest :math:`a_k z + b_k`, which
    brackets :math:`z`. Its last two Newton steps are differentiable, so that gradients and Hessians are those of the implicit
    function.

    Args:
        units: number of sigmoids; an entry takes ``3 * units`` numbers: slopes, offsets and weights.
        bound: largest size of :math:`\log a_k`, kept by :math:`\log a = b \tanh(\cdot / b)`.

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
    def per_entry(self) -> int:
        return 3 * self.units

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _mixture(value, *self._read(value, parameters))

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        return _unmixed(value, *self._read(value, parameters))

    def _read(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _units(parameters.unflatten(-1, (value.shape[-1], 3 * self.units)), self.bound)


def _units(each: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-slopes, offsets and log-weights of raw numbers ``(..., D, 3 * units)``."""
    raw, b, logits = each.unflatten(-1, (3, -1)).unbind(-2)
    # units that start apart, or they would stay together
    b = b + torch.linspace(-1.0, 1.0, b.shape[-1], dtype=b.dtype, device=b.device)
    return soft_clamp(raw, bound), b, F.log_softmax(logits, -1)


def _mixture(z: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.addcmul(b, log_a.exp(), z.unsqueeze(-1))
    below, above = F.logsigmoid(s), F.logsigmoid(-s)
    log_cdf, log_rest = torch.logsumexp(log_w + below, -1), torch.logsumexp(log_w + above, -1)
    log_density = torch.logsumexp(log_w + log_a + below + above, -1)
    return log_cdf - log_rest, log_density - log_cdf - log_rest


def _unmixed(x: Tensor, log_a: Tensor, b: Tensor, log_w: Tensor) -> tuple[Tensor, Tensor]:
    """The inverse of :func:`_mixture`, by a bracketed root and two Newton steps."""

    def newton(z: Tensor) -> tuple[Tensor, Tensor]:
        found, log_slope = _mixture(z, log_a, b, log_w)
        return found - x, log_slope.exp()

    with torch.no_grad():
        ends = (x.unsqueeze(-1) - b) * (-log_a).exp()
    z = monotone_root(newton, ends.amin(-1), ends.amax(-1))
    for _ in range(2):
        error, slope = newton(z)
        z = z - error / slope
    return z, -_mixture(z, log_a, b, log_w)[1]


@options
class LogisticMixtureMap(Univariate):
    r"""The map of Flow++: a mixture of logistic distribution functions seen through the logit, scaled and shifted (Ho et al. 2019).

    On the way to the base, which costs one evaluation, :math:`z = e^s\, \mathrm{logit}(\sum_k w_k\, \sigma(a_k x + b_k)) + t`
    (https://arxiv.org/abs/1902.00275, equation 15). Draws invert it as :class:`SigmoidalMap` inverts itself, with implicit gradients.

    Args:
        components: of the mixture; an entry takes ``3 * components + 2`` numbers.
        bound: largest size of :math:`s` and of :math:`\log a_k`.

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
    def per_entry(self) -> int:
        return 3 * self.components + 2

    def _read(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor, Any]:
        each = parameters.unflatten(-1, (value.shape[-1], self.per_entry))
        return soft_clamp(each[..., 0], self.bound), each[..., 1], _units(each[..., 2:], self.bound)

    def forward(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        x, log_slope = _unmixed((value - shift) * (-log_scale).exp(), *units)
        return x, log_slope - log_scale

    def inverse(self, value: Tensor, parameters: Tensor) -> tuple[Tensor, Tensor]:
        log_scale, shift, units = self._read(value, parameters)
        y, log_slope = _mixture(value, *units)
        return y * log_scale.exp() + shift, log_slope + log_scale
