r"""Stochastic gradient Langevin dynamics (Welling and Teh 2011): training with added noise, so that it samples the posterior.

With RMSprop's preconditioner (Li et al. 2016, https://arxiv.org/abs/1512.07666) and a cyclical step size (Zhang et al. 2020,
https://arxiv.org/abs/1902.03932), whose cycles find several modes.

The cycles differ from theirs in two ways, because a descent without noise ends in the mode and steps that go to zero stay there: noise
is always on, and the step size of the part that gives snapshots is constant. And the preconditioner is held where snapshots are
taken: it is then no function of the weights, and the term :math:`\Gamma = \nabla \cdot G` that the paper neglects is zero.

What is left out still makes it an approximation. There is no accept step, so the variance is too large by about
:math:`\epsilon G h / 2` of itself for a curvature :math:`h` of the loss per example; the gradient noise of minibatches adds a share of
:math:`\epsilon G N v / 2 B` for a variance :math:`v` of the examples' gradients in batches of :math:`B`. Both vanish with the step
size ``lr``.
"""

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import (
    Forward,
    LossAndLogs,
    negative_log_likelihood,
    prepare,
    total_steps,
    train_posterior,
)
from flowbnn.methods.layer_modes import normalizers, statistics, trained_parameters, without_dropout
from flowbnn.options import Bounds, Count, Ge, NonNegative, Positive, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.weights import NOISE, MemberPosterior, state_of
from flowbnn.regression import MAX_RATIO, fit_noise_scale
from flowbnn.training import Clock, History, is_main_process

SHORTEST = 100  # steps of which a preconditioner knows at least


@register_method
@options(kw_only=True, repr=False)
class SGLD(Method):
    r"""Stochastic gradient Langevin dynamics.

    The network's own dropout is off: it is the network as it predicts that is sampled. The noise of a Gaussian likelihood, where it is
    learned, is sampled with the weights: its logarithm has a normal prior of standard deviation 1 around the value that the run
    begins with, the size of the residuals there, and each snapshot has a level of its own (``posterior.log_noise``). Steps that are
    large for the data shake the weights, and inflate the levels: where predictions come out more than 1.5 times as wide as their
    residuals on the training data, all levels get the factor that gives these data the largest predictive likelihood. Snapshots of
    networks with BatchNorm get the statistics of a pass of their own over the data: running ones lag behind weights that are shaken.
    A checkpoint holds the snapshots taken so far.

    Args:
        samples: networks kept, spread over the sampling parts of the cycles.
        cycles: of the step size, each from ``lr`` down by a cosine until ``exploration`` ends; 1 is one decay, 0 a constant step size.
        exploration: the share of each cycle, its largest steps, that goes without snapshots, to find a mode; of the whole run with
            ``cycles=0``.
        preconditioned: scale steps by the root mean square of the gradient, as RMSprop does; it is learned before snapshots are taken.
        damping: what is added to the gradient size.
        temperature: 1 is the posterior; below 1 a colder, narrower one.
        lr: step size of a loss per example, as an ordinary learning rate.
        prior_scale: standard deviation of the prior on every weight.
        epochs: of the whole run, at least 1. The network starts as it is.

    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)] * 10
    >>> posterior = fb.SGLD(epochs=4, samples=6, cycles=2).fit(nn.Linear(2, 3), loader, seed=0, progress=False)
    >>> posterior
    SGLDPosterior(6 networks of Linear, Categorical())
    """

    epochs: Count = 20
    lr: Positive = 1e-2
    optimizer: None = None  # it is an optimizer itself, with a schedule of its own
    schedule: None = None
    samples: Count = 20
    cycles: Annotated[int, Ge(0)] = 4
    exploration: Annotated[float, Bounds(ge=0, lt=1)] = 0.5
    preconditioned: bool = True
    damping: Positive = 1e-3
    temperature: NonNegative = 1.0

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Iterable[Any], **given: Any) -> "SGLDPosterior":
        """As :meth:`Method.fit`; what is validated at each epoch is the present network."""
        model, run = self.setup(network, loader, given, "sampling by SGLD")
        total, number = total_steps(loader, self.epochs, "SGLD"), run.num_examples(loader)
        plan = self.plan(total)
        if run.early_stop is not None or len(plan.kept) < self.samples:
            reason = (
                f"{self.samples} snapshots do not fit into the {total} steps of this run, of which only a share samples; ask for more "
                "epochs, fewer samples, or fewer cycles"
            )
            if run.early_stop is not None:
                reason = "SGLD goes through its whole schedule; leave early_stop out"
            raise FlowBNNError(reason, argument="early_stop" if run.early_stop else "samples")
        likelihood, _, _ = prepare(model, loader, run.likelihood, run.seed)
        decay = 1.0 / (self.prior_scale**2 * number)
        groups: list[dict[str, Any]] = [
            {"params": list(trained_parameters(model).values()), "weight_decay": decay}
        ]
        if learned := [p for p in likelihood.parameters() if p.requires_grad]:
            groups.append({"params": learned, "noise": learns_noise(likelihood)})
        engine = Langevin(groups, self.lr, number, 0.0, self.preconditioned, self.damping)
        engine.temperature = self.temperature
        level = likelihood.log_scale if learns_noise(likelihood) else None
        snapshots = Snapshots(model, level, sorted(plan.kept))

        def loss(forward: Forward, batch: Any, clock: Clock) -> LossAndLogs:
            snapshots.look(clock.step)
            engine.adapts = not plan.samples_at(clock.step)
            found, logs = negative_log_likelihood(likelihood, forward, batch, clock)
            return found + snapshots.energy() / number, logs

        def schedule(optimizer: torch.optim.Optimizer, total: int) -> LambdaLR:
            return LambdaLR(optimizer, plan.rate)

        point = PointPosterior(model, likelihood)
        with without_dropout(model):
            history = train_posterior(point, loss, engine, loader, run, schedule, extra_state=snapshots)
        snapshots.look(total)
        self._warn_of_divergence(history, sum(p.numel() for p in trained_parameters(model).values()) / number)
        members = snapshots.stacked()
        posterior = SGLDPosterior(model, likelihood, members, history, members.pop(NOISE, None))
        posterior.schedule = {name: getattr(self, name) for name in ("cycles", "temperature", "lr")}
        posterior.schedule["steps"] = snapshots.steps
        if normalizers(model):
            of_each = statistics(posterior.member, self.samples, loader, run.seed or 0, run.progress)
            posterior.members |= of_each
        fit_noise_scale(posterior, loader, run.seed, MAX_RATIO)
        return posterior

    def _warn_of_divergence(self, history: History, weights: float) -> None:
        """The posterior lies about half a nat for each weight below its mode: a walk that ends far below its start has lost it."""
        told = history["log_likelihood"]
        if told and told[0] - told[-1] > 2.0 * weights + 0.1 and is_main_process():
            warn(
                f"SGLD has left the data: the log-likelihood is {told[-1]:.3g} per example in the last epoch and was {told[0]:.3g} in "
                f"the first; take a smaller step size (lr={self.lr / 10:.1g})",
                kind="diverged",
                first=told[0],
                last=told[-1],
            )

    def plan(self, total: int) -> "Plan":
        """The schedule of a run of so many steps; it keeps fewer than ``samples`` where the run is too short for them."""
        return Plan(total, self.cycles, self.exploration, self.samples)


