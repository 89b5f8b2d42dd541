r"""Importance sampling that tells how far it can be trusted: Pareto-smoothed weights and their shape :math:`\hat k`.

Draws of an approximation :math:`q` of a posterior have the weights :math:`w_s = p(D, z_s) / q(z_s)`, whose mean is the evidence
:math:`p(D)`. The largest of them are replaced by quantiles of a generalized Pareto distribution that is fitted to them; its shape
:math:`\hat k` says how heavy the tail is. Vehtari et al. 2024 (https://arxiv.org/abs/1507.02646); as a judge of variational inference,
Yao et al. 2018 (https://arxiv.org/abs/1802.02538).
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked

GOOD, USABLE = 0.5, 0.7  # of k-hat
FEWEST = 25  # weights, of which the five largest make a tail
HEAVIEST = 0.95  # tail whose mean is computed: from k = 1 on there is none


def usable(samples: int) -> float:
    r"""The largest :math:`\hat k` for which so many draws suffice, :math:`\min(0.7, 1 - 1 / \log_{10} S)` (Vehtari et al. 2024).

    >>> [round(usable(samples), 2) for samples in (100, 400, 10_000)]
    [0.5, 0.62, 0.7]
    """
    return min(USABLE, 1.0 - 1.0 / math.log10(samples))


@checked
def pareto_smoothed(log_weights: Tensor) -> tuple[Tensor, float]:
    r"""Log-weights with a smoothed tail, and :math:`\hat k`.

    Below 0.5 the weights are reliable, below :func:`usable` usable, above not; from 1 on they have no mean that draws could find.
    It is infinite where the weights of the tail are too far apart for floating point, and 0 where they are equal.

    Args:
        log_weights: ``[S]``.

    >>> log_weights = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> smoothed, k = pareto_smoothed(log_weights)
    >>> bool(k < 0.5), bool((smoothed.logsumexp(0) - log_weights.logsumexp(0)).abs() < 0.05)
    (True, True)
    """
    return _smoothed(log_weights)[:2]


class LogMean(NamedTuple):
    """The logarithm of the mean of weights, and how far to trust it.

    Args:
        value, error: of the smoothed weights, and its standard error.
        k: of the tail.
        effective: number of equal weights that they are worth.
    """

    value: float
    error: float
    k: float
    effective: float


def log_mean(log_weights: Tensor) -> LogMean:
    r"""The logarithm of the mean of weights by Pareto smoothing.

    Smoothed weights end at the largest that was drawn, and a few draws of a heavy tail look lighter than it is. So the error has,
    beside the spread of the weights, what a tail of :math:`\hat k + (1 + \hat k) / \sqrt{T}`, one standard error above the shape of the
    :math:`T` largest weights, has beyond them. It is infinite from :math:`\hat k = 1` on.

    >>> log_weights = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> found = log_mean(log_weights)  # the exact one is 0.5
    >>> abs(found.value - 0.5) < 2 * found.error < 0.5
    True
    """
    smoothed, k, beyond = _smoothed(log_weights)
    count, effective = len(smoothed), float(1.0 / torch.softmax(smoothed, 0).square().sum())
    spread = math.sqrt(max(0.0, 1.0 / effective - 1.0 / count))
    return LogMean(float(smoothed.logsumexp(0)) - math.log(count), spread + beyond, k, effective)


def _smoothed(log_weights: Tensor) -> tuple[Tensor, float, float]:
    """Smoothed log-weights, k-hat, and what a heavier tail has beyond the weights, as a share of their mean."""
    if log_weights.ndim != 1 or len(log_weights) < FEWEST:
        raise FlowBNNError(
            f"log_weights must be a vector of at least {FEWEST} numbers, got {tuple(log_weights.shape)}",
            argument="log_weights",
        )
    if bad := int((~log_weights.isfinite()).sum()):
        raise FlowBNNError(
            f"the likelihood or a density is not finite at {bad} of {len(log_weights)} draws: look for a logarithm, root or division "
            "in the network, or for a posterior that is far too wide",
            kind="not finite",
            argument="log_weights",
        )
    order = log_weights.double().sort()
    top, count = order.values[-1], len(log_weights)
    values = (order.values - top).exp()
    tail = math.ceil(min(0.2 * count, 3.0 * math.sqrt(count)))
    cutoff = values[-tail - 1]
    if bool(order.values[-tail - 1] == top):
        return log_weights.double(), 0.0, 0.0
    if not bool(cutoff >= torch.finfo(cutoff.dtype).tiny):
        return log_weights.double(), math.inf, math.inf
    k, scale = generalized_pareto(values[-tail:] - cutoff)
    places = (torch.arange(tail, dtype=torch.float64, device=values.device) + 0.5) / tail
    far = -torch.log1p(-places)
    excess = scale * (torch.expm1(k * far) / k if abs(k) > 1e-8 else far)
    smoothed = order.values.clone()
    smoothed[-tail:] = (cutoff + excess).log().clamp(max=0.0) + top
    heavier = min(HEAVIEST, k + (1.0 + k) / math.sqrt(tail))
    new = (smoothed - top).exp()
    beyond = float((cutoff + scale / (1.0 - heavier)) * tail - new[-tail:].sum()) / float(new.sum())
    beyond = max(0.0, beyond) if k < 1.0 else math.inf
    return torch.empty_like(smoothed).index_copy_(0, order.indices, smoothed), k, beyond


def generalized_pareto(excess: Tensor) -> tuple[float, float]:
    r"""Shape :math:`k` and scale :math:`\sigma` of :math:`p(x) \propto (1 + k x / \sigma)^{-1/k - 1}` for sorted positive numbers.

    The mean of a posterior over a grid of one parameter, which profile likelihood leaves (Zhang and Stephens 2009,
    https://doi.org/10.1198/tech.2009.08017), with :math:`k` drawn a little to 0.5 as Vehtari et al. do.

    >>> places = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    >>> k, scale = generalized_pareto(2.0 * torch.expm1(-0.3 * torch.log1p(-places)) / 0.3)
    >>> round(k, 1), round(scale, 1)
    (0.3, 2.0)
    """
    count = len(excess)
    points = 30 + int(math.sqrt(count))
    grid = torch.arange(1, points + 1, dtype=torch.float64, device=excess.device)
    quartile = excess[int(count / 4 + 0.5) - 1].clamp_min(1e-300)
    rate = (1.0 - torch.sqrt(points / (grid - 0.5))) / (3.0 * quartile) + 1.0 / excess[-1]
    shape = torch.log1p(-rate[:, None] * excess).mean(1)
    weight = torch.softmax(count * (torch.log(-rate / shape) - shape - 1.0), 0)
    mean = (weight * rate).sum()
    k = torch.log1p(-mean * excess).mean()
    return float((count * k + 5.0) / (count + 10.0)), float(-k / mean)
