"""One optimizer step, with the questions that are asked before the weights may change."""

import math
import warnings
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training.checkpoint import Position, Trained
from flowbnn.training.cuda_graph import NotRecordable, Recorder
from flowbnn.training.device import Engine, move_batch, unwrap
from flowbnn.training.finite import (
    GradientGate,
    LossGate,
    batch_size,
    check_finite_batch,
    explain_nonfinite_loss,
    first_nonfinite_tensor,
    single_row_told,
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
        self.check_now = engine.device.type == "cpu" and not engine.scales_loss
        together = all(parameter.device == engine.device for parameter in trained.parameters)
        later = engine.device.type == "cuda" and together and not engine.scales_loss
        self.gradient_gate = GradientGate(trained.optimizer, engine.device) if later else None
        self.updating = False
        self.recorder = self._make_recorder()

    def _make_recorder(self) -> Recorder | None:
        wish = self.options.acceleration
        if wish == "off" or (wish == "auto" and self.engine.device.type != "cuda"):
            return None
        optimizer = self.trained.optimizer
        reason = Recorder.serves(self.step, optimizer, self.options, self.engine)
        if reason is None:
            return Recorder(self.step, self.trained.model, optimizer, self.options, self.engine.device)
        if wish != "auto":
            warnings.warn(
                f"acceleration={wish!r} is not possible here ({reason}); steps are taken one by one",
                FlowBNNWarning,
            )
        return None

    def take(self, batch: Any, position: Position, steps_per_epoch: int | None) -> None:
        """One step from ``position``, which is advanced."""
        self.listen(position)
        if self.recorder is not None:
            if self.take_recorded(batch, position, steps_per_epoch):
                return
            self.listen(position, wait=True)  # a step that is taken by itself must not follow a bad one
        if self.engine.device.type == "cpu":
            check_finite_batch(batch, position.epoch, position.batches)
        batch = move_batch(batch, self.engine.device)
        clock = Clock(position.epoch, position.step, steps_per_epoch, self.options.epochs)
        before = self.randomness.torch_state()
        self.optimizer.zero_grad()
        with single_row_told(batch, position.epoch, position.batches):
            loss, logs = _checked(self.step(self.model, batch, clock))
        if not self.gate.ask(loss):
            self.blame_loss(batch, clock, position, logs, before)
        self.engine.backward(loss)
        if not self.gate.hear():
            self.blame_loss(batch, clock, position, logs, before)
        numbers = self.engine.exchange(self.trained.parameters, {"loss": loss, **logs})
        clips = self.options.clip_gradient is not None and self.gradient_gate is not None
        norm = self.engine.gradient_norm(self.trained.parameters) if self.check_now or clips else None
        if self.check_now and norm is not None and not math.isfinite(norm.item()):
            self.blame_gradient(position.words, position, "")
        self.updating = True
        if self.options.clip_gradient is not None:
            self.engine.clip(self.model, self.optimizer, self.options.clip_gradient, norm)
        with self.asking_for_finite_gradients():
            self.optimizer.step()
        if self.trained.schedule is not None and self.options.schedule_every == "step":
            self.step_schedule()
        position.step += 1
        position.batches += 1
        position.averages.add(numbers, self.engine.rows(batch_size(batch)))
        self.updating = False

    def take_recorded(self, batch: Any, position: Position, steps_per_epoch: int | None) -> bool:
        """The same by the recording; False where the batch does not fit it, or nothing can be recorded here."""
        assert self.recorder is not None
        batch = move_batch(batch, self.engine.device)
        clock = Clock(position.epoch, position.step, steps_per_epoch, self.options.epochs)
        try:
            with single_row_told(batch, position.epoch, position.batches):
                taken = self.recorder.take(batch, clock)
        except NotRecordable as error:
            self.settle(position)
            self.recorder = None
            warnings.warn(f"{error}; steps are taken one by one", FlowBNNWarning)
            return False
        if taken:
            self.updating = True
            if self.trained.schedule is not None and self.options.schedule_every == "step":
                self.step_schedule()
            position.step += 1
            position.batches += 1
            self.updating = False
        return taken

    def flush(self, position: Position) -> None:
        """Bring the averages up to date, which a recording keeps on the device."""
        if self.recorder is not None:
            means, weight = self.recorder.means()
            position.averages.add(means, weight)

    def asking_for_finite_gradients(self) -> AbstractContextManager[None]:
        """Around the update on a CUDA device."""
        if self.gradient_gate is None:
            return nullcontext()
        return self.gradient_gate.ask(self.engine.gradients(self.trained.parameters))

    def settle(self, position: Position) -> None:
        """Wait for the device; refuse to go on from a step whose loss or gradient was not finite."""
        self.listen(position, wait=True)
        self.flush(position)

    def listen(self, position: Position, wait: bool = False) -> None:
        """Refuse to go on from a step whose gradient was not finite, where that is known only afterwards."""
        if self.recorder is not None and self.recorder.bad(wait):
            self.blame_recorded(position)
        if self.gradient_gate is not None and not self.gradient_gate.hear():
            spoilt = "" if self.gradient_gate.skips else "; the weights have been updated with it"
            self.blame_gradient(f"in epoch {position.epoch + 1}, step {position.step}", position, spoilt)

    def blame_gradient(self, when: str, position: Position, spoilt: str) -> None:
        """Name the parameter whose gradient is not finite; a norm that only overflowed is no fault."""
        pairs = zip(self.trained.told_names, self.trained.parameters, strict=True)
        name = first_nonfinite_tensor((name, p.grad) for name, p in pairs if p.grad is not None)
        if name is not None:
            raise FlowBNNError(
                f"the gradient of {name!r} is not finite {when} although the loss is; lower the learning rate or "
                f"bound what that layer computes{self.advice}{spoilt}{position.last_good}"
            )

    def blame_recorded(self, position: Position) -> None:
        """Take the recorder's last batches again, one by one and with the same draws, until one goes wrong."""
        assert self.recorder is not None
        words = (
            f"between steps {max(1, position.step - len(self.recorder.witnesses) + 1)} and {position.step}"
        )
        for batch, clock, random in self.recorder.witnesses:
            torch.cuda.set_rng_state(random, self.engine.device)
            before = self.randomness.torch_state()
            self.optimizer.zero_grad()
            loss, logs = _checked(self.step(self.model, batch, clock))
            if not math.isfinite(loss.item()):
                self.blame_loss(batch, clock, position, logs, before)
            self.engine.backward(loss)
            self.blame_gradient(words, position, "")
        raise FlowBNNError(
            f"the loss or a gradient was not finite {words}, but not when these steps were taken again one by one"
            f"{self.advice}{position.last_good}"
        )

    @property
    def advice(self) -> str:
        """What to do about numbers that are none."""
        half = "16" in self.options.precision
        return "; in half precision numbers overflow: try precision='32-true'" if half else ""

    def step_schedule(self, *value: float) -> None:
        """One step of the learning-rate schedule."""
        schedule = self.trained.schedule
        if schedule is None:
            return
        advance: Callable[..., None] = schedule.step  # only ReduceLROnPlateau takes a value
        try:
            advance(*value)
        except ValueError as error:
            reason = " ".join(str(error).split())[:200]
            raise FlowBNNError(
                f"the learning-rate schedule {type(schedule).__name__} goes no further ({reason}); build it for all "
                f"{self.options.epochs} epochs"
            ) from None

    def blame_loss(
        self, batch: Any, clock: Clock, position: Position, logs: Mapping[str, Any], before: dict[str, Any]
    ) -> None:
        """Say where a loss that is not finite came from, by running the batch again with the same draws."""
        check_finite_batch(batch, position.epoch, position.batches)

        def again() -> None:
            self.randomness.restore(before)
            with torch.enable_grad():
                self.step(self.model, batch, clock)

        cause = explain_nonfinite_loss(unwrap(self.model), again, logs, self.trained.names_below)
        raise FlowBNNError(
            f"the loss is not finite {position.words}: {cause}{self.advice}{position.last_good}"
        )


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
