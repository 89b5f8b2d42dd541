"""Data and networks for the tests of all methods, and exact solutions."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

QUIET = {"progress": False, "accelerator": "cpu"}
NOISE, PRIOR = 0.5, 0.8


def of_kind(caught, kind: str) -> list:
    """Returns the FlowBNN warnings of one kind among those that were caught."""
    messages = [warning.message for warning in caught]
    return [message for message in messages if getattr(message, "fields", {}).get("kind") == kind]


@dataclass(frozen=True)
class Conjugate:
    """Bayesian linear regression with known noise and its Gaussian posterior in closed form."""

    design: Tensor
    targets: Tensor

    @property
    def precision(self) -> Tensor:
        return self.design.T @ self.design / NOISE**2 + torch.eye(self.design.shape[1]).double() / PRIOR**2

    @property
    def mean(self) -> Tensor:
        return torch.linalg.solve(self.precision, self.design.T @ self.targets / NOISE**2)

    @property
    def covariance(self) -> Tensor:
        return torch.linalg.inv(self.precision)

    @property
    def least_squares(self) -> Tensor:
        return torch.linalg.lstsq(self.design, self.targets.unsqueeze(1)).solution.squeeze(1)


def conjugate(bias: bool) -> tuple[Conjugate, nn.Module, list[tuple[Tensor, Tensor]], Tensor]:
    """Returns the problem, a network, its data as one batch, and inputs whose outputs determine the weights."""
    generator = torch.Generator().manual_seed(4)
    inputs = (
        torch.randn(24, 3, generator=generator).double()
        @ torch.tensor([[1.0, 0.6, 0.0], [0.0, 0.8, 0.3], [0.0, 0.0, 0.7]]).double()
    )
    design = torch.cat([inputs, torch.ones(24, 1).double()], 1) if bias else inputs
    weights = torch.tensor([0.9, -0.6, 0.4, 0.5]).double()[: design.shape[1]]
    targets = design @ weights + NOISE * torch.randn(24, generator=generator).double()
    network = nn.Linear(3, 1, bias=bias).double()
    for parameter in network.parameters():
        nn.init.constant_(parameter, 0.1)
    return Conjugate(design, targets), network, [(inputs, targets.unsqueeze(1))], probes(bias)


def probes(bias: bool) -> Tensor:
    zero = torch.zeros(1, 3).double()
    return torch.cat([torch.eye(3).double(), zero]) if bias else torch.eye(3).double()


def weights_from(outputs: Tensor, bias: bool) -> Tensor:
    """Returns weights ``[S, D]`` from outputs ``[S, D, 1]`` at the probes."""
    values = outputs.squeeze(-1)
    return torch.cat([values[:, :3] - values[:, 3:], values[:, 3:]], 1) if bias else values


def blobs(count: int = 96, far: float = 0.0) -> TensorDataset:
    """Three classes that overlap slightly."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % 3
    return TensorDataset(
        2.5 * torch.eye(3, 4)[labels] + torch.randn(count, 4, generator=generator) + far, labels
    )


def lines(count: int = 96, far: float = 0.0) -> TensorDataset:
    """Regression of two targets on four features, nearly linear."""
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 4, generator=generator) + far
    targets = torch.stack([inputs[:, 0] - inputs[:, 1], inputs[:, 2].sin()], 1)
    return TensorDataset(inputs, targets + 0.1 * torch.randn(count, 2, generator=generator))


def loader(data: TensorDataset) -> DataLoader:
    return DataLoader(data, batch_size=32, shuffle=True)


def small(outputs: int = 3) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def normalized() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


class Tied(nn.Module):
    """Network with two layers that share one weight and have separate biases."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))
