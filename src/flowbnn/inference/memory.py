"""How many rows go through a network at once: what the device's memory holds, found by measuring, and less when that fails."""

import os
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.inference.batches import call, rows, take, tensors_of
from flowbnn.inference.passes import device_of, dtype_of, evaluating
from flowbnn.layers import noise, noise_layers

__all__ = ["Limit", "max_rows", "out_of_memory"]

Result = TypeVar("Result")

# past its caches a CPU gains nothing from more rows at once, and loses where the C library gives memory back between passes: beyond
# 64 MB, see flowbnn.training.machine.keep_memory
CPU_BYTES = 3 * 2**24
GPU_BYTES = 2**33  # nor does a GPU when it is full
LEAST, MOST = 16, 2**17
MEASURED = 64  # rows of the passes that are measured
WORDS = ("out of memory", "not enough memory", "can't allocate memory", "ALLOC_FAILED")


def out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a CUDA device or on the CPU."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in WORDS)


class Limit:
    """The rows of one pass, halved whenever memory runs out.

    Args:
        rows: to begin with.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.told = False

    def attempt(self, work: Callable[[], Result], tried: int) -> Result | None:
        """Do ``work``, which takes ``tried`` rows; None when memory ran out, after which :attr:`rows` is smaller."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if not out_of_memory(error):
                raise
        # here the exception, and with it what the failed pass held, is gone
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        if tried <= 1:
            raise FlowBNNError(
                "memory ran out with a single row in the pass; free memory on the device, or predict in a lower precision"
            )
        self.rows = max(1, tried // 2)
        if not self.told:
            self.told = True
            warnings.warn(
                f"memory ran out with {tried} rows in one pass; going on with {self.rows}, and fewer if need be "
                f"(max_batch={self.rows} starts there)",
                FlowBNNWarning,
            )
        return None


_PER_ROW: WeakKeyDictionary[nn.Module, dict[Any, int]] = WeakKeyDictionary()


def max_rows(model: nn.Module, inputs: Any) -> int:
    """How many rows fit a pass: on a CUDA device by measuring small passes once, elsewhere by the network's widest place."""
    device = device_of(model)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        free = torch.cuda.mem_get_info(device)[0] // 2
        if free < GPU_BYTES:  # torch's own counts take longer to read
            free += (torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)) // 2
        free = min(free, GPU_BYTES)
        known = _PER_ROW.setdefault(model, {})
        key = (
            min(MEASURED, rows(inputs)),
            tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors_of(inputs)),
            dtype_of(model),
            torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type),
        )
        if key not in known:
            known[key] = _measured(model, inputs, device)
        per_row = known[key]
    else:
        free, per_row = _free_memory(), 0
    # beside a layer's input and output live the noise and the product
    per_row = per_row or 3 * _widest(model, take(inputs, 0, min(2, rows(inputs))))
    return int(min(max(free // max(1, per_row), LEAST), MOST))


def _free_memory() -> int:
    try:
        pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (ValueError, OSError, AttributeError):
        pages = 2**30
    return min(pages, CPU_BYTES)


def _plainly(model: nn.Module, inputs: Any) -> None:
    with evaluating(model), noise(model, "off") if noise_layers(model) else nullcontext():
        call(model, inputs)


def _measured(model: nn.Module, inputs: Any, device: torch.device) -> int:
    """Bytes that one more row adds to the peak, with half as much again for the noise; 0 if there are too few rows to tell."""
    many = min(MEASURED, rows(inputs))
    few = many // 2
    if few < 1:
        return 0
    peaks = []
    for count in (few, few, many):  # the first pass sets up libraries, whose memory is no row's
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        _plainly(model, take(inputs, 0, count))
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    return 3 * max(0, peaks[2] - peaks[1]) // (2 * (many - few))


def _widest(model: nn.Module, few: Any) -> int:
    """Bytes of one row at the place where a module reads and writes the most."""
    widest = 0

    def measure(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal widest
        sizes = [t.numel() * t.element_size() for t in (*args, output) if isinstance(t, Tensor)]
        widest = max(widest, sum(sizes))

    handles = [module.register_forward_hook(measure) for module in model.modules()]
    try:
        _plainly(model, few)
    finally:
        for handle in handles:
            handle.remove()
    return widest // rows(few)
