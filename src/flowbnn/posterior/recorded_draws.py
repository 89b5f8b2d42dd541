"""Draws of a prediction on a CUDA device, recorded as a CUDA graph and replayed with other seeds.

The noise of a network is small, but drawing it takes hundreds of launches, which delay the first kernel of the network. A recorded
graph makes the same draws in one launch. Its generators are seeded before each replay, so that a seed gives the same numbers.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from flowbnn.distributions.bases import MixtureBase, NormalBase
from flowbnn.noise.base import DropoutNoise, Noise, block_seeds
from flowbnn.noise.contexts import NoiseMode
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.gaussians import SharedDraws
from flowbnn.posterior.prediction import PredictionCache


class RecordedDraws:
    """Recorded draws of all layers of a network.

    Args:
        layers: Noise modules of the network.
        modes: Modes by layer key, which have the seeds and the number of samples.
        device: CUDA device.
        count: Number of generators that the draws take.
    """

    def __init__(
        self, layers: Sequence[Noise], modes: Mapping[int, NoiseMode], device: torch.device, count: int
    ) -> None:
        self.generators = [torch.Generator(device) for _ in range(count)]
        self.graph = torch.cuda.CUDAGraph()
        for generator in self.generators:
            self.graph.register_generator_state(generator)
        generators = iter(self.generators)
        torch.cuda.synchronize(device)
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.draws = SharedDraws(layers, modes, device, lambda seed: next(generators))

    def draw(self, modes: Mapping[int, NoiseMode]) -> SharedDraws:
        """Returns draws with the seeds of these modes. They are overwritten by the next call.

        Args:
            modes: Modes by layer key, with the same number of samples.
        """
        self.draws.modes = modes
        for generator, seed in zip(self.generators, block_seeds_of(self.draws), strict=True):
            generator.manual_seed(seed)
        self.graph.replay()
        return self.draws


def recorded_draws(
    layers: Sequence[Noise], modes: Mapping[int, NoiseMode], device: torch.device, cache: PredictionCache
) -> SharedDraws:
    """Returns the draws of all layers for a prediction on a CUDA device. The second prediction of its kind records them.

    Args:
        layers: Noise modules of the network.
        modes: Modes by layer key, which have the seeds and the number of samples.
        device: CUDA device.
        cache: Cache of the posterior.
    """
    key = _signature(layers, modes, device)
    recorded = cache.values.get(key)
    if recorded is None:  # the first draws compile their kernels, which a recording cannot
        draws = SharedDraws(layers, modes, device)
        cache.values[key] = len(list(block_seeds_of(draws))) if all(map(is_recordable, layers)) else 0
        return draws
    if recorded == 0:
        return SharedDraws(layers, modes, device)
    if not isinstance(recorded, RecordedDraws):
        recorded = cache.values[key] = RecordedDraws(layers, modes, device, recorded)
    return recorded.draw(modes)


def is_recordable(layer: Noise) -> bool:
    """Returns True if draws of mode ``shared`` depend only on the generators, and if none waits for the device.

    This is known of the library's own noise only. A recording that fails would leave the generators of torch in a broken state.
    """
    noise = layer.joint_noise
    if layer.site == "position":  # drawn later
        return True
    if not isinstance(noise, InputNoise):
        return type(noise) is DropoutNoise
    transform = noise.transform
    packages = {type(module).__module__.partition(".")[0] for module in transform.modules()}
    direct = transform.solver in ("none", "inverse") and transform.draws == "none" and not noise.reads_batch
    known = packages <= {"flowbnn", "torch"} and type(noise.base) in (NormalBase, MixtureBase)
    return direct and known and noise.uses_default_draw


def block_seeds_of(draws: SharedDraws) -> Iterator[int]:
    """Yields the seed of each block of draws of each layer."""
    for layer in draws.order:
        mode = draws.modes[layer.key]
        yield from block_seeds(mode.samples, mode.seed)


def _signature(
    layers: Sequence[Noise], modes: Mapping[int, NoiseMode], device: torch.device
) -> tuple[object, ...]:
    """Returns everything but the seeds that recorded draws depend on, such as the memory of the parameters."""
    half = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    stream = torch.cuda.current_stream(device).cuda_stream
    signature: list[object] = ["draws", half, stream]
    for layer in layers:
        noise = layer.joint_noise
        signature += (layer.key, modes[layer.key].samples, getattr(noise, "rate", None))
        modules: list[nn.Module | None] = [noise]
        for module in modules:  # the list grows during the loop; torch's own iterators take a millisecond
            if module is not None:
                tensors = (*module._parameters.values(), *module._buffers.values())
                signature += [tensor.data_ptr() for tensor in tensors if tensor is not None]
                modules += module._modules.values()
    return tuple(signature)
