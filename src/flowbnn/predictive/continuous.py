"""Base class for predictive distributions of real values."""

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from flowbnn import plots
from flowbnn.metrics import root_mean_squared_error
from flowbnn.metrics.checks import check_values, mean_as_float
from flowbnn.numerics import monotone_root
from flowbnn.options import Count, Positive, Probability, checked
from flowbnn.predictive.base import Decision, Predictive, quantile_levels


class Interval(NamedTuple):
    """Predictive interval.

    Args:
        low: Lower ends.
        high: Upper ends.
    """

    low: Tensor
    high: Tensor


class ContinuousPredictive(Predictive):
    r"""Base class for predictive distributions of real values, mixtures :math:`\frac1S \sum_s p_s(y)` of the densities of S samples.

    The targets of an input are independent within a sample. A subclass defines ``samples`` and ``sample_variances``, the means and
    variances of :math:`p_s`, and five methods of one target at a time. Values ``[B, D, G]`` are G points for each input and target.

    - ``_log_densities(values)``: :math:`\log p_s`, ``[S, B, D, G]``.
    - ``_cdfs(values, upper)``: distribution functions of :math:`p_s`, or with ``upper`` their complements, ``[S, B, D, G]``.
    - ``_part_quantiles(z)``: quantiles at the level :math:`\Phi(z)` of all densities that :math:`p_s` mix, ``[M, B, D]``.
    - ``_draws(tensors, generator)``: one draw from each density that the given tensors ``[N, B, ...]`` describe, ``[N, B, D]``.
    - ``_rescaled(center, factor)``: the tensors of densities stretched about centers ``[B, D]``.
    - ``_gaussian_tensors(mean, variance)``: the tensors of Gaussians with means and variances ``[S, B, D]``.
    """

    uncertainties = ("std", "epistemic", "variance", "aleatoric")
    summary_properties: tuple[str, ...] = (
        "sample_counts",
        "standard_error",
        "sampling_error",
        "mean",
        "aleatoric",
        "epistemic",
        "variance",
        "std",
    )
    summary_scores = ("nll", "crps", "cdf", "covered")
    can_rescale: bool = True  # False if the predictive has no rescale
    _values_per_point: int = 1  # numbers that the densities of one point need, for the size of a chunk

    @property
    @abstractmethod
    def sample_variances(self) -> Tensor:
        """Variance of the density of each sample, ``[S, B, D]``."""

    @abstractmethod
    def _log_densities(self, values: Tensor) -> Tensor: ...

    @abstractmethod
    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor: ...

    @abstractmethod
    def _part_quantiles(self, z: float) -> Tensor: ...

    @abstractmethod
    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor: ...

    @abstractmethod
    def _rescaled(self, center: Tensor, factor: float | Tensor) -> Sequence[Tensor]: ...

    @abstractmethod
    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]: ...

    # -------------------- moments

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

    # -------------------- densities

    @checked
    def cdf(self, values: Tensor) -> Tensor:
        r"""Returns the predictive distribution function :math:`\frac1S \sum_s F_s(y)`, ``[B, D]``.

        Args:
            values: Values :math:`y` in the shape of the targets.
        """
        points = self._check_targets(values).unsqueeze(-1)
        return self._to_target_shape(self._mean(self._cdfs(points)).squeeze(-1))

    @checked
    def nll(self, targets: Tensor) -> Tensor:
        r"""Returns the negative log-density of the targets of each input under the mixture, ``[B]``.

        Targets are independent within a sample.

        .. math:: -\log \frac1S \sum_s \prod_d p_{sd}(y_d) .

        Args:
            targets: Targets ``[B, D]``.
        """
        points = self._check_targets(targets).unsqueeze(-1)
        return -self._log_mean_exp(self._log_densities(points).squeeze(-1).sum(-1))

    @checked
    def sample(self, number: Count = 1, seed: int | None = None) -> Tensor:
        """Draws targets from the mixture, ``[number, B, D]``. Each draw uses one of the S samples for all inputs.

        Args:
            number: Number of draws.
            seed: Seed of the draws. None uses torch's global generator.
        """
        indices, generator = self._draw_sample_indices(number, seed)
        inputs = torch.arange(len(self), device=indices.device)
        chosen = [tensor[indices.expand(-1, len(self)), inputs] for tensor in self._tensors]
        return self._to_target_shape(self._draws(chosen, generator))

    @checked
    def quantiles(self, q: float | Sequence[float] | Tensor) -> Tensor:
        """Returns quantiles of the mixture, ``[Q, B, D]``, by root finding on its :meth:`cdf`. They have no gradient.

        Args:
            q: Levels between 0 and 1, without the ends.
        """
        levels = quantile_levels(q, closed=False)
        return self._to_target_shape(torch.stack([self._quantile(level) for level in levels]))

    @torch.no_grad()
    def _quantile(self, level: float) -> Tensor:
        """Returns one quantile of the mixture, ``[B, D]``."""
        # the tail of a level above one half is the upper one, because small probabilities are more precise
        upper, tail = level > 0.5, min(level, 1.0 - level)
        sign = -1.0 if upper else 1.0

        def residual(value: Tensor) -> tuple[Tensor, Tensor]:
            points = value.unsqueeze(-1)
            mass = self._mean(self._cdfs(points, upper)).squeeze(-1)
            density = self._mean(self._log_densities(points).exp()).squeeze(-1)
            return sign * (mass - tail), density

        # the quantile of the mixture is between the quantiles of its parts
        z = float(torch.special.ndtri(torch.tensor(tail, dtype=torch.float64)))
        parts = self._part_quantiles(sign * z)
        missing = parts.isnan()
        low = parts.masked_fill(missing, math.inf).amin(0)
        high = parts.masked_fill(missing, -math.inf).amax(0)
        return monotone_root(residual, low, high, iterations=80)

    @checked
    def interval(self, mass: Probability = 0.9) -> Interval:
        """Returns the central interval of this predictive mass, with ends ``[B, D]`` and equal tails.

        Args:
            mass: Probability of the interval.
        """
        tail = (1.0 - mass) / 2
        return Interval(*self.quantiles([tail, 1.0 - tail]))

    @checked
    def covered(self, targets: Tensor, mass: Probability = 0.9) -> Tensor:
        """Returns True for each target in the central :meth:`interval` of this predictive mass.

        Args:
            targets: Targets ``[B, D]``.
            mass: Probability of the interval.
        """
        # a target is in the 90 % interval if and only if its cdf is in [0.05, 0.95]
        return (self.cdf(targets) - 0.5).abs() <= mass / 2

    # -------------------- integrals

    def _grid(self, count: int) -> Tensor:
        """Returns sorted points ``[B, D, count]`` that are dense where the densities of the samples have their mass."""
        number = self._part_quantiles(0.0).shape[0]
        # normal quantiles; the mass beyond the outermost is 6e-7
        levels = torch.linspace(-5.0, 5.0, max(9, -(-count // number))).tolist()
        points = torch.cat([self._part_quantiles(z) for z in levels]).movedim(0, -1).sort(-1).values
        last = (~points.isnan()).sum(-1, keepdim=True) - 1  # NaN, for missing samples, is sorted to the end
        fractions = torch.linspace(0.0, 1.0, count, device=points.device, dtype=torch.float64)
        return points.gather(-1, (last * fractions).round().long())

    def _fine_grid(self) -> Tensor:
        """Returns sorted points ``[B, D, 509]``, four for each interval between points of the grid."""
        edges = self._grid(128)
        steps = torch.linspace(0.0, 1.0, 5, device=edges.device, dtype=edges.dtype)[:-1]
        points = (edges[..., :-1, None] + edges.diff(dim=-1).unsqueeze(-1) * steps).flatten(-2)
        return torch.cat([points, edges[..., -1:]], -1)

    @torch.no_grad()
    def _by_chunks(self, function: Callable[..., Tensor], points: int, *values: Tensor) -> Tensor:
        """Applies a function of a predictive and values ``[B, ...]`` to a few inputs at a time, and joins results ``[B, ...]``."""
        work = max(1, self._tensors[0][:, :1].numel() * points * self._values_per_point)
        rows = max(1, 2**22 // work)
        chunks = [slice(start, start + rows) for start in range(0, max(1, len(self)), rows)]
        return torch.cat([function(self[chunk], *(value[chunk] for value in values)) for chunk in chunks])

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        r"""Returns the continuous ranked probability score (CRPS) :math:`\int (F(x) - 1[y \le x])^2 dx` of each target, in its unit.

        Lower is better. The integral is computed by Gauss-Legendre quadrature on 64 intervals between quantiles of the samples.

        Args:
            targets: Targets ``[B, D]``.
        """
        return self._to_target_shape(self._by_chunks(_crps, 256, self._check_targets(targets)))

    @checked
    def hdr(self, mass: Probability = 0.9) -> Interval:
        """Returns the highest density region of this predictive mass, the smallest set with it, as a union of R intervals.

        Ends are found on a grid of about 500 points by linear interpolation of the density. Each target has its own region.

        Args:
            mass: Probability of the region.

        Returns:
            Ends ``[R, B, D]`` in ascending order. They are NaN if the region of an input has fewer than R intervals.

        >>> from flowbnn.predictive import GaussianPredictive
        >>> prediction = GaussianPredictive(torch.tensor([[[-3.0]], [[3.0]]]), 0.25)  # two peaks
        >>> prediction.hdr(0.9).low.flatten()
        tensor([-3.8..., 2.1...])
        """
        ends = self._by_chunks(lambda chunk: _region(chunk, mass), 512)
        low, high = ends.unbind(-1)
        count = max(1, int((~low.isnan()).sum(-1).max())) if len(self) else 1
        return Interval(*(self._to_target_shape(end[..., :count].movedim(-1, 0)) for end in (low, high)))

    # -------------------- decisions and metrics

    def decide(self, abstain_above: float | Tensor, by: str = "std") -> Decision:
        """Returns the mean ``[B, D]``, with NaN for values whose uncertainty is above a threshold, and a mask of these.

        Args:
            abstain_above: Uncertainty above which the predictive abstains.
            by: Name of the :meth:`uncertainty`. ``"std"`` is in the unit of the targets. ``"epistemic"``, ``"aleatoric"`` and
                ``"variance"`` are in the squared unit.

        >>> from flowbnn.predictive import GaussianPredictive
        >>> prediction = GaussianPredictive(torch.tensor([[[1.0], [0.0]], [[1.0], [4.0]]]), 0.01)
        >>> prediction.decide(abstain_above=1.0)
        Decision(values=tensor([[1.],
                [nan]]), abstained=tensor([[False],
                [ True]]))
        """
        return Decision.make(self.mean, self._exceeds(abstain_above, by))

    @checked
    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Returns root mean squared error, NLL, CRPS, and the coverage of the 90 % :meth:`interval`.

        Args:
            targets: Targets ``[B, D]``.
        """
        targets = self._check_targets(targets)
        return {
            "rmse": root_mean_squared_error(self._mean(self.samples), targets),
            "nll": mean_as_float(self.nll(targets)),
            "crps": mean_as_float(self.crps(targets)),
            "coverage_90": mean_as_float(self.covered(targets)),
        }

    plot_intervals, plot_pit, plot_coverage = plots.plot_intervals, plots.plot_pit, plots.plot_coverage

    @checked
    def rescale(self, factor: Positive | Tensor) -> Self:
        """Returns the predictive stretched about its mean, whose standard deviation is ``factor`` times as large.

        Args:
            factor: Positive number, or a tensor of one number.
        """
        center = self.mean.reshape(self.samples.shape[1:])
        return self._copy(*self._rescaled(center, factor))

    def with_fallback(self, novel: Tensor, fallback: Tensor) -> Self:
        """Returns the predictive with a fixed Gaussian for some inputs.

        With several samples, half of the variance of the Gaussian is the disagreement of their means.

        Args:
            novel: Booleans ``[B]``, True for inputs to replace.
            fallback: Mean and variance of the Gaussian of each target, ``[2, D]``.
        """
        mean, variance = (value.to(self.samples).expand(self.samples.shape) for value in fallback)
        counts = self.sample_counts.to(mean.dtype)
        levels = (torch.arange(self.num_samples, device=mean.device).unsqueeze(1) + 0.5) / counts
        spread = torch.special.ndtri(levels.clamp(max=1.0 - 1e-6))
        size = self._mean(spread.square()).sqrt()
        spread = torch.where(size > 0, spread / size.clamp_min(1e-6), 0.0).unsqueeze(-1)
        share = torch.where(size > 0, 0.5, 0.0).unsqueeze(-1)  # of the variance, between samples
        tensors = self._gaussian_tensors(mean + (share * variance).sqrt() * spread, (1.0 - share) * variance)
        novel = novel.to(mean.device)
        return self._copy(
            *(
                torch.where(novel.view(-1, *(1,) * (old.ndim - 2)), new, old)
                for new, old in zip(tensors, self._tensors, strict=True)
            )
        )

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
        return f"{type(self).__name__}(samples={samples}, inputs={inputs}, outputs={outputs}{text})"


def gauss_legendre(count: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Returns nodes and weights of the Gauss-Legendre rule on [0, 1], in the dtype and on the device of a tensor."""
    nodes, weights = (torch.from_numpy(values).to(like) for values in np.polynomial.legendre.leggauss(count))
    return 0.5 * (nodes + 1.0), 0.5 * weights


def _crps(predictive: ContinuousPredictive, targets: Tensor) -> Tensor:
    """Returns the CRPS of targets ``[B, D]``."""
    edges = torch.cat([predictive._grid(64), targets.unsqueeze(-1)], -1).sort(-1).values
    nodes, weights = gauss_legendre(4, edges)
    widths = edges.diff(dim=-1).unsqueeze(-1)
    points = (edges[..., :-1, None] + widths * nodes).flatten(-2)
    distance = predictive._mean(predictive._cdfs(points)) - (points >= targets.unsqueeze(-1)).to(points)
    return (distance.square() * (widths * weights).flatten(-2)).sum(-1)


def _region(predictive: ContinuousPredictive, mass: float) -> Tensor:
    """Returns the ends of the intervals of a highest density region, ``[B, D, 256, 2]``, NaN where there are fewer intervals."""
    points = predictive._fine_grid()
    density = predictive._mean(predictive._log_densities(points).exp())
    masses = predictive._mean(predictive._cdfs(points)).diff(dim=-1)
    low, high = torch.zeros_like(density[..., :1]), density.amax(-1, keepdim=True)
    for _ in range(40):
        threshold = 0.5 * (low + high)
        enough = (masses * _share_above(density, threshold)).sum(-1, keepdim=True) >= mass
        low, high = torch.where(enough, threshold, low), torch.where(enough, high, threshold)
    return _crossings(points, density, low)


def _share_above(density: Tensor, threshold: Tensor) -> Tensor:
    """Returns the share of the mass of each cell in which the linearly interpolated density is at least a threshold."""
    left, right = density[..., :-1], density[..., 1:]
    top, bottom = torch.maximum(left, right), torch.minimum(left, right)
    inside = ((top - threshold) / (top - bottom)).clamp(0.0, 1.0)  # share of the width
    share = inside * (top + threshold) / (top + bottom)
    share = torch.where(bottom >= threshold, 1.0, share)
    return torch.where(top < threshold, 0.0, share)


def _crossings(points: Tensor, density: Tensor, threshold: Tensor) -> Tensor:
    """Returns the ends of the intervals in which a density is above a threshold, ``[..., R, 2]``."""
    above = density >= threshold
    position = (threshold - density[..., :-1]) / (density[..., 1:] - density[..., :-1])
    between = points[..., :-1] + position.nan_to_num(0.0).clamp(0.0, 1.0) * points.diff(dim=-1)
    starts = torch.cat([above[..., :1], above[..., 1:] & ~above[..., :-1]], -1)
    stops = torch.cat([above[..., :-1] & ~above[..., 1:], above[..., -1:]], -1)
    lows = torch.cat([points[..., :1], between], -1).masked_fill(~starts, math.inf)
    highs = torch.cat([between, points[..., -1:]], -1).masked_fill(~stops, math.inf)
    ends = torch.stack([lows.sort(-1).values, highs.sort(-1).values], -1)
    return ends.masked_fill(ends.isinf(), math.nan)[..., : points.shape[-1] // 2, :]
