"""Handles on the noise of a whole network: find it, hold it, freeze it, give it its own learning rate, find its batch axes."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.batches import apply, call, rows
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.noise.base import Noise
from flowbnn.noise.passes import Mode, NoisePass, Setting
from flowbnn.options import Count, NonNegative, checked

__all__ = [
    "align_batch_axes",
    "freeze",
    "hold_noise",
    "noise_layers",
    "noise_mode",
    "noise_parameters",
    "parameter_groups",
    "settings_of",
    "unfreeze",
    "weight_parameters",
]

Part = Literal["weights", "noise"]
FROZEN = "_frozen_by_flowbnn"


def noise_layers(model: nn.Module) -> dict[str, Noise]:
    """The noise modules of a converted network by the name of the layer they serve, in the network's order."""
    if not isinstance(model, nn.Module):
        owner = type(model).__name__
        advice = "; its network is its .model" if isinstance(getattr(model, "model", None), nn.Module) else ""
        raise FlowBNNError(f"this takes a network (torch.nn.Module), not a {owner}{advice}")
    found: dict[str, Noise] = {}
    seen: set[int] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:  # as named_modules goes, but not into the noise, which has the most parts
        name, module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        if isinstance(module, Noise):
            found[name.rpartition(".")[0]] = module
            continue
        prefix = f"{name}." if name else ""
        for part, child in reversed(module._modules.items()):
            if child is not None:
                waiting.append((prefix + part, child))
    return found


def _layers(model: nn.Module) -> dict[str, Noise]:
    found = noise_layers(model)
    if not found:
        raise FlowBNNError("this network has no noise; convert it first with to_stochastic(network, rules)")
    return found


