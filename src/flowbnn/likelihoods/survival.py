r"""Observation model of survival times that may be censored: accelerated failure time models.

.. math:: \log T = \mu(x) + \sigma(x) W, \qquad
          \log p(t, \delta) = \delta \log f(t) + (1 - \delta) \log P(T > t)

The event indicator :math:`\delta` is 1 if the event happened at :math:`t`, and 0 if it had not happened until :math:`t`.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.errors import check_shape
from flowbnn.likelihoods.base import stack_outputs, with_columns
from flowbnn.likelihoods.regression import RealLikelihood
from flowbnn.options import Positive, checked
from flowbnn.predictive.survival import (
    EULER_GAMMA,
    LogNormalPredictive,
    SurvivalPredictive,
    WeibullPredictive,
    check_survival,
)


class Survival(RealLikelihood):
    r"""Likelihood of right-censored times: log-normal or Weibull accelerated failure time (Kalbfleisch and Prentice 2002).

    The outputs of the network are :math:`\mu` and :math:`\log \sigma`. Targets are ``[B, 2]``: times, and event indicators 0 or 1.

    Args:
        distribution: Distribution of the times. ``"lognormal"`` has a normal :math:`W`, ``"weibull"`` a Gumbel variable of minima.
        scale: Scale :math:`\sigma` of log-times. With ``"predicted"`` it is the second output of the network. A number is a known
            scale. A Weibull distribution with a scale of 1 is exponential.

    >>> likelihood = Survival("weibull")
    >>> targets = torch.tensor([[2.0, 1.0], [2.0, 0.0]])  # an event at 2, and a time censored at 2
    >>> likelihood.log_prob(torch.zeros(2, 2), targets)  # exponential: the density and the survival function are exp(-2)
    tensor([-2., -2.])
    """

    shape = ()

    @checked
    def __init__(
        self,
        distribution: Literal["lognormal", "weibull"] = "lognormal",
        scale: Literal["predicted"] | Positive = "predicted",
    ) -> None:
        super().__init__()
        self.distribution, self.scale = distribution, scale

    def extra_repr(self) -> str:
        return f"{self.distribution!r}, scale={self.scale!r}"

    @property
    def predictive_cls(self) -> type[SurvivalPredictive]:
        """Class of the predictive distribution."""
        return LogNormalPredictive if self.distribution == "lognormal" else WeibullPredictive

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the network."""
        return 2 if self.scale == "predicted" else 1

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Does nothing, because a predicted time is one number."""

    def parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns locations and scales of log-times, ``[..., 1]``, for outputs ``[..., num_outputs]``."""
        outputs = outputs.double()
        if self.scale != "predicted":
            return outputs, torch.full_like(outputs, float(self.scale))
        loc, log_scale = outputs.chunk(2, -1)
        # float64 represents the moments of times with a scale of exp(4) at most
        return loc, log_scale.clamp(-10.0, 4.0).exp()

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-density of observed times, and the log-probability of survival of censored ones, ``[B]``.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
            targets: Times and event indicators, ``[B, 2]``.
        """
        loc, scale = (values.squeeze(-1) for values in self.parameters_of(with_columns(outputs, 2)))
        times, events = targets.double().unbind(-1)
        kind, log_times = self.predictive_cls, times.log()
        z = (log_times - loc) / scale
        density = kind.standard_log_density(z) - scale.log() - log_times
        result = torch.where(events == 1, density, kind.standard_log_survival(z))
        return result.to(torch.promote_types(outputs.dtype, torch.float32))

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean of the log-times, ``[B, 1]``."""
        loc, scale = self.parameters_of(with_columns(outputs, 2))
        return loc - EULER_GAMMA * scale if self.distribution == "weibull" else loc

    def link(self, targets: Tensor) -> Tensor:
        """Returns the logarithm of the times, ``[B, 1]``, censored or not."""
        return targets.double().reshape(len(targets), -1)[:, :1].clamp_min(1e-300).log()

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of the outputs. The second output may be the logarithm of the scale."""
        if self.scale != "predicted":
            return loc, scale
        return torch.cat([loc, scale.log()]), torch.cat([scale, torch.ones_like(scale)])

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns times and event indicators in double precision."""
        return targets.double()

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> SurvivalPredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, num_outputs]``."""
        outputs = with_columns(outputs, 3)
        check_shape("outputs", outputs, ("samples", "batch", self.num_outputs), owner=repr(self))
        return self.predictive_cls(*self.parameters_of(outputs), sample_counts, self.shape)

    def information(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Returns the Gauss-Newton matrix :math:`h''(z) \nabla z \nabla z^T` of the outputs, ``[B, C, C]``.

        The loss of an example is :math:`h(z)` of the standardized log-time :math:`z`, plus a linear function of the outputs. It is
        convex in :math:`z`, so that the matrix is positive semidefinite for observed and for censored times.
        """
        loc, scale = self.parameters_of(with_columns(outputs, 2))
        times, events = targets.double().unsqueeze(-1).unbind(1)
        kind, z = self.predictive_cls, (times.log() - loc) / scale
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            loss = -torch.where(
                events == 1, kind.standard_log_density(leaf), kind.standard_log_survival(leaf)
            ).sum()
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            (curvature,) = torch.autograd.grad(slope.sum(), leaf)
        columns = [-1.0 / scale] if self.scale != "predicted" else [-1.0 / scale, -z]
        gradient = torch.cat(columns, -1)
        weight = curvature.detach().clamp_min(0.0).unsqueeze(-1)
        return (weight * gradient.unsqueeze(-1) * gradient.unsqueeze(-2)).to(outputs.dtype)

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the mean location. A predicted scale gets the variance of log-times of the mixture."""
        stacked = stack_outputs(outputs)
        if self.scale != "predicted":
            return stacked.mean(0)
        loc, scale = self.parameters_of(stacked)
        unit = math.pi / math.sqrt(6.0) if self.distribution == "weibull" else 1.0  # standard deviation of W
        shift = EULER_GAMMA if self.distribution == "weibull" else 0.0
        means = loc - shift * scale
        variance = scale.square().mean(0) + means.var(0, correction=0) / unit**2
        result = torch.cat([means.mean(0) + shift * variance.sqrt(), 0.5 * variance.log()], -1)
        return result.to(stacked.dtype)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if targets are no times with event indicators, or if the number of outputs is wrong.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
            targets: Times and event indicators, ``[B, 2]``.
        """
        columns = with_columns(outputs, 2)
        check_shape("outputs", columns, ("batch", self.num_outputs), kind="outputs", owner=repr(self))
        hint = "use torch.stack([times, events], 1)"
        check_shape("targets", targets, (len(outputs), 2), hint, "targets", "Survival")
        check_survival(targets)

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        settings = {"distribution": self.distribution, "scale": self.scale}
        return {**super().to_dict(), **settings}
