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
from flowbnn.options import Count, Probability, checked
from flowbnn.predictive.base import Predictive, check_finite, check_samples, quantile_levels


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
        sample_counts: how many samples each input had, ``[B]``, where they differ: the first ones of the S.
        shape: of one target, ``()`` for a number; mean, variances, quantiles and intervals have it in place of ``[D]``.

    >>> prediction = GaussianPredictive(torch.tensor([[[1.0]], [[3.0]]]), 0.25)  # 2 samples, 1 input, 1 output
    >>> prediction
    GaussianPredictive(samples=2, inputs=1, outputs=1; variance 1.25 = aleatoric 0.25 + epistemic 1)
    >>> prediction.interval(0.9)
    Interval(low=tensor([[0.3592]]), high=tensor([[3.6408]]))
    """

    uncertainties = ("std", "epistemic", "variance", "aleatoric")

    @checked
    def __init__(
        self,
        mean: Tensor,
        variance: Tensor | float,
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = shape
        mean, self._sample_counts = check_samples(mean, "mean", "[S, B, D]", sample_counts)
        variance = torch.as_tensor(variance, dtype=mean.dtype, device=mean.device)
        try:
            variance = variance.expand(mean.shape)
        except RuntimeError:
            shapes = f"{list(variance.shape)} does not broadcast to the mean's, {list(mean.shape)}"
            raise FlowBNNError(f"variance: {shapes}", kind="shape", argument="variance") from None
        self._tensors = (mean, variance)
        present, spread = self._present(mean, 0.0), self._present(variance, 1.0)
        check_finite(~(torch.isfinite(present) & torch.isfinite(spread)))
        self._tensors = (self._present(mean, math.nan), self._present(variance, math.nan))
        if (spread <= 0).any():
            raise FlowBNNError(
                "variance must be above 0 everywhere; is it a log-variance or a standard deviation?",
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
        return self._shaped(self._mean(self.samples))

    @cached_property
    def aleatoric(self) -> Tensor:
        r"""Mean noise variance :math:`\frac1S \sum_s \sigma_s^2`, ``[B, D]``: more data would not lower it."""
        return self._shaped(self._mean(self.sample_variances))

    @cached_property
    def epistemic(self) -> Tensor:
        r"""Variance of the means :math:`\frac1S \sum_s (\mu_s - \bar\mu)^2`, ``[B, D]``: how far the samples disagree."""
        return self._shaped(self._spread(self.samples))

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
        return (self.standard_error / self.std).reshape(self.samples.shape[1:]).amax(-1)

    @checked
    def cdf(self, values: Tensor) -> Tensor:
        r"""Predictive chance to fall below each value, :math:`\frac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`, ``[B, D]``."""
        scaled = (self._targets(values) - self.samples) / self.sample_variances.sqrt()
        return self._shaped(self._mean(torch.special.ndtr(scaled)))

    @checked
    def nll(self, targets: Tensor) -> Tensor:
        r"""Negative log-density of each input's targets in the mixture, ``[B]``; outputs are independent within a sample:

        .. math:: -\log \frac1S \sum_s \prod_d \mathcal N(y_d; \mu_{sd}, \sigma_{sd}^2) .
        """
        square = (self._targets(targets) - self.samples).square() / self.sample_variances
        log_density = -0.5 * (square + self.sample_variances.log() + math.log(2 * math.pi)).sum(-1)
        return -self._log_mean_exp(log_density)

    @checked
    def sample(self, number: Count = 1, seed: int | None = None) -> Tensor:
        """Targets drawn from the mixture, ``[number, B, D]``; each draw takes one of the S samples for all inputs."""
        chosen, generator = self._chosen(number, seed)
        index = chosen.unsqueeze(-1).expand(-1, -1, self.samples.shape[-1])
        means, variances = self.samples.gather(0, index), self.sample_variances.gather(0, index)
        normal = torch.randn(means.shape, generator=generator, device=means.device, dtype=means.dtype)
        return self._shaped(means + variances.sqrt() * normal)

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        r"""Continuous ranked probability score :math:`\int (F(x) - 1[y \le x])^2 dx` of each target, in its unit; smaller is better.

        In closed form for a mixture ([Grimit 2006](https://doi.org/10.1256/qj.05.235)), with :math:`d \sim \mathcal N(\mu, \sigma^2)`:

        .. math:: \frac1S \sum_s A(y - \mu_s, \sigma_s^2) - \frac1{2 S^2} \sum_{s, t} A(\mu_s - \mu_t, \sigma_s^2 + \sigma_t^2), \qquad
                  A(\mu, \sigma^2) = E|d| = 2 \sigma \phi(\mu / \sigma) + \mu (2 \Phi(\mu / \sigma) - 1) .

        Work grows with the square of the number of samples.

        >>> GaussianPredictive(torch.zeros(1, 1, 1), 1.0).crps(torch.zeros(1, 1))  # (sqrt(2) - 1) / sqrt(pi)
        tensor([[0.2337]])
        """
        means, variances = self._present(self.samples, 0.0), self._present(self.sample_variances, 1.0)
        counts = self._counts(means)
        near = self._present(_distance(self._targets(targets) - means, variances), 0.0).sum(0) / counts
        pairs = self._present(_distance(torch.zeros_like(means), 2.0 * variances), 0.0).sum(0)
        for s in range(self.num_samples - 1):  # every pair once
            apart = _distance(means[s + 1 :] - means[s], variances[s + 1 :] + variances[s])
            there = 1.0 if self._absent is None else (~self._absent[s + 1 :]).unsqueeze(-1).to(apart)
            pairs = pairs + 2.0 * (apart * there).sum(0)
        return self._shaped(near - 0.5 * pairs / counts.square())

    @checked
    def quantiles(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Quantiles of the predictive mixture, ``[Q, B, D]``, by root finding on its :meth:`cdf`; no gradient flows back.

        >>> GaussianPredictive(torch.tensor([[[-1.0]], [[1.0]]]), 1e-4).quantiles([0.25, 0.75]).flatten()
        tensor([-1.,  1.])
        """
        return self._shaped(
            torch.stack([self._quantile(level) for level in quantile_levels(q, closed=False)])
        )

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
        return sign * monotone_root(gap, *ends, iterations=80)

    @checked
    def interval(self, mass: Probability = 0.9) -> Interval:
        """The central interval of this predictive mass, equal tails left out on both sides; ends are ``[B, D]``."""
        tail = (1.0 - mass) / 2
        return Interval(*self.quantiles([tail, 1.0 - tail]))

    def decide(self, abstain_above: float | Tensor, by: str = "std") -> Decision:
        """Mean ``[B, D]`` and, for each number, whether its :meth:`uncertainty` ``by`` is above the threshold.

        ``"std"`` is in the target's unit; ``"epistemic"``, ``"aleatoric"`` and ``"variance"`` are in its square.

        >>> prediction = GaussianPredictive(torch.tensor([[[1.0], [0.0]], [[1.0], [4.0]]]), 0.01)
        >>> prediction.decide(abstain_above=1.0)
        Decision(values=tensor([[1.],
                [2.]]), abstained=tensor([[False],
                [ True]]))
        """
        return Decision(self.mean, self._above(abstain_above, by))

    @checked
    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Root mean squared error, mean NLL and CRPS, and the share of targets inside the 90 % :meth:`interval`."""
        targets = self._targets(targets)
        # y lies in the central interval exactly when its cdf lies in [0.05, 0.95]: no root to find
        inside = (self.cdf(targets) - 0.5).abs() <= 0.45
        return {
            "rmse": root_mean_squared_error(self._mean(self.samples), targets),
            "nll": average(self.nll(targets)),
            "crps": average(self.crps(targets)),
            "coverage_90": average(inside),
        }

    def _targets(self, targets: Tensor) -> Tensor:
        if self.shape is not None and len(self.shape) > 1 and targets.shape[1:] == self.shape:
            targets = targets.flatten(1)
        return check_values(targets, "targets", self.samples.shape[1:]).to(self.samples)

    def __repr__(self) -> str:
        _, inputs, outputs = self.samples.shape
        text = ""
        if inputs:
            means = [average(x) for x in (self.variance, self.aleatoric, self.epistemic)]
            text = "; variance {:.3g} = aleatoric {:.3g} + epistemic {:.3g}".format(*means)
        return f"GaussianPredictive(samples={self._samples_text()}, inputs={inputs}, outputs={outputs}{text})"


def _distance(mean: Tensor, variance: Tensor) -> Tensor:
    """Mean size of a Gaussian variable."""
    std = variance.sqrt()
    scaled = mean / std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2.0 * math.pi)
    return 2.0 * std * density + mean * torch.special.erf(scaled / math.sqrt(2.0))
