r"""Variational inference of any density that is known up to a constant.

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

from flowbnn.batches import device_of
from flowbnn.distributions.draws import reparameterized_sample
from flowbnn.errors import FlowBNNError, describe_value, pluralize
from flowbnn.flows import FlowModel
from flowbnn.metrics.pareto import log_mean
from flowbnn.options import Count, Positive, Seed, UnitInterval, accepts_options_of, checked, options
from flowbnn.training import Clock, History, TrainingOptions, train
from flowbnn.training.randomness import sampling_context
from flowbnn.transforms.base import check_distribution_module, warn_slow_sampling


@dataclass(frozen=True)
class TargetFit:
    r"""A flow :math:`q` that stands for a density :math:`p(x) = \tilde p(x) / Z` of which :math:`\log \tilde p` is known.

    Args:
        flow: the fitted module; ``flow()`` is the distribution.
        log_density: :math:`\log \tilde p`.
        history: the record of its training, ``elbo`` in it.
    """

    flow: nn.Module
    log_density: Callable[[Tensor], Tensor]
    history: History

    def __repr__(self) -> str:
        return f"TargetFit({type(self.flow).__name__}, {pluralize(self.history.epochs, 'epoch')})"

    @checked
    def evidence(self, samples: Count = 10_000, seed: Seed = 0) -> dict[str, float]:
        r"""The ELBO :math:`E_q[\log \tilde p - \log q] \le \log Z`, :math:`\log Z` by importance sampling, and how far to trust it.

        ``k_hat`` is the shape of the weights' tail: below 0.7 ``log_evidence`` and the flow are usable, above not
        (:func:`flowbnn.metrics.pareto.log_mean`).
        """
        with sampling_context(device_of(self.flow), seed):
            x, log_prob = _draw(self.flow(), samples)
        log_weights = (self.log_density(x).double() - log_prob.double()).cpu()
        found = log_mean(log_weights)
        return {
            "elbo": float(log_weights.mean()),
            "elbo_error": float(log_weights.std()) / math.sqrt(samples),
            "log_evidence": found.value,
            "k_hat": found.k,
        }


@options(kw_only=True, of="fit_target")
class TargetOptions(TrainingOptions):
    """What :func:`fit_target` takes besides the flow and the target: the options of the training run, and these.

    Args:
        epochs: of 100 steps each.
        samples: fresh draws in each step.
        lr: the rate of Adam, which falls to zero along a cosine.
        warmup: share of the run over which the target's weight grows from 0.01 to 1, so that no mode is lost early
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
def fit_target(flow: nn.Module, log_density: Callable[[Tensor], Tensor], **given: Any) -> TargetFit:
    r"""Variational inference of any density: a copy of a flow is fitted by :math:`\max_q E_q[\log \tilde p(x) - \log q(x)]`.

    Args:
        flow: a module that, called, gives a distribution which samples with gradients, such as ``fb.flows.IAF(2)``.
        log_density: the logarithm of the target, up to a constant, for points whose numbers are on the last axis. It is finite where
            the flow draws: for a target of positive numbers end the flow with ``Exp``, for one of the unit interval with ``Sigmoid``.
        given: as in :class:`TargetOptions`: ``epochs``, ``samples``, ``lr``, ``seed``, ``checkpoint``, ``resume`` and the rest.
    """
    run = TargetOptions(**given)
    check_distribution_module(flow)
    flow = deepcopy(flow)
    if isinstance(flow, FlowModel):
        warn_slow_sampling(flow.transform, type(flow).__name__)
    steps = [torch.zeros(run.samples, 1)] * 100
    engine = torch.optim.Adam(flow.parameters(), lr=run.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(engine, len(steps) * run.epochs)
    objective = _Reverse(flow, log_density, run.samples, run.warmup)
    history = train(objective, engine, steps, run, schedule=schedule, name_prefix="flow")
    return TargetFit(flow.eval(), log_density, history)


class _Reverse(nn.Module):
    def __init__(
        self, flow: nn.Module, log_density: Callable[[Tensor], Tensor], samples: int, warmup: float
    ) -> None:
        super().__init__()
        self.flow, self.log_density, self.samples, self.warmup = flow, log_density, samples, warmup

    def forward(self, batch: Any, clock: Clock) -> tuple[Tensor, dict[str, Tensor]]:
        made = self.flow()
        if getattr(getattr(made, "transform", None), "discrete", False):
            text = "the flow's draws are integers, which carry no gradient to fit it by; take a flow of real numbers"
            raise FlowBNNError(text, argument="flow")
        x, log_prob = _draw(made, self.samples)
        log_density = self.log_density(x)
        if not isinstance(log_density, Tensor) or log_density.shape != log_prob.shape:
            found = (
                tuple(log_density.shape) if isinstance(log_density, Tensor) else describe_value(log_density)
            )
            raise FlowBNNError(
                f"log_density must give a tensor with one number for each point, {tuple(log_prob.shape)} here, not {found}",
                kind="shape",
                argument="log_density",
            )
        if not x.requires_grad:
            text = "the flow's draws carry no gradient to fit it by; take one whose rsample passes gradients"
            raise FlowBNNError(text, argument="flow")
        if not log_density.requires_grad:
            text = "log_density gives no gradient in the points: compute it by torch alone, without detach, no_grad or NumPy"
            raise FlowBNNError(text, argument="log_density")
        done = float(clock.progress) / self.warmup if self.warmup else 1.0
        weight = min(1.0, 0.01 + 0.99 * done)
        elbo = (log_density - log_prob).mean()
        logs = {"log_density": log_density.detach().mean(), "elbo": elbo.detach()}
        return (log_prob - weight * log_density).mean(), logs


def _draw(distribution: Any, samples: int) -> tuple[Tensor, Tensor]:
    """Draws with gradients and their log-density, in one pass where the distribution has it."""
    both = getattr(distribution, "rsample_and_log_prob", None)
    if both is not None:
        return both((samples,))
    x = reparameterized_sample(distribution, (samples,))
    return x, distribution.log_prob(x)