class Langevin(torch.optim.Optimizer):
    r"""Stochastic gradient Langevin dynamics, with RMSprop's preconditioner where it is asked for.

    .. math::
        w \leftarrow w - \epsilon\, G \circ (\nabla L + \lambda w) + \sqrt{2 \epsilon\, T\, G / N}\; \xi, \qquad
        G = \frac{1}{\delta + \sqrt{v}}, \quad v \leftarrow v + \frac{3}{n + 3} (\nabla L^2 - v)

    for a loss :math:`L` per example, :math:`\lambda = 1 / \sigma^2 N` and standard normal :math:`\xi`, from torch's generator. The mean
    :math:`v` over about the last third of :math:`n` steps changes only while ``adapts`` is true, and in the first hundred steps.

    Args:
        params: parameters, or groups of them; a group with ``noise=False`` only descends.
        lr: :math:`\epsilon`.
        num_data: :math:`N`.
        weight_decay: :math:`\lambda`, the prior.
        preconditioned: False takes :math:`G = 1`.
        damping: :math:`\delta`, at least :math:`\epsilon \lambda`, so that the prior's pull alone never overshoots.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int,
        weight_decay: float = 0.0,
        preconditioned: bool = True,
        damping: float = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "noise": True}
        super().__init__(params, defaults)
        self.num_data, self.preconditioned, self.temperature = num_data, preconditioned, 1.0
        self.damping, self.adapts = damping, True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, decay = float(group["lr"]), float(group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                metric = self.metric(parameter, max(self.damping, rate * decay))
                drift = parameter.grad.add(parameter, alpha=decay)
                parameter.add_(drift if metric is None else drift * metric, alpha=-rate)
                heat = 2.0 * rate * self.temperature / self.num_data
                if group["noise"] and heat > 0:
                    shake = torch.randn_like(parameter)
                    parameter.add_(shake if metric is None else shake * metric.sqrt(), alpha=math.sqrt(heat))

    def metric(self, parameter: Tensor, damping: float) -> Tensor | None:
        """The preconditioner, brought up to date."""
        if not self.preconditioned:
            return None
        state = self.state[parameter]
        if not state:
            state["step"], state["square"] = 0, torch.zeros_like(parameter)
        if self.adapts or state["step"] < SHORTEST:
            share = 3.0 / (state["step"] + 3.0)
            state["square"].mul_(1.0 - share).addcmul_(parameter.grad, parameter.grad, value=share)
            state["step"] += 1
        return 1.0 / (damping + state["square"].sqrt())


class Plan:
    r"""When to explore, when to sample and when to keep a snapshot.

    With cycles, the step size of step :math:`t` is :math:`\frac{\epsilon}{2} (\cos(\pi r) + 1)`, :math:`r` being the share of its
    cycle that is done (Zhang et al. 2020), until the part that gives snapshots, which keeps the last one. Without, it is constant.

    >>> plan = Plan(total=20, cycles=2, exploration=0.5, samples=4)
    >>> [round(plan.rate(t), 2) for t in range(0, 20, 5)], [plan.samples_at(t) for t in (0, 4, 5, 9)], sorted(plan.kept)
    ([1.0, 0.5, 1.0, 0.5], [False, False, True, True], [8, 10, 18, 20])
    """

    def __init__(self, total: int, cycles: int, exploration: float, samples: int) -> None:
        self.cycles = cycles
        parts = max(1, cycles)
        self.bounds = [round(index * total / parts) for index in range(parts + 1)]
        self.first = [
            low + math.ceil(exploration * (high - low))
            for low, high in zip(self.bounds, self.bounds[1:], strict=False)
        ]
        self.kept: set[int] = set()
        for index, (first, high) in enumerate(zip(self.first, self.bounds[1:], strict=True)):
            share = (index + 1) * samples // parts - index * samples // parts
            self.kept |= {
                high - (share - 1 - k) * (high - first) // share for k in range(share) if high > first
            }

    def cycle(self, step: int) -> int:
        return next((index for index, high in enumerate(self.bounds[1:]) if step < high), len(self.first) - 1)

    def rate(self, step: int) -> float:
        """What the step size is multiplied by at this step."""
        if not self.cycles:
            return 1.0
        index = self.cycle(step)
        low, high = self.bounds[index], self.bounds[index + 1]
        share = (min(step, self.first[index]) - low) / max(1, high - low)
        return 0.5 * (math.cos(math.pi * min(1.0, share)) + 1.0)

    def samples_at(self, step: int) -> bool:
        """Whether snapshots are taken in this part of the run."""
        return step >= self.first[self.cycle(step)]


class Snapshots(nn.Module):
    """Networks kept on the way, each as a step finds it before it changes anything; buffers, so that a checkpoint has them.

    Args:
        model: the network that is sampled.
        level: the logarithm of the noise that is sampled with it, if any; the center of its prior is the value it has now.
        steps: when to keep a network.
    """

    def __init__(self, model: nn.Module, level: Tensor | None, steps: list[int]) -> None:
        super().__init__()
        self.steps, self.sampled = steps, (model, level)  # in a tuple they are no parts of this module
        self.names = list(self.present())
        for number, value in enumerate(self.present().values()):
            self.register_buffer(str(number), value.new_zeros(len(steps), *value.shape))
        self.register_buffer("center", torch.zeros(()) if level is None else level.detach().clone())

    def present(self) -> dict[str, Tensor]:
        """A copy of everything that is sampled, and of the network's buffers."""
        model, level = self.sampled
        return state_of(model) if level is None else {**state_of(model), NOISE: level.detach().clone()}

    def energy(self) -> Tensor | float:
        """Minus the log-density of the noise's logarithm, up to a constant."""
        level = self.sampled[1]
        return 0.0 if level is None else 0.5 * (level - self.get_buffer("center")).square().sum()

    def look(self, step: int) -> None:
        """Keep the network if it is time."""
        if step in self.steps:
            for number, value in enumerate(self.present().values()):
                self.get_buffer(str(number))[self.steps.index(step)] = value

    def stacked(self) -> dict[str, Tensor]:
        """All of them, ``{name: [M, ...]}``."""
        return {name: self.get_buffer(str(number)) for number, name in enumerate(self.names)}


class SGLDPosterior(MemberPosterior):
    """Snapshots of a run of stochastic gradient Langevin dynamics, with the buffers (BatchNorm's statistics) of each.

    ``schedule`` has plain values: cycles, temperature, step size, and the steps at which snapshots were taken.
    """

    kind: ClassVar[str] = "sgld"
    schedule: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        return self.schedule

    @classmethod
    def restored(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        made = super().restored(point, state, settings)
        made.schedule = settings
        return made
