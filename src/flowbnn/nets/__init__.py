"""Conditioners: networks that compute the parameters of transforms.

Each is called as ``net(value, context)``, reads and writes the last axis, and starts with a last layer of zeros, so that what it
conditions starts at the identity.
"""

from flowbnn.nets.masked import MaskedMLP
from flowbnn.nets.mlp import MLP

__all__ = ["MLP", "MaskedMLP"]
