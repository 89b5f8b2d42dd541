"""Flows by name: a base and a transform as one module, which called gives the distribution.

>>> import torch
>>> flow = NSF(dim=2)
>>> x = flow().sample((5,))
>>> flow().log_prob(x).shape
torch.Size([5])
>>> conditional = MAF(2, context_dim=3)
>>> conditional(torch.ones(5, 3)).log_prob(x).shape
torch.Size([5])

A name is a few lines over :class:`FlowModel`. The transform of a model, ``NSF(dim, context_dim, ...).transform``, serves as
well as noise of a network or as the posterior of an autoencoder. All start at or near the identity.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import (
    FFJORD,
    IAF,
    MAF,
    NAF,
    NICE,
    NSF,
    FlowModel,
    Householder,
    Planar,
    Radial,
    RealNVP,
    Sylvester,
)
from flowbnn.flows.images import IDF, DiscreteFlow, FlowPP, Glow, ResidualFlow
from flowbnn.transforms import Transform

__all__ = [
    "FFJORD",
    "IAF",
    "IDF",
    "MAF",
    "NAF",
    "NICE",
    "NSF",
    "DiscreteFlow",
    "FlowModel",
    "FlowPP",
    "Glow",
    "Householder",
    "Planar",
    "Radial",
    "RealNVP",
    "ResidualFlow",
    "Sylvester",
]


def named_flows() -> dict[str, Callable[..., FlowModel]]:
    """The flows of real vectors by their names in small letters."""
    discrete = ("DiscreteFlow", "FlowModel", "IDF")
    return {name.lower(): globals()[name] for name in __all__ if name not in discrete}


def make_posterior_transform(name: str, dim: int, context_dim: int = 0, **settings: Any) -> Transform:
    """The transform of a flow by its name for noise and posteriors: draws are cheap, and log-determinants exact, where a setting lets
    one choose.

    A ``length`` is for flows that have steps, which flows in continuous time have not.
    """
    kind = named_flows()[name]
    takes = signature(kind).parameters
    wanted = {"cheap": "forward", "log_det": "exact"}
    settings = {name: value for name, value in wanted.items() if name in takes} | settings
    if "length" not in takes:
        settings.pop("length", None)
    made = kind(dim, context_dim, **settings)
    if made.base.value_kind != "real numbers":
        text = f"noise and posteriors are real numbers, and the flow {name!r} of these settings has {made.base.value_kind}"
        raise FlowBNNError(text, argument="settings")
    return made.transform
