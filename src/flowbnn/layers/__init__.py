"""Stochastic layers: input noise from flows, dropout, and the handles on them."""

from flowbnn.layers.control import (
    freeze,
    hold_noise,
    noise,
    noise_layers,
    noise_parameters,
    parameter_groups,
    unfreeze,
    weight_parameters,
)
from flowbnn.layers.dropout import DropoutNoise
from flowbnn.layers.input_noise import InputNoise
from flowbnn.layers.layout import Layout, layout_of, register_layer, wrappable
from flowbnn.layers.noise import Mode, Noise, Site
from flowbnn.layers.packing import NoiseGroup, shared_draws
from flowbnn.layers.preparing import Divergences, ahead, divergences
from flowbnn.layers.recipes import (
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
from flowbnn.layers.scaling import absorbs, weight_scale
from flowbnn.layers.sharing import Share

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
    "noise",
    "noise_layers",
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
