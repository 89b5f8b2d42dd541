"""Bases and flows, as ``torch.distributions``."""

from flowbnn.distributions.bases import Base, DiagonalNormal, MixtureBase, NormalBase, NormalMixture
from flowbnn.distributions.divergence import Divergence, divergence
from flowbnn.distributions.flow import Flow
from flowbnn.distributions.torch_transform import from_torch

__all__ = [
    "Base",
    "DiagonalNormal",
    "Divergence",
    "Flow",
    "MixtureBase",
    "NormalBase",
    "NormalMixture",
    "divergence",
    "from_torch",
]
