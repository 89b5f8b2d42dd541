"""Where a run computes: the device of this process, its precision, and settings of torch's compiler and of the C library."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.training.launch import device_kind
from flowbnn.training.options import TrainingOptions

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}


class Process:
    """One process on one device; also the interface that :class:`flowbnn.training.distributed.Worker` fills for several.

    ``weight`` multiplies the loss of the present batch, and ``rows`` is its number of rows where other processes have some of them.
    """

    rank: int = 0
    processes: int = 1
    weight: float = 1.0
    rows: int | None = None

    def __init__(self, options: TrainingOptions) -> None:
        kind = device_kind(options.accelerator)
        self.device = (
            torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device(kind)
        )
        self.half, self.dtype = MIXED.get(options.precision), TRUE.get(options.precision)
        self.autocast: Callable[[], AbstractContextManager[Any]] = nullcontext  # around the forward pass
        if self.half is not None:
            self.autocast = partial(torch.autocast, kind, self.half)
        self.scaler = torch.amp.GradScaler(kind) if self.half == torch.float16 else None
        if kind == "cpu":
            keep_memory()

    def wrap(self, objective: nn.Module) -> nn.Module:
        """The objective on this device, as the loop calls it."""
        return objective.to(self.device, self.dtype)

    def share_out(self, loader: Any) -> Any:
        """The loader of this process's rows of every batch."""
        return loader

    @contextmanager
    def sharing(self, objective: nn.Module) -> Iterator[None]:
        """Around all steps of a run: layers that depend on the whole batch know that it is spread over processes."""
        yield

    def average(self, numbers: Mapping[str, Any]) -> Mapping[str, Any]:
        """Numbers of a batch, averaged over all rows of all processes."""
        return numbers

    def agree(self, value: Any) -> Any:
        """The value that the first process has."""
        return value

    def synchronize(self, objective: nn.Module) -> None:
        """Wait for all processes, and take over the first one's buffers."""

    def lost(self, error: BaseException) -> str | None:
        """Which other process has died, where that is what an error means."""
        return None


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
        return type(batch)([move_batch(part, device) for part in batch])
    if isinstance(batch, Mapping):
        return {key: move_batch(part, device) for key, part in batch.items()}
    return batch.to(device) if hasattr(batch, "to") else batch


@contextmanager
def kept_modes(objective: nn.Module) -> Iterator[None]:
    """Around what changes between training and evaluation mode: every module ends in the mode it had."""
    modes = [(module, module.training) for module in objective.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def quiet_compiler() -> Iterator[None]:
    """Ignore what torch's compiler remarks on its own choices, even where warnings are errors."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module=r"torch\._(dynamo|functorch|inductor)")
        # recorded on purpose, to hold memory for those that follow
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty", category=UserWarning)
        yield


def unlimited_recompiles() -> AbstractContextManager[Any]:
    """Raise torch's recompile limit: it gives up compiling a function after eight shapes, and counts all runs of a process together."""
    return torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096)


@cache
def keep_memory() -> None:
    """Let the C library keep what a pass on a CPU frees, for the next one.

    glibc gives free memory back to the system beyond twice the largest block that was ever freed, and the next pass has it faulted in
    again, page by page, which costs large feature maps a third of their time. Freeing one block of almost 32 MB, the largest that
    counts, raises that bound to 64 MB for this process; nothing is ever written to it. Elsewhere this does nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)
