"""Which layers a Laplace approximation covers, found by running a few rows, and whether its structure can serve them."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.posterior.batches import call, rows, take
from flowbnn.posterior.forward import evaluating

__all__ = [
    "NORMS",
    "PLAIN",
    "CoveredLayer",
    "Survey",
    "chosen_layers",
    "own_parameters",
    "survey",
    "without_nested",
]

PLAIN = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
NORMS = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.SyncBatchNorm,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclass(frozen=True)
class CoveredLayer:
    """A layer and those of its parameters that get a posterior, under the names they have in the network."""

    name: str
    names: tuple[str, ...]


@dataclass
class Survey:
    """What one small pass showed.

    Args:
        order: layers with parameters, in the order in which they were called.
        calls: how often each was.
        shapes: of each one's first input.
        direct: the Linear layer whose output is the network's, where there is one.
        rows: examples in that pass.
        batch: examples in the batch they are of.
        outputs: numbers that the network gives for each.
    """

    order: list[str] = field(default_factory=list)
    calls: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    direct: str | None = None
    rows: int = 0
    batch: int = 1
    outputs: int = 1

    @classmethod
    def unseen(cls, model: nn.Module) -> "Survey":
        """What can be told without running the network: its layers in the order in which it has them."""
        names = list(holders(model))
        return cls(names, Counter(names))


def own_parameters(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """A module's own parameters, those behind a parametrization among them."""
    yield from module.named_parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.named_parameters("parametrizations")  # type: ignore[union-attr]


def holders(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that hold parameters themselves, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".") and next(own_parameters(module), None) is not None
    }


def without_nested(model: nn.Module) -> nn.Module:
    """A network whose transformers keep to ordinary tensors: nested ones pass the layers by, and have no shape to be seen."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def survey(model: nn.Module, inputs: Any) -> Survey:
    """Run up to three rows and see which layers are called."""
    found, last = Survey(rows=min(3, rows(inputs)), batch=rows(inputs)), {}

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            found.order.append(name)
            found.calls[name] += 1
            if args and isinstance(args[0], Tensor):
                found.shapes.setdefault(name, args[0].shape)

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            last[name] = output

        return hook

    handles = []
    for name, module in holders(model).items():
        handles += [
            module.register_forward_pre_hook(before(name)),
            module.register_forward_hook(after(name)),
        ]
    try:
        with evaluating(model):
            outputs = call(model, take(inputs, 0, found.rows))
    finally:
        for handle in handles:
            handle.remove()
    found.outputs = outputs[:1].numel()
    name = found.order[-1] if found.order else ""
    final = holders(model).get(name)
    if (
        final is not None
        and last.get(name) is outputs
        and found.calls[name] == 1
        and _is_plain(final, (nn.Linear,))
        and outputs.ndim == 2
        and not _shared(model, name)
    ):
        found.direct = name
    return found


def chosen_layers(model: nn.Module, seen: Survey, which: str, structure: str) -> list[CoveredLayer]:
    """The layers that ``which`` (``"last"``, ``"all"`` or a glob) means, refused where the structure cannot serve one."""
    parts = holders(model)
    if which == "last":
        if not seen.order:
            raise FlowBNNError("the network calls no layer that has weights of its own; say layers='all'")
        names = [seen.order[-1]]
    elif which == "all":
        names = list(parts)
    else:
        names = [name for name in parts if fnmatchcase(name, which)]
        if not names:
            raise FlowBNNError(
                f"layers='{which}' matches no layer with weights{nearest(which, ['last', 'all', *parts])}"
            )
    canonical = {id(parameter): name for name, parameter in model.named_parameters()}
    found, taken = [], set[str]()
    for name in names:
        module = parts[name]
        mine = [
            canonical[id(parameter)]
            for _, parameter in own_parameters(module)
            if parameter.is_floating_point() and (which == "last" or parameter.requires_grad)
        ]
        if not mine or (structure == "kron" and isinstance(module, NORMS) and which != name):
            continue
        if structure == "kron":
            _check_kron(model, name, module, seen)
        mine = [one for one in dict.fromkeys(mine) if one not in taken]
        taken.update(mine)
        if mine:
            found.append(CoveredLayer(name, tuple(mine)))
    if not found:
        held = ", ".join(f"'{name}'" for name in names[:3])
        raise FlowBNNError(
            f"no weights are left for a Laplace approximation in {held}: frozen, or of normalization layers, "
            "which 'kron' keeps as they are; choose other layers"
        )
    return found


def _is_plain(module: nn.Module, kinds: tuple[type[nn.Module], ...] = PLAIN) -> bool:
    """Whether it computes what torch's own layer does with weights of its own."""
    return (
        any(isinstance(module, kind) and type(module).forward is kind.forward for kind in kinds)
        and not parametrize.is_parametrized(module)
        and all(name in ("weight", "bias") for name, _ in module.named_parameters(recurse=False))
    )


def _shared(model: nn.Module, name: str) -> str | None:
    """Another layer that has a weight of this one."""
    mine = {id(parameter) for _, parameter in own_parameters(model.get_submodule(name))}
    for other, module in model.named_modules():
        if module is not model.get_submodule(name) and any(
            id(parameter) in mine for parameter in module.parameters(recurse=False)
        ):
            return other or "the network itself"
    return None


def _check_kron(model: nn.Module, name: str, module: nn.Module, seen: Survey) -> None:
    shown = f"layer '{name}' ({type(module).__name__})"
    able = "Laplace('diag') or Laplace('full') can, or leave it out with layers="
    if not _is_plain(module):
        raise FlowBNNError(
            f"Kronecker factors serve Linear and Conv1d, 2d, 3d layers, which {shown} is not; {able}"
        )
    if getattr(module, "groups", 1) != 1:
        raise FlowBNNError(f"Kronecker factors do not serve {shown} with {module.groups} groups; {able}")
    other = _shared(model, name)
    if other is not None:
        raise FlowBNNError(
            f"Kronecker factors do not serve {shown}, which shares its weights with '{other}'; {able}"
        )
    if seen.calls[name] != 1:
        told = (
            "is never called" if not seen.calls[name] else f"is called {seen.calls[name]} times in one pass"
        )
        raise FlowBNNError(f"Kronecker factors do not serve {shown}, which {told}; {able}")
