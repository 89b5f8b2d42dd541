r"""The update of stochastic gradient Langevin dynamics as an optimizer, and its cyclical schedule."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Langevin", "Plan"]


class Langevin(torch.optim.Optimizer):
    r"""Stochastic gradient Langevin dynamics, with RMSprop's preconditioner where it is asked for.

    .. math::
        w \leftarrow w - \epsilon\, G \circ (\nabla L + \lambda w) + \sqrt{2 \epsilon\, T\, G / N}\; \xi, \qquad
        G = \frac{1}{\delta + \sqrt{v}}, \quad v \leftarrow \alpha v + (1 - \alpha) \nabla L^2

    for a loss :math:`L` per example, :math:`\lambda = 1 / \sigma^2 N` and standard normal :math:`\xi`, from torch's generator.

    Args:
        params: parameters, or groups of them; a group with ``noise=False`` only descends.
        lr: :math:`\epsilon`.
        num_data: :math:`N`.
        weight_decay: :math:`\lambda`, the prior.
        preconditioned: False takes :math:`G = 1`.
        alpha, damping: :math:`\alpha` and :math:`\delta`; the damping is at least :math:`\epsilon \lambda`, so that the prior's
            pull alone never overshoots.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float,
        num_data: int,
        weight_decay: float = 0.0,
        preconditioned: bool = True,
        alpha: float = 0.99,
        damping: float = 1e-3,
    ) -> None:
        defaults = {"lr": lr, "weight_decay": weight_decay, "noise": True}
        super().__init__(params, defaults)
        self.num_data, self.preconditioned, self.alpha, self.damping = (
            num_data,
            preconditioned,
            alpha,
            damping,
        )
        self.temperature = 1.0

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
        state["step"] += 1
        state["square"].mul_(self.alpha).addcmul_(parameter.grad, parameter.grad, value=1.0 - self.alpha)
        square = state["square"] / (1.0 - self.alpha ** state["step"])
        return 1.0 / (damping + square.sqrt())


class Plan:
    r"""When to explore, when to sample and when to keep a snapshot.

    With cycles, the step size of step :math:`t` is :math:`\frac{\epsilon}{2} (\cos(\pi r) + 1)`, :math:`r` being the share of its
    cycle that is done (Zhang et al., 1902.03932), and the first part of every cycle has no noise. Without, it is constant.

    >>> plan = Plan(total=20, cycles=2, exploration=0.5, burn_in=0.0, samples=4)
    >>> [round(plan.rate(t), 2) for t in range(0, 20, 5)], [plan.samples_at(t) for t in (0, 4, 5, 9)], sorted(plan.kept)
    ([1.0, 0.5, 1.0, 0.5], [False, False, True, True], [8, 10, 18, 20])
    """

    def __init__(self, total: int, cycles: int, exploration: float, burn_in: float, samples: int) -> None:
        self.total, self.cycles = total, cycles
        parts = max(1, cycles)
        silent = exploration if cycles else burn_in
        self.bounds = [round(index * total / parts) for index in range(parts + 1)]
        self.first = [
            low + math.ceil(silent * (high - low))
            for low, high in zip(self.bounds, self.bounds[1:], strict=False)
        ]
        self.kept: set[int] = set()
        for index, (first, high) in enumerate(zip(self.first, self.bounds[1:], strict=True)):
            share = (index + 1) * samples // parts - index * samples // parts
            self.kept |= {
                high - (share - 1 - k) * (high - first) // share for k in range(share) if high > first
            }

    def cycle(self, step: int) -> int:
        return min(
            next((index for index, high in enumerate(self.bounds[1:]) if step < high), len(self.first) - 1),
            len(self.first) - 1,
        )

    def rate(self, step: int) -> float:
        """What the step size is multiplied by at this step."""
        if not self.cycles:
            return 1.0
        index = self.cycle(step)
        low, high = self.bounds[index], self.bounds[index + 1]
        return 0.5 * (math.cos(math.pi * min(1.0, (step - low) / max(1, high - low))) + 1.0)

    def samples_at(self, step: int) -> bool:
        """Whether noise is added at this step."""
        return not self.cycles or step >= self.first[self.cycle(step)]
