"""Starting the processes of a run that several devices share, and ending them together."""

import atexit
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from flowbnn.errors import FlowBNNError

__all__ = [
    "Children",
    "alone",
    "is_main_process",
    "launched",
    "processes",
    "settled_devices",
    "start_processes",
]

PATIENCE = 20.0  # seconds in which the first process may tell of a dead one itself
CROWD = 16  # processes for each core of a machine that are too many
FAREWELL = 60.0  # seconds in which the others may finish when the first is done


def launched() -> bool:
    """Whether torchrun started this process, as one of several.

    >>> launched()
    False
    """
    return "TORCHELASTIC_RUN_ID" in os.environ and int(os.environ.get("WORLD_SIZE", 1)) > 1


def settled_devices(accelerator: str, devices: int | str, num_nodes: int) -> tuple[int | str, int]:
    """How many devices each machine uses and how many machines there are, or one line that says why it cannot be.

    Under torchrun, what it started is what there is.

    >>> settled_devices("cpu", 2, 1)
    (2, 1)
    """
    where = _accelerator(accelerator)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        world, here = (int(os.environ.get(name, 1)) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if str(devices) not in ("1", "auto", str(here)) or num_nodes not in (1, world // here):
            raise FlowBNNError(
                f"torchrun started {here} processes on each of {world // here} machines, which does not go with "
                f"devices={devices!r}, num_nodes={num_nodes}: leave them out, or start as many"
            )
        devices, num_nodes = here, world // here
    number = int(devices) if str(devices).isdigit() else None
    if number is None:
        return devices, num_nodes
    if number < 1:
        raise FlowBNNError(f"devices is at least 1, not {devices}")
    cores = os.cpu_count() or 1
    if where == "cpu" and number > CROWD * cores and "LOCAL_RANK" not in os.environ:
        raise FlowBNNError(
            f"devices={number} would start {number} processes on {cores} core{'s' if cores > 1 else ''}, which would mostly wait for "
            f"each other: ask for at most {CROWD * cores}"
        )
    there = torch.cuda.device_count() if where == "cuda" else 1
    if where in ("cuda", "mps") and number > there:
        kind = torch.cuda.get_device_name(0) if where == "cuda" else "Apple's GPU"
        plural = "s" if there > 1 else ""
        raise FlowBNNError(
            f"devices={number} was asked for and this machine has {there} GPU{plural} ({kind}): ask for at most {there}, "
            "or use accelerator='cpu', which takes any number of processes"
        )
    running = int(os.environ.get("WORLD_SIZE", 1)) if "LOCAL_RANK" in os.environ else 1
    if running > 1 and number * num_nodes not in (1, running):
        raise FlowBNNError(
            f"{running} processes are running already, so this run cannot have {number * num_nodes}: use one number in "
            "all of a script"
        )
    return number, num_nodes


def _accelerator(asked: str) -> str:
    cuda = torch.cuda.is_available()
    mps = torch.backends.mps.is_available()
    if (asked == "cuda" and not cuda) or (asked == "gpu" and not cuda and not mps):
        reason = (
            "this torch is built without CUDA" if torch.version.cuda is None else "no driver or no device"
        )
        raise FlowBNNError(
            f"accelerator={asked!r} asks for a GPU and torch sees none here ({reason}): use accelerator='cpu', or run it "
            "where there is one"
        )
    if asked == "mps" and not mps:
        raise FlowBNNError(
            "accelerator='mps' asks for Apple's GPU and torch sees none here: use accelerator='cpu'"
        )
    if asked in ("auto", "gpu"):
        return "cuda" if cuda else "mps" if mps else "cpu"
    return asked


def start_processes(number: int, num_nodes: int) -> None:
    """Run this script again in ``number - 1`` more processes of this machine, which join this one; once in a process."""
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK") if name not in os.environ]
    if num_nodes > 1 and missing:
        raise FlowBNNError(
            f"num_nodes={num_nodes} needs {', '.join(missing)} in the environment of every machine: start it with torchrun, "
            "which sets them (docs/devices.md)"
        )
    command = _command()
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", str(_free_port()))
    os.environ.setdefault("NODE_RANK", "0")
    os.environ.update(LOCAL_RANK="0", WORLD_SIZE=str(number * num_nodes))
    first = int(os.environ["NODE_RANK"]) * number
    started = {
        first + rank: subprocess.Popen(command, env=os.environ | {"LOCAL_RANK": str(rank)})
        for rank in range(1, number)
    }
    Children(started, number * num_nodes).start()


class Children(threading.Thread):
    """Watches the processes that this one started: none outlives the others for long.

    A process that waits for a dead one on a CPU is told so by the connection, at once. On a GPU it may wait for ever:
    then this thread ends it.
    """

    advice = ""  # what to do about a lost run, told by the run that is going on

    def __init__(self, processes: dict[int, "subprocess.Popen[bytes]"], world: int) -> None:
        super().__init__(daemon=True, name="flowbnn-children")
        self.processes, self.world = processes, world
        atexit.register(self.farewell)

    def run(self) -> None:
        while True:
            codes = {rank: process.poll() for rank, process in self.processes.items()}
            if all(code == 0 for code in codes.values()):
                return
            failed = next((rank for rank, code in codes.items() if code), None)
            if failed is not None:
                time.sleep(PATIENCE)
                self.end(f"worker {failed} of {self.world} {_fate(codes[failed] or 0)}{Children.advice}")
            time.sleep(0.2)

    def end(self, message: str) -> None:
        """End this process and all others, with a message."""
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        print(f"flowbnn: {message}", file=sys.stderr, flush=True)
        os._exit(1)

    def farewell(self) -> None:
        """At the end of this process: the others end too, by themselves if they can."""
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # whoever waits for this process is told that it is gone
        until = time.monotonic() + FAREWELL
        for process in self.processes.values():
            try:
                process.wait(max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
        sys.stderr.flush()


def _fate(code: int) -> str:
    """What an exit code says.

    >>> _fate(-9), _fate(2)
    ('was killed by SIGKILL', 'ended with exit code 2')
    """
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def _command() -> Sequence[str]:
    import __main__

    spec = getattr(__main__, "__spec__", None)
    if spec is not None:
        name = spec.name.removesuffix(".__main__")
        return [sys.executable, "-m", name, *sys.argv[1:]]
    if not sys.argv or not os.path.isfile(sys.argv[0]):
        raise FlowBNNError(
            "several processes are started by running the script again, and here is none (a notebook, python -c): "
            "write it to a file, or use torchrun"
        )
    return [sys.executable, os.path.abspath(sys.argv[0]), *sys.argv[1:]]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# -------------------- processes.py

Result = TypeVar("Result")


def is_main_process() -> bool:
    """Whether this process is the only one, or the first of several: the one that writes and speaks.

    >>> is_main_process()
    True
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return not several or torch.distributed.get_rank() == 0


def processes() -> int:
    """How many processes are connected to each other, this one counted.

    >>> processes()
    1
    """
    several = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if several else 1


def alone(function: Callable[[], Result]) -> Result:
    """What the first of all processes makes of a function, which only it calls, told to all; none goes on before all have it.

    Where that is an error, the first process tells it and the others end in silence.

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
    torch.distributed.broadcast_object_list(box, 0)
    torch.distributed.barrier()
    if trouble is not None:
        raise trouble
    if box[1]:
        raise SystemExit(2)
    return box[0]
