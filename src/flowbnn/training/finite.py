"""Checks that end a run when a loss, gradient or weight is not finite, with a message that names the layer at fault."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from flowbnn.batches import check_finite_batch, first_nonfinite_tensor, named_tensors
from flowbnn.errors import FlowBNNError
from flowbnn.networks import watch_modules
from flowbnn.training.checkpoint import RunState
from flowbnn.training.compatibility import strip_prefix
from flowbnn.training.cuda_graph import Recorder, is_fused
from flowbnn.training.device import Process
from flowbnn.training.options import Clock

UNSCALE_DTYPES = (torch.float16, torch.float32, torch.float64)  # of the kernel of loss scaling on CUDA


class FiniteGuard:
    """Checks of the losses, gradients and weights of one run.

    Args:
        state: State of the run.
        process: Process whose device holds the parameters.

    Attributes:
        loss_check: Asynchronous check of the loss on CUDA, or None.
        gradient_check: Asynchronous check of the gradients on CUDA, or None.
    """

    def __init__(self, state: RunState, process: Process) -> None:
        self.state, self.process = state, process
        on_cuda = process.device.type == "cuda"
        one_device = all(parameter.device == process.device for parameter in state.parameters)
        self.loss_check = AsyncLossCheck() if on_cuda else None
        self.gradient_check: AsyncGradientCheck | None = None
        if on_cuda and one_device and process.scaler is None:
            self.gradient_check = AsyncGradientCheck(state.optimizer, process.device)

    def check_last_step(self, recorder: Recorder | None, wait: bool = False) -> None:
        """Raises an error if the last step on a CUDA device was not finite.

        Args:
            recorder: Recorder of the steps, or None.
            wait: If True, waits for the device. Otherwise uses what is known already.
        """
        position = self.state.position
        if recorder is not None and recorder.is_nonfinite(wait):
            self.fail_on_recorded_step(recorder)
        if self.gradient_check is not None and not self.gradient_check.is_finite():
            note = "" if self.gradient_check.skips_update else "; the weights were updated with it"
            self.fail_on_gradient(f"in epoch {position.epoch + 1}, step {position.step}", note)

    def check_weights(self) -> None:
        """Raises an error if a weight is not finite, so that it never replaces a good checkpoint."""
        state = self.state
        name = first_nonfinite_tensor(zip(state.names, state.parameters, strict=True))
        if name is not None:
            name = strip_prefix(name, state.name_prefix)
            self.fail(f"parameter {name!r} is not finite {state.position}", name)

    def fail_on_loss(
        self, batch: Any, clock: Clock, logs: Mapping[str, Any], random_state: dict[str, Any]
    ) -> NoReturn:
        """Raises an error that names the source of a loss that is not finite.

        The batch is run again with the same random numbers.

        Args:
            batch: Batch of the step.
            clock: Clock of the step.
            logs: Values that the objective logged.
            random_state: Random state before the forward pass.
        """
        state = self.state
        check_finite_batch(batch, state.position.epoch, state.position.batches)

        def repeat_step() -> None:
            state.random.restore(random_state)
            with torch.enable_grad(), self.process.autocast():
                state.objective(batch, clock)

        layer = first_nonfinite_tensor(state.objective.named_parameters())
        if layer is not None:
            layer = strip_prefix(layer, state.name_prefix)
            cause, term = f"parameter {layer!r} is not finite", None
        else:
            source, receiver = _watch_outputs(state.objective, repeat_step)
            layer = source or receiver  # "" is the objective itself
            term = first_nonfinite_tensor(named_tensors(logs))
            if layer:
                kind = type(state.objective.get_submodule(layer)).__name__
                layer = strip_prefix(layer, state.name_prefix)
                subject = f"layer {layer!r} ({kind})" if layer else f"the model itself ({kind})"
                cause = f"{subject} {'produced it' if source else 'received inputs that are not finite'}"
            elif term is not None:
                cause = f"its term {term!r} is not"
            else:
                cause = "the outputs of all layers are finite"
        self.fail(f"the loss is not finite {state.position}: {cause}", layer or None, term)

    def fail_on_gradient(self, position: str, note: str = "") -> None:
        """Raises an error that names the parameter whose gradient is not finite.

        Returns if all gradients are finite, because their norm may overflow.

        Args:
            position: Epoch and step, for the message.
            note: End of the message.
        """
        pairs = zip(self.state.names, self.state.parameters, strict=True)
        name = first_nonfinite_tensor((name, p.grad) for name, p in pairs if p.grad is not None)
        if name is not None:
            name = strip_prefix(name, self.state.name_prefix)
            self.fail(
                f"the gradient of {name!r} is not finite {position}, but the loss is; decrease the learning rate{note}",
                name,
            )

    def fail_on_recorded_step(self, recorder: Recorder) -> NoReturn:
        """Repeats the recent batches of a recorder with the same random numbers, and raises the error of the first bad one."""
        state, last = self.state, self.state.position.step
        steps = f"between steps {max(1, last - len(recorder.recent) + 1)} and {last}"
        for batch, clock, cuda_state in recorder.recent:
            torch.cuda.set_rng_state(cuda_state, self.process.device)
            random_state = state.random.torch_state()
            state.optimizer.zero_grad()
            with self.process.autocast():
                loss, logs = state.objective(batch, clock)
            if not math.isfinite(loss.item()):
                self.fail_on_loss(batch, clock, logs, random_state)
            loss.backward()
            self.fail_on_gradient(steps)
        self.fail(f"the loss or a gradient was not finite {steps}, but finite when repeated")

    def fail(self, message: str, layer: str | None = None, term: str | None = None) -> NoReturn:
        """Raises the error that ends the run.

        Args:
            message: Description of what is not finite.
            layer: Name of the layer or parameter at fault.
            term: Name of the logged value that is not finite.
        """
        half = "; try precision='32-true'" if self.process.autocast_dtype else ""
        saved = self.state.saved_step is not None
        file = f"; last good checkpoint: '{self.state.path}'" if saved else ""
        raise FlowBNNError(f"{message}{half}{file}", kind="not finite", layer=layer, term=term)


class AsyncLossCheck:
    """Check of the loss on CUDA that starts after the forward pass and is read after the backward pass, so the device never idles."""

    def __init__(self) -> None:
        self.result = torch.empty((), dtype=torch.bool, pin_memory=True)
        self.event = torch.cuda.Event()

    def start(self, loss: Tensor) -> None:
        """Starts the check, before the backward pass."""
        self.result.copy_(torch.isfinite(loss.detach()), non_blocking=True)
        self.event.record()

    def is_finite(self) -> bool:
        """Waits for the check and returns True if the loss was finite."""
        self.event.synchronize()
        return bool(self.result.item())


class AsyncGradientCheck:
    """Check of the gradients on CUDA that is read when the next step begins, so the device never idles.

    The fused optimizers of torch read the result on the device (``found_inf``) and leave the weights unchanged if a gradient is not
    finite.

    Args:
        optimizer: Optimizer to step.
        device: CUDA device of the gradients.

    Attributes:
        skips_update: True if the optimizer leaves the weights unchanged.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.optimizer = optimizer
        # the kernel takes no other dtype
        self.nonfinite = torch.zeros((), dtype=torch.float32, device=device)
        self.unit_scale = torch.ones_like(self.nonfinite)
        self.skips_update = is_fused(optimizer)
        self.result = torch.empty((), pin_memory=True)
        self.event = torch.cuda.Event()
        self.started = False

    def update(self, gradients: list[Tensor]) -> None:
        """Starts the check and steps the optimizer."""
        self.nonfinite.zero_()
        layouts = {(gradient.dtype, gradient.layout) for gradient in gradients}
        if len(layouts) == 1 and gradients[0].dtype in UNSCALE_DTYPES and not gradients[0].is_sparse:
            # the kernel of loss scaling, with a scale of 1: one launch for all gradients
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.nonfinite, self.unit_scale)
        else:
            for gradient in gradients:
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                self.nonfinite.logical_or_(~torch.isfinite(values).all())
        self.result.copy_(self.nonfinite, non_blocking=True)
        self.event.record()
        self.started = True
        if self.skips_update:
            self.optimizer.found_inf = self.nonfinite  # type: ignore[attr-defined]
        try:
            self.optimizer.step()
        finally:
            if self.skips_update:
                del self.optimizer.found_inf  # type: ignore[attr-defined]

    def is_finite(self) -> bool:
        """Waits for the last check and returns True if all gradients were finite."""
        if not self.started:
            return True
        self.started = False
        self.event.synchronize()
        return self.result.item() == 0


def first_nonfinite_layer(model: nn.Module, call: Callable[[], Any]) -> str | None:
    """Returns the first module that computed an output that is not finite from finite inputs.

    Args:
        model: Network whose modules are watched by hooks, which are removed afterwards.
        call: Function without arguments that runs the network, such as ``lambda: model(inputs)``.

    Returns:
        Name of the module (``""`` for the model itself), or None if all outputs are finite.

    >>> network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    >>> _ = nn.init.constant_(network[1].weight, float("inf"))
    >>> first_nonfinite_layer(network, lambda: network(torch.ones(1, 2)))
    '1'
    """
    return _watch_outputs(model, call)[0]


def _watch_outputs(model: nn.Module, call: Callable[[], Any]) -> tuple[str | None, str | None]:
    """Returns the first module with a bad output from finite inputs, and the first module with bad inputs."""
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
