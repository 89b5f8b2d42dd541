"""What is not finite ends a run before it reaches the weights or the disk, with a line that says where it came from."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowbnn.batches import check_finite_batch, first_nonfinite_tensor, named_tensors, watch_modules
from flowbnn.errors import FlowBNNError
from flowbnn.training.checkpoint import State, strip_prefix
from flowbnn.training.cuda_graph import Recorder, is_fused
from flowbnn.training.device import Process
from flowbnn.training.options import Clock


class Guard:
    """Watches the losses and gradients of one run, whose parameters are on the device of its process."""

    def __init__(self, state: State, process: Process) -> None:
        self.state, self.process = state, process
        cuda = process.device.type == "cuda"
        together = all(parameter.device == process.device for parameter in state.parameters)
        self.loss_gate = LossGate() if cuda else None
        self.gradient_gate: GradientGate | None = None
        self.nonfinite = NonFinite(process.device)
        if cuda and together and process.scaler is None:
            self.gradient_gate = GradientGate(state.optimizer, self.nonfinite)

    def check_last_step(self, recorder: Recorder | None, wait: bool = False) -> None:
        """Refuse to go on from a step that was not finite, where a CUDA device says so only afterwards."""
        position = self.state.position
        if recorder is not None and recorder.bad(wait):
            self.explain_recorded(recorder)
        if self.gradient_gate is not None and not self.gradient_gate.finite():
            updated = "" if self.gradient_gate.skips else "; the weights have been updated with it"
            self.explain_gradient(f"in epoch {position.epoch + 1}, step {position.step}", updated)

    def check_weights(self) -> None:
        """Refuse to go on with weights that are not finite, which never replace good ones on the disk."""
        state = self.state
        broken = first_nonfinite_tensor(zip(state.names, state.parameters, strict=True))
        if broken is not None:
            broken = strip_prefix(broken, state.name_prefix)
            self.fail(f"parameter {broken!r} is not finite {state.position}", broken)

    def explain_loss(
        self, batch: Any, clock: Clock, logs: Mapping[str, Any], before: dict[str, Any]
    ) -> NoReturn:
        """Say where a loss that is not finite came from, by running the batch again with the same draws."""
        state = self.state
        check_finite_batch(batch, state.position.epoch, state.position.batches)

        def again() -> None:
            state.randomness.restore(before)
            with torch.enable_grad(), self.process.autocast():
                state.objective(batch, clock)

        layer = first_nonfinite_tensor(state.objective.named_parameters())
        if layer is not None:
            layer = strip_prefix(layer, state.name_prefix)
            cause = f"parameter {layer!r} is not finite, so an earlier gradient was not"
        else:
            source, receiver = _watch(state.objective, again)
            layer = source or receiver  # "" is the objective itself, whose loss is known to be bad
            term = first_nonfinite_tensor(named_tensors(logs))
            if layer:
                kind = type(state.objective.get_submodule(layer)).__name__
                layer = strip_prefix(layer, state.name_prefix)
                cause = f"layer {layer!r} ({kind})" if layer else f"the model itself ({kind})"
                made = (
                    "made it first" if source else "was given inputs that are not finite, which no layer made"
                )
                cause += f" {made}"
            elif term is not None:
                cause = f"every layer's output is finite, but {term!r} is not"
            else:
                cause = "every layer's output is finite, so the loss function made it"
        self.fail(f"the loss is not finite {state.position}: {cause}", layer or None)

    def explain_gradient(self, when: str, more: str = "") -> None:
        """Name the parameter whose gradient is not finite; a norm that only overflowed is no fault."""
        pairs = zip(self.state.names, self.state.parameters, strict=True)
        name = first_nonfinite_tensor((name, p.grad) for name, p in pairs if p.grad is not None)
        if name is not None:
            name = strip_prefix(name, self.state.name_prefix)
            self.fail(
                f"the gradient of {name!r} is not finite {when} although the loss is; lower the learning rate or bound what that "
                f"layer computes{more}",
                name,
            )

    def explain_recorded(self, recorder: Recorder) -> NoReturn:
        """Take the recorder's last batches again, one by one and with the same draws, until one goes wrong."""
        state, last = self.state, self.state.position.step
        when = f"between steps {max(1, last - len(recorder.witnesses) + 1)} and {last}"
        for batch, clock, random in recorder.witnesses:
            torch.cuda.set_rng_state(random, self.process.device)
            before = state.randomness.torch_state()
            state.optimizer.zero_grad()
            with self.process.autocast():
                loss, logs = state.objective(batch, clock)
            if not math.isfinite(loss.item()):
                self.explain_loss(batch, clock, logs, before)
            loss.backward()
            self.explain_gradient(when)
        self.fail(
            f"the loss or a gradient was not finite {when}, but not when these steps were taken again one by one"
        )

    def fail(self, words: str, layer: str | None = None) -> NoReturn:
        """End the run, with advice that fits it."""
        half = "; half precision overflows: try precision='32-true'" if self.process.half is not None else ""
        saved = self.state.saved_step is not None
        good = f"; the last good checkpoint is '{self.state.path}'" if saved else ""
        raise FlowBNNError(f"{words}{half}{good}", kind="not finite", layer=layer)


