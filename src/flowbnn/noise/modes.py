"""Handles on the noise of a whole network: find it, hold it, freeze it, give it its own learning rate, find its batch axes."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import apply, call, evaluation_mode, rows, take, watch_modules
from flowbnn.errors import warn
from flowbnn.noise.base import Noise, layers_with_noise, noise_layers, settings_of
from flowbnn.noise.passes import Mode, NoisePass
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
    with NoisePass(settings_of(model, mode, samples, seed, generator)):
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


def align_batch_axes(model: nn.Module, inputs: Any) -> list[str]:
    """Find the axis of the examples in every layer that takes noise.

    A sequence-first layer has it on axis 1, and a layer whose input is the same whatever the examples are (the embedding of positions)
    has none: one draw then serves them all. Rules that name a ``batch_axis`` are left alone.

    Args:
        inputs: a batch; some of its rows are run with the noise off.

    Returns:
        The layers that the network never calls.
    """
    count = min(3, rows(inputs) // 2)
    layers = noise_layers(model)
    more = _observed(model, inputs if count < 2 else take(inputs, 0, count))
    idle = [name for name in layers if more and name not in more]
    if count < 2:
        return idle
    # others: what depends on the examples changes
    fewer = _observed(model, take(inputs, count, 2 * count - 1))
    for name, layer in layers.items():
        first, second, layout = more.get(name), fewer.get(name), layer.layout
        if first is None or second is None or first.ndim != second.ndim:
            continue
        if layer.recipe is None or layer.recipe.batch_axis is not None:
            continue
        sizes = enumerate(zip(first.shape, second.shape, strict=True))
        axes = [axis for axis, (a, b) in sizes if a != b and a * (count - 1) == b * count]
        if first.shape == second.shape and first.numel() and torch.equal(first, second):
            warn(
                f"the input of layer '{name}' does not depend on the examples, so one draw of its noise serves a whole batch; "
                "leave it plain with None in the rules if that is not meant",
                kind="axis",
                layer=name,
            )
            layer.layout = layout._replace(batch_axis=None)
            layer.recipe = replace(layer.recipe, batch_axis="none")
        elif len(axes) == 1 and axes[0] not in (layout.batch_axis, first.ndim + layout.feature_axis):
            layer.layout = layout._replace(batch_axis=axes[0], unbatched_ndim=first.ndim - 1)
            layer.recipe = replace(layer.recipe, batch_axis=axes[0])
    _order_folded_rows(model, inputs, count, more)
    return idle


def _order_folded_rows(model: nn.Module, inputs: Any, count: int, seen: dict[str, Tensor]) -> None:
    """Where rows are time steps or frames of examples: whether those of one example follow each other."""
    folded: dict[str, Noise] = {}
    for name, layer in noise_layers(model).items():
        number = len(seen[name]) if name in seen and layer.layout.batch_axis == 0 else 0
        if number > count and not number % count:
            folded[name] = layer
    if not folded:
        return
    changed = apply(inputs, lambda tensor: torch.cat([tensor[count : count + 1], tensor[1:count]]))
    for name, other in _observed(model, changed).items():
        if name in folded and other.shape == seen[name].shape:
            differs = (other != seen[name]).flatten(1).any(1).nonzero().flatten().tolist()
            if differs == list(range(0, len(other), count)):
                folded[name].layout = folded[name].layout._replace(examples_first=False)


def _observed(model: nn.Module, inputs: Any) -> dict[str, Tensor]:
    """What each noisy layer multiplies at its first call; nothing where the network fails on these inputs."""
    seen: dict[str, Tensor] = {}

    layers = noise_layers(model)

    def record(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inside = layers[name].layout.side == "input"
        value = next(iter((*args, *kwargs.values())), None) if inside else output
        seen.setdefault(name, value if isinstance(value, Tensor) else torch.empty(0))

    modules = {name: model.get_submodule(name) for name in layers}
    try:
        with watch_modules(modules, None, record), evaluation_mode(model), noise_mode(model, "off"):
            call(model, inputs)
    except Exception:  # a network made for one size of batch: take its layers at their word
        return {}
    return seen
