"""Predicted real values."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import root_mean_squared_error
from flowbnn.metrics.checks import average, check_values
from flowbnn.numerics import monotone_root
from flowbnn.options import Probability, checked
from flowbnn.predictive.base import Predictive, check_finite, check_samples, quantile_levels

__all__ = ["Decision", "GaussianPredictive", "Interval"]


class Decision(NamedTuple):
    """Predicted ``values`` and, in the same shape, whether to abstain from them."""

    values: Tensor
    abstained: Tensor


class Interval(NamedTuple):
    """Lower and upper ends."""

    low: Tensor
    high: Tensor


class GaussianPredictive(Predictive):
    r"""Real values from S samples of a Gaussian: the mixture :math:`\frac1S \sum_s \mathcal N(\mu_s, \sigma_s^2)`.

    Args:
        mean: ``[S, B, D]``.
        variance: of the noise, above zero; a number, or a tensor that broadcasts to the mean's shape.
        spent: how many samples each input had, ``[B]``, where they differ: the first ones of the S.

    >>> prediction = GaussianPredictive(torch.tensor([[[1.0]], [[3.0]]]), 0.25)  # 2 samples, 1 input, 1 output
    >>> prediction
    GaussianPredictive(samples=2, inputs=1, outputs=1; variance 1.25 = aleatoric 0.25 + epistemic 1)
    >>> prediction.interval(0.9)
    Interval(low=tensor([[0.3592]]), high=tensor([[3.6408]]))
    """

    uncertainties = ("std", "epistemic", "variance", "aleatoric")

    def __init__(self, mean: Tensor, variance: Tensor | float, spent: Tensor | None = None) -> None:
        mean, self._spent = check_samples(mean, "mean", "[S, B, D]", spent)
        variance = torch.as_tensor(variance, dtype=mean.dtype, device=mean.device).expand(mean.shape)
        self._tensors = (mean, variance)
        present, spread = self._present(mean, 0.0), self._present(variance, 1.0)
        check_finite(~(torch.isfinite(present) & torch.isfinite(spread)))
        self._tensors = (self._present(mean, math.nan), self._present(variance, math.nan))
        if (spread <= 0).any():
            raise FlowBNNError(
                "variance must be above 0 everywhere; is it a log-variance or a standard deviation?",
                kind="value",
                argument="variance",
            )

    @property
    def samples(self) -> Tensor:
        """Means of each sample, ``[S, B, D]``; NaN where an input did not have it."""
        return self._tensors[0]

    @property
    def sample_variances(self) -> Tensor:
        """Noise variances of each sample, ``[S, B, D]``."""
        return self._tensors[1]

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean, ``[B, D]``."""
        return self._mean(self.samples)

    @cached_property
    def aleatoric(self) -> Tensor:
        r"""Mean noise variance :math:`\frac1S \sum_s \sigma_s^2`, ``[B, D]``: more data would not lower it."""
        return self._mean(self.sample_variances)

    @cached_property
    def epistemic(self) -> Tensor:
        r"""Variance of the means :math:`\frac1S \sum_s (\mu_s - \bar\mu)^2`, ``[B, D]``: how far the samples disagree."""
        return self._spread(self.samples)

    @property
    def variance(self) -> Tensor:
        """Predictive variance, aleatoric + epistemic by the law of total variance, ``[B, D]``."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation, ``[B, D]``."""
        return self.variance.sqrt()

    @property
    def sampling_error(self) -> Tensor:
        """The largest :attr:`standard_error` of the mean, in predictive standard deviations, ``[B]``."""
        return (self.standard_error / self.std).amax(-1)

    def cdf(self, values: Tensor) -> Tensor:
        r"""Predictive chance to fall below each value, :math:`\frac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`, ``[B, D]``."""
        scaled = (self._targets(values) - self.samples) / self.sample_variances.sqrt()
        return self._mean(torch.special.ndtr(scaled))

    def nll(self, targets: Tensor) -> Tensor:
        r"""Negative log-density of each input's targets in the mixture, ``[B]``; outputs are independent within a sample:

        .. math:: -\log \frac1S \sum_s \prod_d \mathcal N(y_d; \mu_{sd}, \sigma_{sd}^2) .
        """
        square = (self._targets(targets) - self.samples).square() / self.sample_variances
        log_density = -0.5 * (square + self.sample_variances.log() + math.log(2 * math.pi)).sum(-1)
        return -self._log_mean_exp(log_density)

    def quantiles(self, q: float | Sequence[float]) -> Tensor:
        """Quantiles of the predictive mixture, ``[Q, B, D]``, by root finding on its :meth:`cdf`; no gradient flows back.

        >>> GaussianPredictive(torch.tensor([[[-1.0]], [[1.0]]]), 1e-4).quantiles([0.25, 0.75]).flatten()
        tensor([-1.,  1.])
        """
        return torch.stack([self._quantile(level) for level in quantile_levels(q, closed=False)])

    @torch.no_grad()
    def _quantile(self, level: float) -> Tensor:
        # the upper half is the mirror image of the lower, where small probabilities keep their digits
        sign, level = (1.0, level) if level <= 0.5 else (-1.0, 1.0 - level)
        means, stds = sign * self.samples, self.sample_variances.sqrt()

        def gap(value: Tensor) -> tuple[Tensor, Tensor]:
            scaled = (value - means) / stds
            density = torch.exp(-0.5 * scaled.square()) / (stds * math.sqrt(2 * math.pi))
            return self._mean(torch.special.ndtr(scaled)) - level, self._mean(density)

        each = means + stds * torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()
        ends = self._present(each, math.inf).amin(0), self._present(each, -math.inf).amax(0)
        return sign * monotone_root(gap, *ends)

    @checked
    def interval(self, mass: Probability = 0.9) -> Interval:
        """The central interval of this predictive mass, equal tails left out on both sides; ends are ``[B, D]``."""
        tail = (1.0 - mass) / 2
        return Interval(*self.quantiles([tail, 1.0 - tail]))

    def decide(self, abstain_above: float, by: str = "std") -> Decision:
        """Mean ``[B, D]`` and, for each number, whether its :meth:`uncertainty` ``by`` is above the threshold.

        ``"std"`` is in the target's unit; ``"epistemic"``, ``"aleatoric"`` and ``"variance"`` are in its square.

        >>> prediction = GaussianPredictive(torch.tensor([[[1.0], [0.0]], [[1.0], [4.0]]]), 0.01)
        >>> prediction.decide(abstain_above=1.0)
        Decision(values=tensor([[1.],
                [2.]]), abstained=tensor([[False],
                [ True]]))
        """
        return Decision(self.mean, self._above(abstain_above, by))

    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Root mean squared error, mean NLL, and the share of targets inside the 90 % :meth:`interval`."""
        targets = self._targets(targets)
        # y lies in the central interval exactly when its cdf lies in [0.05, 0.95]: no root to find
        inside = (self.cdf(targets) - 0.5).abs() <= 0.45
        return {
            "rmse": root_mean_squared_error(self.mean, targets),
            "nll": average(self.nll(targets)),
            "coverage_90": average(inside),
        }

    def _targets(self, targets: Tensor) -> Tensor:
        return check_values(targets, "targets", self.samples.shape[1:]).to(self.samples)

    def __repr__(self) -> str:
        _, inputs, outputs = self.samples.shape
        text = ""
        if inputs:
            means = [average(x) for x in (self.variance, self.aleatoric, self.epistemic)]
            text = "; variance {:.3g} = aleatoric {:.3g} + epistemic {:.3g}".format(*means)
        return f"GaussianPredictive(samples={self._samples_text()}, inputs={inputs}, outputs={outputs}{text})"