def settings_of(
    model: nn.Module,
    mode: Mode,
    samples: int = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> dict[int, Setting]:
    """One mode for all noise of a network, by the keys of its layers: what :class:`~flowbnn.noise.passes.NoisePass` takes.

    Each layer's shared draws come from its own stream, derived from ``seed`` and the layer's place in the network.
    """
    layers = _layers(model)
    if mode == "shared" and seed is None:
        seed = int(torch.randint(2**31 - 1, (), generator=generator))
    if mode == "sample" and seed is not None and generator is None:
        device = next((t.device for t in (*model.parameters(), *model.buffers())), torch.device("cpu"))
        generator = torch.Generator(device).manual_seed(seed)
    settings: dict[int, Setting] = {}
    for index, layer in enumerate(layers.values()):
        settings[layer.key] = Setting(mode, samples, ((seed or 0) * 1_000_003 + index) % 2**63, generator)
    return settings


@checked
def hold_noise(
    model: Any,
    mode: Mode,
    samples: Count = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Hold all noise in one mode until told otherwise. See :class:`~flowbnn.noise.base.Noise` for the modes.

    Args:
        model: the network.
        samples: in mode ``"shared"``, how many draws the noise holds.
        seed: of these draws; in mode ``"sample"`` it makes the draws repeatable.
        generator: as an alternative to ``seed`` in mode ``"sample"``.
    """
    settings = settings_of(model, mode, samples, seed, generator)
    for layer in noise_layers(model).values():
        layer.setting = settings[layer.key]


@checked
@contextmanager
def noise_mode(
    model: Any,
    mode: Mode,
    samples: Count = 1,
    seed: int | None = None,
    generator: torch.Generator | None = None,
) -> Iterator[nn.Module]:
    """As :func:`hold_noise` for the length of a ``with`` block, in this thread only.

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


def _choose(model: nn.Module, part: Part) -> list[nn.Parameter]:
    if part not in ("weights", "noise"):
        raise FlowBNNError(f"what can be frozen is 'weights' or 'noise', not {part!r}")
    _layers(model)
    return noise_parameters(model) if part == "noise" else weight_parameters(model)


def _frozen(model: nn.Module) -> Iterator[tuple[set[str], str, nn.Parameter]]:
    """Every module's parameters, with the names of those that :func:`freeze` froze; they are kept by the module and copied with it."""
    for module in model.modules():
        marks = module.__dict__.setdefault(FROZEN, set())
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield marks, name, parameter


def freeze(model: nn.Module, part: Part) -> None:
    """Stop training the ``"weights"`` or the ``"noise"``, until :func:`unfreeze`."""
    chosen = {id(parameter) for parameter in _choose(model, part) if parameter.requires_grad}
    for marks, name, parameter in _frozen(model):
        if id(parameter) in chosen:
            marks.add(name)
            parameter.requires_grad_(False)


def unfreeze(model: nn.Module, part: Part) -> None:
    """Train those of the ``"weights"`` or the ``"noise"`` again that :func:`freeze` froze.

    What was frozen by other means stays so: ``requires_grad_(True)`` on a layer or a network thaws all of it.
    """
    chosen = {id(parameter) for parameter in _choose(model, part)}
    thawed = {id(parameter) for marks, name, parameter in _frozen(model) if name in marks} & chosen
    for marks, name, parameter in _frozen(model):
        if id(parameter) in thawed:
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
    more = _observed(model, inputs if count < 2 else apply(inputs, lambda tensor: tensor[:count]))
    idle = [name for name in layers if more and name not in more]
    if count < 2:
        return idle
    # others: what depends on the examples changes
    fewer = _observed(model, apply(inputs, lambda tensor: tensor[count : 2 * count - 1]))
    for name, layer in layers.items():
        first, second = more.get(name), fewer.get(name)
        if first is None or second is None or first.ndim != second.ndim or layer.recipe is None:
            continue
        if layer.recipe.batch_axis is not None:
            continue
        axes = [
            axis
            for axis, (a, b) in enumerate(zip(first.shape, second.shape, strict=True))
            if a != b and a * (count - 1) == b * count
        ]
        if first.shape == second.shape and first.numel() and torch.equal(first, second):
            warnings.warn(
                FlowBNNWarning(
                    f"the input of layer '{name}' does not depend on the examples, so one draw of its noise serves a whole batch; "
                    "leave it plain with None in the rules if that is not meant",
                    kind="axis",
                    layer=name,
                )
            )
            layer.layout = layer.layout._replace(batch_axis=None)
            layer.recipe = replace(layer.recipe, batch_axis="none")
        elif len(axes) == 1 and axes[0] not in (
            layer.layout.batch_axis,
            first.ndim + layer.layout.feature_axis,
        ):
            layer.layout = layer.layout._replace(batch_axis=axes[0], unbatched_ndim=first.ndim - 1)
            layer.recipe = replace(layer.recipe, batch_axis=axes[0])
    _order_folded_rows(model, inputs, count, more)
    return idle


def _order_folded_rows(model: nn.Module, inputs: Any, count: int, seen: dict[str, Tensor]) -> None:
    """Where rows are time steps or frames of examples: whether those of one example follow each other."""
    folded = {
        name: layer
        for name, layer in noise_layers(model).items()
        if name in seen
        and layer.layout.batch_axis == 0
        and seen[name].shape[0] > count
        and not seen[name].shape[0] % count
    }
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
    training = [module for module in model.modules() if module.training]

    def record(name: str, side: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        value = output if side == "output" else next(iter((*args, *kwargs.values())), None)
        seen.setdefault(name, value if isinstance(value, Tensor) else torch.empty(0))

    handles = []
    for name, layer in noise_layers(model).items():
        hook = partial(record, name, layer.layout.side)
        handles.append(model.get_submodule(name).register_forward_hook(hook, with_kwargs=True))
    try:
        with torch.no_grad(), noise_mode(model, "off"):
            model.eval()
            call(model, inputs)
    except Exception:  # a network made for one size of batch: take its layers at their word
        return {}
    finally:
        for handle in handles:
            handle.remove()
        for module in training:
            module.training = True
    return seen
