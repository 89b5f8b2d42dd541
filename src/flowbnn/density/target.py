r"""Variational inference of densities that are known up to a constant.

>>> import torch, flowbnn as fb
>>> fitted = fb.fit_target(fb.flows.Planar(2), lambda x: -0.5 * x.square().sum(-1), epochs=1, progress=False)
>>> fitted.flow().rsample((3,)).shape, sorted(fitted.evidence(100))
(torch.Size([3, 2]), ['elbo', 'elbo_error', 'k_hat', 'log_evidence'])
"""

import math
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn import plots
from flowbnn.batches import device_of
from flowbnn.distributions.draws import reparameterized_sample
from flowbnn.errors import FlowBNNError, check_shape, pluralize
from flowbnn.flows import FlowModel
from flowbnn.metrics.pareto import log_mean
from flowbnn.options import Count, Positive, Seed, UnitInterval, accepts_options_of, checked, options
from flowbnn.training import Clock, History, TrainingOptions, train
from flowbnn.training.randomness import sampling_context
from flowbnn.transforms.base import check_distribution_module, warn_slow_sampling


@dataclass(frozen=True)
class TargetFit:
    r"""Flow :math:`q` that approximates a density :math:`p(x) = \tilde p(x) / Z` with known :math:`\log \tilde p`.

    Args:
        flow: Fitted module. ``flow()`` returns the distribution :math:`q`.
        log_density: Unnormalized log-density :math:`\log \tilde p`.
        history: History of the training, with ``elbo``.
    """

    flow: nn.Module
    log_density: Callable[[Tensor], Tensor]
    history: History

    def __repr__(self) -> str:
        elbo = self.history.last.get("elbo")
        quality = "" if elbo is None else f", ELBO {elbo:.4g} nats"
        return f"TargetFit({type(self.flow).__name__}, {pluralize(self.history.epochs, 'epoch')}{quality})"

    plot, plot_history = plots.plot_density, plots.plot_history

    @checked
    def evidence(self, samples: Count = 10_000, seed: Seed = 0) -> dict[str, float]:
        r"""Estimates the normalizing constant :math:`\log Z` and the reliability of the estimate.

        Args:
            samples: Number of draws from the flow.
            seed: Seed of the draws.

        Returns:
            ``elbo``, the lower bound :math:`E_q[\log \tilde p - \log q] \le \log Z`, with its standard error ``elbo_error``.
            ``log_evidence``, an estimate of :math:`\log Z` by importance sampling. ``k_hat``, the tail shape of the importance weights:
            above 0.7 neither ``log_evidence`` nor the flow is reliable (:func:`flowbnn.metrics.pareto.log_mean`).
        """
        with sampling_context(device_of(self.flow), seed):
            x, log_prob = _sample_with_log_prob(self.flow(), samples)
        log_weights = (self.log_density(x).double() - log_prob.double()).cpu()
        estimate = log_mean(log_weights)
        return {
            "elbo": float(log_weights.mean()),
            "elbo_error": float(log_weights.std()) / math.sqrt(samples),
            "log_evidence": estimate.value,
            "k_hat": estimate.k,
        }


@options(kw_only=True, owner="fit_target")
class TargetOptions(TrainingOptions):
    """Options of :func:`fit_target`: those of :class:`~flowbnn.training.TrainingOptions`, and these.

    Args:
        epochs: Number of epochs, 100 steps each.
        samples: Number of fresh draws in each step.
        lr: Learning rate of Adam. It decays to zero along a cosine.
        warmup: Share of the training over which the weight of the target grows from 0.01 to 1, so that no mode is lost early
            (Rezende and Mohamed 2015, section 6.1).
    """

    epochs: Count = 20
    samples: Count = 256
    lr: Positive = 5e-3
    warmup: UnitInterval = 0.3
    clip_gradient: Positive | None = 10.0
    description: str = "fitting the target"


@checked
@accepts_options_of(TargetOptions)
def fit_target(flow: nn.Module, log_density: Callable[[Tensor], Tensor], **kwargs: Any) -> TargetFit:
    r"""Fits a copy of a flow to a density known up to a constant, :math:`\max_q E_q[\log \tilde p(x) - \log q(x)]`.

    Args:
        flow: Module that returns a distribution with reparameterized samples when it is called, such as ``fb.flows.IAF(2)``.
        log_density: Unnormalized log-density of points ``[..., dim]``. It must be finite on the support of the flow: end the flow with
            ``Exp`` for a target of positive numbers, with ``Sigmoid`` for one on the unit interval.
        kwargs: Options of :class:`TargetOptions`, such as ``epochs``, ``samples``, ``lr``, ``seed``, ``checkpoint`` and ``resume``.

    Returns:
        The fitted flow, with its estimate of the normalizing constant.
    """
    options = TargetOptions(**kwargs)
    check_distribution_module(flow)
    flow = deepcopy(flow)
    if isinstance(flow, FlowModel):
        warn_slow_sampling(flow.transform, type(flow).__name__)
    steps = [torch.zeros(options.samples, 1)] * 100
    optimizer = torch.optim.Adam(flow.parameters(), lr=options.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, len(steps) * options.epochs)
    objective = _ReverseKL(flow, log_density, options.samples, options.warmup)
    history = train(objective, optimizer, steps, options, schedule=schedule, name_prefix="flow")
    return TargetFit(flow.eval(), log_density, history)


class _ReverseKL(nn.Module):
    r"""Training loss :math:`E_q[\log q(x) - w \log \tilde p(x)]`, with a weight :math:`w` that grows during the warm-up."""

    def __init__(
        self, flow: nn.Module, log_density: Callable[[Tensor], Tensor], samples: int, warmup: float
    ) -> None:
        super().__init__()
        self.flow, self.log_density, self.samples, self.warmup = flow, log_density, samples, warmup

    def forward(self, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the loss of fresh draws and the values to log. The batch is ignored."""
        distribution = self.flow()
        if getattr(getattr(distribution, "transform", None), "discrete", False):
            raise _gradient_error()
        x, log_prob = _sample_with_log_prob(distribution, self.samples)
        log_density = self.log_density(x)
        _check_log_density(log_density, x, log_prob)
        fraction = float(clock.progress) / self.warmup if self.warmup else 1.0
        weight = min(1.0, 0.01 + 0.99 * fraction)
        elbo = (log_density - log_prob).mean()
        logs = {"log_density": log_density.detach().mean(), "elbo": elbo.detach()}
        return (log_prob - weight * log_density).mean(), logs


def _gradient_error() -> FlowBNNError:
    """Returns the error for a flow whose draws carry no gradient."""
    text = "the draws of the flow carry no gradient; use a flow of real numbers with rsample"
    return FlowBNNError(text, kind="gradient", argument="flow")


def _check_log_density(log_density: Any, x: Tensor, log_prob: Tensor) -> None:
    """Raises FlowBNNError if log-densities have another shape than the points or carry no gradient."""
    if not x.requires_grad:
        raise _gradient_error()
    check_shape("log_density", log_density, log_prob.shape, hint="return one number for each point")
    if not getattr(log_density, "requires_grad", False):
        text = "log_density has no gradient; compute it with torch, without detach, no_grad or NumPy"
        raise FlowBNNError(text, kind="gradient", argument="log_density")


def _sample_with_log_prob(distribution: Any, samples: int) -> tuple[Tensor, Tensor]:
    """Returns reparameterized draws and their log-densities, from one pass if the distribution supports it."""
    method = getattr(distribution, "rsample_and_log_prob", None)
    if method is not None:
        return method((samples,))
    x = reparameterized_sample(distribution, (samples,))
    return x, distribution.log_prob(x)
