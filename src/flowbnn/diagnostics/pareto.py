r"""Importance sampling that tells how far it can be trusted: Pareto-smoothed weights and their shape :math:`\hat k`.

Draws of an approximation :math:`q` of a posterior have the weights :math:`w_s = p(D, z_s) / q(z_s)`, whose mean is the evidence
:math:`p(D)`. The largest of them are replaced by quantiles of a generalized Pareto distribution that is fitted to them; its shape
:math:`\hat k` says how heavy the tail is. Vehtari et al. 2024 (https://arxiv.org/abs/1507.02646); as a judge of variational inference,
Yao et al. 2018 (https://arxiv.org/abs/1802.02538).
"""

import math

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import checked

GOOD, USABLE = 0.5, 0.7  # of k-hat
FEWEST = 25  # weights, of which the five largest make a tail


@checked
def pareto_smoothed(log_weights: Tensor) -> tuple[Tensor, float]:
    r"""Log-weights with a smoothed tail, and :math:`\hat k`.

    Below 0.5 the weights are reliable, below 0.7 usable, above not; from 1 on they have no mean that draws could find.

    Args:
        log_weights: ``[S]``.

    >>> log_weights = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> smoothed, k = pareto_smoothed(log_weights)
    >>> bool(k < 0.5), bool((smoothed.logsumexp(0) - log_weights.logsumexp(0)).abs() < 0.05)
    (True, True)
    """
    if log_weights.ndim != 1 or len(log_weights) < FEWEST or not bool(torch.isfinite(log_weights).all()):
        raise FlowBNNError(
            f"log_weights must be a vector of at least {FEWEST} finite numbers, got {tuple(log_weights.shape)}",
            argument="log_weights",
        )
    order = log_weights.double().sort()
    top, count = order.values[-1], len(log_weights)
    values = (order.values - top).exp()
    tail = math.ceil(min(0.2 * count, 3.0 * math.sqrt(count)))
    cutoff = values[-tail - 1]
    if not bool(values[-tail] > cutoff):  # as many equals as there are weights in the tail
        return log_weights.double(), 0.0
    k, scale = generalized_pareto(values[-tail:] - cutoff)
    places = (torch.arange(tail, dtype=torch.float64, device=values.device) + 0.5) / tail
    far = -torch.log1p(-places)
    excess = scale * (torch.expm1(k * far) / k if abs(k) > 1e-8 else far)
    smoothed = order.values.clone()
    smoothed[-tail:] = (cutoff + excess).log().clamp(max=0.0) + top
    return torch.empty_like(smoothed).index_copy_(0, order.indices, smoothed), k


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
