"""Layers that behave differently in training and in prediction, dropout and BatchNorm, and how methods handle them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, evaluating, move, split_batch
from flowbnn.methods.fitting import undisturbed
from flowbnn.training import is_main_process, track

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def own_dropout(model: nn.Module) -> list[Any]:
    """The dropout that a network brings."""
    return [part for part in model.modules() if isinstance(part, DROPOUT) and part.p > 0]


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout at rate 0; the network's own rates come back."""
    parts: list[Any] = own_dropout(model)
    rates = [part.p for part in parts]
    for part in parts:
        part.p = 0.0
    try:
        yield
    finally:
        for part, rate in zip(parts, rates, strict=True):
            part.p = rate


def normalizers(model: nn.Module) -> list[nn.Module]:
    """Layers that keep running statistics of what they see."""
    kinds = (nn.modules.batchnorm._NormBase,)
    return [part for part in model.modules() if isinstance(part, kinds) and part.running_mean is not None]


def refresh(model: nn.Module, loader: Iterable[Any], seed: int) -> None:
    """Running statistics as plain means over the batches of one pass, everything else in evaluation mode."""
    layers = normalizers(model)
    momenta = [layer.momentum for layer in layers]
    with evaluating(model), undisturbed(loader, seed):
        for layer in layers:
            layer.reset_running_stats()  # type: ignore[operator]
            layer.momentum = None  # type: ignore[assignment]
            layer.train()
        for batch in loader:
            call(model, move(split_batch(batch)[0], device_of(model), dtype_of(model)))
    for layer, momentum in zip(layers, momenta, strict=True):
        layer.momentum = momentum


def statistics(
    network_of: Callable[[int], nn.Module], count: int, loader: Iterable[Any], seed: int, progress: bool
) -> dict[str, Tensor]:
    """Buffers ``{name: [count, ...]}`` of so many networks after a pass of each over the data."""
    states = []
    for index in track(range(count), "BatchNorm statistics", progress and is_main_process()):
        network = network_of(index)
        refresh(network, loader, seed)
        states.append(dict(network.named_buffers()))
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are learned, each tied one once."""
    return {name: value for name, value in model.named_parameters() if value.requires_grad}
