"""Functions on the noise of a network: modes, freezing, optimizer groups, and the axes of the examples."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from flowbnn.batches import call, is_container, rows, take
from flowbnn.errors import FlowBNNError, warn
from flowbnn.networks import evaluation_mode, record_calls
from flowbnn.noise.base import Noise, layers_with_noise, make_noise_modes, noise_layers
from flowbnn.noise.contexts import Mode, NoiseContext
from flowbnn.options import Count, NonNegative, checked

ParameterKind = Literal["weights", "noise"]


@checked
@contextmanager
def noise_mode(
    model: Any,
    mode: Mode,
    samples: Count = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[nn.Module]:
    """Context manager that sets the mode of all noise of a network, in this thread.

    Args:
        model: Stochastic network.
        mode: ``"sample"``, ``"shared"``, ``"mean"`` or ``"off"``, as in :class:`~flowbnn.noise.base.Noise`.
        samples: Number of draws in mode ``"shared"``.
        seed: Seed of the draws.
        generator: Generator of the draws in mode ``"sample"``, instead of ``seed``.

    >>> from flowbnn.noise import NormalAffine
    >>> from flowbnn import to_stochastic
    >>> plain = nn.Linear(3, 2)
    >>> bayesian = to_stochastic(plain, {"*": NormalAffine()})
    >>> x = torch.ones(4, 3)
    >>> with noise_mode(bayesian, "off"):
    ...     torch.equal(bayesian(x), plain(x))
    True
    """
    with NoiseContext(make_noise_modes(model, mode, samples, seed, generator)):
        yield model


def noise_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters of the noise, each once."""
    return list({id(p): p for layer in noise_layers(model).values() for p in layer.parameters()}.values())


