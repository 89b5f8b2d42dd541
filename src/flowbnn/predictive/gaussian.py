"""Predictive distribution of real values."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import root_mean_squared_error
from flowbnn.metrics.checks import check_values, mean_as_float
from flowbnn.numerics import monotone_root
from flowbnn.options import Count, Probability, checked
from flowbnn.predictive.base import Predictive, check_finite_samples, check_samples, quantile_levels


class Decision(NamedTuple):
    """Predicted values, and a mask of the same shape for values that are too uncertain.

    Args:
        values: Predicted values.
        abstained: True for values that should not be used.
    """

    values: Tensor
    abstained: Tensor


class Interval(NamedTuple):
    """Predictive interval.

    Args:
        low: Lower ends.
        high: Upper ends.
    """

    low: Tensor
    high: Tensor


class GaussianPredictive(Predictive):
    r"""Predictive distribution of real values, the mixture :math:`\frac1S \sum_s \mathcal N(\mu_s, \sigma_s^2)` of S samples.

    Args:
        mean: Means ``[S, B, D]``.
        variance: Positive noise variances, as a number or a tensor that broadcasts to the shape of the means.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling. Only the first samples of an input are used, up
            to its count.
        shape: Shape of a target, ``()`` for a number. Means, variances, quantiles and intervals have this shape instead of ``[D]``.

    Raises:
        FlowBNNError: If the variance is not positive or does not broadcast, or if a sample is not finite.

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
            text = f"variance {list(variance.shape)} cannot broadcast to {list(mean.shape)}"
            raise FlowBNNError(text, kind="shape", argument="variance") from None
        self._tensors = (mean, variance)
        means, variances = self._fill_missing(mean, 0.0), self._fill_missing(variance, 1.0)
        check_finite_samples(~(torch.isfinite(means) & torch.isfinite(variances)))
        self._tensors = (self._fill_missing(mean, math.nan), self._fill_missing(variance, math.nan))
        if (variances <= 0).any():
            text = (
                f"variance must be positive, got {float(variances.min()):.3g}; take exp() of a log-variance"
            )
            raise FlowBNNError(text, kind="range", argument="variance")

    @property
    def samples(self) -> Tensor:
        """Means of each sample, ``[S, B, D]``. NaN for samples that an input does not have."""
        return self._tensors[0]

    @property
    def sample_variances(self) -> Tensor:
        """Noise variances of each sample, ``[S, B, D]``."""
        return self._tensors[1]

    @cached_property
    def mean(self) -> Tensor:
        """Predictive mean, ``[B, D]``."""
        return self._to_target_shape(self._mean(self.samples))

    @cached_property
    def aleatoric(self) -> Tensor:
        r"""Mean noise variance :math:`\frac1S \sum_s \sigma_s^2`, ``[B, D]``, which more data would not reduce."""
        return self._to_target_shape(self._mean(self.sample_variances))

    @cached_property
    def epistemic(self) -> Tensor:
        r"""Variance of the means :math:`\frac1S \sum_s (\mu_s - \bar\mu)^2`, ``[B, D]``: the disagreement of the samples."""
        return self._to_target_shape(self._variance_over_samples(self.samples))

    @property
    def variance(self) -> Tensor:
        """Predictive variance, the sum of aleatoric and epistemic variance by the law of total variance, ``[B, D]``."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Predictive standard deviation, ``[B, D]``."""
        return self.variance.sqrt()

    @property
    def sampling_error(self) -> Tensor:
        """Largest :attr:`standard_error` of the mean, in predictive standard deviations, ``[B]``."""
        return (self.standard_error / self.std).reshape(self.samples.shape[1:]).amax(-1)

    @checked
    def cdf(self, values: Tensor) -> Tensor:
        r"""Returns the predictive distribution function :math:`\frac1S \sum_s \Phi((y - \mu_s) / \sigma_s)`, ``[B, D]``.

        Args:
            values: Values :math:`y` in the shape of the targets.
        """
        scaled = (self._check_targets(values) - self.samples) / self.sample_variances.sqrt()
        return self._to_target_shape(self._mean(torch.special.ndtr(scaled)))

    @checked
    def nll(self, targets: Tensor) -> Tensor:
        r"""Returns the negative log-density of the targets of each input under the mixture, ``[B]``.

        Outputs are independent within a sample.

        .. math:: -\log \frac1S \sum_s \prod_d \mathcal N(y_d; \mu_{sd}, \sigma_{sd}^2) .

        Args:
            targets: Targets ``[B, D]``.
        """
        square = (self._check_targets(targets) - self.samples).square() / self.sample_variances
        log_density = -0.5 * (square + self.sample_variances.log() + math.log(2 * math.pi)).sum(-1)
        return -self._log_mean_exp(log_density)

    @checked
    def sample(self, number: Count = 1, seed: int | None = None) -> Tensor:
        """Draws targets from the mixture, ``[number, B, D]``. Each draw uses one of the S samples for all inputs.

        Args:
            number: Number of draws.
            seed: Seed of the draws. None uses torch's global generator.
        """
        indices, generator = self._draw_sample_indices(number, seed)
        index = indices.unsqueeze(-1).expand(-1, -1, self.samples.shape[-1])
        means, variances = self.samples.gather(0, index), self.sample_variances.gather(0, index)
        normal = torch.randn(means.shape, generator=generator, device=means.device, dtype=means.dtype)
        return self._to_target_shape(means + variances.sqrt() * normal)

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        r"""Returns the continuous ranked probability score (CRPS) :math:`\int (F(x) - 1[y \le x])^2 dx` of each target, in its unit.

        Lower is better. A mixture has a closed form ([Grimit 2006](https://doi.org/10.1256/qj.05.235)):

        .. math:: \frac1S \sum_s A(y - \mu_s, \sigma_s^2) - \frac1{2 S^2} \sum_{s, t} A(\mu_s - \mu_t, \sigma_s^2 + \sigma_t^2), \qquad
                  A(\mu, \sigma^2) = E|d| = 2 \sigma \phi(\mu / \sigma) + \mu (2 \Phi(\mu / \sigma) - 1)

        for :math:`d \sim \mathcal N(\mu, \sigma^2)`. The cost is quadratic in the number of samples.

        Args:
            targets: Targets ``[B, D]``.

        >>> GaussianPredictive(torch.zeros(1, 1, 1), 1.0).crps(torch.zeros(1, 1))  # (sqrt(2) - 1) / sqrt(pi)
        tensor([[0.2337]])
        """
        means = self._fill_missing(self.samples, 0.0)
        variances = self._fill_missing(self.sample_variances, 1.0)
        counts = self._counts_like(means)
        distances = _mean_absolute_value(self._check_targets(targets) - means, variances)
        to_target = self._fill_missing(distances, 0.0).sum(0) / counts
        pairs = self._fill_missing(_mean_absolute_value(torch.zeros_like(means), 2.0 * variances), 0.0).sum(0)
        for s in range(self.num_samples - 1):  # every pair once
            distances = _mean_absolute_value(means[s + 1 :] - means[s], variances[s + 1 :] + variances[s])
            weight = 1.0 if self._missing is None else (~self._missing[s + 1 :]).unsqueeze(-1).to(distances)
            pairs = pairs + 2.0 * (distances * weight).sum(0)
        return self._to_target_shape(to_target - 0.5 * pairs / counts.square())

    @checked
    def quantiles(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Returns quantiles of the mixture, ``[Q, B, D]``, by root finding on its :meth:`cdf`. They have no gradient.

        Args:
            q: Levels between 0 and 1, without the ends.

        >>> GaussianPredictive(torch.tensor([[[-1.0]], [[1.0]]]), 1e-4).quantiles([0.25, 0.75]).flatten()
        tensor([-1.,  1.])
        """
        levels = quantile_levels(q, closed=False)
        return self._to_target_shape(torch.stack([self._quantile(level) for level in levels]))

    @torch.no_grad()
    def _quantile(self, level: float) -> Tensor:
        """Returns one quantile of the mixture, ``[B, D]``."""
        # reflect levels above one half, because small probabilities are more precise
        sign, level = (1.0, level) if level <= 0.5 else (-1.0, 1.0 - level)
        means, stds = sign * self.samples, self.sample_variances.sqrt()

        def residual(value: Tensor) -> tuple[Tensor, Tensor]:
            scaled = (value - means) / stds
            density = torch.exp(-0.5 * scaled.square()) / (stds * math.sqrt(2 * math.pi))
            return self._mean(torch.special.ndtr(scaled)) - level, self._mean(density)

        # the quantile of the mixture is between the quantiles of its components
        quantiles = means + stds * torch.special.ndtri(torch.tensor(level, dtype=torch.float64)).item()
        low = self._fill_missing(quantiles, math.inf).amin(0)
        high = self._fill_missing(quantiles, -math.inf).amax(0)
        return sign * monotone_root(residual, low, high, iterations=80)

    @checked
    def interval(self, mass: Probability = 0.9) -> Interval:
        """Returns the central interval of this predictive mass, with ends ``[B, D]`` and equal tails.

        Args:
            mass: Probability of the interval.
        """
        tail = (1.0 - mass) / 2
        return Interval(*self.quantiles([tail, 1.0 - tail]))

    def decide(self, abstain_above: float | Tensor, by: str = "std") -> Decision:
        """Returns the mean ``[B, D]``, and a mask of values whose uncertainty is above a threshold.

        Args:
            abstain_above: Uncertainty above which the predictive abstains.
            by: Name of the :meth:`uncertainty`. ``"std"`` is in the unit of the targets. ``"epistemic"``, ``"aleatoric"`` and
                ``"variance"`` are in the squared unit.

        >>> prediction = GaussianPredictive(torch.tensor([[[1.0], [0.0]], [[1.0], [4.0]]]), 0.01)
        >>> prediction.decide(abstain_above=1.0)
        Decision(values=tensor([[1.],
                [2.]]), abstained=tensor([[False],
                [ True]]))
        """
        return Decision(self.mean, self._exceeds(abstain_above, by))

    @checked
    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Returns root mean squared error, NLL, CRPS, and the coverage of the 90 % :meth:`interval`.

        Args:
            targets: Targets ``[B, D]``.
        """
        targets = self._check_targets(targets)
        # a target is in the central interval if and only if its cdf is in [0.05, 0.95]
        covered = (self.cdf(targets) - 0.5).abs() <= 0.45
        return {
            "rmse": root_mean_squared_error(self._mean(self.samples), targets),
            "nll": mean_as_float(self.nll(targets)),
            "crps": mean_as_float(self.crps(targets)),
            "coverage_90": mean_as_float(covered),
        }

    def _check_targets(self, targets: Tensor) -> Tensor:
        if self.shape is not None and len(self.shape) > 1 and targets.shape[1:] == self.shape:
            targets = targets.flatten(1)
        return check_values(targets, "targets", self.samples.shape[1:]).to(self.samples)

    def __repr__(self) -> str:
        _, inputs, outputs = self.samples.shape
        text = ""
        if inputs:
            means = [mean_as_float(values) for values in (self.variance, self.aleatoric, self.epistemic)]
            text = "; variance {:.3g} = aleatoric {:.3g} + epistemic {:.3g}".format(*means)
        samples = self._describe_sample_counts()
        return f"GaussianPredictive(samples={samples}, inputs={inputs}, outputs={outputs}{text})"


def _mean_absolute_value(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns the mean absolute value of a Gaussian variable."""
    std = variance.sqrt()
    scaled = mean / std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2.0 * math.pi)
    return 2.0 * std * density + mean * torch.special.erf(scaled / math.sqrt(2.0))
