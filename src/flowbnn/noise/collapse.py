"""Has a layer's posterior collapsed to a point, or fallen back onto its prior?"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from flowbnn.errors import FlowBNNWarning, quote_names
from flowbnn.noise.joint import independent_vectors, joint_name
from flowbnn.options import Count, Seed, checked

POINT = 0.005  # a posterior narrower than this share of its prior is a point; much precise data makes it as narrow as 0.02
PRIOR = 0.002  # nats per dimension: a posterior nearer to its prior than this has learned nothing


@dataclass(frozen=True)
class LayerHealth:
    """How far one layer's posterior has moved.

    Args:
        layer: its name.
        kl: nats, for one noise vector.
        kl_per_dim: the same over the number of dimensions.
        spread: mean over dimensions of the posterior's standard deviation over the prior's.
        state: ``"point"``, ``"prior"`` or ``"healthy"``.
    """

    layer: str
    kl: float
    kl_per_dim: float
    spread: float
    state: str


@checked
def health_warnings(healths: Sequence[LayerHealth]) -> list[FlowBNNWarning]:
    """One warning for each ailment, about all the layers that have it."""
    ill: dict[str, list[LayerHealth]] = {"point": [], "prior": []}
    for health in healths:
        ill.get(health.state, []).append(health)
    return [
        FlowBNNWarning(_line(some), kind=state, layers=[health.layer for health in some])
        for state, some in ill.items()
        if some
    ]


def _line(ill: Sequence[LayerHealth]) -> str:
    """What is wrong with layers in the same state."""
    plural, most = ("s", "at most ") if len(ill) > 1 else ("", "")
    noise = f"the noise of layer{plural} {quote_names([health.layer for health in ill])}"
    if ill[0].state == "point":
        return (
            f"{noise} has collapsed to a point (its spread is {most}{max(h.spread for h in ill):.1%} of the prior's), so it "
            "says nothing about uncertainty; a larger beta, or gamma > 0, keeps it open"
        )
    return (
        f"{noise} has fallen back onto its prior (KL {most}{max(h.kl_per_dim for h in ill):.4f} nats per dimension): it has "
        f"learned nothing from the data; train longer, raise noise_lr, lower beta, or leave the layer{plural} plain"
    )


@checked
@torch.no_grad()
def posterior_health(model: nn.Module, samples: Count = 512, seed: Seed = 0) -> list[LayerHealth]:
    """The state of every layer's noise posterior.

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
        state = "point" if spread < POINT else "prior" if per_dim < PRIOR else "healthy"
        name = names[0] if len(names) == 1 else joint_name(names[0], healths)
        healths[name] = LayerHealth(name, kl, per_dim, spread, state)
    return list(healths.values())
