"""Detection of layers whose noise has collapsed to a point or to its prior."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flowbnn.errors import FlowBNNWarning, quote_names
from flowbnn.noise.joint import independent_vectors, joint_name
from flowbnn.options import Count, Seed, checked


@dataclass(frozen=True)
class LayerHealth:
    """State of the noise of one layer.

    Args:
        layer: Name of the layer.
        kl: KL divergence of one noise vector, in nats.
        kl_per_dim: KL divergence per dimension, in nats.
        spread: Standard deviation of the posterior relative to the prior, averaged over dimensions.
        state: ``"point"``, ``"prior"`` or ``"healthy"``.
    """

    layer: str
    kl: float
    kl_per_dim: float
    spread: float
    state: str


@checked
def health_warnings(healths: Sequence[LayerHealth]) -> list[FlowBNNWarning]:
    """Returns one warning for each kind of collapse, with the names of all its layers."""
    warnings = []
    for state in ("point", "prior"):
        if layers := [health for health in healths if health.state == state]:
            names = [health.layer for health in layers]
            warnings.append(FlowBNNWarning(_message(layers), kind=state, layers=names))
    return warnings


def _message(healths: Sequence[LayerHealth]) -> str:
    """Returns the message about layers in the same state."""
    plural, limit = ("s", "at most ") if len(healths) > 1 else ("", "")
    noise = f"the noise of layer{plural} {quote_names([health.layer for health in healths])} has collapsed"
    if healths[0].state == "point":
        spread = max(health.spread for health in healths)
        return f"{noise} to a point ({limit}{spread:.1%} of prior_scale); increase beta or gamma"
    kl = max(health.kl_per_dim for health in healths)
    return (
        f"{noise} to its prior (KL {limit}{kl:.4f} nats per dimension); train longer, increase noise_lr, decrease beta, or "
        f"exclude the layer{plural}"
    )


@checked
@torch.no_grad()
def posterior_health(model: nn.Module, samples: Count = 512, seed: Seed = 0) -> list[LayerHealth]:
    """Returns the state of the noise of every layer.

    Noise is a point if its standard deviation is below 0.5 % of that of the prior. It is at its prior if its KL
    divergence is below 0.002 nats per dimension.

    Args:
        model: Network with noise.
        samples: Number of draws for both estimates.
        seed: Seed of the draws.

    >>> from flowbnn.noise import NormalAffine
    >>> from flowbnn import to_stochastic
    >>> [health.state for health in posterior_health(to_stochastic(nn.Linear(3, 2), {"*": NormalAffine(base_scale=0.5)}))]
    ['prior']
    """
    healths: dict[str, LayerHealth] = {}
    for noise, names in independent_vectors(model):
        prior = noise.prior.distribution()
        generator = torch.Generator(prior.mean.device).manual_seed(seed)
        spread = float((noise.draw((samples,), generator).std(0) / prior.variance.sqrt()).mean())
        kl = float(noise.divergence(samples, generator).kl)
        per_dim = kl / noise.layout.dim / noise.count
        state = "point" if spread < 0.005 else "prior" if per_dim < 0.002 else "healthy"
        name = names[0] if len(names) == 1 else joint_name(names[0], healths)
        healths[name] = LayerHealth(name, kl, per_dim, spread, state)
    return list(healths.values())
