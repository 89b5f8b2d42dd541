"""Is the posterior multimodal? Marginal densities of the noise, and how many modes they have."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.noise import noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.options import Count, Ge, Seed, UnitInterval, checked


@dataclass(frozen=True)
class Marginal:
    """The density of one noise dimension on a grid, with its prior and its number of modes."""

    layer: str
    dimension: int
    grid: Tensor
    density: Tensor
    prior: Tensor
    modes: int


def _kernel_density(samples: Tensor, grid: Tensor) -> Tensor:
    """With the kernel width under which each draw is most likely given the others.

    Rules of thumb take the spread of the whole for the width of one mode and wash several modes out.
    """
    few = samples[:1000]
    distance = (few[:, None] - few[None]).square().fill_diagonal_(torch.inf)
    thumb = 0.9 * float(few.std().clamp_min(1e-6)) * len(few) ** -0.2
    widths = [thumb * 0.7**k for k in range(10)]
    likely = [float((torch.logsumexp(-0.5 * distance / w**2, 1) - math.log(w)).sum()) for w in widths]
    width = widths[likely.index(max(likely))] * (len(samples) / len(few)) ** -0.2
    away = (grid[:, None] - samples[None]) / width
    return torch.exp(-0.5 * away.square()).mean(1) / (width * (2 * torch.pi) ** 0.5)


@checked
def count_modes(density: Tensor, prominence: UnitInterval = 0.1) -> int:
    """Peaks of a density on a grid that rise above the valleys beside them by ``prominence`` of the highest peak.

    >>> x = torch.linspace(-6, 6, 200)
    >>> bump = lambda m: torch.exp(-0.5 * (x - m) ** 2)
    >>> count_modes(bump(0.0)), count_modes(bump(-3.0) + bump(3.0)), count_modes(bump(-0.5) + bump(0.5))
    (1, 2, 1)
    """
    if density.ndim != 1 or not len(density):
        raise FlowBNNError(
            f"density must be a vector on a grid, not {tuple(density.shape)}",
            argument="density",
        )
    values = density.tolist()
    need = prominence * max(values)
    modes, rising, low, high = 0, True, 0.0, 0.0
    for value in values:
        if rising:
            high = max(high, value)
            if high - low >= need and high - value >= need:
                modes, rising, low = modes + 1, False, value
        else:
            low = min(low, value)
            if value - low >= need:
                rising, high = True, value
    if rising and high - low >= need:
        modes += 1
    return modes


@checked
@torch.no_grad()
def marginal(
    model: nn.Module, layer: str, dimension: Annotated[int, Ge(0)], samples: Count = 4000, seed: Seed = 0
) -> Marginal:
    """The marginal density of one dimension of a layer's noise, from draws.

    >>> from flowbnn.noise import NormalAffine
    >>> from flowbnn import to_stochastic
    >>> marginal(to_stochastic(nn.Linear(3, 2), {"*": NormalAffine()}), "", 0).modes
    1
    """
    layers = {name: noise for name, noise in noise_layers(model).items() if isinstance(noise, InputNoise)}
    problem = "" if layer in layers else f"no layer {layer!r} carries flow noise{nearest(layer, layers)}"
    if not problem and not dimension < (size := layers[layer].layout.dim):
        problem = f"the noise of layer {layer!r} has dimensions 0 to {size - 1}, not {dimension}"
    if problem:
        raise FlowBNNError(problem, layer=layer)
    noise = layers[layer]
    prior = noise.prior.distribution()
    generator = torch.Generator(prior.mean.device).manual_seed(seed)
    draws = noise.draw((samples,), generator)[:, dimension].double().cpu()
    mean, scale = float(prior.mean[dimension]), float(prior.variance[dimension].sqrt())
    low = min(float(draws.min()), mean - 3.5 * scale)
    high = max(float(draws.max()), mean + 3.5 * scale)
    grid = torch.linspace(low, high, 240, dtype=torch.float64)
    density = _kernel_density(draws, grid)
    own = slice(dimension, dimension + 1)
    alone = prior.like(prior.loc[own].double().cpu(), prior.scale[own].double().cpu())
    believed = alone.log_prob(grid[:, None]).exp()
    return Marginal(layer, dimension, grid, density, believed, count_modes(density))
