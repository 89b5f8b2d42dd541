"""Handles on the noise of a whole network: find it, hold it, freeze it, give it its own learning rate, find its batch axes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import call, evaluation_mode, record_calls, rows, take
from flowbnn.errors import warn
from flowbnn.noise.base import Noise, layers_with_noise, make_noise_modes, noise_layers
from flowbnn.noise.contexts import Mode, NoiseContext
from flowbnn.options import Count, NonNegative, checked

Part = Literal["weights", "noise"]
FROZEN = "_frozen_by_flowbnn"


@checked
@contextmanager
def noise_mode(
    model: Any,
    mode: Mode,
    samples: Count = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[nn.Module]:
    """Hold all noise in one mode, as :class:`~flowbnn.noise.base.Noise` has them, for a ``with`` block, in this thread.

    Args:
        model: the network.
        samples: in mode ``"shared"``, how many draws the noise holds.
        seed: of these draws; in mode ``"sample"`` it makes the draws repeatable.
        generator: as an alternative to ``seed`` in mode ``"sample"``.

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
    """Parameters of the noise, each once."""
    return list({id(p): p for layer in noise_layers(model).values() for p in layer.parameters()}.values())


def weight_parameters(model: nn.Module) -> list[nn.Parameter]:
    """All other parameters, each once."""
    theirs = {id(p) for p in noise_parameters(model)}
    return [p for p in model.parameters() if id(p) not in theirs]


def _marked(model: nn.Module, part: Part) -> list[tuple[set[str], str, nn.Parameter]]:
    """The parameters of a part, each with the names that :func:`freeze` froze in its module; copies of the module keep them."""
    layers_with_noise(model)
    chosen = {id(p) for p in (noise_parameters(model) if part == "noise" else weight_parameters(model))}
    marked = []
    for module in model.modules():
        marks = module.__dict__.setdefault(FROZEN, set())
        marked += [(marks, name, p) for name, p in module._parameters.items() if id(p) in chosen]
    return marked  # type: ignore[return-value]


@checked
def freeze(model: nn.Module, part: Part) -> None:
    """Stop training the ``"weights"`` or the ``"noise"``, until :func:`unfreeze`; BatchNorm then keeps its statistics, too."""
    for marks, name, parameter in [one for one in _marked(model, part) if one[2].requires_grad]:
        marks.add(name)
        parameter.requires_grad_(False)


@checked
def unfreeze(model: nn.Module, part: Part) -> None:
    """Train those of the ``"weights"`` or the ``"noise"`` again that :func:`freeze` froze.

    What was frozen by other means stays so: ``requires_grad_(True)`` on a layer or a network thaws all of it.
    """
    for marks, name, parameter in _marked(model, part):
        if name in marks:
            marks.discard(name)
            parameter.requires_grad_(True)


@checked
def parameter_groups(
    model: nn.Module,
    likelihood: nn.Module | None = None,
    weight_lr: NonNegative = 2e-4,
    noise_lr: NonNegative = 2e-3,
    weight_decay: NonNegative = 0.0,
) -> list[dict[str, Any]]:
    """Optimizer groups with learning rates of their own: Xiong's report uses 2e-4 for weights and 2e-3 for noise.

    Frozen parameters are left out; weight decay never touches the noise, whose prior is in the KL.

    Args:
        likelihood: its parameters, such as the noise of the observations, are trained with the rate of the noise.
    """
    parts = {
        "weights": (weight_parameters(model), weight_lr, weight_decay),
        "noise": (noise_parameters(model), noise_lr, 0.0),
        "likelihood": ([] if likelihood is None else list(likelihood.parameters()), noise_lr, 0.0),
    }
    groups = [
        {"name": name, "params": [p for p in parameters if p.requires_grad], "lr": lr, "weight_decay": decay}
        for name, (parameters, lr, decay) in parts.items()
    ]
    return [group for group in groups if group["params"]]


