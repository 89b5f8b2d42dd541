"""Network with sparse gradients, and an adapter from a function ``loss(network, batch, clock)`` to the objective of ``train``."""

import torch
from torch import nn

from flowbnn.training import train as train_objective


class Objective(nn.Module):
    def __init__(self, network, loss):
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, batch, clock):
        return self.loss(self.network, batch, clock)


def train(network, loss, optimizer, *args, validate=None, **options):
    """Trains a network by a loss function, and calls ``validate`` with the network."""
    validation = None if validate is None else lambda: validate(network)
    options = {"name_prefix": "network", "validate": validation, **options}
    return train_objective(Objective(network, loss), optimizer, *args, **options)


class SparseAndDouble(nn.Module):
    """Embedding with sparse gradients in float32, followed by a linear layer in float64."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 2, sparse=True)
        self.linear = nn.Linear(2, 1, dtype=torch.float64)

    def forward(self, x):
        return self.linear(self.table(x).double())
