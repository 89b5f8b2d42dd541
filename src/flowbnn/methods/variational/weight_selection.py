"""Selection of the random weights of a network, and of the gradient estimator of each."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, move
from flowbnn.methods.network_layers import check_real_weights, no_layer_selected, unsupported_layer
from flowbnn.networks import evaluation_mode, record_calls
from flowbnn.noise.layout import FORWARD, absorbs
from flowbnn.posterior.trace import examples_interact

Estimator = Literal["reparameterization", "local", "flipout"]
LayerChoice = str | type[nn.Module] | Callable[[str, nn.Module], bool] | None


def parameter_layers(model: nn.Module) -> dict[str, list[str]]:
    """Returns the layers that hold each parameter, by parameter name; a tied parameter has several."""
    layers: dict[int, list[str]] = {}
    for layer, module in model.named_modules():
        for parameter in module._parameters.values():
            if parameter is not None:
                layers.setdefault(id(parameter), []).append(layer)
    return {name: layers[id(parameter)] for name, parameter in model.named_parameters()}


def tied_parameters(model: nn.Module) -> set[str]:
    """Returns the names of parameters that are used in several places."""
    return {name for name, layers in parameter_layers(model).items() if len(layers) > 1}


def describe_layer(model: nn.Module, layer: str) -> str:
    """Returns the name and type of a layer for messages."""
    return f"'{layer}' ({type(model.get_submodule(layer)).__name__})"


def _matches(choice: Any, layer: str, module: nn.Module) -> bool:
    """Returns True if a choice selects a layer. The choice None selects all layers except normalization."""
    if choice is None:
        norms = (
            nn.modules.batchnorm._NormBase,
            nn.LayerNorm,
            nn.GroupNorm,
            nn.LocalResponseNorm,
            nn.RMSNorm,
        )
        return not isinstance(module, norms)
    if isinstance(choice, str):  # a name includes the layers inside it
        names = layer.split(".")
        return any(fnmatchcase(".".join(names[: end + 1]), choice) for end in range(len(names)))
    if isinstance(choice, type):
        return isinstance(module, choice)
    return bool(choice(layer, module))


def select_weights(model: nn.Module, choice: LayerChoice) -> list[str]:
    """Returns the names of the trainable parameters of the chosen layers.

    A tied parameter is included if one of its layers is chosen.

    Args:
        model: Network.
        choice: Name or glob, class, or predicate ``(name, module) -> bool``; None for all but normalization layers.

    Raises:
        FlowBNNError: If no parameter is chosen, or if one of them is complex.

    >>> select_weights(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), None)
    ['0.weight', '0.bias']
    """
    layers_of = parameter_layers(model)
    layers = dict.fromkeys(layer for holders in layers_of.values() for layer in holders)
    chosen = {layer for layer in layers if _matches(choice, layer, model.get_submodule(layer))}
    parameters = {
        name: parameter
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and chosen.intersection(layers_of[name])
    }
    if not parameters:
        raise no_layer_selected(choice, layers, parameters=layers_of)
    check_real_weights(parameters)
    return list(parameters)


def initial_scales(mean: Mapping[str, Tensor], factor: float, fallback: float) -> dict[str, Tensor]:
    """Returns initial standard deviations: ``factor`` times the root mean square of each tensor.

    A tensor of zeros gets the root mean square of all tensors, or ``fallback`` if all are zero.
    """
    total = sum(float(value.square().sum()) for value in mean.values())
    overall = (total / max(1, sum(value.numel() for value in mean.values()))) ** 0.5 or fallback
    scales = {}
    for name, value in mean.items():
        size = float(value.square().mean().sqrt()) if value.numel() else 0.0
        scales[name] = torch.full_like(value, factor * (size if size > 1e-3 * overall else overall))
    return scales


def input_axes(model: nn.Module, inputs: Any) -> dict[str, list[int]]:
    """Returns the number of axes of the input of each call of the linear layers and convolutions in a forward pass.

    The result is empty if outputs depend on other examples of the batch, because one draw of the weights must then serve all of them.
    """
    if examples_interact(model, move(inputs, device_of(model), dtype_of(model))):
        return {}
    modules = {name: module for name, module in model.named_modules() if is_linear_map(module)}
    with record_calls(modules) as calls, evaluation_mode(model):
        call(model, move(inputs, device_of(model), dtype_of(model)))
    return {name: [each.inputs.ndim for each in calls if each.name == name] for name in modules}


class EstimatorChoice(NamedTuple):
    """Estimators of the gradient. All other parameters use plain reparameterization.

    Args:
        layers: Estimator ``"local"`` or ``"flipout"`` by the name of the layer.
        parameters: The same by the name of the parameter.
    """

    layers: dict[str, str]
    parameters: dict[str, Estimator]


def select_estimators(model: nn.Module, names: list[str], estimator: str, inputs: Any) -> EstimatorChoice:
    """Returns the estimator of every layer.

    Args:
        model: Network.
        names: Names of the random parameters.
        estimator: ``"auto"``, ``"reparameterization"``, ``"local"`` or ``"flipout"``.
        inputs: Inputs of a forward pass.

    Raises:
        FlowBNNError: If ``"local"`` or ``"flipout"`` does not support a layer.
    """
    choice = EstimatorChoice({}, {})
    if estimator == "reparameterization":
        return choice
    calls, tied, layers_of = input_axes(model, inputs), tied_parameters(model), parameter_layers(model)
    for layer in dict.fromkeys(layers_of[name][0] for name in names if name not in tied):
        module = model.get_submodule(layer)
        random = [name for name in names if layers_of[name] == [layer]]
        parameters = [name for name, layers in layers_of.items() if layer in layers]
        if tied.intersection(parameters):
            continue  # one draw of a tied parameter must serve all its layers
        if estimator == "auto":
            if isinstance(module, nn.Linear) and calls.get(layer) == [2] and len(random) == len(parameters):
                choice.layers[layer] = "local"
        elif not calls.get(layer):
            option = f"estimator='{estimator}'"
            raise unsupported_layer(model, layer, option, "estimator='auto'", argument="estimator")
        elif any(name.rpartition(".")[2] == "weight" for name in random):
            choice.layers[layer] = estimator
        if layer in choice.layers:
            choice.parameters.update(dict.fromkeys(random, choice.layers[layer]))  # type: ignore[arg-type]
    return choice


def is_linear_map(module: nn.Module) -> bool:
    """Returns True for linear layers and convolutions of torch with a weight that can absorb noise.

    >>> is_linear_map(nn.Conv2d(4, 8, 3, groups=2)), is_linear_map(nn.ConvTranspose2d(4, 8, 3)), is_linear_map(nn.GRU(4, 8))
    (True, False, False)
    """
    return isinstance(module, FORWARD) and absorbs(module)
