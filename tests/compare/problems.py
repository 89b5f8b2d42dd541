"""Data and a network for the tests of comparisons."""

import torch
from torch import Tensor, nn

from flowbnn.data import TensorLoader, clusters, ring


def make_loaders() -> tuple[TensorLoader, TensorLoader, Tensor]:
    """Returns training batches, test batches and novel inputs."""
    generator = torch.Generator().manual_seed(0)
    train = TensorLoader(*clusters(80, 1.2, generator), batch_size=40)
    return train, TensorLoader(*clusters(60, 1.2, generator), batch_size=40), ring(30, 18.0, generator)


def make_network() -> nn.Module:
    """Returns a small classifier with 42 weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
