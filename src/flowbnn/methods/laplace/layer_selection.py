"""Selection of the layers that a Laplace approximation covers, and checks of its structure and memory."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from flowbnn.batches import call, device_of, has_row_axis, rewrap_forward_errors, rows, take, tensors_of
from flowbnn.errors import requirement_error
from flowbnn.memory import check_memory
from flowbnn.methods.laplace.blocks import Shapes
from flowbnn.methods.network_layers import check_real_weights, no_layer_selected, unsupported_layer
from flowbnn.networks import evaluation_mode, watch_modules
from flowbnn.noise.layout import FORWARD

Layers = dict[str, Shapes]  # for each layer, the shapes of its parameters by their names in the network


@dataclass
class LayerTrace:
    """Record of the layers that a network called in one small forward pass.

    Args:
        num_rows: Number of examples in the pass.
        order: Names of the layers with parameters, in the order of their calls.
        counts: Number of calls of each layer.
        shapes: Shape of the first input of each layer.
        output_layer: Name of the linear layer or 1x1 convolution whose output is that of the network, or None.
        unscaled_output_layer: The same for the outputs before they are scaled to the units of the targets.
        output_shape: Shape of the outputs of one example.
        equivalent: Names of the layers of subclasses whose own forward returned what that of their torch class returns.
    """

    num_rows: int
    order: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)
    shapes: dict[str, torch.Size] = field(default_factory=dict)
    output_layer: str | None = None
    unscaled_output_layer: str | None = None
    output_shape: torch.Size = torch.Size()
    equivalent: set[str] = field(default_factory=set)


def own_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Yields the parameters of a module without those of its children, including parametrized ones."""
    yield from module.parameters(recurse=False)
    if parametrize.is_parametrized(module):
        yield from module.parametrizations.parameters()  # type: ignore[union-attr]


def parameter_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that hold parameters themselves, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if "parametrizations" not in name.split(".") and next(own_parameters(module), None) is not None
    }


def trace_layers(model: nn.Module, inputs: Any, owner: str = "Laplace", hint: str = "use SWAG") -> LayerTrace:
    """Runs up to three examples and records the layers that are called.

    Args:
        model: Network.
        inputs: Inputs of a batch.
        owner: Name of the method in messages.
        hint: Advice if the inputs cannot be split into examples.

    Raises:
        FlowBNNError: If the inputs cannot be split into examples, as a graph with its edges, or if the network fails on three of them.
    """
    if not has_row_axis(inputs):
        sizes = [list(tensor.shape) for tensor in tensors_of(inputs)]
        requirement, value = "inputs with one row per example", f"shapes {sizes}"
        raise requirement_error(owner, requirement, value, hint, kind="shape", argument="loader")
    layers, results = parameter_modules(model), dict[str, Any]()
    calls = LayerTrace(min(3, rows(inputs)))

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.order.append(name)
        calls.counts[name] += 1
        if args and isinstance(args[0], Tensor):
            calls.shapes.setdefault(name, args[0].shape)

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        results[name] = output
        if _overrides_forward(module) and args and computes_torch_layer(module, args[0], output):
            calls.equivalent.add(name)

    def before_scaling(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        results["unscaled"] = output

    root = watch_modules({"": model}, None, before_scaling, unscaled=True)
    with root, watch_modules(layers, before, after, unscaled=True), evaluation_mode(model):
        examples = take(inputs, 0, calls.num_rows)
        with rewrap_forward_errors(examples, f"{owner} fails on the first {calls.num_rows} examples, of"):
            outputs = call(model, examples)
    calls.output_shape = outputs.shape[1:]
    last = calls.order[-1] if calls.order else ""
    unscaled = results.pop("unscaled", outputs)
    if (
        results.get(last) is unscaled
        and outputs.ndim >= 2
        and calls.counts[last] == 1
        and (isinstance(layers[last], nn.Linear) or _is_pointwise(layers[last]))
        and (_is_torch_layer(layers[last]) or last in calls.equivalent)
        and shares_weights(model, last) is None
    ):
        calls.unscaled_output_layer = last
        calls.output_layer = last if unscaled is outputs else None
    return calls


def select_layers(model: nn.Module, calls: LayerTrace, pattern: str, structure: str) -> Layers:
    """Returns the layers that a pattern selects.

    Args:
        model: Network.
        calls: Record of a forward pass of the network.
        pattern: ``"last"``, ``"all"`` or a glob of layer names.
        structure: Structure of the curvature, ``"kron"``, ``"diag"`` or ``"full"``.

    Raises:
        FlowBNNError: If no layer matches, the structure does not support a layer, or memory is insufficient.
    """
    modules, selected, assigned = parameter_modules(model), Layers(), set[str]()
    names = [name for name in modules if pattern == "all" or fnmatchcase(name, pattern)]
    names = calls.order[-1:] if pattern == "last" else names
    parameter_names = {id(parameter): name for name, parameter in model.named_parameters()}
    norms = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)
    for name in names:
        module = modules[name]
        shapes = {
            parameter_names[id(parameter)]: tuple(parameter.shape)
            for parameter in own_parameters(module)
            if parameter_names[id(parameter)] not in assigned
            and (pattern == "last" or parameter.requires_grad)
        }
        if not shapes or (structure == "kron" and isinstance(module, norms)):
            continue
        check_real_weights({weight: model.get_parameter(weight) for weight in shapes})
        assigned.update(shapes)
        selected[name] = shapes
        if structure == "kron":
            _check_kronecker(model, name, module, calls)
    if not selected:
        target = f"trainable weights (structure='{structure}')"
        raise no_layer_selected(pattern, ["last", "all", *modules], target, dict(model.named_parameters()))
    cheaper = "'kron' or 'diag'" if structure == "full" else "'diag'"
    needed, hint = required_memory(structure, selected), f"use {cheaper}, or fewer layers"
    check_memory("structure", structure, needed, device_of(model), hint)
    return selected