def weight_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that do not belong to the noise, each once."""
    noise = {id(p) for p in noise_parameters(model)}
    return [p for p in model.parameters() if id(p) not in noise]


def _named_parameters(model: nn.Module, kind: ParameterKind) -> list[tuple[set[str], str, nn.Parameter]]:
    """Returns parameters with their names and the set of frozen names of their module, which copies keep."""
    layers_with_noise(model)
    ids = {id(p) for p in (noise_parameters(model) if kind == "noise" else weight_parameters(model))}
    parameters = []
    for module in model.modules():
        frozen = module.__dict__.setdefault("_frozen_by_flowbnn", set())
        parameters += [(frozen, name, p) for name, p in module._parameters.items() if id(p) in ids]
    return parameters  # type: ignore[return-value]


@checked
def freeze(model: nn.Module, kind: ParameterKind) -> None:
    """Freezes the ``"weights"`` or the ``"noise"`` until :func:`unfreeze`. BatchNorm then keeps its statistics as well.

    Args:
        model: Stochastic network.
        kind: ``"weights"`` or ``"noise"``.

    >>> from flowbnn import to_stochastic
    >>> from flowbnn.noise import NormalAffine
    >>> network = to_stochastic(nn.Linear(3, 2), {"*": NormalAffine()})
    >>> freeze(network, "weights")
    >>> network.weight.requires_grad
    False
    """
    # a list, because a tied parameter is marked in each of its modules
    for frozen, name, parameter in [
        entry for entry in _named_parameters(model, kind) if entry[2].requires_grad
    ]:
        frozen.add(name)
        parameter.requires_grad_(False)


@checked
def unfreeze(model: nn.Module, kind: ParameterKind) -> None:
    """Unfreezes the ``"weights"`` or the ``"noise"`` that :func:`freeze` froze.

    Parameters that were not frozen by :func:`freeze` stay frozen. ``requires_grad_(True)`` on a network unfreezes all.

    Args:
        model: Stochastic network.
        kind: ``"weights"`` or ``"noise"``.
    """
    for frozen, name, parameter in _named_parameters(model, kind):
        if name in frozen:
            frozen.discard(name)
            parameter.requires_grad_(True)


@checked
def parameter_groups(
    model: nn.Module,
    likelihood: nn.Module | None = None,
    weight_lr: NonNegative = 2e-4,
    noise_lr: NonNegative = 2e-3,
    weight_decay: NonNegative = 0.0,
) -> list[dict[str, Any]]:
    """Returns optimizer groups with separate learning rates. The defaults are those of Xiong's report.

    Frozen parameters are left out. Weight decay does not apply to the noise, whose prior is part of the KL divergence.

    Args:
        model: Stochastic network.
        likelihood: Likelihood whose parameters, such as the observation noise, are trained with ``noise_lr``.
        weight_lr: Learning rate of the weights.
        noise_lr: Learning rate of the noise.
        weight_decay: Weight decay of the weights.
    """
    settings = {
        "weights": (weight_parameters(model), weight_lr, weight_decay),
        "noise": (noise_parameters(model), noise_lr, 0.0),
        "likelihood": ([] if likelihood is None else list(likelihood.parameters()), noise_lr, 0.0),
    }
    groups = [
        {"name": name, "params": [p for p in parameters if p.requires_grad], "lr": lr, "weight_decay": decay}
        for name, (parameters, lr, decay) in settings.items()
    ]
    return [group for group in groups if group["params"]]


# -------------------- axis of the examples


def share_draws_in_batches(model: nn.Module, shared: bool) -> None:
    """Sets whether one draw of the noise serves all examples of a batch in training, because the examples interact.

    Args:
        model: Network with noise, whose layers are changed in place.
        shared: True for one draw per batch, False for one draw per example.
    """
    for layer in noise_layers(model).values():
        layer.layout = layer.layout._replace(one_draw=shared)


class LayerCalls(NamedTuple):
    """Layers with noise that a forward pass does not call, or calls with the same input for all examples.

    Args:
        idle: Names of the layers that the network never calls.
        constant: Names of the layers whose input does not depend on the examples. Layers whose rule says so are left out.
    """

    idle: list[str]
    constant: list[str]


def align_batch_axes(
    model: nn.Module,
    inputs: Any,
    layer_inputs: Mapping[str, Tensor] | None = None,
    few_layer_inputs: Mapping[str, Tensor] | None = None,
) -> LayerCalls:
    """Finds the axis of the examples in every layer with noise, from one pass over a batch and one pass over a few of its rows.

    A sequence-first layer has the examples on axis 1. A layer whose input does not depend on the examples, such as an embedding of
    positions, has no such axis. One draw then serves all examples. Rules that set ``batch_axis`` are respected.

    Args:
        model: Network with noise, whose layers are changed in place.
        inputs: Batch of inputs.
        layer_inputs: Inputs of the layers for this batch, from :func:`record_noise_inputs`. The pass is run here by default.
        few_layer_inputs: The same for the second and third row of this batch.

    Returns:
        Names of the layers that the network never calls, and of those whose input does not depend on the examples.
    """
    layers, size = noise_layers(model), rows(inputs)
    first = _noise_inputs(model, inputs) if layer_inputs is None else layer_inputs
    if first is None:
        return LayerCalls([], [])
    idle, constant = [name for name in layers if name not in first], list[str]()
    subset_size = 0 if is_container(inputs) else min(2, size - 1)
    # without the first row, so that an input that depends on the examples changes
    second = few_layer_inputs
    if second is None:
        second = (_noise_inputs(model, take(inputs, 1, 1 + subset_size)) if subset_size else None) or {}
    for name, layer in layers.items():
        is_comparable = name in first and name in second and first[name].ndim == second[name].ndim
        if is_comparable and _align_layer(layer, first[name], second[name], size, subset_size):
            constant.append(name)
    return LayerCalls(idle, constant)


def warn_constant_inputs(names: Sequence[str]) -> None:
    """Warns about layers whose input does not depend on the examples."""
    for name in names:
        text = f"the input of layer '{name}' is the same for all examples, which share one draw of noise; set its rule to None"
        warn(text, kind="axis", layer=name)


def _align_layer(layer: Noise, first: Tensor, second: Tensor, size: int, subset_size: int) -> bool:
    """Sets the axis of the examples of one layer, from its inputs for a batch and for ``subset_size`` rows of it.

    Returns:
        True if the input does not depend on the examples.
    """
    layout, has_no_rule = layer.layout, layer.recipe is not None and layer.recipe.batch_axis is None
    sizes = enumerate(zip(first.shape, second.shape, strict=True))
    axes = [axis for axis, (a, b) in sizes if a != b and a * subset_size == b * size]
    constant = (
        has_no_rule and first.shape == second.shape and bool(first.numel()) and torch.equal(first, second)
    )
    if constant:
        layer.layout = layout._replace(batch_axis=None)
        layer.recipe = replace(layer.recipe, batch_axis="none")
    elif (
        has_no_rule
        and len(axes) == 1
        and axes[0] not in (layout.batch_axis, first.ndim + layout.feature_axis)
    ):
        layer.layout = layout._replace(batch_axis=axes[0], unbatched_ndim=first.ndim - 1)
        layer.recipe = replace(layer.recipe, batch_axis=axes[0])
    steps, remainder = divmod(len(first), size) if layer.layout.batch_axis == 0 and first.ndim else (1, 0)
    if steps > 1 and not remainder and len(second) == steps * subset_size:
        # rows are time steps or frames: either those of one example or those of one step follow each other
        by_step = first.unflatten(0, (steps, size))[:, 1 : 1 + subset_size].flatten(0, 1)
        by_example = first[steps : steps * (1 + subset_size)]
        gaps = [float((second - expected).abs().max()) for expected in (by_step, by_example)]
        if gaps[0] < 0.1 * gaps[1]:
            layer.layout = layer.layout._replace(examples_first=False)
    return constant


@contextmanager
def record_noise_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context manager that records, for every layer with noise, the tensor that the noise multiplies at its first call."""
    layers, recorded = noise_layers(model), dict[str, Tensor]()
    with record_calls({name: model.get_submodule(name) for name in layers}) as calls:
        yield recorded
    for name, inputs, output in calls:
        value = inputs if layers[name].layout.side == "input" else output
        if isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
            hint = "use torch.autograd.grad, or set its rule to None"
            text = f"layer '{name}' runs inside of torch.func, where noise has no axis of examples; {hint}"
            raise FlowBNNError(text, kind="unsupported", layer=name)
        recorded.setdefault(name, value.detach() if isinstance(value, Tensor) else torch.empty(0))


def _noise_inputs(model: nn.Module, inputs: Any) -> dict[str, Tensor] | None:
    """Returns the tensor that the noise of every layer multiplies, or None if the network fails on these inputs."""
    try:
        with record_noise_inputs(model) as recorded, evaluation_mode(model), noise_mode(model, "off"):
            call(model, inputs)
    except Exception:  # a network for batches of one size: its layers do not change
        return None
    return recorded
