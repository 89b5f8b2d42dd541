"""Inspection of a network with noise: layers that are never called or that no gradient reaches, and weights without noise.

Every fit runs :func:`probe_rows`, one pass over two rows. Further passes are run only if this pass fails or finds something unusual.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, has_row_axis, rows, take
from flowbnn.errors import FlowBNNError, quote_names, warn
from flowbnn.networks import deepcopy_network, evaluation_mode
from flowbnn.noise.base import Noise, make_noise_modes, noise_layers
from flowbnn.noise.contexts import NoiseContext, NoiseGroup, Shape
from flowbnn.noise.joint import JointPart
from flowbnn.noise.layout import registration_advice
from flowbnn.noise.modes import align_batch_axes, record_noise_inputs, warn_constant_inputs


class GradientProbe:
    """Source of draws that require gradients: the posterior mean of fitted noise, or ones.

    Args:
        fitted: If True, the noise of the network is fitted.

    Attributes:
        tensors: Draws of each layer, by layer key.
    """

    def __init__(self, fitted: bool) -> None:
        self.fitted = fitted
        self.tensors: dict[int, list[Tensor]] = {}
        self.means: dict[int, Tensor] = {}

    def draws(self, layer: Noise, positions: Shape, call: int, device: torch.device) -> Tensor:
        if layer.key not in self.means:
            with torch.no_grad():
                mean = layer.mean() if self.fitted else torch.ones(layer.layout.dim)
                self.means[layer.key] = mean
        shape = (1, *(1,) * len(positions), layer.layout.dim)
        tensor = self.means[layer.key].view(shape).clone().to(device).requires_grad_()
        self.tensors.setdefault(layer.key, []).append(tensor)
        return tensor


class ProbePass(NamedTuple):
    """Pass over a few rows of a batch, with the noise at its mean.

    Args:
        rows: Rows of the batch.
        outputs: Outputs of the network for these rows.
        noise_inputs: Inputs of the layers with noise, by layer name.
        unreached: Layers with trainable noise that the gradient of the outputs does not reach.
    """

    rows: slice
    outputs: Tensor
    noise_inputs: Mapping[str, Tensor]
    unreached: list[str]


def probe_rows(model: nn.Module, inputs: Any) -> ProbePass | None:
    """Runs the second and third row of a batch in evaluation mode. The first row is left out, so that inputs of layers change.

    Args:
        model: Network with noise.
        inputs: Batch of inputs on the device of the network.

    Returns:
        The pass, or None if the rows cannot be separated or the network fails on them.
    """
    if not has_row_axis(inputs) or rows(inputs) < 2:
        return None
    selected = slice(1, min(3, rows(inputs)))
    try:
        with evaluation_mode(model), record_noise_inputs(model) as noise_inputs:
            outputs, unreached = _run_probe(model, take(inputs, selected.start, selected.stop))
    except Exception:
        # a network for batches of one size, or one that torch cannot differentiate in its noise
        return None
    return ProbePass(selected, outputs, noise_inputs, unreached)


def layers_without_gradient(model: nn.Module, inputs: Any, max_rows: int = 8) -> list[str]:
    """Returns the layers that multiply by noise, but through which no gradient of the outputs flows.

    This is the case under ``torch.no_grad()`` or before ``detach()``. Noise that is not trained is left out, such as dropout or frozen
    noise. The result is empty if the network fails on a few rows.

    Args:
        model: Network with noise.
        inputs: Batch of inputs on the device of the network.
        max_rows: Number of rows to run.

    >>> from flowbnn import to_stochastic
    >>> from flowbnn.noise import NormalAffine
    >>> class Head(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.trunk, self.out = nn.Linear(2, 4), nn.Linear(4, 3)
    ...     def forward(self, x):
    ...         return self.out(self.trunk(x).detach())
    >>> layers_without_gradient(to_stochastic(Head(), {"*": NormalAffine()}), torch.ones(5, 2))
    ['trunk']
    """
    if has_row_axis(inputs) and rows(inputs) > max_rows:
        inputs = take(inputs, 0, max_rows)
    with evaluation_mode(model):
        names = _unreached_layers(model, inputs)
    if names:  # gradients may be off in evaluation mode only
        unreached = _unreached_layers(deepcopy_network(model).train(), inputs)
        names = [name for name in names if name in unreached]
    return names


def _unreached_layers(model: nn.Module, inputs: Any) -> list[str]:
    """Returns the layers with trainable noise that the gradient of the outputs does not reach, or nothing if the network fails."""
    try:
        return _run_probe(model, inputs)[1]
    except Exception:
        # a network for batches of one size, or one that torch cannot differentiate in its noise
        return []


def _run_probe(model: nn.Module, inputs: Any) -> tuple[Tensor, list[str]]:
    """Returns the outputs and the layers with trainable noise that the gradient of the outputs does not reach."""
    layers = noise_layers(model)
    probe = GradientProbe(any(layer.fitted for layer in layers.values()))
    context = NoiseContext(make_noise_modes(layers, "shared", 1, 0), probe, sharded=False)
    devices = [device] if (device := device_of(model)).type == "cuda" else []
    with context, torch.random.fork_rng(devices), torch.enable_grad():
        outputs = call(model, inputs)
        tensors = [tensor for draws in probe.tensors.values() for tensor in draws]
        gradients: Sequence[Tensor | None] = [None] * len(tensors)
        if outputs.requires_grad and tensors:
            gradients = torch.autograd.grad(outputs.sum(), tensors, allow_unused=True)
    reached = {
        id(tensor) for tensor, gradient in zip(tensors, gradients, strict=True) if gradient is not None
    }
    unreached = [
        name
        for name, noise in layers.items()
        if noise.key in probe.tensors
        and not any(id(tensor) in reached for tensor in probe.tensors[noise.key])
        and any(parameter.requires_grad for parameter in noise.joint_noise.parameters())
    ]
    return outputs.detach(), unreached


def remove_noise_without_gradient(model: nn.Module, inputs: Any, probe: ProbePass | None = None) -> list[str]:
    """Removes noise that no gradient reaches, so that its layers are plain, and warns.

    Such noise would stay at its initial value or return to its prior, and only disturb the predictions.

    Args:
        model: Network with noise, which is changed in place.
        inputs: Batch of inputs on the device of the network.
        probe: Result of :func:`probe_rows` for this batch, if it is known.

    Returns:
        Names of the layers without gradient.

    Raises:
        FlowBNNError: If all layers have no gradient, or if a layer shares joint noise with others.
    """
    if probe is not None and not probe.unreached:
        return []
    names, layers = layers_without_gradient(model, inputs), noise_layers(model)
    if not names:
        return []
    text = f"no gradient reaches layers {quote_names(names)}, because of torch.no_grad() or detach()"
    if len(names) == len(layers) or any(isinstance(layers[name], JointPart) for name in names):
        raise FlowBNNError(f"{text}; exclude them", kind="gradient", argument="network", layers=names)
    warn(
        f"{text}; they get no noise (set their rules to None to silence this)", kind="gradient", layers=names
    )
    for name in names:
        remove_noise(model, name)
    return names


def remove_noise(model: nn.Module, name: str) -> None:
    """Removes the noise of one layer in place.

    Args:
        model: Network with noise.
        name: Name of the layer, whose noise must not be joint.
    """
    module, noise = model.get_submodule(name), noise_layers(model)[name]
    for child_name, child in list(module.named_children()):
        if child is noise:
            delattr(module, child_name)
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        for key, hook in list(hooks.items()):
            if getattr(hook, "__self__", None) is noise:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
    for parent in model.modules():
        for hook in (*parent._forward_pre_hooks.values(), *parent._forward_hooks.values()):
            group = getattr(hook, "__self__", None)
            if isinstance(group, NoiseGroup):
                group.layers = [layer for layer in group.layers if layer is not noise]


def inspect_noise(
    model: nn.Module,
    inputs: Any,
    layer_inputs: Mapping[str, Tensor] | None = None,
    probe: ProbePass | None = None,
) -> list[str]:
    """Removes noise that cannot be learned, finds the axis of the examples in all other layers, and warns of layers without calls.

    Args:
        model: Network with noise, which is changed in place.
        inputs: Batch of inputs on the device of the network.
        layer_inputs: Inputs of the layers for this batch, see :func:`~flowbnn.noise.modes.align_batch_axes`.
        probe: Result of :func:`probe_rows` for this batch, if it is known.

    Returns:
        Names of the layers that the network never calls.

    Raises:
        FlowBNNError: If no layer with noise is called, or if no gradient reaches any of them.
    """
    remove_noise_without_gradient(model, inputs, probe)
    few_layer_inputs = None if probe is None else probe.noise_inputs
    idle, constant = align_batch_axes(model, inputs, layer_inputs, few_layer_inputs)
    warn_constant_inputs(constant)
    check_called(model, idle)
    if idle:
        warn_idle(idle)
    return idle


def warn_idle(idle: Sequence[str]) -> None:
    """Warns about layers whose noise has no effect, because the network never calls them."""
    text = f"the network never calls layers {quote_names(idle)}; set their rules to None"
    warn(text, kind="idle", layers=list(idle))


def check_called(model: nn.Module, idle: Sequence[str]) -> None:
    """Raises FlowBNNError if the network calls none of its layers with noise.

    Args:
        model: Network with noise.
        idle: Layers that the network never calls.
    """
    if idle and len(idle) == len(noise_layers(model)):
        text = f"the network never calls layers {quote_names(idle)}; call them in forward, or give noise to other layers"
        raise FlowBNNError(text, kind="idle", argument="network", layers=list(idle))


def matrix_share(model: nn.Module) -> tuple[float, list[str]]:
    """Returns the share of matrix weights in layers with noise, and the classes of the modules that hold the others, largest first."""
    layers = noise_layers(model)
    noise = {id(value) for each in layers.values() for value in each.parameters()}
    reached = {id(value) for name in layers for value in model.get_submodule(name).parameters()}
    total, sizes, counted = 0, dict[str, int](), set(noise)
    for module in model.modules():
        for value in module._parameters.values():
            if value is None or value.ndim < 2 or id(value) in counted:
                continue
            counted.add(id(value))
            total += value.numel()
            if id(value) not in reached:
                kind = type(module).__name__
                sizes[kind] = sizes.get(kind, 0) + value.numel()
    share = 1.0 - sum(sizes.values()) / total if total else 1.0
    return share, sorted(sizes, key=sizes.__getitem__, reverse=True)


def warn_mostly_plain(model: nn.Module) -> None:
    """Warns if most matrix weights are in modules that cannot have noise, although all other layers have it."""
    share, classes = matrix_share(model)
    if share < 0.5:
        warn(
            f"noise reaches {100 * share:.0f} % of the matrix weights, because {quote_names(classes)} cannot have noise; "
            f"{registration_advice(classes)}",
            kind="share",
            share=share,
            classes=classes,
        )
