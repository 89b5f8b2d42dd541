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

__all__ = ["alone", "connect", "device_kind", "is_main_process", "launched", "processes", "settled_devices"]

MOST_PER_CORE = 16  # processes for each core of a machine


def launched() -> bool:
    """Whether torchrun started this process, as one of several.

    >>> launched()
    False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of several: the one that writes files and prints.

    >>> is_main_process()
    True
    """
    return processes() == 1 or distributed.get_rank() == 0


def processes() -> int:
    """How many processes are connected to each other, this one counted.

    >>> processes()
    1
    """
    connected = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if connected else 1


def connect(options: TrainingOptions) -> int:
    """Start, or join, the processes that the options ask for, ahead of any run; returns their number.

    >>> connect(TrainingOptions(accelerator="cpu"))
    1
    """
    kind = device_kind(options.accelerator)
    devices, num_nodes = settled_devices(kind, options.devices, options.num_nodes)
    if devices * num_nodes > 1 and not launched():
        _start_torchrun(devices, num_nodes)
    if devices * num_nodes > 1 and processes() == 1:
        if kind == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        distributed.init_process_group("nccl" if kind == "cuda" else "gloo")
        atexit.register(distributed.destroy_process_group)
    return devices * num_nodes


def _start_torchrun(devices: int, num_nodes: int) -> None:
    """Run this script again under torchrun, in place of this process."""
    import __main__

    spec = getattr(__main__, "__spec__", None)
    trouble, argument = "", "devices"
    if num_nodes > 1:
        argument = "num_nodes"
        trouble = f"num_nodes={num_nodes}: start the script with torchrun on every machine (docs/devices.md)"
    elif spec is None and (not sys.argv or not os.path.isfile(sys.argv[0])):
        trouble = (
            f"devices={devices} runs the script again in several processes, and there is none (a notebook, python -c): write it to "
            "a file, or use torchrun"
        )
    if trouble:
        raise FlowBNNError(trouble, kind="devices", argument=argument)
    target = [os.path.abspath(sys.argv[0])] if spec is None else ["-m", spec.name.removesuffix(".__main__")]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(devices)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // devices)))
    os.execv(sys.executable, [sys.executable, *command, *target, *sys.argv[1:]])


def settled_devices(kind: str, devices: int | str, num_nodes: int) -> tuple[int, int]:
    """How many devices each machine uses and how many machines there are, or one line that says why it cannot be.

    Under torchrun, what it started is what there is.

    Args:
        kind: as :func:`device_kind` gives it.
        devices, num_nodes: as in :class:`TrainingOptions`.

    >>> settled_devices("cpu", 2, 1)
    (2, 1)
    """
    there = torch.cuda.device_count() if kind == "cuda" else 1
    cores = os.cpu_count() or 1
    trouble = ""
    if launched():
        world, here = int(os.environ["WORLD_SIZE"]), int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        if devices not in (1, "auto", here) or num_nodes not in (1, world // here):
            trouble = (
                f"torchrun started {here} processes on each of {world // here} machines, which does not go with "
                f"devices={devices!r}, num_nodes={num_nodes}: leave them out, or start as many"
            )
        devices, num_nodes = here, world // here
    number = there if devices == "auto" else int(devices)
    if not trouble and kind == "cpu" and number > MOST_PER_CORE * cores:
        trouble = (
            f"devices={number} would start {number} processes on {cores} core{'s' if cores > 1 else ''}, which would mostly wait "
            f"for each other: ask for at most {MOST_PER_CORE * cores}"
        )
    if not trouble and kind != "cpu" and number > there:
        name = torch.cuda.get_device_name(0) if kind == "cuda" else "Apple's GPU"
        trouble = (
            f"devices={number} was asked for and this machine has {there} GPU{'s' if there > 1 else ''} ({name}): ask for at most "
            f"{there}, or use accelerator='cpu', which takes any number of processes"
        )
    if trouble:
        raise FlowBNNError(trouble, kind="devices", argument="devices")
    return number, num_nodes


def device_kind(accelerator: str) -> str:
    """``"cpu"``, ``"cuda"`` or ``"mps"``, as asked for and as is there.

    >>> device_kind("cpu")
    'cpu'
    """
    cuda, mps = torch.cuda.is_available(), torch.backends.mps.is_available()
    there = {"auto": True, "cpu": True, "cuda": cuda, "mps": mps, "gpu": cuda or mps}
    if not there[accelerator]:
        wanted = "Apple's GPU" if accelerator == "mps" else "a GPU"
        reason = "it is built without CUDA" if torch.version.cuda is None else "no driver or no device"
        raise FlowBNNError(
            f"accelerator={accelerator!r} asks for {wanted} and torch sees none here ({reason}): use accelerator='cpu', or run it "
            "where there is one",
            kind="devices",
            argument="accelerator",
        )
    if accelerator in ("auto", "gpu"):
        return "cuda" if cuda else "mps" if mps else "cpu"
    return accelerator


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
    trouble: FlowBNNError | None = None
    if is_main_process():
        try:
            box[0] = function()
        except FlowBNNError as error:
            trouble, box[1] = error, True
    distributed.broadcast_object_list(box, 0)
    distributed.barrier()
    if trouble is not None:
        raise trouble
    if box[1]:
        raise SystemExit(2)
    return box[0]
