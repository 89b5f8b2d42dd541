"""Predictive distribution of counts."""

import math
from collections.abc import Sequence
from functools import cached_property
from typing import NoReturn

import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape, requirement_error
from flowbnn.options import Probability, checked
from flowbnn.predictive.base import check_finite_samples, check_samples
from flowbnn.predictive.continuous import ContinuousPredictive, Interval, gauss_legendre


class CountPredictive(ContinuousPredictive):
    r"""Predictive distribution of counts, the mixture of S negative binomial or Poisson distributions.

    A sample has the mean :math:`\mu_s` and the variance :math:`\mu_s + \alpha_s \mu_s^2`. It is a Poisson distribution if the
    dispersion :math:`\alpha_s` is zero. Quantiles are the smallest counts that reach a level, so intervals have at least their mass.

    Args:
        log_mean: Logarithms of the means :math:`\mu_s`, ``[S, B, D]``.
        log_dispersion: Logarithms of the dispersions :math:`\alpha_s`, ``[S, B, D]``. The default is minus infinity, for Poisson.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.
        shape: Shape of a target, ``()`` for a number.

    >>> prediction = CountPredictive(torch.tensor([[[1.0]], [[3.0]]]).log())  # 2 samples, 1 input, 1 target
    >>> prediction
    CountPredictive(samples=2, inputs=1, outputs=1; variance 3 = aleatoric 2 + epistemic 1)
    >>> prediction.interval(0.9)
    Interval(low=tensor([[0.]], dtype=torch.float64), high=tensor([[5.]], dtype=torch.float64))
    """

    can_rescale = False  # a stretched count is not a count

    @checked
    def __init__(
        self,
        log_mean: Tensor,
        log_dispersion: Tensor | None = None,
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = shape
        log_mean, self._sample_counts = check_samples(log_mean, "log_mean", sample_counts)
        log_mean = log_mean.double()  # probabilities of counts of a million need it
        if log_dispersion is None:
            log_dispersion = torch.full_like(log_mean, -math.inf)
        check_shape("log_dispersion", log_dispersion, log_mean.shape)
        self._tensors = log_mean, log_dispersion.double()
        means, dispersions = (self._fill_missing(tensor, 0.0) for tensor in self._tensors)
        check_finite_samples(~(torch.isfinite(means) & (dispersions < math.inf)))
        self._tensors = tuple(self._fill_missing(tensor, math.nan) for tensor in self._tensors)

    @property
    def log_mean(self) -> Tensor:
        """Logarithm of the mean of each sample, ``[S, B, D]``."""
        return self._tensors[0]

    @property
    def log_dispersion(self) -> Tensor:
        """Logarithm of the dispersion of each sample, ``[S, B, D]``, minus infinity for Poisson."""
        return self._tensors[1]

    @cached_property
    def samples(self) -> Tensor:
        """Mean of each sample, ``[S, B, D]``."""
        return self.log_mean.exp()

    @property
    def sample_variances(self) -> Tensor:
        """Variance of each sample, ``[S, B, D]``."""
        return self.samples + (2.0 * self.log_mean + self.log_dispersion).exp()

    def _log_densities(self, values: Tensor) -> Tensor:
        return count_log_prob(self.log_mean.unsqueeze(-1), self.log_dispersion.unsqueeze(-1), values)

    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        return self._interpolated_cdfs(values.floor(), upper)

    def _interpolated_cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        """Returns distribution functions at values that need not be integers, between which they are smooth."""
        mean, log_dispersion = self.samples.unsqueeze(-1), self.log_dispersion.unsqueeze(-1)
        counts = values.double().clamp_min(0.0) + 1.0
        gamma = torch.special.gammainc if upper else torch.special.gammaincc
        result = gamma(counts, mean)
        overdispersed = log_dispersion > -math.inf
        if bool(overdispersed.any()):
            beta = _negative_binomial_cdf(mean, log_dispersion, counts, upper)
            result = torch.where(overdispersed, beta, result)
        outside = torch.where(result.isnan(), math.nan, 1.0 if upper else 0.0)
        return torch.where(values >= 0, result, outside)

    def _part_quantiles(self, z: float) -> Tensor:
        """Returns approximate quantiles of the samples, by Wilson and Hilferty 1931 for a gamma variable of equal moments."""
        shape = self.samples.square() / self.sample_variances
        root = 1.0 - 1.0 / (9.0 * shape) + z / (3.0 * shape.sqrt())
        return (self.samples * root.clamp_min(0.0) ** 3).round()

    @torch.no_grad()
    def _quantile(self, level: float) -> Tensor:
        """Returns the smallest count whose cumulative probability is at least a level, ``[B, D]``, by bisection."""
        upper = level > 0.5  # the smaller tail is the more precise one

        def reaches(values: Tensor) -> Tensor:
            mass = self._mean(self._cdfs(values.unsqueeze(-1), upper)).squeeze(-1)
            return mass <= 1.0 - level if upper else mass >= level

        z = float(torch.special.ndtri(torch.tensor(level, dtype=torch.float64)))
        high = self._part_quantiles(z).nan_to_num(0.0).amax(0) + 1.0
        while not bool((reached := reaches(high)).all()):
            high = torch.where(reached, high, 2.0 * high)
        low = torch.full_like(high, -1.0)
        for _ in range(100):
            middle = ((low + high) / 2.0).floor()
            if not bool(((middle > low) & (middle < high)).any()):
                break
            reached = reaches(middle)
            low, high = torch.where(reached, low, middle), torch.where(reached, middle, high)
        return high

    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        log_mean, log_dispersion = tensors
        mean = log_mean.exp()
        concentration = (-log_dispersion).exp()
        poisson = concentration.isinf()
        gamma = torch._standard_gamma(torch.where(poisson, 1.0, concentration), generator=generator)
        rate = torch.where(poisson, mean, mean * gamma / concentration)
        return torch.poisson(rate, generator=generator)

    def _rescaled(self, center: Tensor, factor: float | Tensor) -> NoReturn:
        hint = "use fb.calibrate"
        raise requirement_error("a temperature", "real values", "counts", hint, argument="likelihood")

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        return mean + 0.5 * variance, variance.expm1().clamp_min(1e-12).log()

    def _check_targets(self, targets: Tensor) -> Tensor:
        targets = super()._check_targets(targets.double())
        check_counts(targets)
        return targets

    @checked
    def cdf(self, values: Tensor) -> Tensor:
        r"""Returns the predictive distribution function :math:`\frac1S \sum_s P_s(Y \le y)`, ``[B, D]``.

        Args:
            values: Values :math:`y` in the shape of the targets.
        """
        points = super()._check_targets(values.double()).unsqueeze(-1)
        return self._to_target_shape(self._mean(self._cdfs(points)).squeeze(-1))

    @checked
    def covered(self, targets: Tensor, mass: Probability = 0.9) -> Tensor:
        """Returns True for each target in the central :meth:`interval` of this predictive mass.

        Args:
            targets: Targets ``[B, D]``.
            mass: Probability of the interval.
        """
        tail, targets = (1.0 - mass) / 2, self._check_targets(targets)
        at_least = self._mean(self._cdfs(targets.unsqueeze(-1))).squeeze(-1) >= tail
        at_most = self._mean(self._cdfs(targets.unsqueeze(-1) - 1.0)).squeeze(-1) < 1.0 - tail
        return self._to_target_shape(at_least & at_most)

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        r"""Returns the ranked probability score :math:`\sum_{k \ge 0} (F(k) - 1[y \le k])^2` of each target.

        Lower is better. The sum over many counts is computed by Gauss-Legendre quadrature between quantiles of the samples.

        Args:
            targets: Targets ``[B, D]``.
        """
        return self._to_target_shape(self._by_chunks(_ranked_score, 128, self._check_targets(targets)))

    def hdr(self, mass: Probability = 0.9) -> Interval:
        """Raises FlowBNNError, because highest density regions are for densities. Use :meth:`interval`."""
        raise requirement_error("hdr", "a density", "counts", "use interval")


def count_log_prob(log_mean: Tensor, log_dispersion: Tensor, counts: Tensor) -> Tensor:
    r"""Returns log-probabilities of counts under negative binomial or Poisson distributions, in float64.

    .. math:: \log p(y) = \log \frac{\Gamma(y + r)}{\Gamma(r)\, y!} + r \log \frac{r}{r + \mu} + y \log \frac{\mu}{r + \mu},
              \qquad r = 1 / \alpha

    Args:
        log_mean: Logarithms of the means :math:`\mu`.
        log_dispersion: Logarithms of the dispersions :math:`\alpha`, minus infinity for Poisson.
        counts: Counts :math:`y`.

    >>> zero = torch.zeros(1)
    >>> count_log_prob(zero, zero - math.inf, zero + 1)  # -1
    tensor([-1.], dtype=torch.float64)
    """
    log_mean, log_dispersion, counts = log_mean.double(), log_dispersion.double(), counts.double()
    poisson = counts * log_mean - log_mean.exp() - torch.lgamma(counts + 1.0)
    is_poisson = log_dispersion == -math.inf
    log_r = -torch.where(is_poisson, 0.0, log_dispersion)
    r, gap = log_r.exp(), log_mean - log_r
    constant = torch.lgamma(counts + r) - torch.lgamma(r) - torch.lgamma(counts + 1.0)
    odds = -r * torch.nn.functional.softplus(gap) - counts * torch.nn.functional.softplus(-gap)
    return torch.where(is_poisson, poisson, constant + odds)


def check_counts(targets: Tensor) -> None:
    """Raises FlowBNNError if targets are negative or have fractions."""
    valid = (targets >= 0) & (targets == targets.round())
    check_entries("targets", targets, valid, "counts", "use likelihood='gaussian'", kind="targets")


def _negative_binomial_cdf(mean: Tensor, log_dispersion: Tensor, counts: Tensor, upper: bool) -> Tensor:
    """Returns the distribution function at ``counts - 1`` by the incomplete beta function, which torch does not have."""
    from scipy.special import betainc  # here, because importing scipy adds a warning filter

    r = (-log_dispersion).exp()
    share = torch.sigmoid(mean.log() + log_dispersion)  # mean / (mean + r)
    first, second, point = (counts, r, share) if upper else (r, counts, 1.0 - share)
    arrays = torch.broadcast_tensors(first, second, point)
    result = betainc(*(array.detach().cpu().numpy() for array in arrays))
    return torch.as_tensor(result, dtype=mean.dtype, device=mean.device)


def _ranked_score(predictive: CountPredictive, targets: Tensor) -> Tensor:
    """Returns the ranked probability score of targets ``[B, D]``."""
    grid, zeros = predictive._grid(60), torch.zeros_like(targets).unsqueeze(-1)
    top = grid[..., -1:]
    tail = [top + 2.0, top + 4.0, 1.5 * top + 6.0]  # the last approximate quantile may be too low
    edges = (
        torch.cat([zeros, grid, *(edge.floor() for edge in tail), targets.unsqueeze(-1)], -1).sort(-1).values
    )
    starts, widths = edges[..., :-1, None], edges.diff(dim=-1).unsqueeze(-1)
    nodes, weights = gauss_legendre(2, edges)
    # cells of one or two counts are summed, wider ones integrated with each count as the middle of a unit interval
    few = widths <= 2.0
    steps = torch.arange(2, device=edges.device, dtype=edges.dtype)
    points = torch.where(few, starts + steps, starts - 0.5 + widths * nodes).flatten(-2)
    weights = torch.where(few, (steps < widths).to(edges), widths * weights).flatten(-2)
    reached = (points >= targets.unsqueeze(-1) - 0.25).to(points)
    distance = predictive._mean(predictive._interpolated_cdfs(points)) - reached
    return (distance.square() * weights).sum(-1)
