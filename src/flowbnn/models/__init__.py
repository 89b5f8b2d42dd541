"""Plain architectures: each exists once, deterministic, and becomes Bayesian through ``to_stochastic``."""

from flowbnn.models.lenet import LeNet
from flowbnn.models.mlp import MLP
from flowbnn.models.small_conv import SmallConv

__all__ = ["MLP", "LeNet", "SmallConv"]
