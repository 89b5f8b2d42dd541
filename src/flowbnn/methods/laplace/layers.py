"""Which layers a Laplace approximation covers, whether its structure can serve them, and the memory that it needs for them."""

import logging
import os
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowbnn.batches import device_of
from flowbnn.errors import FlowBNNError, FlowBNNWarning, nearest
from flowbnn.methods.laplace.blocks import Shapes
from flowbnn.methods.laplace.jacobian import ROW_BYTES
from flowbnn.posterior.batches import call, rows, take
from flowbnn.posterior.forward import evaluating

__all__ = [
    "CoveredLayer",
    "Survey",
    "bytes_needed",
    "check_memory",
    "choose_layers",
    "shares_weights",
    "survey",
    "without_nested",
]

REFUSED, WARNED = 1 / 2, 1 / 8  # of the memory that is free
PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class CoveredLayer:
    """A layer and the shapes of those of its parameters that get a posterior, under the names they have in the network."""

    name: str
    shapes: Shapes


@dataclass
class Survey:
    """What one small pass showed.

    Args:
        order: layers with parameters, in the order in which they were called.
        calls: how often each was.
        shapes: of each one's first input.
        direct: the Linear layer whose output is the network's, where there is one.
        rows: examples in that pass.
        batch: examples in the batch they are from.
        outputs: numbers that the network gives for each.
    """

    order: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    direct: str | None = None
    rows: int = 0
    batch: int = 1
    outputs: int = 1


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """A module's own parameters, including those behind a parametrization."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def holders(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold parameters themselves, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".") and next(own_parameters(module), None) is not None
    }


def without_nested(model: nn.Module) -> nn.Module:
    """The network with its transformers kept to ordinary tensors: nested ones bypass the layers' hooks."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def survey(model: nn.Module, inputs: Any = None) -> Survey:
    """Run up to three rows and see which layers are called; without inputs, the layers in the order of the network."""
    layers = holders(model)
    if inputs is None:
        return Survey(list(layers), Counter(layers.keys()))
    seen, results = Survey(rows=min(3, rows(inputs)), batch=rows(inputs)), dict[str, Any]()

    def hook(name: str, module: nn.Module, args: Any, output: Any) -> None:
        seen.calls[name] += 1
        results[name] = output

    def pre_hook(name: str, module: nn.Module, args: Any) -> None:
        seen.order.append(name)
        if args and isinstance(args[0], Tensor):
            seen.shapes.setdefault(name, args[0].shape)

    handles = []
    for name, module in layers.items():
        handles.append(module.register_forward_pre_hook(partial(pre_hook, name)))
        handles.append(module.register_forward_hook(partial(hook, name)))
    try:
        with evaluating(model):
            outputs = call(model, take(inputs, 0, seen.rows))
    finally:
        for handle in handles:
            handle.remove()
    seen.outputs = outputs[:1].numel()
    last = seen.order[-1] if seen.order else None
    if (
        last is not None
        and results.get(last) is outputs
        and outputs.ndim == 2
        and seen.calls[last] == 1
        and _is_plain(layers[last], (nn.Linear,))
        and shares_weights(model, last) is None
    ):
        seen.direct = last
    return seen


def choose_layers(model: nn.Module, seen: Survey, which: str, structure: str) -> list[CoveredLayer]:
    """The layers that ``which`` (``"last"``, ``"all"`` or a glob) means, refused where the structure cannot serve one."""
    layers = holders(model)
    if which == "last":
        names = seen.order[-1:]
    else:
        names = [name for name in layers if which == "all" or fnmatchcase(name, which)]
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    covered, taken = [], set[str]()
    for name in names:
        module = layers[name]
        own = {
            canonical[id(parameter)]: tuple(parameter.shape)
            for parameter in own_parameters(module)
            if parameter.is_floating_point() and (which == "last" or parameter.requires_grad)
        }
        if not own or (structure == "kron" and isinstance(module, NORMS) and which != name):
            continue
        reason = _unfit_for_kron(model, name, module, seen) if structure == "kron" else None
        if reason is not None:
            raise FlowBNNError(
                f"Kronecker factors do not serve layer '{name}' ({type(module).__name__}), {reason}; Laplace('diag') or "
                "Laplace('full') can, or leave it out with layers=",
                layer=name,
            )
        fresh = {key: shape for key, shape in own.items() if key not in taken}
        taken.update(fresh)
        if fresh:
            covered.append(CoveredLayer(name, fresh))
    if not covered:
        trouble = (
            "leaves no weights: they are frozen, or of normalization layers, which 'kron' keeps as trained"
        )
        if not names:
            trouble = f"matches no layer with weights{nearest(which, ['last', 'all', *layers])}"
        raise FlowBNNError(f"layers='{which}' {trouble}", argument="layers")
    return covered


def shares_weights(model: nn.Module, name: str) -> str | None:
    """Another layer that has a parameter of this one."""
    layer = model.get_submodule(name)
    own = {id(parameter) for parameter in own_parameters(layer)}
    for other, module in model.named_modules():
        if module is not layer and any(id(p) in own for p in module.parameters(recurse=False)):
            return other or "the network itself"
    return None


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...] = PLAIN) -> bool:
    """Whether it computes what torch's own layer does, with weights of its own."""
    return (
        any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
        and not parametrize.is_parametrized(module)
        and all(name in ("weight", "bias") for name, _ in module.named_parameters(recurse=False))
    )


def _unfit_for_kron(model: nn.Module, name: str, module: nn.Module, seen: Survey) -> str | None:
    if not _is_plain(module):
        return "only Linear and Conv1d, 2d, 3d layers"
    if getattr(module, "groups", 1) != 1:
        return f"which has {module.groups} groups"
    if (other := shares_weights(model, name)) is not None:
        return f"which shares its weights with '{other}'"
    if seen.calls[name] != 1:
        return f"which is called {seen.calls[name]} times in one pass"
    return None


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


def check_memory(structure: str, model: nn.Module, layers: list[CoveredLayer], seen: Survey) -> int:
    """The bytes that are needed: logged always, a warning where they are many, an error where they are too many."""
    needed, free = bytes_needed(structure, model, layers, seen), available_bytes(device_of(model))
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