def shares_weights(model: nn.Module, name: str) -> str | None:
    """Returns the name of another layer that has a parameter of this one, or None."""
    layer = model.get_submodule(name)
    parameters = {id(parameter) for parameter in own_parameters(layer)}
    for other, module in model.named_modules():
        if module is not layer and any(id(p) in parameters for p in module.parameters(recurse=False)):
            return other or "the network itself"
    return None


def _is_plain(module: nn.Module) -> bool:
    """Returns True for a linear layer or convolution with an unparametrized weight and no other parameters than a bias."""
    return (
        isinstance(module, FORWARD)
        and not parametrize.is_parametrized(module)
        and all(name in ("weight", "bias") for name, _ in module.named_parameters(recurse=False))
    )


def _is_torch_layer(module: nn.Module) -> bool:
    """Returns True if the module is a linear layer or a convolution with the forward of torch and an unparametrized weight."""
    return _is_plain(module) and not _overrides_forward(module)


def _overrides_forward(module: nn.Module) -> bool:
    """Returns True for a linear layer or a convolution of a class with its own forward."""
    kind: Any = next((kind for kind in FORWARD if isinstance(module, kind)), None)
    return kind is not None and type(module).forward is not kind.forward


def computes_torch_layer(module: nn.Module, inputs: Any, output: Any) -> bool:
    """Returns True if a layer with its own forward computes what its torch class does, as the Linear layers of timm do.

    Args:
        module: Layer.
        inputs: Input of a call.
        output: Output of the call.
    """
    kind: Any = next(kind for kind in FORWARD if isinstance(module, kind))
    if not _is_plain(module) or not isinstance(inputs, Tensor) or not isinstance(output, Tensor):
        return False
    expected = kind.forward(module, inputs)
    return expected.shape == output.shape and torch.allclose(expected, output, rtol=1e-4, atol=1e-5)


def _is_pointwise(module: nn.Module) -> bool:
    """Returns True if the module is a 1x1 convolution, which is a linear layer at each position."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    sizes = (*module.kernel_size, *module.stride, module.groups)
    padding = module.padding if isinstance(module.padding, tuple) else (0,)
    return all(size == 1 for size in sizes) and not any(padding)


def channels_last(module: nn.Module, values: Tensor) -> Tensor:
    """Returns inputs or outputs of a linear layer or a convolution with their channels on the last axis."""
    return values if isinstance(module, nn.Linear) else values.movedim(1, -1)


def _check_kronecker(model: nn.Module, name: str, module: nn.Module, calls: LayerTrace) -> None:
    """Raises FlowBNNError if Kronecker factors do not support this layer."""
    reason = None
    if not _is_torch_layer(module) and name not in calls.equivalent:
        reason = "unsupported type"
    elif getattr(module, "groups", 1) != 1:
        reason = f"{module.groups} groups"
    elif (other := shares_weights(model, name)) is not None:
        reason = f"tied to '{other}'"
    elif calls.counts[name] != 1:
        reason = f"called {calls.counts[name]} times"
    if reason is not None:
        raise unsupported_layer(model, name, "Laplace('kron')", "Laplace('diag')", reason)


def required_memory(structure: str, layers: Layers) -> int:
    """Returns the number of bytes that the matrices of a structure take. A diagonal counts as none."""
    if structure == "diag":
        return 0
    sides = [sum(math.prod(shape) for shapes in layers.values() for shape in shapes.values())]
    if structure == "kron":
        sides = [next(iter(shapes.values()))[0] for shapes in layers.values()]
        sides += [sum(math.prod(shape[1:]) for shape in shapes.values()) for shapes in layers.values()]
    # float64 sums and their eigenvectors, and the workspace of the largest eigendecomposition
    return 8 * (2 * sum(side**2 for side in sides) + 4 * max(sides) ** 2)
