"""Named flows: modules of a base and a transform that return the distribution when they are called.

>>> import torch
>>> flow = NSF(dim=2)
>>> x = flow().sample((5,))
>>> flow().log_prob(x).shape
torch.Size([5])
>>> conditional = MAF(2, context_dim=3)
>>> conditional(torch.ones(5, 3)).log_prob(x).shape
torch.Size([5])

A named flow is a few lines on top of :class:`FlowModel`. Its transform, ``NSF(dim, context_dim, ...).transform``, also serves as
noise of a network or as the posterior of an autoencoder. All flows start at or near the identity.
"""

from collections.abc import Callable
from inspect import signature
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import FlowModel
from flowbnn.flows.images import IDF, DiscreteFlow, FlowPP, Glow, ResidualFlow
from flowbnn.flows.vectors import (
    FFJORD,
    IAF,
    MAF,
    NAF,
    NICE,
    NSF,
    Householder,
    Planar,
    Radial,
    RealNVP,
    Sylvester,
)
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
    """Returns the flows of real vectors by their names in lower case.

    >>> named_flows()["nsf"] is NSF
    True
    """
    discrete = ("DiscreteFlow", "FlowModel", "IDF")
    return {name.lower(): globals()[name] for name in __all__ if name not in discrete}


def make_posterior_transform(name: str, dim: int, context_dim: int = 0, **options: Any) -> Transform:
    """Returns the transform of a named flow for noise and posteriors.

    Draws are cheap and log-determinants exact if the flow has such an option.

    Args:
        name: Name of the flow in lower case.
        dim: Length of the vectors.
        context_dim: Length of the context vectors; 0 for none.
        options: Further options of the flow. ``length`` is ignored by flows without it.

    Raises:
        FlowBNNError: The flow with these options has a base of angles or integers.

    >>> make_posterior_transform("naf", 3).cheap
    'forward'
    """
    flow = named_flows()[name]
    parameters = signature(flow).parameters
    defaults = {"cheap": "forward", "log_det": "exact"}
    options = {option: value for option, value in defaults.items() if option in parameters} | options
    if "length" not in parameters:
        options.pop("length", None)
    model = flow(dim, context_dim, **options)
    if model.base.value_kind != "real numbers":
        text = f"flow {name!r} models {model.base.value_kind}, expected real numbers; change its settings"
        raise FlowBNNError(text, argument="settings")
    return model.transform
