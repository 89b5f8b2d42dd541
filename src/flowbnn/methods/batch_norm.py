"""Running statistics of BatchNorm layers, recomputed for given weights."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import call, device_of, dtype_of, evaluation_mode, move, split_batch
from flowbnn.training import is_main_process, track
from flowbnn.training.randomness import preserve_rng_state


def batch_norm_layers(model: nn.Module) -> list[nn.Module]:
    """Returns the normalization layers with running statistics."""
    norm = nn.modules.batchnorm._NormBase
    return [m for m in model.modules() if isinstance(m, norm) and m.running_mean is not None]


def recompute_batch_norm(model: nn.Module, loader: Iterable[Any], seed: int) -> None:
    """Replaces running statistics by means over the batches of one pass, with all other layers in evaluation mode.

    Args:
        model: Network, modified in place.
        loader: Batches of inputs and targets.
        seed: Seed of a shuffled loader; all generators are restored.
    """
    layers = batch_norm_layers(model)
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


def batch_norm_statistics(
    make_network: Callable[[int], nn.Module], count: int, loader: Iterable[Any], seed: int, progress: bool
) -> dict[str, Tensor]:
    """Returns the buffers ``{name: [count, ...]}`` of several networks, with running statistics of the data.

    Args:
        make_network: Function from an index to a network.
        count: Number of networks.
        loader: Batches of inputs and targets.
        seed: Seed of a shuffled loader.
        progress: True to show a progress bar.
    """
    states = []
    for index in track(range(count), "BatchNorm statistics", progress and is_main_process()):
        network = make_network(index)
        recompute_batch_norm(network, loader, seed)
        states.append(dict(network.named_buffers()))
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}