# -------------------- the axis of the examples


def align_batch_axes(
    model: nn.Module, inputs: Any, layer_inputs: Mapping[str, Tensor] | None = None
) -> list[str]:
    """Finds the axis of the examples in every layer with noise, from one pass over a batch and one over a few of its rows.

    A sequence-first layer has the examples on axis 1. A layer whose input does not depend on the examples, such as an embedding of
    positions, has no such axis, so that one draw serves all examples. Rules that set ``batch_axis`` are respected.

    Args:
        model: Network with noise, whose layers are changed in place.
        inputs: Batch of inputs.
        layer_inputs: Inputs of the layers for this batch, from :func:`record_noise_inputs`. The pass is run here by default.

    Returns:
        Names of the layers that the network never calls.
    """
    layers, size = noise_layers(model), rows(inputs)
    first = _noise_inputs(model, inputs) if layer_inputs is None else layer_inputs
    idle = [name for name in layers if first and name not in first]
    few = min(2, size - 1)
    # without the first row, so that an input that depends on the examples changes
    second = _noise_inputs(model, take(inputs, 1, 1 + few)) if few else {}
    for name, layer in layers.items():
        if name in first and name in second and first[name].ndim == second[name].ndim:
            _align_layer(name, layer, first[name], second[name], size, few)
    return idle


def _align_layer(name: str, layer: Noise, first: Tensor, second: Tensor, size: int, few: int) -> None:
    """Sets the axis of the examples of one layer, from its inputs for a batch and for ``few`` rows of it."""
    layout, free = layer.layout, layer.recipe is not None and layer.recipe.batch_axis is None
    sizes = enumerate(zip(first.shape, second.shape, strict=True))
    axes = [axis for axis, (a, b) in sizes if a != b and a * few == b * size]
    if free and first.shape == second.shape and first.numel() and torch.equal(first, second):
        warn(
            f"the input of layer '{name}' does not depend on the examples, so one draw of its noise serves a whole batch; "
            "to leave it without noise, set its rule to None",
            kind="axis",
            layer=name,
        )
        layer.layout = layout._replace(batch_axis=None)
        layer.recipe = replace(layer.recipe, batch_axis="none")
    elif free and len(axes) == 1 and axes[0] not in (layout.batch_axis, first.ndim + layout.feature_axis):
        layer.layout = layout._replace(batch_axis=axes[0], unbatched_ndim=first.ndim - 1)
        layer.recipe = replace(layer.recipe, batch_axis=axes[0])
    steps, rest = divmod(len(first), size) if layer.layout.batch_axis == 0 and first.ndim else (1, 0)
    if steps > 1 and not rest and len(second) == steps * few:
        # rows are time steps or frames: either those of one example or those of one step follow each other
        by_step = first.unflatten(0, (steps, size))[:, 1 : 1 + few].flatten(0, 1)
        by_example = first[steps : steps * (1 + few)]
        gaps = [float((second - other).abs().max()) for other in (by_step, by_example)]
        if gaps[0] < 0.1 * gaps[1]:
            layer.layout = layer.layout._replace(examples_first=False)


@contextmanager
def record_noise_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Context manager that records, for every layer with noise, the tensor that the noise multiplies at its first call."""
    layers, recorded = noise_layers(model), dict[str, Tensor]()
    with record_calls({name: model.get_submodule(name) for name in layers}) as calls:
        yield recorded
    for name, inputs, output in calls:
        value = inputs if layers[name].layout.side == "input" else output
        recorded.setdefault(name, value if isinstance(value, Tensor) else torch.empty(0))


def _noise_inputs(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """Returns what the noise of every layer multiplies, or nothing if the network fails on these inputs."""
    try:
        with record_noise_inputs(model) as recorded, evaluation_mode(model), noise_mode(model, "off"):
            call(model, inputs)
    except Exception:  # a network for batches of one size: its layers stay as they are
        return {}
    return recorded
