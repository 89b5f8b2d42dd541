"""Free memory of a device, the check of results that would not fit it, and errors of memory that ran out."""

import math
from contextlib import suppress
from pathlib import Path

import torch

from flowbnn.errors import FlowBNNError

# a smaller result is allocated without reading how much memory is free, which takes a few system calls
SMALL_BYTES = 2**28


def free_memory(device: torch.device) -> float:
    """Returns the free memory of a device in bytes, infinity if it is unknown."""
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + cached
    limits = [math.inf]
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        limits += [int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")  # the limit of a container may be lower than that of the machine
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0.0, min(limits))


def is_out_of_memory(error: BaseException) -> bool:
    """Returns True if an exception means that memory ran out, on a CUDA device or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    phrases = "out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED"
    return isinstance(error, RuntimeError) and any(phrase in str(error) for phrase in phrases)


def check_memory(
    argument: str, /, value: object, num_bytes: float, device: torch.device, hint: str = "use fewer"
) -> None:
    """Raises FlowBNNError if a result needs more than half of the free memory. The other half is for intermediate results.

    Args:
        argument: Name of the argument that sets the size of the result.
        value: Value of the argument.
        num_bytes: Number of bytes of the result.
        device: Device of the result.
        hint: Advice that follows the message.

    >>> check_memory("samples", 10, 4e3, torch.device("cpu"))
    >>> check_memory("samples", 10**9, 4e15, torch.device("cpu"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: samples=1000000000 needs 3.73e+06 GiB of memory, ... GiB are free; use fewer
    """
    if num_bytes <= SMALL_BYTES:
        return
    free = free_memory(device)
    if num_bytes > free / 2:
        needed = f"{argument}={value!r} needs {num_bytes / 2**30:.3g} GiB of memory"
        text = f"{needed}, {free / 2**30:.3g} GiB are free; {hint}"
        raise FlowBNNError(text, kind="memory", argument=argument, needed=num_bytes)
