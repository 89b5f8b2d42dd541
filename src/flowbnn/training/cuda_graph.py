"""A training step recorded once and replayed: a CUDA graph of forward, backward and update.

A small network on a fast GPU waits for Python, which launches its kernels one by one. A CUDA graph launches them all at once. What
is recorded is fixed, so everything that changes from step to step lies in tensors: the batch, the learning rates, the share of the
run that is done. A loss or gradient that is not finite is noticed on the device: from then on no update is made, so that the weights
stay those from before the bad step until the host looks, some steps later.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from flowbnn.batches import apply, batch_size, named_tensors
from flowbnn.errors import warn
from flowbnn.training.device import preserve_training_modes, quiet_compiler, unlimited_recompiles
from flowbnn.training.options import Clock, TrainingOptions

_WARM = 3  # steps taken one by one before the recording: allocations, autotuning, the optimizer's state
_WITNESSES = 2**28  # bytes of batches kept to find out which one was bad


def is_fused(optimizer: Optimizer) -> bool:
    """Whether the optimizer takes ``found_inf`` on the device, and leaves the weights alone where that is set."""
    able = getattr(optimizer, "_step_supports_amp_scaling", False)
    return able and all(group.get("fused") for group in optimizer.param_groups)


class Recorder:
    """Takes steps on one CUDA device by replaying a recording; what does not fit the recording it leaves to the caller."""

    def __init__(
        self, objective: nn.Module, optimizer: Optimizer, options: TrainingOptions, device: torch.device
    ) -> None:
        self.objective, self.optimizer, self.options, self.device = objective, optimizer, options, device
        self.half = options.precision == "bf16-mixed"
        self.channels_last = _to_channels_last(objective, optimizer) if self.half else False
        self.stream = _side_stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.signature: Any = None
        self.warm, self.looked = 0, False
        self.trouble = ""  # why the step cannot be recorded
        self.found, self.one = torch.zeros((), device=device), torch.ones((), device=device)
        self.shown = torch.zeros((), device=device)
        self.rates = [torch.tensor(float(group["lr"]), device=device) for group in optimizer.param_groups]
        self.known_rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.names: list[str] = []
        self.totals: Tensor | None = None
        self.weight = 0
        self.witnesses: deque[tuple[Any, Clock, Tensor]] = deque(maxlen=1)
        self.answer = torch.zeros((), pin_memory=True)
        self.event: torch.cuda.Event | None = None
        self.function = self._function
        if options.acceleration == "compile":
            self.function = torch.compile(self._function, fullgraph=True, dynamic=False)

    @staticmethod
    def refusal(
        objective: nn.Module,
        optimizer: Optimizer,
        options: TrainingOptions,
        device: torch.device,
        processes: int,
    ) -> str | None:
        """Why steps cannot be recorded, or None."""
        if device.type != "cuda":
            return "there is no CUDA device"
        if processes > 1:
            return "several processes take part"
        if not getattr(objective, "capturable", False):
            return "its objective is not marked capturable"
        if options.precision not in ("32-true", "bf16-mixed"):
            return f"precision {options.precision!r} scales or casts in ways that a recording cannot"
        if not is_fused(optimizer) or any(group.get("amsgrad") for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} was not made with fused=True"
        return None

    def take(self, batch: Any, clock: Clock) -> bool:
        """One step, or False where the batch has another shape than the recording's."""
        if not _only_tensors(batch):
            return False
        signature = [(name, t.shape, t.dtype) for name, t in named_tensors(batch)]
        if self.signature is None:
            self.signature = signature
            size = sum(t.numel() * t.element_size() for _, t in named_tensors(batch))
            self.witnesses = deque(maxlen=max(1, min(64, _WITNESSES // max(1, size))))
            self.batch = apply(batch, self._room_for)
        if signature != self.signature:
            return False
        check = getattr(self.objective, "check_batch", None)
        if clock.epoch == 0 and check is not None:
            check(batch)
        self._bring(batch, clock)
        self.witnesses.append((batch, clock, torch.cuda.get_rng_state(self.device)))
        if self.graph is None and self.warm == _WARM:
            self._record(clock)
            if self.trouble:
                return False
        if self.graph is None:
            self._step_before_recording(clock)
        else:
            self.graph.replay()
        self.weight += batch_size(batch)
        most = self.witnesses.maxlen
        if len(self.witnesses) == most and clock.step % max(1, most // 2) == 0:
            self.answer.copy_(self.found, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        return True

    def _room_for(self, tensor: Tensor) -> Tensor:
        if self.channels_last and tensor.ndim == 4:
            return torch.empty_like(tensor, device=self.device, memory_format=torch.channels_last)
        return torch.empty_like(tensor, device=self.device)

    def _bring(self, batch: Any, clock: Clock) -> None:
        for (_, room), (_, tensor) in zip(named_tensors(self.batch), named_tensors(batch), strict=True):
            room.copy_(tensor, non_blocking=True)
        self.shown.fill_(clock.progress)
        for index, group in enumerate(self.optimizer.param_groups):
            rate = float(group["lr"])
            if rate != self.known_rates[index]:
                self.rates[index].fill_(rate)
                self.known_rates[index] = rate

    def _step_before_recording(self, clock: Clock) -> None:
        """One of the first steps, on the stream that is recorded later."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._whole_step(clock)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.warm += 1

    def _record(self, clock: Clock) -> None:
        """Record a step without taking it, or say in ``trouble`` why that cannot be done."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        before = torch.cuda.get_rng_state(self.device)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._whole_step(clock)
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            torch.cuda.set_rng_state(before, self.device)
            reason = " ".join(str(error).split())[:200]
            self.trouble = f"a CUDA graph of the training step cannot be made ({reason})"
            return
        self.gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        self.graph = graph

    def _function(
        self, batch: Any, shown: Tensor, clock: Clock
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            # the recording is of no particular step: nothing of the clock but the tensor may be read
            return self.objective(batch, Clock(0, 0, clock.steps_per_epoch, clock.epochs, shown, True))

    def _whole_step(self, clock: Clock) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with nullcontext() if self.warm else quiet_compiler():  # the first backward pass is compiled too
            loss, logs = self._evaluate(clock)
            loss.backward()
        parameters = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        gradients = [p.grad for p in parameters]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, self.one)
        self.found.copy_(torch.maximum(self.found, (~torch.isfinite(loss.detach())).to(self.found.dtype)))
        if self.options.clip_gradient is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            clip_grads_with_norm_(parameters, self.options.clip_gradient, norm)
        with self._recordable():
            self.optimizer.step()
        values = {"loss": loss, **logs}
        self.names = list(values)
        tensors = [torch.as_tensor(v, device=self.device).detach() for v in values.values()]
        alike = len({(t.dtype, t.shape) for t in tensors}) == 1  # then one conversion serves for all
        row = torch.stack(tensors if alike else [t.reshape(()).double() for t in tensors]).double()
        if self.totals is None:
            self.totals = torch.zeros_like(row)
        self.totals.add_(row, alpha=batch_size(self.batch))

    def _evaluate(self, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        if self.function == self._function:
            return self._function(self.batch, self.shown, clock)
        if not self.looked and any(
            getattr(module, "site", "") == "position" for module in self.objective.modules()
        ):
            self._look(clock)
        try:
            # every run compiles a step of its own, and torch's limit counts them all
            with unlimited_recompiles():
                return self.function(self.batch, self.shown, clock)
        except Exception as error:  # the step itself can still be recorded
            if self.warm:
                raise
            reason = " ".join(str(error).split())[:200]
            message = f"torch.compile fails on the training step ({reason}); it is recorded uncompiled"
            warn(message, kind="acceleration")
            self.function = self._function
            return self._function(self.batch, self.shown, clock)

    def _look(self, clock: Clock) -> None:
        """One pass outside the compiler that leaves no trace: from it, noise at positions learns how many there are."""
        self.looked = True
        # what fails here fails again, and with a message, when it matters
        with (
            preserve_training_modes(self.objective),
            suppress(Exception),
            torch.random.fork_rng([self.device]),
        ):
            for module in self.objective.modules():
                module.training = False
            self._function(self.batch, self.shown, clock)

    @contextmanager
    def _recordable(self) -> Iterator[None]:
        """Around an update: learning rates as tensors, and the flag that stops it."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        names = ["lr", "capturable"]
        kept = [{name: group[name] for name in names if name in group} for group in groups]
        for group, rate, former in zip(groups, self.rates, kept, strict=True):
            group.update({name: rate if name == "lr" else True for name in former})
        optimizer.found_inf = self.found  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
            for group, former in zip(groups, kept, strict=True):
                group.update(former)

    def means(self) -> tuple[dict[str, float], int]:
        """The logs since the last call, as means over examples, and how many examples those are; waits for the device."""
        if self.totals is None or not self.weight:
            return {}, 0
        values = (self.totals / self.weight).tolist()
        weight, self.weight = self.weight, 0
        self.totals.zero_()
        return dict(zip(self.names, values, strict=True)), weight

    def bad(self, wait: bool = False) -> bool:
        """Whether some loss or gradient was not finite, as far as is known; ``wait`` makes it known."""
        if wait:
            return bool(self.found.item())
        if self.event is None or not self.event.query():
            return False
        self.event = None
        return self.answer.item() != 0


def make_recorder(
    objective: nn.Module, optimizer: Optimizer, options: TrainingOptions, device: torch.device, processes: int
) -> Recorder | None:
    """What records the steps of a run, where that is asked for and possible; warns where it is asked for by name and is not."""
    asked = options.acceleration
    if asked == "off" or (asked == "auto" and device.type != "cuda"):
        return None
    reason = Recorder.refusal(objective, optimizer, options, device, processes)
    if reason is None:
        return Recorder(objective, optimizer, options, device)
    if asked != "auto":
        message = f"acceleration={asked!r} is not possible here ({reason}); steps are taken one by one"
        warn(message, kind="acceleration")
    return None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all recordings on a device: cuBLAS keeps some 60 MiB for every stream it was ever called on."""
    return torch.cuda.Stream(device)


def _only_tensors(batch: Any) -> bool:
    """Whether nothing of a batch would be frozen into a recording."""
    if isinstance(batch, Mapping):
        return all(_only_tensors(part) for part in batch.values())
    if isinstance(batch, (list, tuple)):
        return all(_only_tensors(part) for part in batch)
    return isinstance(batch, Tensor)


def _to_channels_last(model: nn.Module, optimizer: Optimizer) -> bool:
    """Weights (and the optimizer's copies of them) in the layout that half-precision convolutions are fast in."""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim == 4:
                state[name] = value.to(memory_format=torch.channels_last)
    return True
