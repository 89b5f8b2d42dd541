"""What a Laplace approximation will need of memory, told before anything is allocated."""

import logging
import os
import warnings
from pathlib import Path

import torch
from torch import nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.inference.laplace_layers import CoveredLayer, Survey
from flowbnn.inference.laplace_rows import ROW_BYTES
from flowbnn.training.progress import get_console

__all__ = ["available_bytes", "bytes_needed", "check_memory", "readable"]

REFUSED, WARNED = 1 / 2, 1 / 8  # of what is free


def bytes_needed(structure: str, model: nn.Module, layers: list[CoveredLayer], seen: Survey) -> int:
    """Bytes at the peak of a fit: sums in float64, their eigenvectors, and the Jacobians that are held at once."""
    own = dict(model.named_parameters())
    sizes = [[own[name] for name in layer.names] for layer in layers]
    weights = sum(parameter.numel() for layer in sizes for parameter in layer)
    each = max((parameter.element_size() for layer in sizes for parameter in layer), default=4)
    row, jacobians = 3 * weights * each, 0
    if [layer.name for layer in layers] != [seen.direct]:
        jacobians = max(row, min(ROW_BYTES, row * seen.outputs * seen.batch))
    if structure == "diag":
        return 8 * 3 * weights + jacobians
    factors = [weights]
    if structure == "kron":
        jacobians = 0
        factors = [sum(p[0].numel() if p.ndim > 1 else 1 for p in layer) for layer in sizes]
        factors += [layer[0].shape[0] for layer in sizes]
    # the sums and their eigenvectors, and what finding the largest ones takes
    return 8 * (2 * sum(size**2 for size in factors) + 4 * max(factors) ** 2) + jacobians


def available_bytes(device: torch.device) -> int | None:
    """Memory that could be had now, or None where that cannot be told."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + spare)
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) * 1024)
    except (OSError, ValueError, IndexError):
        pass
    if not found:
        try:
            found.append(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
        except (ValueError, OSError, AttributeError):
            return None
    try:  # a container may hold less than the machine
        group = Path("/sys/fs/cgroup")
        found.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    except (OSError, ValueError):
        pass
    return max(0, min(found))


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
    structure: str,
    model: nn.Module,
    layers: list[CoveredLayer],
    seen: Survey,
    device: torch.device,
    shown: bool = False,
) -> int:
    """Say what is needed: in the log always, as a warning where it is much, and with a refusal where it is too much.

    Args:
        shown: say it on the terminal too, where there is one.
    """
    needed, free = bytes_needed(structure, model, layers, seen), available_bytes(device)
    own = dict(model.named_parameters())
    weights = sum(own[name].numel() for layer in layers for name in layer.names)
    told = f"a '{structure}' Laplace approximation of {weights:,} weights needs {readable(needed)} of memory"
    logging.getLogger("flowbnn").info(told)
    console = get_console()
    if shown and console.is_terminal:
        console.print(told, highlight=False)
    if free is None or needed <= WARNED * free:
        return needed
    told += f", and {readable(free)} are free"
    if needed <= REFUSED * free:
        warnings.warn(told, FlowBNNWarning)
        return needed
    cheaper = []
    for other in ("kron", "diag"):
        try:
            less = bytes_needed(other, model, layers, seen)
        except (IndexError, ValueError):
            continue
        if other != structure and less < needed:
            cheaper.append(f"'{other}' ({readable(less)})")
    cheaper.append("fewer layers (layers='last' or a glob)")
    raise FlowBNNError(f"{told}: take {' or '.join(cheaper)}")
