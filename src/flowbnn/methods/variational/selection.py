"""Which weights of a network are random, and how they are drawn in training."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods.variational.estimators import is_linear_map
from flowbnn.methods.variational.gaussian_weights import Way
from flowbnn.posterior.batches import call, move
from flowbnn.posterior.forward import device_of, dtype_of, evaluating

__all__ = [
    "LayerChoice",
    "Ways",
    "base_scales",
    "chosen_weights",
    "owners",
    "seen_by",
    "tied",
    "title",
    "ways_of",
]

LayerChoice = str | type[nn.Module] | Callable[[str, nn.Module], bool] | None
_NORMS: tuple[type[nn.Module], ...] = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.LocalResponseNorm,
    nn.RMSNorm,
)


def owners(model: nn.Module) -> dict[str, list[str]]:
    """The layers that hold each parameter, by its name; a tied one has several, or one that holds it twice."""
    found: dict[int, list[str]] = {}
    for layer, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                found.setdefault(id(parameter), []).append(layer)
    return {name: found[id(parameter)] for name, parameter in model.named_parameters()}


def tied(model: nn.Module) -> set[str]:
    """Parameters that stand in several places."""
    return {name for name, layers in owners(model).items() if len(layers) > 1}


def title(model: nn.Module, layer: str) -> str:
    """A layer as messages name it."""
    return f"'{layer}' ({type(model.get_submodule(layer)).__name__})"


def _matches(choice: Any, layer: str, module: nn.Module) -> bool:
    if choice is None:
        return not isinstance(module, _NORMS)
    if isinstance(choice, str):  # a name covers what is inside of it
        above = layer.split(".")
        return any(fnmatchcase(".".join(above[: end + 1]), choice) for end in range(len(above)))
    if isinstance(choice, type):
        return isinstance(module, choice)
    return bool(choice(layer, module))


def chosen_weights(model: nn.Module, choice: LayerChoice) -> list[str]:
    """Names of the parameters of the chosen layers that are to be learned; a tied one counts where one of its layers is chosen.

    >>> chosen_weights(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), None)
    ['0.weight', '0.bias']
    """
    modules = dict(model.named_modules())
    own = dict(model.named_parameters())
    held = owners(model)
    picked = {
        layer for layers in held.values() for layer in layers if _matches(choice, layer, modules[layer])
    }
    found = [
        name
        for name, parameter in own.items()
        if parameter.requires_grad and parameter.is_floating_point() and picked.intersection(held[name])
    ]
    if found:
        return found
    reason = f"layers={choice!r} matches no layer with weights to learn" if choice is not None else ""
    if isinstance(choice, str):
        reason += nearest(choice, dict.fromkeys(layer for layers in held.values() for layer in layers))
    raise FlowBNNError(
        reason
        or "only normalisation layers of this network have weights to learn; choose them with layers='*'"
    )


def base_scales(mean: Mapping[str, Tensor], share: float, fallback: float) -> dict[str, Tensor]:
    """Standard deviations to start from: a share of each tensor's size; where it is all zeros, of the size of all of them."""
    total = sum(float(value.square().sum()) for value in mean.values())
    overall = (total / max(1, sum(value.numel() for value in mean.values()))) ** 0.5 or fallback
    found = {}
    for name, value in mean.items():
        size = float(value.square().mean().sqrt()) if value.numel() else 0.0
        found[name] = torch.full_like(value, share * (size if size > 1e-3 * overall else overall))
    return found


def seen_by(model: nn.Module, inputs: Any) -> dict[str, list[int]]:
    """How often layers that are linear maps are called in a pass, as the number of axes of each call's input."""
    found: dict[str, list[int]] = {name: [] for name, part in model.named_modules() if is_linear_map(part)}

    def recorder(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found[name].append((args[0] if args else kwargs["input"]).ndim)

        return hook

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(recorder(name), with_kwargs=True)
        for name in found
    ]
    try:
        with evaluating(model):
            call(model, move(inputs, device_of(model), dtype_of(model)))
    finally:
        for hook in hooks:
            hook.remove()
    return found


@dataclass(frozen=True)
class Ways:
    """How weights are drawn: ``"local"`` or ``"flipout"`` by layer, and by parameter. What is not named is drawn plainly."""

    layers: dict[str, str]
    parameters: dict[str, Way]


def ways_of(model: nn.Module, names: list[str], estimator: str, inputs: Any) -> Ways:
    """The way of every layer, or one line that names a layer which an estimator asked for by name cannot serve."""
    layers: dict[str, str] = {}
    parameters: dict[str, Way] = {}
    if estimator == "reparameterization":
        return Ways(layers, parameters)
    calls, several, held = seen_by(model, inputs), tied(model), owners(model)
    for layer in dict.fromkeys(held[name][0] for name in names if name not in several):
        module = model.get_submodule(layer)
        mine = [name for name in names if held[name] == [layer]]
        own = [name for name, places in held.items() if layer in places]
        if several.intersection(own):
            continue  # part of it is tied, and one draw of that must serve all its places
        if estimator == "auto":
            if isinstance(module, nn.Linear) and calls.get(layer) == [2] and len(mine) == len(own):
                layers[layer] = "local"
        elif not calls.get(layer):
            why = (
                "is never called itself"
                if layer in calls
                else "is no linear layer or convolution of torch's own"
            )
            raise FlowBNNError(
                f"layer {title(model, layer)} cannot be drawn by estimator='{estimator}': it {why}; "
                "estimator='auto' or 'reparameterization' serves it, or leave it out with layers="
            )
        elif any(name.rpartition(".")[2] == "weight" for name in mine):
            layers[layer] = estimator
        parameters.update({name: layers[layer] for name in mine if layer in layers})  # type: ignore[misc]
    return Ways(layers, parameters)
