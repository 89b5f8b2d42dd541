"""Stochastic layers: input noise from flows, dropout, and the handles on them."""

from flowbnn.noise.base import Noise, Site, noise_layers, settings_of
from flowbnn.noise.batched import Divergences, NoiseGroup, ahead, divergences, shared_draws
from flowbnn.noise.fixed import FixedNoise
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.layout import Layout, absorbs, layout_of, register_layer, weight_scale, wrappable
from flowbnn.noise.modes import (
    align_batch_axes,
    freeze,
    hold_noise,
    noise_mode,
    noise_parameters,
    parameter_groups,
    unfreeze,
    weight_parameters,
)
from flowbnn.noise.passes import NoisePass, Setting, Share, current_share, pass_of, share_batch
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
    "FixedNoise",
    "FlowNoise",
    "InputNoise",
    "Layout",
    "Noise",
    "NoiseGroup",
    "NoisePass",
    "NormalAffine",
    "NormalCoupling",
    "NormalGlow",
    "NormalInvConv",
    "NormalPlanar",
    "NormalRadial",
    "NormalSylvester",
    "Recipe",
    "Setting",
    "Share",
    "Site",
    "absorbs",
    "ahead",
    "align_batch_axes",
    "current_share",
    "divergences",
    "freeze",
    "hold_noise",
    "layout_of",
    "noise_layers",
    "noise_mode",
    "noise_parameters",
    "parameter_groups",
    "pass_of",
    "recipe_from_dict",
    "register_layer",
    "settings_of",
    "share_batch",
    "shared_draws",
    "unfreeze",
    "weight_parameters",
    "weight_scale",
    "wrappable",
]
