"""Where a run computes: Lightning Fabric, or plain torch when one CPU process is all that is asked for.

Importing Lightning takes seconds and adds warning filters and log handlers, so it is imported when a run first needs
it. A single CPU process in 32 bits needs nothing of it; both engines take the same steps, to the bit.
"""

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grads_with_norm_
from torch.optim import Optimizer

from flowbnn.errors import FlowBNNError
from flowbnn.training.launch import settled_devices, start_processes
from flowbnn.training.options import TrainingOptions

__all__ = [
    "Engine",
    "FabricEngine",
    "connect",
    "keep_memory",
    "make_engine",
    "many_shapes",
    "move_batch",
    "open_fabric",
    "quiet_lightning",
    "unconcerned",
    "unwrap",
]

# -------------------- fabric.py

KNOWN = ("auto", "cpu", "cuda", "gpu", "mps")  # of others Lightning tells whether they are there


def connect(options: TrainingOptions) -> int:
    """Start, or join, the processes that the options ask for, ahead of any run; returns their number.

    >>> connect(TrainingOptions(accelerator="cpu"))
    1
    """
    devices, num_nodes = settled_devices(options.accelerator, options.devices, options.num_nodes)
    if str(devices) == "1" and num_nodes == 1 and options.accelerator in KNOWN:
        return 1
    return int(open_fabric(options).world_size)


def open_fabric(options: TrainingOptions) -> Any:
    """A launched Fabric; where it is to have several processes and nobody has started them, they are started."""
    devices, num_nodes = settled_devices(options.accelerator, options.devices, options.num_nodes)
    asked: dict[str, Any] = {
        "accelerator": options.accelerator,
        "devices": devices,
        "num_nodes": num_nodes,
        "strategy": options.strategy,
        "precision": options.precision,
    }
    with quiet_lightning():
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import DDPStrategy

        class Together(DDPStrategy):
            """Processes whose gradients the loop averages itself, so that what the forward pass does not see takes part."""

            def setup_module(self, module: nn.Module) -> Any:
                return module

        try:
            several = options.strategy != "auto" or num_nodes > 1 or devices not in (1, "1")
            if several and Fabric(**asked).world_size * num_nodes > 1:
                asked["strategy"] = Together()
            fabric = Fabric(**asked)
            place = getattr(fabric.strategy, "cluster_environment", None)
            number = getattr(fabric.strategy, "num_processes", 1)
            if place is not None and number * num_nodes > 1 and not place.creates_processes_externally:
                start_processes(number, num_nodes)
            fabric.launch()
        except FlowBNNError:
            raise
        except Exception as error:
            asked_for = ", ".join(f"{name}={getattr(options, name)!r}" for name in asked)
            reason = " ".join(str(error).split())[:300]
            raise FlowBNNError(f"Lightning Fabric refuses {asked_for}: {reason}") from None
    return fabric


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Keep Lightning's advice, and the warning filters that its import adds, out of the user's process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"lightning(\.|_utilities|$)")
        warnings.filterwarnings(
            "ignore", category=DeprecationWarning, module=r"(pkg_resources|torchmetrics|torch)"
        )
        import lightning.fabric  # noqa: F401

        # its import sets the level, so this comes after it
        loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
        levels = [logger.level for logger in loggers]
        for logger in loggers:
            logger.setLevel(logging.WARNING)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


# -------------------- machine.py


