"""What a computation costs: its time and its peak memory."""

import ctypes
import gc
import time
from contextlib import suppress
from pathlib import Path

import torch


def clock(device: torch.device | None = None) -> float:
    """Seconds: CPU time where one thread computes, so that other processes do not count; else wall time."""
    if device is not None and device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


class PeakMemory:
    """Peak memory since this was made, beyond what was in use then, in megabytes; None where the system does not say.

    On a GPU by torch's counter; on Linux by the high-water mark of the process, which is reset first.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.device = device if device is not None and device.type == "cuda" else None
        gc.collect()
        if self.device is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            self.before: float | None = torch.cuda.memory_allocated(self.device) / 2**20
            return
        with suppress(OSError, AttributeError):  # give back what earlier work left in the heap
            ctypes.CDLL(None).malloc_trim(0)
        self.before = None
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
            self.before = _status("VmRSS")

    def read(self) -> float | None:
        """Megabytes so far."""
        if self.before is None:
            return None
        if self.device is not None:
            return torch.cuda.max_memory_allocated(self.device) / 2**20 - self.before
        return max(0.0, _status("VmHWM") - self.before)


def _status(name: str) -> float:
    """A line of what Linux tells about this process, in megabytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))
