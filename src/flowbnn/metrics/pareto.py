r"""Pareto-smoothed importance sampling (PSIS), computed by ``arviz-stats``.

Draws of an approximation :math:`q` of a posterior have the weights :math:`w_s = p(D, z_s) / q(z_s)`, whose mean is the evidence
:math:`p(D)`. PSIS fits a generalized Pareto distribution to the largest weights and replaces them by its quantiles. The shape
:math:`\hat k` of this distribution measures the weight of the tail (Vehtari et al. 2024, https://arxiv.org/abs/1507.02646). Yao et al.
2018 (https://arxiv.org/abs/1802.02538) use it to evaluate variational inference.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape
from flowbnn.metrics.convergence import array_statistics
from flowbnn.options import checked

MIN_WEIGHTS = 25  # arviz-stats fits the tail to the largest fifth, and needs five weights


def max_usable_k(samples: int) -> float:
    r"""Returns the largest :math:`\hat k` that is usable with this many draws, :math:`\min(0.7, 1 - 1 / \log_{10} S)`.

    The rule is by Vehtari et al. 2024.

    Args:
        samples: Number of draws.

    >>> [round(max_usable_k(samples), 2) for samples in (100, 400, 10_000)]
    [0.5, 0.62, 0.7]
    """
    return min(0.7, 1.0 - 1.0 / math.log10(samples))


def k_standard_error(k: float, samples: int) -> float:
    r"""Returns the standard error of :math:`\hat k`.

    The shape of a generalized Pareto distribution, estimated from :math:`T` draws, has the asymptotic standard error
    :math:`(1 + k) / \sqrt T`. Here :math:`T` is the number of weights in the tail. The estimate is shrunk to 0.5 with the weight of
    ten draws, which multiplies the error by :math:`T / (T + 10)`.

    Args:
        k: Estimated shape :math:`\hat k`.
        samples: Number of draws, of which the largest weights are the tail.

    >>> round(k_standard_error(0.7, 400), 2), round(k_standard_error(0.7, 10_000), 2)
    (0.19, 0.09)
    """
    size = _tail_size(samples)
    return (1.0 + k) / math.sqrt(size) * size / (size + 10)


@checked
def pareto_smoothed(log_weights: Tensor) -> tuple[Tensor, float]:
    r"""Returns log-weights with a smoothed tail, and :math:`\hat k`.

    Weights are reliable if :math:`\hat k < 0.5`, and usable up to :func:`max_usable_k`. From 1 on they have no finite mean.
    :math:`\hat k` is 0 if the largest weights are equal. It is infinite if they are too far apart for floating point.

    Args:
        log_weights: Logarithms of the importance weights, ``[S]``.

    Returns:
        The smoothed log-weights ``[S]``, which are not normalized, and :math:`\hat k`.

    >>> log_weights = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> smoothed, k = pareto_smoothed(log_weights)
    >>> bool(k < 0.5), bool((smoothed.logsumexp(0) - log_weights.logsumexp(0)).abs() < 0.05)
    (True, True)
    """
    tail = _smooth(log_weights)
    return tail.log_weights, tail.k


class LogMean(NamedTuple):
    """Logarithm of the mean of importance weights.

    Args:
        value: Logarithm of the mean of the smoothed weights.
        error: Standard error of ``value``.
        k: Shape of the tail of the weights.
        effective: Effective number of equal weights.
    """

    value: float
    error: float
    k: float
    effective: float


def log_mean(log_weights: Tensor) -> LogMean:
    r"""Returns the logarithm of the mean of importance weights, estimated by Pareto smoothing.

    The standard error has two parts. The first is the spread of the weights. The second accounts for the tail beyond the largest
    draw, which smoothed weights leave out. The assumed tail has the shape :math:`\hat k + (1 + \hat k) / \sqrt{T}`, which is one
    standard error above the shape of the :math:`T` largest weights. The error is infinite if :math:`\hat k \ge 1`.

    Args:
        log_weights: Logarithms of the importance weights, ``[S]``.

    >>> log_weights = torch.randn(2000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    >>> estimate = log_mean(log_weights)  # the exact value is 0.5
    >>> abs(estimate.value - 0.5) < 2 * estimate.error < 0.5
    True
    """
    tail = _smooth(log_weights)
    count = len(tail.log_weights)
    effective = float(1.0 / torch.softmax(tail.log_weights, 0).square().sum())
    spread = math.sqrt(max(0.0, 1.0 / effective - 1.0 / count))
    value = float(tail.log_weights.logsumexp(0)) - math.log(count)
    return LogMean(value, spread + tail.mass_beyond(), tail.k, effective)


class SmoothedTail(NamedTuple):
    r"""Log-weights, of which the largest are replaced by quantiles of a generalized Pareto distribution.

    Args:
        log_weights: Smoothed log-weights ``[S]``.
        k: Shape :math:`\hat k` of the tail.
        cutoff: Largest log-weight below the tail.
        size: Number of weights in the tail.
    """

    log_weights: Tensor
    k: float
    cutoff: float = 0.0
    size: int = 0

    @property
    def scale(self) -> float:
        r"""Scale :math:`\sigma` of the generalized Pareto distribution, as a multiple of the cutoff.

        arviz-stats does not return it. It follows from the middle quantile, :math:`x_p = c + \sigma ((1 - p)^{-k} - 1) / k`.
        """
        middle = self.size // 2
        place = (middle + 0.5) / self.size
        quantile = float(self.log_weights.sort().values[middle - self.size])
        growth = -math.log1p(-place)
        return math.expm1(quantile - self.cutoff) / (
            math.expm1(self.k * growth) / self.k if self.k else growth
        )

    def mass_beyond(self) -> float:
        """Returns the mass of a slightly heavier tail beyond the smoothed weights, as a fraction of the mass of all weights."""
        if not self.size or self.k >= 1.0:
            return 0.0 if self.k < 1.0 else math.inf
        # a tail of shape 1 or more has no mean
        heavier = min(0.95, self.k + (1.0 + self.k) / math.sqrt(self.size))
        weights = (self.log_weights - self.cutoff).exp()
        tail = weights.sort().values[-self.size :].sum()
        mass = (1.0 + self.scale / (1.0 - heavier)) * self.size
        return max(0.0, float((mass - tail) / weights.sum()))


def _smooth(log_weights: Tensor) -> SmoothedTail:
    """Returns log-weights with a smoothed tail.

    Raises:
        FlowBNNError: If there are too few weights, or some are not finite.
    """
    check_shape("log_weights", log_weights, (f"draws >= {MIN_WEIGHTS}",))
    hint = "look for log, sqrt or division in the network"
    check_entries("log_weights", log_weights, log_weights.isfinite(), "finite", hint, "not finite")
    weights = log_weights.detach().double()
    ordered = weights.sort().values
    size = _tail_size(len(weights))
    cutoff, top = ordered[-size - 1], ordered[-1]
    if ordered[-size] == top:
        return SmoothedTail(weights, 0.0)
    if (cutoff - top).exp() < torch.finfo(torch.float64).tiny:
        return SmoothedTail(weights, math.inf)
    with np.errstate(all="ignore"):
        normalized, k = array_statistics().psislw(-weights.cpu().numpy())
    if not np.isfinite(normalized).all():  # the fit fails if most weights of the tail are equal
        return SmoothedTail(weights, math.inf)
    smoothed = torch.as_tensor(normalized, device=weights.device)
    lowest = int(weights.argmin())  # below the tail, where smoothing changes the normalization only
    smoothed = smoothed + (weights[lowest] - smoothed[lowest])
    return SmoothedTail(smoothed, float(k), float(cutoff), size)


def _tail_size(samples: int) -> int:
    """Returns the number of weights in the tail, as in arviz-stats."""
    return int(3.0 * math.sqrt(samples)) if samples > 225 else samples // 5
