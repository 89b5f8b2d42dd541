"""Predictive distributions of survival times, which may be censored."""

import math
from abc import abstractmethod
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from functools import cached_property
from typing import Self

import torch
from torch import Tensor

from flowbnn.errors import check_entries, check_shape
from flowbnn.metrics.checks import check_values, mean_as_float
from flowbnn.options import Positive, checked
from flowbnn.predictive.base import check_finite_samples, check_samples
from flowbnn.predictive.continuous import ContinuousPredictive, gauss_legendre

EULER_GAMMA = 0.5772156649015329  # minus the mean of a standard Gumbel variable of minima


class SurvivalPredictive(ContinuousPredictive):
    r"""Base class for mixtures of S accelerated failure time models, :math:`\log T = \mu_s + \sigma_s W`.

    Targets are times ``[B]``, or ``[B, 2]`` with the event indicator in the second column. For an indicator of 0 the event happened
    after the time (right censoring), and the likelihood is the probability of that. A subclass defines the distribution of :math:`W`.

    Args:
        loc: Locations :math:`\mu_s` of log-times, ``[S, B, 1]``.
        scale: Positive scales :math:`\sigma_s` of log-times, ``[S, B, 1]``.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.
        shape: Shape of a time, ``()`` for a number.
    """

    summary_properties = ()  # scores of censored times need the samples

    @checked
    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = (),
    ) -> None:
        self.shape = shape
        loc, self._sample_counts = check_samples(loc, "loc", sample_counts, max_size=1)
        check_shape("scale", scale, loc.shape)
        self._tensors = loc.double(), scale.double()
        locs, scales = (self._fill_missing(tensor, 1.0) for tensor in self._tensors)
        check_finite_samples(~(torch.isfinite(locs) & torch.isfinite(scales)))
        check_entries("scale", scales, scales > 0, "positive", "take exp() of a log-scale")
        self._tensors = tuple(self._fill_missing(tensor, math.nan) for tensor in self._tensors)

    @property
    def loc(self) -> Tensor:
        """Location of the log-time of each sample, ``[S, B, 1]``."""
        return self._tensors[0]

    @property
    def scale(self) -> Tensor:
        """Scale of the log-time of each sample, ``[S, B, 1]``."""
        return self._tensors[1]

    @staticmethod
    @abstractmethod
    def standard_log_density(z: Tensor) -> Tensor:
        """Returns the log-density of :math:`W`."""

    @staticmethod
    @abstractmethod
    def standard_log_survival(z: Tensor) -> Tensor:
        r"""Returns :math:`\log P(W > z)`."""

    @staticmethod
    @abstractmethod
    def standard_quantile(z: float) -> float:
        r"""Returns the quantile of :math:`W` at the level :math:`\Phi(z)`."""

    @staticmethod
    @abstractmethod
    def standard_draws(like: Tensor, generator: torch.Generator) -> Tensor:
        """Returns draws of :math:`W` in the shape of a tensor."""

    def _standardized(self, values: Tensor) -> Tensor:
        """Returns log-times in units of each sample, ``[S, B, 1, G]``."""
        log_times = values.double().clamp_min(1e-300).log()
        return (log_times - self.loc.unsqueeze(-1)) / self.scale.unsqueeze(-1)

    def _log_densities(self, values: Tensor) -> Tensor:
        jacobian = self.scale.log().unsqueeze(-1) + values.double().clamp_min(1e-300).log()
        return torch.where(
            values > 0,
            self.standard_log_density(self._standardized(values)) - jacobian,
            values.new_tensor(-math.inf),
        )

    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        log_survival = self.standard_log_survival(self._standardized(values))
        return log_survival.exp() if upper else -log_survival.expm1()

    def _part_quantiles(self, z: float) -> Tensor:
        return (self.loc + self.scale * self.standard_quantile(z)).exp()

    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        loc, scale = tensors
        return (loc + scale * self.standard_draws(loc, generator)).exp()

    def _rescaled(self, center: Tensor, factor: float | Tensor) -> Sequence[Tensor]:
        return center + factor * (self.loc - center), factor * self.scale

    @checked
    def rescale(self, factor: Positive | Tensor) -> Self:
        """Returns the predictive with log-times stretched about their mean location by a factor.

        Args:
            factor: Positive number, or a tensor of one number.
        """
        return self._copy(*self._rescaled(self._mean(self.loc), factor))

    @property
    def sampling_error(self) -> Tensor:
        """Standard error of the mean location of log-times, in their predictive standard deviations, ``[B]``."""
        variance, counts = self._variance_over_samples(self.loc), self._counts_like(self.loc)
        error = (variance / (counts - 1.0).clamp(min=1.0)).masked_fill(counts == 1.0, math.inf)
        return (error / (variance + self._mean(self.scale.square()))).sqrt().squeeze(-1)

    # -------------------- censored targets

    def _times_and_events(self, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns positive times ``[B, 1]``, and booleans ``[B, 1]``, True for observed events."""
        targets = targets.double()
        if targets.ndim == 2 and targets.shape[1] == 2:
            check_survival(targets)
            return targets[:, :1], targets[:, 1:] == 1
        times = check_values(targets, "targets", self.loc.shape[1:])
        check_entries("targets", times, times > 0, "positive times", kind="targets")
        return times, torch.ones_like(times, dtype=torch.bool)

    def _check_targets(self, targets: Tensor) -> Tensor:
        return self._times_and_events(targets)[0].to(self.loc)

    @checked
    def survival(self, times: Tensor) -> Tensor:
        r"""Returns the predictive survival function :math:`\frac1S \sum_s P_s(T > t)`, ``[B]``.

        Args:
            times: Times ``[B]``.
        """
        points = self._check_targets(times).unsqueeze(-1)
        return self._to_target_shape(self._mean(self._cdfs(points, upper=True)).squeeze(-1))

    @checked
    def nll(self, targets: Tensor) -> Tensor:
        """Returns the negative log-density of observed events, and the negative log-probability of survival of censored times, ``[B]``.

        Args:
            targets: Times ``[B]``, or times and event indicators ``[B, 2]``.
        """
        times, events = (
            values.to(self.loc.device).unsqueeze(-1) for values in self._times_and_events(targets)
        )
        log_survival = self.standard_log_survival(self._standardized(times))
        values = torch.where(events, self._log_densities(times), log_survival)
        return -self._log_mean_exp(values.flatten(2).squeeze(-1))

    @checked
    def crps(self, targets: Tensor) -> Tensor:
        r"""Returns the survival CRPS :math:`\int_0^t F(x)^2 dx + \delta \int_t^\infty (1 - F(x))^2 dx` of each target, ``[B]``.

        Without censoring (:math:`\delta = 1`) it is the CRPS ([Avati et al. 2019](https://arxiv.org/abs/1806.08324)).

        Args:
            targets: Times ``[B]``, or times and event indicators ``[B, 2]``.
        """
        times, events = (values.to(self.loc.device) for values in self._times_and_events(targets))
        return self._to_target_shape(self._by_chunks(_survival_crps, 256, times, events))

    @checked
    def evaluate(self, targets: Tensor) -> dict[str, float]:
        """Returns NLL, survival CRPS and the concordance of the median with the order of the times (Harrell et al. 1982).

        Args:
            targets: Times ``[B]``, or times and event indicators ``[B, 2]``.
        """
        times, events = self._times_and_events(targets)
        median = self._mean(self.loc + self.scale * self.standard_quantile(0.0))
        return {
            "nll": mean_as_float(self.nll(targets)),
            "crps": mean_as_float(self.crps(targets)),
            "concordance": concordance(median.flatten(), times.flatten(), events.flatten()),
        }


class LogNormalPredictive(SurvivalPredictive):
    r"""Predictive distribution of times with normal :math:`W`, a mixture of log-normal distributions.

    >>> prediction = LogNormalPredictive(torch.zeros(2, 3, 1), torch.ones(2, 3, 1))  # 2 samples, 3 inputs
    >>> prediction.quantiles(0.5)
    tensor([[1., 1., 1.]], dtype=torch.float64)
    >>> prediction.nll(torch.tensor([[1.0, 0.0]] * 3))  # three censored times, each survived with probability 1/2
    tensor([0.6931, 0.6931, 0.6931], dtype=torch.float64)
    """

    @staticmethod
    def standard_log_density(z: Tensor) -> Tensor:
        return -0.5 * z.square() - 0.5 * math.log(2.0 * math.pi)

    @staticmethod
    def standard_log_survival(z: Tensor) -> Tensor:
        return torch.special.log_ndtr(-z)

    @staticmethod
    def standard_quantile(z: float) -> float:
        return z

    @staticmethod
    def standard_draws(like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.randn(like.shape, generator=generator, device=like.device, dtype=like.dtype)

    @cached_property
    def samples(self) -> Tensor:
        """Mean time of each sample, ``[S, B, 1]``."""
        return (self.loc + 0.5 * self.scale.square()).exp()

    @property
    def sample_variances(self) -> Tensor:
        """Variance of the time of each sample, ``[S, B, 1]``."""
        return self.scale.square().expm1() * self.samples.square()

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        return mean, variance.sqrt()


class WeibullPredictive(SurvivalPredictive):
    r"""Predictive distribution of times with a Gumbel variable (of minima) :math:`W`, a mixture of Weibull distributions.

    A sample has the survival function :math:`\exp(-(t / e^\mu)^{1 / \sigma})`.

    >>> prediction = WeibullPredictive(torch.zeros(2, 3, 1), torch.ones(2, 3, 1))  # exponential distributions
    >>> prediction.mean, prediction.survival(torch.ones(3))
    (tensor([1., 1., 1.], dtype=torch.float64), tensor([0.3679, 0.3679, 0.3679], dtype=torch.float64))
    """

    @staticmethod
    def standard_log_density(z: Tensor) -> Tensor:
        return z + WeibullPredictive.standard_log_survival(z)

    @staticmethod
    def standard_log_survival(z: Tensor) -> Tensor:
        # beyond it, exp(z) continues along its tangent, so that gradients stay finite
        inner = z.clamp_max(30.0)
        return -inner.exp() * (1.0 + (z - inner))

    @staticmethod
    def standard_quantile(z: float) -> float:
        return math.log(-float(torch.special.log_ndtr(torch.tensor(-z, dtype=torch.float64))))

    @staticmethod
    def standard_draws(like: Tensor, generator: torch.Generator) -> Tensor:
        return torch.empty_like(like).exponential_(generator=generator).log()

    @cached_property
    def samples(self) -> Tensor:
        """Mean time of each sample, ``[S, B, 1]``."""
        return (self.loc + torch.lgamma(1.0 + self.scale)).exp()

    @property
    def sample_variances(self) -> Tensor:
        """Variance of the time of each sample, ``[S, B, 1]``."""
        ratio = torch.lgamma(1.0 + 2.0 * self.scale) - 2.0 * torch.lgamma(1.0 + self.scale)
        return ratio.expm1() * self.samples.square()

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        scale = variance.sqrt() * math.sqrt(6.0) / math.pi
        return mean + EULER_GAMMA * scale, scale


def check_survival(targets: Tensor) -> None:
    """Raises FlowBNNError if targets ``[B, 2]`` are no positive times with event indicators 0 or 1."""
    times, events = targets.unbind(1)
    fields = {"kind": "targets", "argument": "targets"}
    check_entries("times targets[:, 0]", times, times > 0, "positive", **fields)
    valid = (events == 0) | (events == 1)
    check_entries("events targets[:, 1]", events, valid, "1, or 0 if censored", **fields)


def concordance(predicted: Tensor, times: Tensor, events: Tensor) -> float:
    """Returns the share of comparable pairs whose predicted times have the order of their times, NaN without such pairs.

    A pair is comparable if the shorter time is an observed event. Equal predictions count one half.

    Args:
        predicted: Predicted times ``[B]``.
        times: Observed or censored times ``[B]``.
        events: Booleans ``[B]``, True for observed events.

    >>> concordance(torch.tensor([1.0, 3.0, 2.0]), torch.tensor([1.0, 2.0, 3.0]), torch.tensor([True, True, False]))
    0.6666666666666666
    """
    later: list[float] = []  # sorted predictions of all longer times
    pending: list[float] = []  # predictions of the current time
    pairs, agreeing, current = 0, 0.0, math.inf
    order = times.argsort(descending=True)
    columns = (values.cpu()[order.cpu()].tolist() for values in (predicted, times, events))
    for value, time, event in zip(*columns, strict=True):
        if time < current:
            for waiting in pending:
                insort(later, waiting)
            pending, current = [], time
        pending.append(value)
        if event:
            low, high = bisect_left(later, value), bisect_right(later, value)
            pairs += len(later)
            agreeing += len(later) - high + 0.5 * (high - low)
    return agreeing / pairs if pairs else math.nan


def _survival_crps(predictive: SurvivalPredictive, times: Tensor, events: Tensor) -> Tensor:
    """Returns the survival CRPS of times ``[B, 1]``."""
    edges = torch.cat([predictive._grid(64), times.unsqueeze(-1)], -1).sort(-1).values
    nodes, weights = gauss_legendre(4, edges)
    widths = edges.diff(dim=-1).unsqueeze(-1)
    points = (edges[..., :-1, None] + widths * nodes).flatten(-2)
    weights = (widths * weights).flatten(-2)
    after = points >= times.unsqueeze(-1)
    distance = torch.where(
        after,
        predictive._mean(predictive._cdfs(points, upper=True)),
        predictive._mean(predictive._cdfs(points)),
    )
    return (distance.square() * weights * (~after | events.unsqueeze(-1))).sum(-1)
