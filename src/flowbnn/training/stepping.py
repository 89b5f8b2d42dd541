"""One optimizer step, with the questions that are asked before the weights may change."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError
from flowbnn.training.checkpoint import Position, Trained
from flowbnn.training.engine import Engine, move_batch, unwrap
from flowbnn.training.guard import (
    LossGate,
    batch_size,
    check_finite_batch,
    explain_nonfinite_loss,
    first_nonfinite_tensor,
)
from flowbnn.training.options import Clock, TrainingOptions
from flowbnn.training.randomness import Randomness

__all__ = ["Step", "Stepper"]

Step = Callable[[nn.Module, Any, Clock], tuple[Tensor, Mapping[str, Tensor | float]]]


class Stepper:
    """Takes steps: batch to the device, loss, gradient, update, each checked for numbers that are none."""

    def __init__(
        self,
        step: Step,
        model: nn.Module,
        optimizer: Optimizer,
        trained: Trained,
        engine: Engine,
        options: TrainingOptions,
        randomness: Randomness,
    ) -> None:
        self.step, self.model, self.optimizer, self.trained = step, model, optimizer, trained
        self.engine, self.options, self.randomness = engine, options, randomness
        self.gate = LossGate(engine.device)
        self.updating = False

    def take(self, batch: Any, position: Position, steps_per_epoch: int | None) -> None:
        """One step from ``position``, which is advanced."""
        on_cpu = self.engine.device.type == "cpu"
        if on_cpu:
            check_finite_batch(batch, position.epoch, position.batches)
        batch = move_batch(batch, self.engine.device)
        clock = Clock(position.epoch, position.step, steps_per_epoch, self.options.epochs)
        before = self.randomness.torch_state()
        self.optimizer.zero_grad()
        loss, logs = _checked(self.step(self.model, batch, clock))
        if not self.gate.ask(loss):
            self.blame_loss(batch, clock, position, logs, before)
        self.engine.backward(loss)
        if not self.gate.hear():
            self.blame_loss(batch, clock, position, logs, before)
        # an accelerator would have to finish its work first: there, the next loss tells of a bad gradient
        norm = self.check_gradient(position) if on_cpu and not self.engine.scales_loss else None
        self.updating = True
        if self.options.clip_gradient is not None:
            self.engine.clip(self.model, self.optimizer, self.options.clip_gradient, norm)
        self.optimizer.step()
        if self.trained.schedule is not None and self.options.schedule_every == "step":
            self.trained.schedule.step()
        position.step += 1
        position.batches += 1
        position.averages.add({"loss": loss, **logs}, batch_size(batch))
        self.updating = False

    def check_gradient(self, position: Position) -> Tensor:
        """The gradient's norm; refuses a gradient that is not finite, naming its parameter."""
        norm = self.engine.gradient_norm(self.trained.parameters)
        if not math.isfinite(norm.item()):
            pairs = zip(self.trained.names, self.trained.parameters, strict=True)
            name = first_nonfinite_tensor((name, p.grad) for name, p in pairs if p.grad is not None)
            if name is not None:
                raise FlowBNNError(
                    f"the gradient of {name!r} is not finite {position.words} although the loss is; "
                    f"lower the learning rate or bound what that layer computes{position.last_good}"
                )
        return norm

    def blame_loss(
        self, batch: Any, clock: Clock, position: Position, logs: Mapping[str, Any], before: dict[str, Any]
    ) -> None:
        """Say where a loss that is not finite came from, by running the batch again with the same draws."""
        check_finite_batch(batch, position.epoch, position.batches)

        def again() -> None:
            self.randomness.restore(before)
            with torch.enable_grad():
                self.step(self.model, batch, clock)

        cause = explain_nonfinite_loss(unwrap(self.model), again, logs)
        raise FlowBNNError(f"the loss is not finite {position.words}: {cause}{position.last_good}")


def _checked(result: Any) -> tuple[Tensor, Mapping[str, Tensor | float]]:
    try:
        loss, logs = result
    except (TypeError, ValueError):
        raise FlowBNNError("the step must return two things: the loss and a dictionary of logs") from None
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise FlowBNNError("the step must return a loss that is a tensor of one number")
    if not loss.requires_grad:
        raise FlowBNNError("the loss depends on no trainable parameter; is the whole model frozen?")
    if not isinstance(logs, Mapping):
        raise FlowBNNError(f"the step's logs must be a dictionary of numbers, got a {type(logs).__name__}")
    for name, value in logs.items():
        if isinstance(value, Tensor) and value.numel() != 1:
            raise FlowBNNError(f"the step logs {name!r} with {value.numel()} values; log one number")
    return loss, logs
