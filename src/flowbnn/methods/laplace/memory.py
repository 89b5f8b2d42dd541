"""The memory that a Laplace approximation needs, checked before the fit begins."""

import logging
import os
import warnings
from pathlib import Path

import torch
from torch import nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.laplace.jacobian import ROW_BYTES
from flowbnn.methods.laplace.layers import CoveredLayer, Survey

__all__ = ["available_bytes", "bytes_needed", "check_memory"]

REFUSED, WARNED = 1 / 2, 1 / 8  # of the memory that is free


def bytes_needed(structure: str, model: nn.Module, layers: list[CoveredLayer], seen: Survey) -> int:
    """Bytes at the peak of a fit: sums in float64, their eigenvectors, and the Jacobians that are held at once."""
    parameters = [[model.get_parameter(name) for name in layer.shapes] for layer in layers]
    weights = sum(parameter.numel() for layer in parameters for parameter in layer)
    element = max(parameter.element_size() for layer in parameters for parameter in layer)
    row, jacobians = 3 * weights * element, 0
    if [layer.name for layer in layers] != [seen.direct]:
        jacobians = max(row, min(ROW_BYTES, row * seen.outputs * seen.batch))
    if structure == "diag":
        return 8 * 3 * weights + jacobians
    factors = [weights]
    if structure == "kron":
        jacobians = 0
        factors = [sum(p[0].numel() if p.ndim > 1 else 1 for p in layer) for layer in parameters]
        factors += [len(layer[0]) if layer[0].ndim else 1 for layer in parameters]
    # the sums and their eigenvectors, and what finding the largest ones takes
    return 8 * (2 * sum(size**2 for size in factors) + 4 * max(factors) ** 2) + jacobians


def available_bytes(device: torch.device) -> int | None:
    """Free memory, or None where it is not known."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + spare)
    free = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")  # a container may have less than the machine
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    if not free and hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        free = [os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    return max(0, min(free)) if free else None


def readable(count: float) -> str:
    """Bytes for people.

    >>> readable(1536), readable(7e12)
    ('1.5 kB', '6.37 TB')
    """
    unit = 0
    while count >= 1024 and unit < 5:
        count, unit = count / 1024, unit + 1
    return f"{count:.3g} {('bytes', 'kB', 'MB', 'GB', 'TB', 'PB')[unit]}"


def check_memory(
    structure: str, model: nn.Module, layers: list[CoveredLayer], seen: Survey, device: torch.device
) -> int:
    """The bytes that are needed: logged always, a warning where they are many, an error where they are too many."""
    needed, free = bytes_needed(structure, model, layers, seen), available_bytes(device)
    weights = sum(model.get_parameter(name).numel() for layer in layers for name in layer.shapes)
    line = f"a '{structure}' Laplace approximation of {weights:,} weights needs {readable(needed)} of memory"
    logging.getLogger("flowbnn").info(line)
    if free is None or needed <= WARNED * free:
        return needed
    line += f", and {readable(free)} are free"
    if needed <= REFUSED * free:
        warnings.warn(FlowBNNWarning(line, kind="memory", needed=needed, free=free))
        return needed
    others = {name: bytes_needed(name, model, layers, seen) for name in ("kron", "diag") if name != structure}
    cheaper = [f"'{name}' ({readable(less)})" for name, less in others.items() if less < needed]
    advice = " or ".join([*cheaper, "fewer layers (layers='last' or a glob)"])
    raise FlowBNNError(f"{line}: take {advice}", kind="memory", needed=needed, free=free)
