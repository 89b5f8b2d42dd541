"""Plain architectures: each exists once, deterministic, and becomes Bayesian through ``to_stochastic``."""

from flowbnn.models.lenet import LeNet
from flowbnn.models.mlp import MLP
from flowbnn.models.small_conv import SmallConv
from flowbnn.models.vgg import VGG16

__all__ = ["MLP", "VGG16", "LeNet", "SmallConv"]
