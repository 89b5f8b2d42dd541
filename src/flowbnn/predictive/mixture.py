"""Predictive distribution of real values whose densities are mixtures of Gaussians."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import check_shape
from flowbnn.options import checked
from flowbnn.predictive.base import check_finite_samples, check_samples
from flowbnn.predictive.continuous import ContinuousPredictive


class MixturePredictive(ContinuousPredictive):
    r"""Predictive distribution of real values, the density :math:`\frac1S \sum_s \sum_k w_{sk} N(\mu_{sk}, \sigma_{sk}^2)`.

    Args:
        means: Means :math:`\mu_{sk}`, ``[S, B, D, K]``.
        stds: Positive standard deviations :math:`\sigma_{sk}`, ``[S, B, D, K]``.
        logits: Logarithms of the weights :math:`w_{sk}`, ``[S, B, D, K]``. They need not be normalized.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.
        shape: Shape of a target, ``()`` for a number.

    >>> means = torch.tensor([-1.0, 1.0]).expand(3, 2, 1, 2)  # 3 samples, 2 inputs, 1 target, 2 components
    >>> MixturePredictive(means, torch.ones(3, 2, 1, 2), torch.zeros(3, 2, 1, 2))
    MixturePredictive(samples=3, inputs=2, outputs=1; variance 2 = aleatoric 2 + epistemic 0)
    """

    @checked
    def __init__(
        self,
        means: Tensor,
        stds: Tensor,
        logits: Tensor,
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        check_shape("means", means, ("S", "B", "D", "K"))
        means, self._sample_counts = check_samples(means, "means", sample_counts, positions=True)
        check_shape("stds", stds, means.shape)
        check_shape("logits", logits, means.shape)
        self.shape, self._tensors = shape, (means, stds.to(means), F.log_softmax(logits.to(means), -1))
        filled = [self._fill_missing(tensor, 1.0) for tensor in self._tensors]
        # a weight of zero has the logarithm minus infinity
        valid = torch.isfinite(filled[0]) & torch.isfinite(filled[1]) & (filled[2] < math.inf)
        check_finite_samples(~valid.all(-1))
        means, stds, log_weights = (self._fill_missing(tensor, math.nan) for tensor in self._tensors)
        self._tensors = means, stds, log_weights

    @property
    def _values_per_point(self) -> int:  # type: ignore[override]
        return 2  # the tensors have one number for each component already

    @property
    def means(self) -> Tensor:
        """Means of the components, ``[S, B, D, K]``."""
        return self._tensors[0]

    @property
    def stds(self) -> Tensor:
        """Standard deviations of the components, ``[S, B, D, K]``."""
        return self._tensors[1]

    @property
    def weights(self) -> Tensor:
        """Weights of the components, ``[S, B, D, K]``."""
        return self._tensors[2].exp()

    @cached_property
    def samples(self) -> Tensor:
        """Mean of the density of each sample, ``[S, B, D]``."""
        return (self.weights * self.means).sum(-1)

    @cached_property
    def sample_variances(self) -> Tensor:
        """Variance of the density of each sample, ``[S, B, D]``."""
        spread = (self.means - self.samples.unsqueeze(-1)).square()
        return (self.weights * (self.stds.square() + spread)).sum(-1)

    def _scaled(self, values: Tensor) -> Tensor:
        """Returns values ``[B, D, G]`` in units of each component, ``[S, B, D, G, K]``."""
        return (values.unsqueeze(-1) - self.means.unsqueeze(-2)) / self.stds.unsqueeze(-2)

    def _log_densities(self, values: Tensor) -> Tensor:
        log_weights, log_stds = self._tensors[2].unsqueeze(-2), self.stds.log().unsqueeze(-2)
        exponents = log_weights - log_stds - 0.5 * self._scaled(values).square()
        return exponents.logsumexp(-1) - 0.5 * math.log(2.0 * math.pi)

    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        scaled = self._scaled(values)
        return (self.weights.unsqueeze(-2) * torch.special.ndtr(-scaled if upper else scaled)).sum(-1)

    def _part_quantiles(self, z: float) -> Tensor:
        return (self.means + z * self.stds).movedim(-1, 0).flatten(0, 1)

    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        means, stds, log_weights = tensors
        size = means.shape[-1]
        chosen = torch.multinomial(log_weights.exp().reshape(-1, size), 1, generator=generator)
        chosen = chosen.reshape(*means.shape[:-1], 1)
        mean, std = (tensor.gather(-1, chosen).squeeze(-1) for tensor in (means, stds))
        normal = torch.randn(mean.shape, generator=generator, device=mean.device, dtype=mean.dtype)
        return mean + std * normal

    def _rescaled(self, center: Tensor, factor: float | Tensor) -> Sequence[Tensor]:
        middle = center.unsqueeze(-1)
        return middle + factor * (self.means - middle), factor * self.stds, self._tensors[2]

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        size = self.means.shape[-1]
        means, stds = (value.unsqueeze(-1).expand(*mean.shape, size) for value in (mean, variance.sqrt()))
        return means, stds, torch.full_like(means, -math.log(size))
