"""The processes of a run: how many there are, starting them with torchrun, and what only the first of them does."""

import atexit
import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import distributed

from flowbnn.errors import FlowBNNError
from flowbnn.training.options import TrainingOptions

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


def launched() -> bool:
    """Whether torchrun started this process, as one of several."""
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of several: the one that writes files and prints."""
    return processes() == 1 or distributed.get_rank() == 0


def processes() -> int:
    """How many processes are connected to each other, this one counted."""
    connected = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if connected else 1


def connect(options: TrainingOptions) -> int:
    """Start, or join, the processes that the options ask for, ahead of any run; returns their number.

    >>> connect(TrainingOptions(accelerator="cpu"))
    1
    """
    kind, devices, num_nodes = planned(options)
    if devices * num_nodes > 1 and not launched():
        _start_torchrun(devices)
    if devices * num_nodes > 1 and processes() == 1:
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


def planned(options: TrainingOptions) -> tuple[str, int, int]:
    """The kind of device, how many of them each machine uses, and machines; or one line that says why that cannot be.

    >>> planned(TrainingOptions(accelerator="cpu", num_nodes=1))
    ('cpu', 1, 1)
    """
    kind, cores = device_kind(options.accelerator), os.cpu_count() or 1
    there = torch.cuda.device_count() if kind == "cuda" else 1
    devices = there if options.devices == "auto" else int(options.devices)
    asked, num_nodes, argument, trouble = options.devices, options.num_nodes, "devices", ""
    if launched():
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
            f"devices={devices} would start {devices} processes on {cores} core{'s' if cores > 1 else ''}, which would mostly wait "
            f"for each other: ask for at most {MOST_PER_CORE * cores}"
        )
    elif kind != "cpu" and devices > there:
        name = torch.cuda.get_device_name(0) if kind == "cuda" else "Apple's GPU"
        trouble = (
            f"devices={devices} was asked for and this machine has {there} GPU{'s' if there > 1 else ''} ({name}): ask for at most "
            f"{there}, or use accelerator='cpu', which takes any number of processes"
        )
    elif devices > 1 and not launched() and not _script():
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


Result = TypeVar("Result")


def alone(function: Callable[[], Result]) -> Result:
    """What a function, which only the first process calls, returns there, sent to all; none goes on before all have it.

    Where that is an error, the first process raises it and the others end in silence.

    >>> alone(lambda: 3)
    3
    """
    if processes() == 1:
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
