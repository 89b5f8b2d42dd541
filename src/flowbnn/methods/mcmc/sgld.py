r"""Stochastic gradient Langevin dynamics (Welling and Teh 2011): SGD with added noise, which samples the posterior.

It uses the preconditioner of RMSprop (Li et al. 2016, https://arxiv.org/abs/1512.07666) and a cyclical step size (Zhang et al. 2020,
https://arxiv.org/abs/1902.03932), whose cycles find several modes.

The cycles differ from Zhang et al. in two ways. Noise is always on, because descent without noise ends at the mode. The step size is
constant while snapshots are taken, because vanishing steps would stay at the mode. The preconditioner is constant in this phase, too.
It therefore does not depend on the weights, and the term :math:`\Gamma = \nabla \cdot G`, which Li et al. neglect, is zero.

The method remains an approximation. Without an accept step, the variance is too large by a factor of about
:math:`1 + \epsilon G h / 2` for a curvature :math:`h` of the loss per example. The gradient noise of minibatches of size :math:`B` adds
:math:`\epsilon G N v / 2 B` for a variance :math:`v` of the gradients of examples. Both errors vanish with the step size ``lr``.
"""

import math
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Self

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import Likelihood, learns_noise
from flowbnn.methods.base import FitOptions, Method, register_method
from flowbnn.methods.fitting import (
    LossAndLogs,
    NetworkFunction,
    Objective,
    make_training_run,
    negative_log_likelihood,
    total_steps,
)
from flowbnn.methods.network_layers import (
    batch_norm_layers,
    batch_norm_statistics,
    disable_dropout,
    trainable_parameters,
)
from flowbnn.methods.preparation import prepare
from flowbnn.options import Bounds, Count, Ge, NonNegative, Positive, SampleCount, accepts_options_of, options
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import NOISE_KEY, MemberPosterior, PointPosterior, state_of
from flowbnn.regression import MAX_RATIO, fit_noise_scale
from flowbnn.training import Clock, History, is_main_process


