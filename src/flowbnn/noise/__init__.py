"""Stochastic layers: input noise from flows, dropout, and the handles on them."""

from flowbnn.noise.base import Mode, Noise, Share, Site
from flowbnn.noise.batched import Divergences, NoiseGroup, ahead, divergences, shared_draws
from flowbnn.noise.dropout import DropoutNoise
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.layout import Layout, absorbs, layout_of, register_layer, weight_scale, wrappable
from flowbnn.noise.modes import (
    freeze,
    hold_noise,
    noise_layers,
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
    NormalGlow,
    NormalInvConv,
    NormalPlanar,
    NormalRadial,
    NormalSylvester,
    Recipe,
    recipe_from_dict,
)

__all__ = [
    "Divergences",
    "Dropout",
    "DropoutNoise",
    "FlowNoise",
    "InputNoise",
    "Layout",
    "Mode",
    "Noise",
    "NoiseGroup",
    "NormalAffine",
    "NormalCoupling",
    "NormalGlow",
    "NormalInvConv",
    "NormalPlanar",
    "NormalRadial",
    "NormalSylvester",
    "Recipe",
    "Share",
    "Site",
    "absorbs",
    "ahead",
    "divergences",
    "freeze",
    "hold_noise",
    "layout_of",
    "noise_layers",
    "noise_mode",
    "noise_parameters",
    "parameter_groups",
    "recipe_from_dict",
    "register_layer",
    "shared_draws",
    "unfreeze",
    "weight_parameters",
    "weight_scale",
    "wrappable",
]
