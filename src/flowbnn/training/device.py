"""Where a run computes: its processes, which torchrun starts, the device and precision of each, and settings of torch's compiler."""

import atexit
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.training.options import TrainingOptions

Result = TypeVar("Result")

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
TRUE = {"64-true": torch.float64, "bf16-true": torch.bfloat16, "16-true": torch.float16}
MOST_PER_CORE = 16  # processes for each core of a machine
TORCHRUN = """
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
try:
    main()
except SignalException as stop:  # Ctrl-C, of which the processes themselves have told
    sys.exit(128 + stop.sigval)
"""


class Process:
    """One process on one device; also the interface that :class:`flowbnn.training.distributed.Worker` fills for several.

    ``weight`` multiplies the loss of the present batch, and ``rows`` is its number of rows where other processes have some of them.
    """

    rank: int = 0
    num_processes: int = 1
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
            raise_malloc_trim_threshold()

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
def preserve_training_modes(objective: nn.Module) -> Iterator[None]:
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
def raise_malloc_trim_threshold() -> None:
    """Let the C library keep what a pass on a CPU frees, for the next one.

    glibc gives free memory back to the system beyond twice the largest block that was ever freed, and the next pass has it faulted in
    again, page by page, which costs large feature maps a third of their time. Freeing one block of almost 32 MB, the largest that
    counts, raises that bound to 64 MB for this process; nothing is ever written to it. Elsewhere this does nothing.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


# -------------------- processes


def is_torchrun_worker() -> bool:
    """Whether torchrun started this process, as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of several: the one that writes files and prints."""
    return num_processes() == 1 or distributed.get_rank() == 0


def num_processes() -> int:
    """How many processes are connected to each other, this one counted."""
    connected = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if connected else 1


def connect(options: TrainingOptions) -> int:
    """Start, or join, the processes that the options ask for, ahead of any run; returns their number.

    >>> connect(TrainingOptions(accelerator="cpu"))
    1
    """
    kind, devices, num_nodes = resolve_devices(options)
    if devices * num_nodes > 1 and not is_torchrun_worker():
        _start_torchrun(devices)
    if devices * num_nodes > 1 and num_processes() == 1:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        atexit.register(distributed.destroy_process_group)
        if not is_main_process():
            sys.excepthook = silent_on_interrupt(sys.excepthook)
    return devices * num_nodes


def silent_on_interrupt(hook: Callable[..., Any]) -> Callable[..., Any]:
    """An exception hook as this one, but for Ctrl-C, of which the first process tells."""

    def told(kind: type[BaseException], *rest: Any) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            hook(kind, *rest)

    return told


def resolve_devices(options: TrainingOptions) -> tuple[str, int, int]:
    """The kind of device, how many of them each machine uses, and machines; or one line that says why that cannot be.

    >>> resolve_devices(TrainingOptions(accelerator="cpu", num_nodes=1))
    ('cpu', 1, 1)
    """
    kind, cores = device_kind(options.accelerator), os.cpu_count() or 1
    there = torch.cuda.device_count() if kind == "cuda" else 1
    devices = there if options.devices == "auto" else int(options.devices)
    asked, num_nodes, argument, trouble = options.devices, options.num_nodes, "devices", ""
    if is_torchrun_worker():
        world, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if asked not in (1, "auto", here) or num_nodes not in (1, world // here):
            trouble = (
                f"torchrun started {here} processes on each of {world // here} machines, which does not go with "
                f"devices={asked!r}, num_nodes={num_nodes}: leave them out, or start as many"
            )
        devices, num_nodes = here, world // here
    elif num_nodes > 1:
        argument = "num_nodes"
        trouble = f"num_nodes={num_nodes}: start the script with torchrun on every machine (docs/devices.md)"
    if not kind:
        argument, wanted = "accelerator", "Apple's GPU" if options.accelerator == "mps" else "a GPU"
        reason = "it is built without CUDA" if torch.version.cuda is None else "no driver or no device"
        trouble = (
            f"accelerator={options.accelerator!r} asks for {wanted} and torch sees none here ({reason}): use accelerator='cpu', or "
            "run it where there is one"
        )
    elif options.precision == "16-mixed" and kind != "cuda":
        argument, trouble = "precision", "precision='16-mixed' needs a CUDA device: use 'bf16-mixed'"
    elif kind == "cpu" and devices > MOST_PER_CORE * cores:
        trouble = (
            f"devices={devices} would start {devices} processes on {pluralize(cores, 'core')}, which would mostly wait "
            f"for each other: ask for at most {MOST_PER_CORE * cores}"
        )
    elif kind != "cpu" and devices > there:
        name = torch.cuda.get_device_name(0) if kind == "cuda" else "Apple's GPU"
        trouble = (
            f"devices={devices} was asked for and this machine has {pluralize(there, 'GPU')} ({name}): ask for at most "
            f"{there}, or use accelerator='cpu', which takes any number of processes"
        )
    elif devices > 1 and not is_torchrun_worker() and not _script():
        trouble = (
            f"devices={devices} runs the script again in several processes, and there is none (a notebook, python -c): write it to "
            "a file, or use torchrun"
        )
    if trouble:
        raise FlowBNNError(trouble, kind="devices", argument=argument)
    return kind, devices, num_nodes


def _script() -> list[str]:
    """What python was started with, as arguments that start it again; nothing in a notebook."""
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is not None:
        return ["-m", spec.name.removesuffix(".__main__")]
    return [os.path.abspath(sys.argv[0])] if sys.argv and os.path.isfile(sys.argv[0]) else []


def _start_torchrun(devices: int) -> None:
    """Run this script again under torchrun, in place of this process."""
    command = ["-c", TORCHRUN, "--standalone", "--nproc-per-node", str(devices)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    os.execv(sys.executable, [sys.executable, *command, *_script(), *sys.argv[1:]])


def device_kind(accelerator: str) -> str:
    """``"cpu"``, ``"cuda"`` or ``"mps"``, as asked for; empty where it is not there.

    >>> device_kind("cpu")
    'cpu'
    """
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    allowed = {"auto": list(there), "gpu": ["cuda", "mps"]}.get(accelerator, [accelerator])
    return next((kind for kind in allowed if there[kind]), "")


def run_on_main(function: Callable[[], Result]) -> Result:
    """What a function, which only the first process calls, returns there, sent to all; none goes on before all have it.

    Where that is an error, the first process raises it and the others end in silence.

    >>> run_on_main(lambda: 3)
    3
    """
    if num_processes() == 1:
        return function()
    box: list[Any] = [None, False]
    trouble: BaseException = SystemExit(2)
    if is_main_process():
        try:
            box[0] = function()
        except FlowBNNError as error:
            trouble, box[1] = error, True
    distributed.broadcast_object_list(box, 0)
    distributed.barrier()
    if box[1]:
        raise trouble
    return box[0]
