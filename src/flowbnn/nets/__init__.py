"""Networks that compute the parameters of transforms.

Each is called as ``net(value, context)`` and reads and writes the last axis. Its last layer starts at zero, so that the transform
starts at the identity. Lipschitz networks and :class:`SmoothMLP`, whose output is itself a step or a velocity, start small.
"""

from flowbnn.nets.convolution import GatedConvNet, PixelCNN, WaveNet
from flowbnn.nets.mlp import ConditionalNormal, ConditionerMLP, MaskedMLP
from flowbnn.nets.smooth import LipschitzConv, LipschitzMLP, SmoothMLP

__all__ = [
    "ConditionalNormal",
    "ConditionerMLP",
    "GatedConvNet",
    "LipschitzConv",
    "LipschitzMLP",
    "MaskedMLP",
    "PixelCNN",
    "SmoothMLP",
    "WaveNet",
]
