"""Scores of real-valued targets for prediction intervals. A region has every value whose score is at most a threshold.

Every target of an input has its own score and threshold. Predictions and targets are ``[B, D]`` here.
"""

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import requirement_error
from flowbnn.options import options
from flowbnn.predictive import CountPredictive, Interval
from flowbnn.predictive.level_sets import level_set, marginal_log_density


class IntervalScore(ABC):
    """Base class for scores of real-valued targets. A subclass defines :meth:`scores` and :meth:`region`."""

    @abstractmethod
    def scores(self, predictive: Any, targets: Tensor, coverage: float) -> Tensor:
        """Returns the score of each target, ``[B, D]``.

        Args:
            predictive: Predictive distribution of B inputs.
            targets: Targets ``[B, D]``.
            coverage: Coverage of the intervals.
        """

    @abstractmethod
    def region(self, predictive: Any, thresholds: Tensor, coverage: float) -> Interval:
        """Returns the values whose score is at most a threshold, as R intervals with ends ``[R, B, D]``.

        Args:
            predictive: Predictive distribution of B inputs.
            thresholds: Threshold of each target, ``[D]``.
            coverage: Coverage of the intervals.
        """


@options
class AbsoluteResidual(IntervalScore):
    r"""Score :math:`|y - \mu(x)|` of the predictive mean. All intervals have the same width.

    >>> from flowbnn.predictive import GaussianPredictive
    >>> predictive = GaussianPredictive(torch.tensor([[[2.0]]]), 1.0)
    >>> AbsoluteResidual().scores(predictive, torch.tensor([[5.0]]), 0.9)
    tensor([[3.]])
    """

    def scores(self, predictive: Any, targets: Tensor, coverage: float) -> Tensor:
        """Returns the absolute differences of targets and means."""
        return (targets - _flat(predictive.mean)).abs()

    def region(self, predictive: Any, thresholds: Tensor, coverage: float) -> Interval:
        """Returns the mean plus and minus the threshold."""
        mean = _flat(predictive.mean).unsqueeze(0)
        return Interval(mean - thresholds.to(mean), mean + thresholds.to(mean))


@options
class NormalizedResidual(IntervalScore):
    r"""Score :math:`|y - \mu(x)| / \sigma(x)`. Widths are proportional to the predictive standard deviation.

    See [Lei 2018](https://arxiv.org/abs/1604.04173).

    >>> from flowbnn.predictive import GaussianPredictive
    >>> predictive = GaussianPredictive(torch.tensor([[[2.0]]]), 4.0)
    >>> NormalizedResidual().scores(predictive, torch.tensor([[5.0]]), 0.9)
    tensor([[1.5000]])
    """

    def scores(self, predictive: Any, targets: Tensor, coverage: float) -> Tensor:
        """Returns the absolute differences of targets and means in standard deviations."""
        return (targets - _flat(predictive.mean)).abs() / _flat(predictive.std)

    def region(self, predictive: Any, thresholds: Tensor, coverage: float) -> Interval:
        """Returns the mean plus and minus the threshold times the standard deviation."""
        mean, std = (_flat(values).unsqueeze(0) for values in (predictive.mean, predictive.std))
        return Interval(mean - thresholds.to(mean) * std, mean + thresholds.to(mean) * std)


@options
class CQR(IntervalScore):
    r"""Conformalized quantile regression (CQR, [Romano 2019](https://arxiv.org/abs/1905.03222)), with predictive quantiles.

    .. math:: s(x, y) = \max(q_{\alpha/2}(x) - y, \; y - q_{1 - \alpha/2}(x))

    The threshold widens or narrows the central predictive interval by the same amount on both sides. An interval that would be
    empty is the middle of the quantiles.

    >>> from flowbnn.predictive import GaussianPredictive
    >>> predictive = GaussianPredictive(torch.tensor([[[0.0]]]), 1.0)
    >>> CQR().scores(predictive, torch.tensor([[2.0]]), 0.9)  # 2 - 1.6449
    tensor([[0.3551]])
    """

    def scores(self, predictive: Any, targets: Tensor, coverage: float) -> Tensor:
        """Returns the distances of targets from the central interval, negative inside of it."""
        low, high = self._quantiles(predictive, coverage)
        return torch.maximum(low - targets, targets - high)

    def region(self, predictive: Any, thresholds: Tensor, coverage: float) -> Interval:
        """Returns the central interval, moved outwards by the threshold."""
        low, high = (end.unsqueeze(0) for end in self._quantiles(predictive, coverage))
        middle = 0.5 * (low + high)
        return Interval(
            torch.minimum(low - thresholds.to(low), middle), torch.maximum(high + thresholds.to(low), middle)
        )

    @staticmethod
    def _quantiles(predictive: Any, coverage: float) -> tuple[Tensor, Tensor]:
        """Returns the ends of the central predictive interval, ``[B, D]``."""
        tail = (1.0 - coverage) / 2
        low, high = predictive.quantiles([tail, 1.0 - tail])
        return _flat(low), _flat(high)


@options
class NegativeLogDensity(IntervalScore):
    r"""Score :math:`-\log p(y \mid x)` of the predictive density, for conformalized Bayesian prediction.

    The region :math:`\{y : p(y \mid x) \ge e^{-\hat\lambda}\}` is the smallest on average if the density is right. It may be a union
    of intervals.
    """

    def scores(self, predictive: Any, targets: Tensor, coverage: float) -> Tensor:
        """Returns the negative log-density of each target."""
        self._check(predictive)
        return -marginal_log_density(predictive, targets.unsqueeze(-1)).squeeze(-1)

    def region(self, predictive: Any, thresholds: Tensor, coverage: float) -> Interval:
        """Returns the values whose density is at least that of the threshold."""
        self._check(predictive)
        ends = level_set(predictive, -thresholds)
        return Interval(*(end.reshape(len(end), len(predictive), -1) for end in ends))

    @staticmethod
    def _check(predictive: Any) -> None:
        """Raises FlowBNNError for counts, which have no density."""
        if isinstance(predictive, CountPredictive):
            raise requirement_error("score='nll'", "a density", "counts", "use score='cqr'", argument="score")


def _flat(values: Tensor) -> Tensor:
    """Returns values ``[B, ...]`` as ``[B, D]``."""
    return values.reshape(len(values), -1)


INTERVAL_SCORES: dict[str, IntervalScore] = {
    "nll": NegativeLogDensity(),
    "cqr": CQR(),
    "absolute": AbsoluteResidual(),
    "normalized": NormalizedResidual(),
}
