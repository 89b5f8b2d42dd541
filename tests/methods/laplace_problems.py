"""Data and networks for the tests of the Laplace approximation."""

import torch
from torch import nn

QUIET = {"progress": False, "seed": 0}
SCALE, NOISE = 0.7, 0.3
STRUCTURES = ("kron", "diag", "full")


def regression(count: int = 40, width: int = 3, outputs: int = 1):
    inputs = torch.randn(count, width, dtype=torch.float64)
    slope = torch.randn(width, outputs, dtype=torch.float64)
    targets = inputs @ slope + 0.5 + NOISE * torch.randn(count, outputs, dtype=torch.float64)
    return inputs, targets


def conjugate(inputs, targets, scale=SCALE, noise=NOISE):
    """Returns mean, covariance and log evidence of a Bayesian linear regression with one output and a bias.

    Args:
        inputs: Inputs ``[N, D]``.
        targets: Targets ``[N, 1]``.
        scale: Standard deviation of the prior, one for all weights or one for each.
        noise: Standard deviation of the noise.
    """
    features = torch.cat([inputs, torch.ones_like(inputs[:, :1])], 1)
    variances = torch.as_tensor(scale, dtype=torch.float64).square().expand(features.shape[1])
    covariance = (features.T @ features / noise**2 + variances.reciprocal().diag()).inverse()
    total = noise**2 * torch.eye(len(inputs), dtype=torch.float64) + features @ variances.diag() @ features.T
    evidence = torch.distributions.MultivariateNormal(torch.zeros_like(targets[:, 0]), total)
    return (
        covariance @ features.T @ targets[:, 0] / noise**2,
        covariance,
        float(evidence.log_prob(targets[:, 0])),
    )


def classes(count: int = 20, width: int = 4, number: int = 3):
    return torch.randn(count, width, dtype=torch.float64), torch.randint(number, (count,))


def small_conv() -> nn.Sequential:
    """Convolutional network with BatchNorm layers whose statistics and scales are not at their initial values."""
    network = nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1, stride=2),
        nn.BatchNorm2d(2),
        nn.ReLU(inplace=True),
        nn.Flatten(),
        nn.Linear(18, 4),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.Linear(4, 3),
    ).double()
    network(torch.randn(30, 1, 6, 6, dtype=torch.float64))
    with torch.no_grad():
        for module in network.modules():
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                module.weight.normal_(1.0, 0.3)
                module.bias.normal_()
    return network.eval()


class Branches(nn.Module):
    """Network whose first registered layer is called last."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.left, self.right = nn.Linear(4, 5), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.left(x)) * self.right(x))


class Tied(nn.Module):
    """Network with one weight shared by two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.out(torch.tanh(self.second(torch.tanh(self.first(x)))))