class LossGate:
    """Is the loss finite? Asked behind the forward pass and answered when the backward pass is queued, so that CUDA never idles."""

    def __init__(self) -> None:
        self.answer = torch.empty((), dtype=torch.bool, pin_memory=True)
        self.event = torch.cuda.Event()

    def ask(self, loss: Tensor) -> None:
        """Before backward."""
        self.answer.copy_(torch.isfinite(loss.detach()), non_blocking=True)
        self.event.record()

    def finite(self) -> bool:
        """After backward: whether the loss was finite."""
        self.event.synchronize()
        return bool(self.answer.item())


def dense(gradient: Tensor) -> Tensor:
    """The numbers of a gradient that may be sparse."""
    return gradient.coalesce().values() if gradient.is_sparse else gradient


class NonFinite:
    """Whether any of some gradients is not finite: a tensor of one number, above 0 if so, which the next call overwrites."""

    def __init__(self, device: torch.device) -> None:
        self.found = torch.zeros((), dtype=torch.float32, device=device)  # the kernel takes no other dtype
        self.one = torch.ones_like(self.found)

    def __call__(self, gradients: list[Tensor]) -> Tensor:
        self.found.zero_()
        kinds = {(gradient.dtype, gradient.layout) for gradient in gradients}
        if len(kinds) == 1 and gradients[0].is_floating_point() and not gradients[0].is_sparse:
            # one kernel over all gradients: the one that loss scaling uses, here with a scale of 1
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, self.one)
        else:
            for gradient in gradients:
                self.found.logical_or_(~torch.isfinite(dense(gradient)).all())
        return self.found


class GradientGate:
    """Was the gradient finite? Asked on CUDA, and answered when the next step begins, so that the device never idles.

    The fused optimizers of torch take the answer on the device and leave the weights alone when it is no (``found_inf``).
    """

    def __init__(self, optimizer: Optimizer, nonfinite: NonFinite) -> None:
        self.optimizer, self.nonfinite = optimizer, nonfinite
        self.skips = is_fused(optimizer)
        self.answer = torch.empty((), pin_memory=True)
        self.event = torch.cuda.Event()
        self.asked = False

    def update(self, gradients: list[Tensor]) -> None:
        """The optimizer's step, after the question whether its gradients are finite."""
        found = self.nonfinite(gradients)
        self.answer.copy_(found, non_blocking=True)
        self.event.record()
        self.asked = True
        if self.skips:
            self.optimizer.found_inf = found  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            if self.skips:
                del self.optimizer.found_inf  # type: ignore[attr-defined]

    def finite(self) -> bool:
        """Whether the gradient last asked about was finite; waits for the backward pass that made it."""
        if not self.asked:
            return True
        self.asked = False
        self.event.synchronize()
        return self.answer.item() == 0


def first_nonfinite_layer(model: nn.Module, call: Callable[[], Any]) -> str | None:
    """The first module, in the order they finish, that turned finite inputs into a non-finite output.

    Args:
        model: its modules are watched by hooks that are removed afterwards.
        call: runs the model, without arguments: ``lambda: model(inputs)``.

    Returns:
        the module's name (``""`` for the model itself), or None when every module kept its numbers finite.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(network[1].weight, float("inf"))
    >>> first_nonfinite_layer(network, lambda: network(torch.ones(1, 2)))
    '1'
    """
    return _watch(model, call)[0]


def _watch(model: nn.Module, call: Callable[[], Any]) -> tuple[str | None, str | None]:
    """The first module that made a non-finite output of finite inputs, and the first that was given bad inputs."""
    sources: list[str] = []
    receivers: list[str] = []
    inputs_finite: list[bool] = []

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs_finite.append(first_nonfinite_tensor(named_tensors([args, kwargs])) is None)
        if not inputs_finite[-1]:
            receivers.append(name)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if inputs_finite.pop() and not sources and first_nonfinite_tensor(named_tensors(output)):
            sources.append(name)

    with watch_modules(dict(model.named_modules()), before, after), torch.no_grad():
        call()
    return next(iter(sources), None), next(iter(receivers), None)