@contextmanager
def unconcerned() -> Iterator[None]:
    """What torch's compiler remarks on its own choices is no error, even where warnings are made errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._(dynamo|functorch|inductor)")
        # recorded on purpose, to hold memory for those that follow
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        yield


def many_shapes() -> AbstractContextManager[Any]:
    """torch gives up compiling a function after eight shapes, for good, and counts all runs of a process together.

    Batches, numbers of samples and runs come in more.
    """
    return torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096)


@cache
def keep_memory() -> None:
    """Let the C library keep what a pass on a processor frees, for the next one.

    glibc gives free memory back to the system beyond twice the largest block that was ever freed, and the next pass has it faulted in
    again, page by page, which costs large feature maps a third of their time. Freeing one block of almost 32 MB, the largest that
    counts, raises that bound to 64 MB for this process; nothing is ever written to it. Elsewhere this does nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, from the one a step function receives.

    A step calls ``model(inputs)`` on what it is given, so that precision and strategy apply; for everything else
    (submodules, the KL of its layers) it uses ``unwrap(model)``.

    >>> network = nn.Linear(2, 1)
    >>> unwrap(network) is network
    True
    """
    fabric = sys.modules.get("lightning.fabric")
    inner = model.module if fabric is not None and fabric.is_wrapped(model) else model
    if not isinstance(inner, nn.Module):
        raise FlowBNNError(f"expected a torch module, got a {type(inner).__name__}")
    return inner


def move_batch(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``, whatever its nesting.

    >>> move_batch((torch.ones(1), {"label": [torch.zeros(1)]}), torch.device("cpu"))
    (tensor([1.]), {'label': [tensor([0.])]})
    """
    if isinstance(batch, Tensor):
        return batch if batch.device == device else batch.to(device, non_blocking=device.type == "cuda")
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_batch(part, device) for part in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)(move_batch(part, device) for part in batch)
    if isinstance(batch, Mapping):
        return {key: move_batch(part, device) for key, part in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


class Engine:
    """One CPU process, plain torch; also the interface that :class:`FabricEngine` fills."""

    rank: int = 0
    processes: int = 1
    device: torch.device = torch.device("cpu")
    scales_loss: bool = False

    @contextmanager
    def sharing(self, model: nn.Module) -> Iterator[None]:
        """Around all steps of a run: layers that look at the whole batch are told that it is spread over processes."""
        yield

    def setup(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """The model and optimizer to use in the loop."""
        return model.to(self.device), optimizer

    def prepare_loader(self, loader: Any) -> Any:
        """The loader of this process."""
        return loader

    def backward(self, loss: Tensor) -> None:
        """Gradients of the loss."""
        loss.backward()

    def exchange(
        self, parameters: list[nn.Parameter], numbers: Mapping[str, Tensor | float]
    ) -> Mapping[str, Tensor | float]:
        """Average the gradients over all rows of all processes; returns the same average of the numbers."""
        return numbers

    def rows(self, here: int) -> int:
        """Rows of the whole batch, of which ``here`` are in this process."""
        return here

    def agree(self, value: Any) -> Any:
        """The value that the first process has."""
        return value

    def lost(self, error: BaseException) -> str | None:
        """Which other process has gone, where that is what an error means."""
        return None

    def gradients(self, parameters: list[nn.Parameter]) -> list[Tensor]:
        """The gradients that are there; at least one must be."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        if not gradients:
            raise FlowBNNError(
                "no parameter of the optimizer has a gradient: build it from the parameters of this model"
            )
        return gradients

    def gradient_norm(self, parameters: list[nn.Parameter]) -> Tensor:
        """Total norm of the gradients."""
        dense = [g.coalesce().values() if g.is_sparse else g for g in self.gradients(parameters)]
        # the formula of torch.nn.utils.get_total_norm without its sorting by device, which costs more than the sum
        return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense)))

    def clip(self, model: nn.Module, optimizer: Optimizer, largest: float, norm: Tensor | None) -> None:
        """Scale the gradients of the optimizer's parameters so that their total norm is at most ``largest``.

        Args:
            model, optimizer: as :meth:`setup` gave them.
            largest: the norm.
            norm: the present norm, where it is known; NaN leaves the gradients as they are, so that the guilty one can
                be told from the others.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        norm = self.gradient_norm(parameters) if norm is None else norm
        clip_grads_with_norm_(parameters, largest, torch.where(torch.isnan(norm), 0.0, norm))

    def mean(self, values: Mapping[str, float]) -> dict[str, float]:
        """Means over the processes."""
        return dict(values)

    def barrier(self) -> None:
        """Wait for all processes."""

    def scaler_state(self) -> dict[str, Any]:
        """State of the gradient scaler, where the precision has one."""
        return {}

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        """Put back :meth:`scaler_state`."""


class FabricEngine(Engine):
    """Lightning Fabric: accelerators, mixed precision; :class:`~flowbnn.training.distributed.CrewEngine` adds several devices."""

    def __init__(self, options: TrainingOptions, fabric: Any = None) -> None:
        self.fabric = open_fabric(options) if fabric is None else fabric
        self.rank = self.fabric.global_rank
        self.processes = self.fabric.world_size
        self.device = self.fabric.device
        if self.device.type == "cpu":
            keep_memory()
        self.scales_loss = options.precision == "16-mixed" and self.device.type == "cuda"

    def setup(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        with quiet_lightning():
            return self.fabric.setup(model, optimizer)

    def backward(self, loss: Tensor) -> None:
        self.fabric.backward(loss)

    def clip(self, model: nn.Module, optimizer: Optimizer, largest: float, norm: Tensor | None) -> None:
        if norm is not None:
            super().clip(model, optimizer, largest, norm)
        else:
            self.fabric.clip_gradients(model, optimizer, max_norm=largest, error_if_nonfinite=False)

    def scaler_state(self) -> dict[str, Any]:
        return self.fabric.strategy.precision.state_dict()

    def load_scaler_state(self, state: dict[str, Any]) -> None:
        self.fabric.strategy.precision.load_state_dict(state)


def make_engine(options: TrainingOptions) -> Engine:
    """The engine that the options ask for."""
    launched = any(name in os.environ for name in ("WORLD_SIZE", "LOCAL_RANK", "SLURM_NTASKS"))
    elsewhere = torch.accelerator.is_available() or find_spec("torch_xla") is not None
    plain = (
        (options.accelerator == "cpu" or (options.accelerator == "auto" and not elsewhere))
        and options.devices in (1, "1", "auto")
        and options.num_nodes == 1
        and options.strategy == "auto"
        and options.precision in ("32-true", "32")
        and not launched
    )
    if plain:
        return Engine()
    fabric = open_fabric(options)
    if fabric.world_size == 1:
        return FabricEngine(options, fabric)
    from flowbnn.training.distributed import CrewEngine

    return CrewEngine(options, fabric)
