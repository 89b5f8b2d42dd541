"""Handles on the noise of a whole network: find it, hold it, freeze it, give it its own learning rate."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.noise.base import Noise
from flowbnn.noise.passes import Mode, NoisePass, Setting
from flowbnn.options import Count, NonNegative, checked

__all__ = [
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
