"""CUDA graphs of the training step: forward pass, backward pass and update are recorded once and replayed.

A small network on a fast GPU waits for Python, which launches its kernels one by one. A CUDA graph launches them all at once. A
recorded graph is fixed, so everything that changes from step to step is stored in tensors: the batch, the learning rates and the
progress of the run. A loss or gradient that is not finite is detected on the device. From then on the optimizer makes no update, so
the weights remain those before the bad step until the host reads the flag, some steps later.
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


def is_fused(optimizer: Optimizer) -> bool:
    """Returns True if the optimizer reads ``found_inf`` on the device and leaves the weights unchanged if it is set."""
    reads_flag = getattr(optimizer, "_step_supports_amp_scaling", False)
    return reads_flag and all(group.get("fused") for group in optimizer.param_groups)


class Recorder:
    """Takes training steps on one CUDA device by replaying a CUDA graph.

    Args:
        objective: Module that returns the loss of a batch and values to log.
        optimizer: Fused optimizer of its parameters.
        options: Options of the training run.
        device: CUDA device.

    Attributes:
        graph: Recorded graph, or None before it is recorded.
        failure: Reason why the step cannot be recorded, or an empty string.
        warmup_steps: Number of steps taken before the recording.
        recent: Recent batches with their clocks and random states.
    """

    def __init__(
        self, objective: nn.Module, optimizer: Optimizer, options: TrainingOptions, device: torch.device
    ) -> None:
        self.objective, self.optimizer, self.options, self.device = objective, optimizer, options, device
        self.half = options.precision == "bf16-mixed"
        self.channels_last = _to_channels_last(objective, optimizer) if self.half else False
        self.stream = _side_stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.signature: Any = None
        self.warmup_steps, self.probed = 0, False
        self.failure = ""
        self.nonfinite, self.unit_scale = torch.zeros((), device=device), torch.ones((), device=device)
        self.progress = torch.zeros((), device=device)
        self.rates = [float(group["lr"]) for group in optimizer.param_groups]
        self.device_rates = [torch.tensor(rate, device=device) for rate in self.rates]
        self.names: list[str] = []
        self.totals: Tensor | None = None
        self.num_rows = 0
        self.recent: deque[tuple[Any, Clock, Tensor]] = deque(maxlen=1)
        self.host_flag = torch.zeros((), pin_memory=True)
        self.event: torch.cuda.Event | None = None
        self.loss = self._loss
        if options.acceleration == "compile":
            self.loss = torch.compile(self._loss, fullgraph=True, dynamic=False)

    @staticmethod
    def obstacle(
        objective: nn.Module,
        optimizer: Optimizer,
        options: TrainingOptions,
        device: torch.device,
        num_processes: int,
    ) -> str | None:
        """Returns the reason why steps cannot be recorded, or None."""
        if device.type != "cuda":
            return "no CUDA device"
        if num_processes > 1:
            return "several processes"
        if not getattr(objective, "capturable", False):
            return "no capturable objective"
        if options.precision not in ("32-true", "bf16-mixed"):
            return f"precision {options.precision!r}"
        if not is_fused(optimizer) or any(group.get("amsgrad") for group in optimizer.param_groups):
            return f"{type(optimizer).__name__} without fused=True"
        return None

    def step(self, batch: Any, clock: Clock) -> bool:
        """Takes one step. Returns False if the shape of the batch differs from the recorded one or recording fails."""
        if not _only_tensors(batch):
            return False
        signature = [(name, t.shape, t.dtype) for name, t in named_tensors(batch)]
        if self.signature is None:
            self.signature = signature
            size = sum(t.numel() * t.element_size() for _, t in named_tensors(batch))
            # 256 MiB of recent batches, which are repeated to find the one that was not finite
            self.recent = deque(maxlen=max(1, min(64, 2**28 // max(1, size))))
            self.batch = apply(batch, self._empty_like)
        if signature != self.signature:
            return False
        check = getattr(self.objective, "check_batch", None)
        if clock.epoch == 0 and check is not None:
            check(batch)
        self._copy_inputs(batch, clock)
        self.recent.append((batch, clock, torch.cuda.get_rng_state(self.device)))
        # three steps for allocations, autotuning and the optimizer's state
        if self.graph is None and self.warmup_steps == 3:
            self._record(clock)
            if self.failure:
                return False
        if self.graph is None:
            self._warmup_step(clock)
        else:
            self.graph.replay()
        self.num_rows += batch_size(batch)
        limit = self.recent.maxlen
        if len(self.recent) == limit and clock.step % max(1, limit // 2) == 0:
            self.host_flag.copy_(self.nonfinite, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        return True

    def _empty_like(self, tensor: Tensor) -> Tensor:
        if self.channels_last and tensor.ndim == 4:
            return torch.empty_like(tensor, device=self.device, memory_format=torch.channels_last)
        return torch.empty_like(tensor, device=self.device)

    def _copy_inputs(self, batch: Any, clock: Clock) -> None:
        """Copies the batch, the progress and the learning rates to the tensors that the graph reads."""
        for (_, target), (_, tensor) in zip(named_tensors(self.batch), named_tensors(batch), strict=True):
            target.copy_(tensor, non_blocking=True)
        self.progress.fill_(clock.progress)
        for index, group in enumerate(self.optimizer.param_groups):
            rate = float(group["lr"])
            if rate != self.rates[index]:
                self.device_rates[index].fill_(rate)
                self.rates[index] = rate

    def _warmup_step(self, clock: Clock) -> None:
        """Takes one of the first steps, on the stream that is recorded later."""
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            self._full_step(clock)
        torch.cuda.current_stream(self.device).wait_stream(self.stream)
        self.warmup_steps += 1

    def _record(self, clock: Clock) -> None:
        """Records a step without taking it, or sets ``failure``."""
        self.optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        random_state = torch.cuda.get_rng_state(self.device)
        try:
            with torch.cuda.graph(graph, stream=self.stream):
                self._full_step(clock)
        except RuntimeError as error:
            torch.cuda.synchronize(self.device)
            torch.cuda.set_rng_state(random_state, self.device)
            reason = " ".join(str(error).split())[:200]
            self.failure = f"the training step cannot be recorded as a CUDA graph ({reason})"
            return
        self.gradients = [p.grad for group in self.optimizer.param_groups for p in group["params"]]
        self.graph = graph

    def _loss(
        self, batch: Any, progress: Tensor, clock: Clock
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.half):
            # the graph serves all steps, so the objective may read nothing of the clock but the tensor
            return self.objective(batch, Clock(0, 0, clock.steps_per_epoch, clock.epochs, progress, True))

    def _full_step(self, clock: Clock) -> None:
        """Takes a complete step, which is recorded: loss, gradients, their checks and clipping, optimizer, and totals."""
        self.optimizer.zero_grad(set_to_none=True)
        # the first backward pass is compiled too
        with nullcontext() if self.warmup_steps else quiet_compiler():
            loss, logs = self._evaluate(clock)
            loss.backward()
        parameters = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None
        ]
        gradients = [p.grad for p in parameters]
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.nonfinite, self.unit_scale)
        bad_loss = (~torch.isfinite(loss.detach())).to(self.nonfinite.dtype)
        self.nonfinite.copy_(torch.maximum(self.nonfinite, bad_loss))
        if self.options.clip_gradient is not None:
            norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
            clip_grads_with_norm_(parameters, self.options.clip_gradient, norm)
        with self._device_settings():
            self.optimizer.step()
        values = {"loss": loss, **logs}
        self.names = list(values)
        tensors = [torch.as_tensor(v, device=self.device).detach() for v in values.values()]
        uniform = len({(t.dtype, t.shape) for t in tensors}) == 1  # then one conversion is enough
        row = torch.stack(tensors if uniform else [t.reshape(()).double() for t in tensors]).double()
        if self.totals is None:
            self.totals = torch.zeros_like(row)
        self.totals.add_(row, alpha=batch_size(self.batch))

    def _evaluate(self, clock: Clock) -> tuple[Tensor, Mapping[str, Tensor | float]]:
        """Returns the loss and its logs, compiled if possible."""
        if self.loss == self._loss:
            return self._loss(self.batch, self.progress, clock)
        modules = self.objective.modules()
        if not self.probed and any(getattr(module, "site", "") == "position" for module in modules):
            self._probe(clock)
        try:
            # every run compiles its own step, and torch's limit counts them all
            with unlimited_recompiles():
                return self.loss(self.batch, self.progress, clock)
        except Exception as error:  # the step can still be recorded uncompiled
            if self.warmup_steps:
                raise
            reason = " ".join(str(error).split())[:200]
            text = f"torch.compile fails on the training step ({reason}); it is recorded uncompiled"
            warn(text, kind="acceleration")
            self.loss = self._loss
            return self._loss(self.batch, self.progress, clock)

    def _probe(self, clock: Clock) -> None:
        """Runs one uncompiled pass that changes nothing, from which noise at positions learns the number of positions."""
        self.probed = True
        # an error here is raised again by the step itself
        with (
            preserve_training_modes(self.objective),
            suppress(Exception),
            torch.random.fork_rng([self.device]),
        ):
            for module in self.objective.modules():
                module.training = False
            self._loss(self.batch, self.progress, clock)

    @contextmanager
    def _device_settings(self) -> Iterator[None]:
        """Context manager of an update with learning rates as tensors and the flag that skips it."""
        optimizer, groups = self.optimizer, self.optimizer.param_groups
        names = ["lr", "capturable"]
        originals = [{name: group[name] for name in names if name in group} for group in groups]
        for group, rate, original in zip(groups, self.device_rates, originals, strict=True):
            group.update({name: rate if name == "lr" else True for name in original})
        optimizer.found_inf = self.nonfinite  # type: ignore[attr-defined]
        try:
            yield
        finally:
            del optimizer.found_inf  # type: ignore[attr-defined]
            for group, original in zip(groups, originals, strict=True):
                group.update(original)

    def means(self) -> tuple[dict[str, float], int]:
        """Waits for the device and returns the means of the logged values since the last call, and the number of examples."""
        if self.totals is None or not self.num_rows:
            return {}, 0
        values = (self.totals / self.num_rows).tolist()
        num_rows, self.num_rows = self.num_rows, 0
        self.totals.zero_()
        return dict(zip(self.names, values, strict=True)), num_rows

    def is_nonfinite(self, wait: bool = False) -> bool:
        """Returns True if a loss or gradient is known not to be finite.

        Args:
            wait: If True, waits for the device to know.
        """
        if wait:
            return bool(self.nonfinite.item())
        if self.event is None or not self.event.query():
            return False
        self.event = None
        return self.host_flag.item() != 0


def make_recorder(
    objective: nn.Module,
    optimizer: Optimizer,
    options: TrainingOptions,
    device: torch.device,
    num_processes: int,
) -> Recorder | None:
    """Returns a recorder of the steps of a run, or None if it is switched off or not possible.

    A warning is raised if ``options.acceleration`` requests it explicitly and it is not possible.

    Args:
        objective: Module that returns the loss of a batch.
        optimizer: Optimizer of its parameters.
        options: Options of the training run.
        device: Device of the run.
        num_processes: Number of processes that train together.
    """
    mode = options.acceleration
    if mode == "off" or (mode == "auto" and device.type != "cuda"):
        return None
    reason = Recorder.obstacle(objective, optimizer, options, device, num_processes)
    if reason is None:
        return Recorder(objective, optimizer, options, device)
    if mode != "auto":
        text = f"acceleration={mode!r} is not possible ({reason})"
        warn(text, kind="acceleration", argument="acceleration")
    return None


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Returns the one stream of all recordings on a device, because cuBLAS keeps about 60 MiB for every stream it has seen."""
    return torch.cuda.Stream(device)


def _only_tensors(batch: Any) -> bool:
    """Returns True if a batch consists of tensors, so that no value of it would be fixed by the recording."""
    if isinstance(batch, Mapping):
        return all(_only_tensors(value) for value in batch.values())
    if isinstance(batch, (list, tuple)):
        return all(_only_tensors(value) for value in batch)
    return isinstance(batch, Tensor)


def _to_channels_last(model: nn.Module, optimizer: Optimizer) -> bool:
    """Converts weights and optimizer state to channels-last, in which half-precision convolutions are fast."""
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        return False
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    for parameter, state in optimizer.state.items():
        for name, value in state.items():
            if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim == 4:
                state[name] = value.to(memory_format=torch.channels_last)
    return True