@register_method
@options(kw_only=True, repr=False)
class SGLD(Method):
    r"""Stochastic gradient Langevin dynamics.

    Dropout layers of the network are disabled, because the network in evaluation mode is sampled. A checkpoint holds the snapshots
    taken so far. For networks with BatchNorm, each snapshot gets running statistics from one pass over the data.

    The learned noise of a Gaussian likelihood is sampled with the weights. Its logarithm has a normal prior of standard deviation 1
    around its initial value, the size of the residuals. Each snapshot has its own noise (``posterior.log_noise``). Large steps
    inflate the noise. If the predictive standard deviation exceeds 1.5 times that of the training residuals, the noise is rescaled to
    maximize the predictive likelihood.

    Args:
        samples: Number of snapshots, spread over the sampling phases of the cycles.
        cycles: Number of cycles of the step size. In each cycle it decays from ``lr`` along a cosine until ``exploration`` ends. 0
            gives a constant step size.
        exploration: Fraction of each cycle without snapshots, at its start, where steps are largest. With ``cycles=0``, fraction of the
            run.
        preconditioned: If True, steps are scaled by the root mean square of the gradient, as RMSprop does.
        damping: Constant added to the root mean square of the gradient.
        temperature: Temperature of the posterior; 1 for the exact posterior, below 1 for a narrower one.
        lr: Step size for the loss per example, as an ordinary learning rate.
        prior_scale: Standard deviation of the prior of every weight.
        epochs: Number of epochs, at least 1. The run starts from the network as it is.

    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)] * 10
    >>> posterior = fb.SGLD(epochs=4, samples=6, cycles=2).fit(nn.Linear(2, 3), loader, seed=0, progress=False)
    >>> posterior
    SGLDPosterior(6 networks of Linear, Categorical())
    """

    epochs: Count = 20
    lr: Positive = 1e-2
    optimizer: None = None  # SGLD has its own optimizer and schedule
    schedule: None = None
    samples: SampleCount = 20
    cycles: Annotated[int, Ge(0)] = 4
    exploration: Annotated[float, Bounds(ge=0, lt=1)] = 0.5
    preconditioned: bool = True
    damping: Positive = 1e-3
    temperature: NonNegative = 1.0

    @accepts_options_of(FitOptions)
    def fit(self, network: nn.Module, loader: Any, **kwargs: Any) -> "SGLDPosterior":
        """Samples the posterior; see :meth:`Method.fit`. Validation evaluates the current network."""
        model, loader, options = self.setup(network, loader, kwargs, "sampling with SGLD")
        if options.early_stop is not None:
            # the snapshots are spread over a run of known length
            message = f"SGLD needs early_stop=None, got {options.early_stop!r}; decrease epochs instead"
            raise FlowBNNError(message, argument="early_stop")
        steps, num_data = total_steps(loader, self.epochs, "SGLD"), options.num_examples(loader)
        step_schedule = self.step_schedule(steps)
        if len(step_schedule.snapshot_steps) < self.samples:
            text = f"SGLD cannot take {self.samples} snapshots in {steps} steps; increase epochs, or decrease samples or cycles"
            raise FlowBNNError(text, argument="samples")
        likelihood = prepare(model, loader, options).likelihood
        optimizer = self._optimizer(model, likelihood, num_data)
        log_noise = likelihood.log_scale if learns_noise(likelihood) else None
        snapshots = Snapshots(model, log_noise, sorted(step_schedule.snapshot_steps))

        def loss(forward: NetworkFunction, batch: Any, clock: Clock) -> LossAndLogs:
            snapshots.record(clock.step)
            optimizer.adapting = not step_schedule.is_sampling(clock.step)
            data_loss, logs = negative_log_likelihood(likelihood, forward, batch, clock)
            return data_loss + snapshots.noise_energy() / num_data, logs

        def schedule(optimizer: torch.optim.Optimizer, _: int) -> LambdaLR:
            return LambdaLR(optimizer, step_schedule.factor)

        point = PointPosterior(model, likelihood)
        with disable_dropout(model):
            objective = Objective(model, likelihood, loss, extra_state=snapshots)
            history = make_training_run(point, objective, optimizer, loader, options, schedule).train()
        if history.stopped_early:  # by a callback
            message = f"SGLD was stopped after {history.epochs} of {self.epochs} epochs, which leaves snapshots out; decrease epochs"
            raise FlowBNNError(message, kind="stopped", argument="callbacks")
        snapshots.record(steps)
        num_weights = sum(parameter.numel() for parameter in trainable_parameters(model).values())
        self._warn_if_diverged(history, num_weights / num_data)
        members = snapshots.stack()
        posterior = SGLDPosterior(model, likelihood, members, history, members.pop(NOISE_KEY, None))
        posterior.schedule = {name: getattr(self, name) for name in ("cycles", "temperature", "lr")}
        posterior.schedule["steps"] = snapshots.steps
        if batch_norm_layers(model):
            posterior.members |= batch_norm_statistics(
                posterior.member, self.samples, loader, options.seed or 0, options.progress
            )
        fit_noise_scale(posterior, loader, options.seed, MAX_RATIO)
        return posterior

    def _optimizer(self, model: nn.Module, likelihood: Likelihood, num_data: int) -> "Langevin":
        weights = list(trainable_parameters(model).values())
        groups: list[dict[str, Any]] = [
            {"params": weights, "weight_decay": 1.0 / (self.prior_scale**2 * num_data)}
        ]
        if parameters := [p for p in likelihood.parameters() if p.requires_grad]:
            groups.append({"params": parameters, "noise": learns_noise(likelihood)})
        optimizer = Langevin(groups, self.lr, num_data, 0.0, self.preconditioned, self.damping)
        optimizer.temperature = self.temperature
        return optimizer

    def _warn_if_diverged(self, history: History, weights_per_example: float) -> None:
        """Warns if the log-likelihood fell by far more than half a nat per weight, the expected distance from the mode."""
        values = history["log_likelihood"]
        if values and values[0] - values[-1] > 2.0 * weights_per_example + 0.1 and is_main_process():
            text = f"SGLD diverged: the log-likelihood fell from {values[0]:.3g} to {values[-1]:.3g}; set lr={self.lr / 10:.1g}"
            warn(text, kind="diverged", first=values[0], last=values[-1])

    def step_schedule(self, total: int) -> "StepSchedule":
        """Returns the schedule of a run of ``total`` steps. A short run has fewer than ``samples`` snapshots."""
        return StepSchedule(total, self.cycles, self.exploration, self.samples)


