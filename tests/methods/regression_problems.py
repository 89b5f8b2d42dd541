"""Regression data and networks for the tests."""

import math

import torch
from torch import nn

from flowbnn.data import TensorLoader


def curve(number, seed, unit=1.0, center=0.0):
    """Returns a curve with noise of standard deviation 0.05, in any unit and around any center."""
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(number, 1, generator=generator) - 2
    y = torch.sin(2 * x) + 0.3 * x + 0.05 * torch.randn(number, 1, generator=generator)
    return x, center + unit * y


def batches(unit=1.0, center=0.0, size=50, **options):
    """Returns a loader of 500 examples of the curve."""
    return TensorLoader(*curve(500, 0, unit, center), batch_size=size, shuffle=True, **options)


def network(outputs=1):
    """Returns an untrained network."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, outputs))


def solved(x, y):
    """Returns a network whose last layer solves the least-squares problem, so that it needs no training."""
    net = network()
    with torch.no_grad():
        net[0].weight.mul_(2)
        hidden = torch.cat([net[:2](x), torch.ones_like(x)], 1).double()
        normal = hidden.T @ hidden + 1e-4 * len(x) * torch.eye(51, dtype=torch.float64)
        weights = torch.linalg.solve(normal, hidden.T @ y.double())
        net[2].weight.copy_(weights[:-1].T)
        net[2].bias.copy_(weights[-1])
    return net


def best_nll(rmse):
    """Returns the NLL per example at the best noise scale for residuals of this size."""
    return math.log(rmse) + 0.5 * math.log(2 * math.pi) + 0.5


def residual(model, data):
    """Returns the root mean square of the residuals."""
    return float((data[1] - model(data[0])).detach().square().mean().sqrt())
