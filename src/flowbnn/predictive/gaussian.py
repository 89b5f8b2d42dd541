"""Predictive distribution of real values."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, check_entries
from flowbnn.options import checked
from flowbnn.predictive.base import check_finite_samples, check_samples
from flowbnn.predictive.continuous import ContinuousPredictive


class GaussianPredictive(ContinuousPredictive):
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

    @checked
    def __init__(
        self,
        mean: Tensor,
        variance: Tensor | float,
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = shape
        mean, self._sample_counts = check_samples(mean, "mean", sample_counts)
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
        check_entries("variance", variances, variances > 0, "positive", "take exp() of a log-variance")

    @property
    def samples(self) -> Tensor:
        """Means of each sample, ``[S, B, D]``. NaN for samples that an input does not have."""
        return self._tensors[0]

    @property
    def sample_variances(self) -> Tensor:
        """Noise variances of each sample, ``[S, B, D]``."""
        return self._tensors[1]

    def _log_densities(self, values: Tensor) -> Tensor:
        means, variances = (tensor.unsqueeze(-1) for tensor in self._tensors)
        return -0.5 * ((values - means).square() / variances + variances.log() + math.log(2.0 * math.pi))

    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        scaled = (values - self.samples.unsqueeze(-1)) / self.sample_variances.sqrt().unsqueeze(-1)
        return torch.special.ndtr(-scaled if upper else scaled)

    def _part_quantiles(self, z: float) -> Tensor:
        return self.samples + z * self.sample_variances.sqrt()

    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        means, variances = tensors
        normal = torch.randn(means.shape, generator=generator, device=means.device, dtype=means.dtype)
        return means + variances.sqrt() * normal

    def _rescaled(self, center: Tensor, factor: float | Tensor) -> Sequence[Tensor]:
        return center + factor * (self.samples - center), factor**2 * self.sample_variances

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        return mean, variance

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
            weight = (
                1.0 if self._sample_counts is None else (~self._missing[s + 1 :]).unsqueeze(-1).to(distances)
            )
            pairs = pairs + 2.0 * (distances * weight).sum(0)
        return self._to_target_shape(to_target - 0.5 * pairs / counts.square())


def _mean_absolute_value(mean: Tensor, variance: Tensor) -> Tensor:
    """Returns the mean absolute value of a Gaussian variable."""
    std = variance.sqrt()
    scaled = mean / std
    density = torch.exp(-0.5 * scaled.square()) / math.sqrt(2.0 * math.pi)
    return 2.0 * std * density + mean * torch.special.erf(scaled / math.sqrt(2.0))
