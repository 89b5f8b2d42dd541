"""Marginal densities of the noise, and their numbers of modes."""

import math
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, check_shape, nearest
from flowbnn.noise import noise_layers
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.options import Count, Ge, Seed, UnitInterval, checked


@dataclass(frozen=True)
class Marginal:
    """Marginal density of one noise variable on a grid.

    Args:
        layer: Name of the layer.
        dimension: Index of the noise variable.
        grid: Values of the noise variable, ``[G]``.
        density: Posterior density at the grid, ``[G]``.
        prior: Prior density at the grid, ``[G]``.
        modes: Number of modes of the posterior density.
    """

    layer: str
    dimension: int
    grid: Tensor
    density: Tensor
    prior: Tensor
    modes: int


def _kernel_density(samples: Tensor, grid: Tensor) -> Tensor:
    """Returns a Gaussian kernel density estimate at a grid.

    The bandwidth maximizes the leave-one-out likelihood. Rules of thumb use the overall spread, which is too wide if there are several
    modes.
    """
    subset = samples[:1000]
    distance = (subset[:, None] - subset[None]).square().fill_diagonal_(torch.inf)
    rule_of_thumb = 0.9 * float(subset.std().clamp_min(1e-6)) * len(subset) ** -0.2
    widths = [rule_of_thumb * 0.7**k for k in range(10)]
    scores = [float((torch.logsumexp(-0.5 * distance / w**2, 1) - math.log(w)).sum()) for w in widths]
    width = widths[scores.index(max(scores))] * (len(samples) / len(subset)) ** -0.2
    scaled = (grid[:, None] - samples[None]) / width
    return torch.exp(-0.5 * scaled.square()).mean(1) / (width * (2 * torch.pi) ** 0.5)


@checked
def count_modes(density: Tensor, prominence: UnitInterval = 0.1) -> int:
    """Counts the peaks of a density on a grid.

    Args:
        density: Density at the grid, ``[G]``.
        prominence: Height of a peak above the adjacent valleys, as a fraction of the highest peak. Lower peaks are ignored.

    Raises:
        FlowBNNError: If the density is not a non-empty vector.

    >>> x = torch.linspace(-6, 6, 200)
    >>> bump = lambda m: torch.exp(-0.5 * (x - m) ** 2)
    >>> count_modes(bump(0.0)), count_modes(bump(-3.0) + bump(3.0)), count_modes(bump(-0.5) + bump(0.5))
    (1, 2, 1)
    """
    check_shape("density", density, ("points >= 1",))
    values = density.tolist()
    min_height = prominence * max(values)
    modes, rising, low, high = 0, True, 0.0, 0.0
    for value in values:
        if rising:
            high = max(high, value)
            if high - low >= min_height and high - value >= min_height:
                modes, rising, low = modes + 1, False, value
        else:
            low = min(low, value)
            if value - low >= min_height:
                rising, high = True, value
    if rising and high - low >= min_height:
        modes += 1
    return modes


@checked
@torch.no_grad()
def marginal(
    model: nn.Module, layer: str, dimension: Annotated[int, Ge(0)], samples: Count = 4000, seed: Seed = 0
) -> Marginal:
    """Estimates the marginal density of one noise variable from draws.

    Args:
        model: Network with noise.
        layer: Name of the layer.
        dimension: Index of the noise variable in the layer.
        samples: Number of draws.
        seed: Seed of the draws.

    Raises:
        FlowBNNError: If the layer has no flow noise, or no such noise variable.

    >>> from flowbnn.noise import NormalAffine
    >>> from flowbnn import to_stochastic
    >>> marginal(to_stochastic(nn.Linear(3, 2), {"*": NormalAffine()}), "", 0).modes
    1
    """
    layers = {name: noise for name, noise in noise_layers(model).items() if isinstance(noise, InputNoise)}
    if layer not in layers:
        text = f"layer '{layer}' lacks flow noise{nearest(layer, layers)}"
        raise FlowBNNError(text, argument="layer", layer=layer)
    noise = layers[layer]
    if dimension >= (size := noise.layout.dim):
        text = f"layer '{layer}' has {size} dimensions, got dimension={dimension}"
        raise FlowBNNError(text, argument="dimension", layer=layer)
    prior = noise.prior.distribution()
    generator = torch.Generator(prior.mean.device).manual_seed(seed)
    draws = noise.draw((samples,), generator)[:, dimension].double().cpu()
    mean, scale = float(prior.mean[dimension]), float(prior.variance[dimension].sqrt())
    low = min(float(draws.min()), mean - 3.5 * scale)
    high = max(float(draws.max()), mean + 3.5 * scale)
    grid = torch.linspace(low, high, 240, dtype=torch.float64)
    density = _kernel_density(draws, grid)
    index = slice(dimension, dimension + 1)
    marginal_prior = prior.like(prior.loc[index].double().cpu(), prior.scale[index].double().cpu())
    prior_density = marginal_prior.log_prob(grid[:, None]).exp()
    return Marginal(layer, dimension, grid, density, prior_density, count_modes(density))