class Langevin(torch.optim.Optimizer):
    r"""Optimizer of stochastic gradient Langevin dynamics, with the preconditioner of RMSprop.

    .. math::
        w \leftarrow w - \epsilon\, G \circ (\nabla L + \lambda w) + \sqrt{2 \epsilon\, T\, G / N}\; \xi, \qquad
        G = \frac{1}{\delta + \sqrt{v}}, \quad v \leftarrow v + \frac{3}{n + 3} (\nabla L^2 - v)

    for a loss :math:`L` per example, :math:`\lambda = 1 / \sigma^2 N` and standard normal :math:`\xi` from torch's generator. The mean
    :math:`v` over about the last third of :math:`n` steps changes only while ``adapting`` is True, and in the first
    ``min_adaptation`` steps.

    Args:
        params: Parameters, or parameter groups. A group with ``noise=False`` is trained by gradient descent without noise.
        lr: Step size :math:`\epsilon`.
        num_data: Number of examples :math:`N`.
        weight_decay: Precision of the prior per example, :math:`\lambda`.
        preconditioned: If False, :math:`G = 1`.
        damping: Damping :math:`\delta`, at least :math:`\epsilon \lambda` so that the prior alone never overshoots.
        min_adaptation: Minimum number of steps from which the preconditioner is estimated.

    >>> weights = nn.Parameter(torch.ones(2))
    >>> optimizer = Langevin([weights], lr=0.1, num_data=100)
    >>> weights.grad = torch.zeros(2)
    >>> optimizer.step()
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int,
        weight_decay: float = 0.0,
        preconditioned: bool = True,
        damping: float = 1e-3,
        min_adaptation: int = 100,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "noise": True}
        super().__init__(params, defaults)
        self.num_data, self.preconditioned, self.temperature = num_data, preconditioned, 1.0
        self.damping, self.min_adaptation, self.adapting = damping, min_adaptation, True

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        """Takes one step."""
        for group in self.param_groups:
            lr, decay = float(group["lr"]), float(group["weight_decay"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                scale = self._preconditioner(parameter, max(self.damping, lr * decay))
                drift = parameter.grad.add(parameter, alpha=decay)
                parameter.add_(drift if scale is None else drift * scale, alpha=-lr)
                variance = 2.0 * lr * self.temperature / self.num_data
                if group["noise"] and variance > 0:
                    noise = torch.randn_like(parameter)
                    parameter.add_(
                        noise if scale is None else noise * scale.sqrt(), alpha=math.sqrt(variance)
                    )

    def _preconditioner(self, parameter: Tensor, damping: float) -> Tensor | None:
        """Updates and returns the preconditioner of a parameter."""
        if not self.preconditioned:
            return None
        state = self.state[parameter]
        if not state:
            state["step"], state["square"] = 0, torch.zeros_like(parameter)
        if self.adapting or state["step"] < self.min_adaptation:
            weight = 3.0 / (state["step"] + 3.0)
            state["square"].mul_(1.0 - weight).addcmul_(parameter.grad, parameter.grad, value=weight)
            state["step"] += 1
        return 1.0 / (damping + state["square"].sqrt())


class StepSchedule:
    r"""Step sizes, sampling phases and snapshots of a run of SGLD.

    With cycles, the step size of step :math:`t` is :math:`\frac{\epsilon}{2} (\cos(\pi r) + 1)` for the completed fraction :math:`r` of
    its cycle (Zhang et al. 2020). It is constant in the sampling phase at the end of the cycle. Without cycles it is always constant.

    Args:
        total: Number of steps.
        cycles: Number of cycles; 0 for a constant step size.
        exploration: Fraction of each cycle before its sampling phase.
        samples: Number of snapshots.

    >>> schedule = StepSchedule(total=20, cycles=2, exploration=0.5, samples=4)
    >>> [round(schedule.factor(t), 2) for t in range(0, 20, 5)], [schedule.is_sampling(t) for t in (0, 4, 5, 9)]
    ([1.0, 0.5, 1.0, 0.5], [False, False, True, True])
    >>> sorted(schedule.snapshot_steps)
    [8, 10, 18, 20]
    """

    def __init__(self, total: int, cycles: int, exploration: float, samples: int) -> None:
        self.cycles = cycles
        num_phases = max(1, cycles)
        self.bounds = [round(index * total / num_phases) for index in range(num_phases + 1)]
        self.sampling_starts = [
            low + math.ceil(exploration * (high - low))
            for low, high in zip(self.bounds, self.bounds[1:], strict=False)
        ]
        self.snapshot_steps: set[int] = set()
        for index, (start, end) in enumerate(zip(self.sampling_starts, self.bounds[1:], strict=True)):
            count = (index + 1) * samples // num_phases - index * samples // num_phases
            self.snapshot_steps |= {
                end - (count - 1 - k) * (end - start) // count for k in range(count) if end > start
            }

    def cycle(self, step: int) -> int:
        """Returns the index of the cycle of a step."""
        last = len(self.sampling_starts) - 1
        return next((index for index, end in enumerate(self.bounds[1:]) if step < end), last)

    def factor(self, step: int) -> float:
        """Returns the factor of the step size at a step."""
        if not self.cycles:
            return 1.0
        index = self.cycle(step)
        low, high = self.bounds[index], self.bounds[index + 1]
        fraction = (min(step, self.sampling_starts[index]) - low) / max(1, high - low)
        return 0.5 * (math.cos(math.pi * min(1.0, fraction)) + 1.0)

    def is_sampling(self, step: int) -> bool:
        """Returns True if the step is in a sampling phase."""
        return step >= self.sampling_starts[self.cycle(step)]


class Snapshots(nn.Module):
    """Snapshots of a network during training, stored as buffers so that checkpoints include them.

    Args:
        model: Network that is sampled.
        log_noise: Logarithm of the noise scale, if it is sampled with the network. Its current value is the center of its prior.
        steps: Steps before which snapshots are taken.
    """

    def __init__(self, model: nn.Module, log_noise: Tensor | None, steps: list[int]) -> None:
        super().__init__()
        self.steps, self.source = steps, (model, log_noise)  # a tuple is not registered as a submodule
        self.names = list(self.current_state())
        for number, value in enumerate(self.current_state().values()):
            self.register_buffer(str(number), value.new_zeros(len(steps), *value.shape))
        center = torch.zeros(()) if log_noise is None else log_noise.detach().clone()
        self.register_buffer("center", center)

    def current_state(self) -> dict[str, Tensor]:
        """Returns a copy of the sampled variables and of the buffers of the network."""
        model, log_noise = self.source
        state = state_of(model)
        return state if log_noise is None else {**state, NOISE_KEY: log_noise.detach().clone()}

    def noise_energy(self) -> Tensor | float:
        """Returns the negative log-density of the prior of the noise, up to a constant."""
        log_noise = self.source[1]
        return 0.0 if log_noise is None else 0.5 * (log_noise - self.get_buffer("center")).square().sum()

    def record(self, step: int) -> None:
        """Takes a snapshot if one is due before this step."""
        if step in self.steps:
            for number, value in enumerate(self.current_state().values()):
                self.get_buffer(str(number))[self.steps.index(step)] = value

    def stack(self) -> dict[str, Tensor]:
        """Returns all snapshots, ``{name: [M, ...]}``."""
        return {name: self.get_buffer(str(number)) for number, name in enumerate(self.names)}


class SGLDPosterior(MemberPosterior):
    """Snapshots of a run of stochastic gradient Langevin dynamics, each with its buffers (BatchNorm statistics).

    Attributes:
        schedule: Cycles, temperature, step size and snapshot steps of the run, as plain values.

    >>> import flowbnn as fb
    >>> loader = [(torch.randn(8, 2), torch.arange(8) % 3)] * 10
    >>> posterior = fb.SGLD(epochs=2, samples=2, cycles=1).fit(nn.Linear(2, 3), loader, seed=0, progress=False)
    >>> posterior.schedule["steps"], len(posterior)
    ([15, 20], 2)
    """

    kind: ClassVar[str] = "sgld"
    schedule: dict[str, Any]

    def settings(self) -> dict[str, Any]:
        return self.schedule

    @classmethod
    def from_state(cls, point: Posterior, state: dict[str, Tensor], settings: dict[str, Any]) -> Self:
        posterior = super().from_state(point, state, settings)
        posterior.schedule = settings
        return posterior
