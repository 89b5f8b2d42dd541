"""Predictive distribution of real values whose quantiles at some levels are known."""

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import NormalDist

import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape
from flowbnn.options import checked
from flowbnn.predictive.base import check_finite_samples, check_samples, quantile_levels
from flowbnn.predictive.continuous import ContinuousPredictive


class QuantilePredictive(ContinuousPredictive):
    r"""Predictive distribution of real values, the mixture of S distributions with quantiles :math:`q_{sl}` at levels :math:`\tau_l`.

    A sample is :math:`y = T_s(z)` of a standard normal variable :math:`z`. :math:`T_s` is linear between the points
    :math:`(\Phi^{-1}(\tau_l), q_{sl})` and beyond the outer ones, so the quantiles of a Gaussian give that Gaussian.

    Args:
        values: Quantiles in ascending order, ``[S, B, D, L]``.
        levels: Levels in ascending order, at least two.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.
        shape: Shape of a target, ``()`` for a number.

    >>> values = torch.tensor([-1.6449, 0.0, 1.6449]).expand(2, 3, 1, 3)  # 2 samples, 3 inputs, 1 target
    >>> QuantilePredictive(values, (0.05, 0.5, 0.95))
    QuantilePredictive(samples=2, inputs=3, outputs=1; variance 1 = aleatoric 1 + epistemic 0)
    """

    @checked
    def __init__(
        self,
        values: Tensor,
        levels: Sequence[float],
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        check_shape("values", values, ("S", "B", "D", len(levels)))
        self.shape = shape
        _, self._sample_counts = check_samples(values, "values", sample_counts, positions=True)
        normals = normal_quantiles(levels, values).expand_as(values)
        self._tensors = values, normals
        filled = self._fill_missing(values, 1.0)
        check_finite_samples(~torch.isfinite(filled).all(-1))
        ascending = self._fill_missing(values.diff(dim=-1), 1.0) > 0
        check_entries("values", values.diff(dim=-1), ascending, "ascending")
        self._tensors = self._fill_missing(values, math.nan), normals

    @property
    def _values_per_point(self) -> int:  # type: ignore[override]
        return 2  # the tensors have one number for each level already

    @property
    def sample_quantiles(self) -> Tensor:
        """Quantiles of each sample, ``[S, B, D, L]``."""
        return self._tensors[0]

    @property
    def _slopes(self) -> Tensor:
        """Slopes of the segments of each sample, ``[S, B, D, L - 1]``."""
        return self.sample_quantiles.diff(dim=-1) / self._tensors[1].diff(dim=-1)

    @property
    def samples(self) -> Tensor:
        """Mean of each sample, ``[S, B, D]``."""
        return self._moments[0]

    @property
    def sample_variances(self) -> Tensor:
        """Variance of each sample, ``[S, B, D]``."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each sample, ``[S, B, D]``, from truncated moments of the normal variable."""
        values, normals = self._tensors
        center, ends = values[..., values.shape[-1] // 2, None], normals[..., 1:-1]
        zero, one = torch.zeros_like(normals[..., :1]), torch.ones_like(normals[..., :1])
        mass = torch.cat([zero, torch.special.ndtr(ends), one], -1).diff(dim=-1)
        density = torch.exp(-0.5 * ends.square()) / math.sqrt(2.0 * math.pi)
        first = -torch.cat([zero, density, zero], -1).diff(dim=-1)
        second = mass - torch.cat([zero, ends * density, zero], -1).diff(dim=-1)
        slopes = self._slopes
        offsets = values[..., :-1] - center - slopes * normals[..., :-1]
        mean = (offsets * mass + slopes * first).sum(-1)
        square = offsets.square() * mass + 2.0 * offsets * slopes * first + slopes.square() * second
        return center.squeeze(-1) + mean, square.sum(-1) - mean.square()

    def _segments(self, points: Tensor, edges: Tensor) -> Tensor:
        """Returns the index of the segment of each point ``[..., G]`` between edges ``[..., L]``."""
        return (points.unsqueeze(-1) >= edges[..., None, 1:-1]).sum(-1)

    def _preimages(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Returns normal variables and slopes at values ``[B, D, G]``, both ``[S, B, D, G]``."""
        values, normals = self._tensors
        points = points.expand(len(values), *points.shape)
        index = self._segments(points, values)
        slope = self._slopes.gather(-1, index)
        return normals.gather(-1, index) + (points - values.gather(-1, index)) / slope, slope

    def _log_densities(self, values: Tensor) -> Tensor:
        z, slope = self._preimages(values)
        return -0.5 * z.square() - 0.5 * math.log(2.0 * math.pi) - slope.log()

    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        z = self._preimages(values)[0]
        return torch.special.ndtr(-z if upper else z)

    def _images(self, tensors: Sequence[Tensor], z: Tensor) -> Tensor:
        """Returns the values ``[N, B, D]`` of normal variables under tensors ``[N, B, D, L]``."""
        values, normals = tensors
        index = self._segments(z.unsqueeze(-1), normals)
        slope = values.diff(dim=-1).gather(-1, index) / normals.diff(dim=-1).gather(-1, index)
        return (values.gather(-1, index) + slope * (z.unsqueeze(-1) - normals.gather(-1, index))).squeeze(-1)

    def _part_quantiles(self, z: float) -> Tensor:
        return self._images(self._tensors, torch.full_like(self.sample_quantiles[..., 0], z))

    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        values = tensors[0][..., 0]
        normal = torch.randn(values.shape, generator=generator, device=values.device, dtype=values.dtype)
        return self._images(tensors, normal)

    def _rescaled(self, center: Tensor, factor: float | Tensor) -> Sequence[Tensor]:
        middle = center.unsqueeze(-1)
        return middle + factor * (self.sample_quantiles - middle), self._tensors[1]

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        normals = self._tensors[1]
        return mean.unsqueeze(-1) + variance.sqrt().unsqueeze(-1) * normals, normals


def normal_quantiles(levels: Sequence[float], like: Tensor) -> Tensor:
    """Returns quantiles of the standard normal distribution, ``[L]``, in the dtype and on the device of a tensor."""
    values = [NormalDist().inv_cdf(level) for level in quantile_levels(levels, closed=False)]
    return torch.tensor(values, dtype=like.dtype, device=like.device)
