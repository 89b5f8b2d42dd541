"""Layers that behave differently in training and in prediction, dropout and BatchNorm, and how methods handle them."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, evaluation_mode, move, split_batch
from flowbnn.training import is_main_process, track
from flowbnn.training.randomness import preserve_rng_state

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def own_dropout(model: nn.Module) -> list[Any]:
    """The dropout layers that a network brings."""
    return [part for part in model.modules() if isinstance(part, DROPOUT) and part.p > 0]


def inner_dropout(model: nn.Module) -> dict[str, Any]:
    """Layers that drop inside of themselves, by name: attention its weights, recurrent layers what passes from one to the next."""
    return {
        name: part
        for name, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention | nn.RNNBase)
        and part.dropout > 0
        and getattr(part, "num_layers", 2) > 1
    }


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Dropout at rate 0; the network's own rates come back."""
    places = [(part, "p") for part in own_dropout(model)]
    places += [(part, "dropout") for part in inner_dropout(model).values()]
    rates = [getattr(part, name) for part, name in places]
    for part, name in places:
        setattr(part, name, 0.0)
    try:
        yield
    finally:
        for (part, name), rate in zip(places, rates, strict=True):
            setattr(part, name, rate)


def without_nested(model: nn.Module) -> nn.Module:
    """The network with its transformers kept to ordinary tensors: nested ones bypass the layers' hooks."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False
    return model


def normalizers(model: nn.Module) -> list[nn.Module]:
    """Layers that keep running statistics of what they see."""
    kinds = (nn.modules.batchnorm._NormBase,)
    return [part for part in model.modules() if isinstance(part, kinds) and part.running_mean is not None]


def refresh(model: nn.Module, loader: Iterable[Any], seed: int) -> None:
    """Running statistics as plain means over the batches of one pass, everything else in evaluation mode."""
    layers = normalizers(model)
    momenta = [layer.momentum for layer in layers]
    with evaluation_mode(model), preserve_rng_state(loader, seed):
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
