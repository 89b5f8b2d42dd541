"""Which layers a Laplace approximation covers, and what its structure cannot serve or hold in memory."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowbnn.batches import call, device_of, evaluation_mode, rows, take
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods.laplace.blocks import Shapes

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
Layers = dict[str, Shapes]  # the parameters of each covered layer, under their names in the network


@dataclass
class Survey:
    """What one small pass showed."""

    rows: int  # examples in that pass
    order: list[str] = field(default_factory=list)  # layers with parameters, as they were called
    calls: Counter[str] = field(default_factory=Counter)  # how often each was
    shapes: dict[str, torch.Size] = field(default_factory=dict)  # of each one's first input
    direct: str | None = None  # the Linear layer whose output is the network's, where there is one


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


def survey(model: nn.Module, inputs: Any) -> Survey:
    """Run up to three rows and see which layers are called."""
    layers, results = holders(model), dict[str, Any]()
    seen = Survey(min(3, rows(inputs)))

    def before(name: str, module: nn.Module, args: Any) -> None:
        seen.order.append(name)
        seen.calls[name] += 1
        if args and isinstance(args[0], Tensor):
            seen.shapes.setdefault(name, args[0].shape)

    def after(name: str, module: nn.Module, args: Any, output: Any) -> None:
        results[name] = output

    with ExitStack() as hooks, evaluation_mode(model):
        for name, module in layers.items():
            hooks.enter_context(module.register_forward_pre_hook(partial(before, name)))
            hooks.enter_context(module.register_forward_hook(partial(after, name), prepend=True))
        outputs = call(model, take(inputs, 0, seen.rows))
    last = seen.order[-1] if seen.order else ""
    if (
        results.get(last) is outputs
        and outputs.ndim == 2
        and seen.calls[last] == 1
        and _is_plain(layers[last], (nn.Linear,))
        and shares_weights(model, last) is None
    ):
        seen.direct = last
    return seen


def choose_layers(model: nn.Module, seen: Survey, which: str, structure: str) -> Layers:
    """The layers that ``which`` (``"last"``, ``"all"`` or a glob) means, refused where the structure cannot serve them."""
    layers, covered, taken = holders(model), Layers(), set[str]()
    names = [name for name in layers if which == "all" or fnmatchcase(name, which)]
    names = seen.order[-1:] if which == "last" else names
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    problem, fields = "", {"argument": "layers"}
    for name in names:
        module = layers[name]
        shapes = {
            canonical[id(parameter)]: tuple(parameter.shape)
            for parameter in own_parameters(module)
            if canonical[id(parameter)] not in taken and (which == "last" or parameter.requires_grad)
        }
        if not shapes or (structure == "kron" and isinstance(module, NORMS)):
            continue
        taken.update(shapes)
        covered[name] = shapes
        reason = _unfit_for_kron(model, name, module, seen) if structure == "kron" else ""
        if reason and not problem:
            fields = {"layer": name}
            problem = (
                f"Kronecker factors do not serve layer '{name}' ({type(module).__name__}), {reason}; Laplace('diag') or "
                "Laplace('full') can, or leave it out with layers="
            )
    if not names:
        problem = f"layers='{which}' matches no layer with weights{nearest(which, ['last', 'all', *layers])}"
    elif not covered:
        problem = f"layers='{which}' leaves no weights: they are frozen, or of normalization layers, which 'kron' keeps as trained"
    if not problem:
        fields, problem = (
            {"kind": "memory"},
            _too_large(structure, covered, available_bytes(device_of(model))),
        )
    if problem:
        raise FlowBNNError(problem, **fields)
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


def _unfit_for_kron(model: nn.Module, name: str, module: nn.Module, seen: Survey) -> str:
    if not _is_plain(module):
        return "only Linear and Conv1d, 2d, 3d layers"
    if getattr(module, "groups", 1) != 1:
        return f"which has {module.groups} groups"
    if (other := shares_weights(model, name)) is not None:
        return f"which shares its weights with '{other}'"
    return "" if seen.calls[name] == 1 else f"which is called {seen.calls[name]} times in one pass"


def _too_large(structure: str, layers: Layers, free: float) -> str:
    """What is wrong if the matrices need more than half of the free memory."""
    weights = sum(math.prod(shape) for shapes in layers.values() for shape in shapes.values())
    if structure == "diag":
        return ""
    sides = [weights]
    if structure == "kron":
        sides = [next(iter(shapes.values()))[0] for shapes in layers.values()]
        sides += [sum(math.prod(shape[1:]) for shape in shapes.values()) for shapes in layers.values()]
    # the sums in float64 and their eigenvectors, and what finding those of the largest matrix takes
    needed = 8 * (2 * sum(side**2 for side in sides) + 4 * max(sides) ** 2)
    if needed <= free / 2:
        return ""
    cheaper = "'kron' or 'diag'" if structure == "full" else "'diag'"
    return (
        f"a '{structure}' Laplace approximation of {weights:,} weights needs {needed / 2**30:.3g} GiB of memory, and "
        f"{free / 2**30:.3g} GiB are free: take {cheaper}, or fewer layers (layers='last' or a glob)"
    )


def available_bytes(device: torch.device) -> float:
    """Free memory; infinite where it is not known."""
    if device.type == "cuda":
        spare = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + spare
    free = [math.inf]
    with suppress(OSError, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable:")]
        group = Path("/sys/fs/cgroup")  # a container may have less than the machine
        free.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return max(0.0, min(free))
