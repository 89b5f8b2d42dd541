"""Conditioners: networks that compute the parameters of transforms.

Each is called as ``net(value, context)``, reads and writes the last axis, and starts with a last layer of zeros, so that what it
conditions starts at the identity. Lipschitz networks and :class:`SmoothMLP`, which are themselves a step or a velocity, start small.
"""

from flowbnn.nets.convolution import GatedConvNet, PixelCNN, WaveNet
from flowbnn.nets.mlp import MLP, ConditionalNormal, MaskedMLP
from flowbnn.nets.smooth import LipschitzConv, LipschitzMLP, SmoothMLP

__all__ = [
    "MLP",
    "ConditionalNormal",
    "GatedConvNet",
    "LipschitzConv",
    "LipschitzMLP",
    "MaskedMLP",
    "PixelCNN",
    "SmoothMLP",
    "WaveNet",
]
