"""Starts the command line in several processes by torchrun."""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from flowbnn.training import TrainingOptions
from flowbnn.training.device import resolve_devices

# torchrun, but without a traceback on Ctrl-C, which the processes themselves report
TORCHRUN = """
import sys
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.run import main
try:
    main()
except SignalException as stop:
    sys.exit(128 + stop.sigval)
"""


def torchrun_command(devices: int, arguments: Sequence[str]) -> list[str]:
    """Returns the command that runs ``flowbnn`` with some arguments in several processes.

    Args:
        devices: Number of processes.
        arguments: Arguments of the command line.

    >>> torchrun_command(2, ["run", "digits"])[3:]
    ['--standalone', '--nproc-per-node', '2', '-m', 'flowbnn_studies', 'run', 'digits']
    """
    launcher = [sys.executable, "-c", TORCHRUN, "--standalone", "--nproc-per-node", str(devices)]
    return [*launcher, "-m", "flowbnn_studies", *arguments]


def launch(accelerator: str, devices: int, num_nodes: int, arguments: Sequence[str]) -> int:
    """Runs ``flowbnn`` in several processes and returns the exit status of torchrun.

    Args:
        accelerator: Type of device.
        devices: Number of processes.
        num_nodes: Number of machines. With more than one, torchrun must be started by hand on each.
        arguments: Arguments of the command line.

    Raises:
        FlowBNNError: If the machine does not have these devices.
    """
    resolve_devices(TrainingOptions(accelerator=accelerator, devices=devices, num_nodes=num_nodes))  # type: ignore[arg-type]
    threads = str(max(1, (os.cpu_count() or 1) // devices))
    environment = {"OMP_NUM_THREADS": threads, **os.environ}
    # torchrun receives Ctrl-C too, saves the state and ends; this process waits for it
    handler = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        return subprocess.call(torchrun_command(devices, arguments), env=environment)
    finally:
        signal.signal(signal.SIGINT, handler)
