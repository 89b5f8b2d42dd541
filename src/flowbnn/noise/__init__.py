"""Noise of stochastic layers: recipes, modes, freezing and optimizer groups."""

from flowbnn.noise.base import Noise, noise_layers
from flowbnn.noise.layout import Layout, register_layer
from flowbnn.noise.modes import (
    freeze,
    noise_mode,
    noise_parameters,
    parameter_groups,
    unfreeze,
    weight_parameters,
)
from flowbnn.noise.recipes import (
    Dropout,
    FlowNoise,
    NormalAffine,
    NormalCoupling,
    NormalFlow,
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    Recipe,
)

__all__ = [
    "Dropout",
    "FlowNoise",
    "Layout",
    "Noise",
    "NormalAffine",
    "NormalCoupling",
    "NormalFlow",
    "NormalGlow",
    "NormalInvConv",
    "NormalPlanar",
    "NormalRadial",
    "NormalSylvester",
    "Recipe",
    "freeze",
    "noise_layers",
    "noise_mode",
    "noise_parameters",
    "parameter_groups",
    "register_layer",
    "unfreeze",
    "weight_parameters",
]
