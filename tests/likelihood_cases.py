"""Every observation model with a small problem: a network with four inputs, and targets for a number of rows."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn import likelihoods
from flowbnn.likelihoods import Likelihood

Case = tuple[Callable[[], Likelihood], int, Callable[[int], Any]]  # likelihood, number of outputs, targets


def labels(rows: int) -> Tensor:
    return torch.arange(rows) % 2


def reals(rows: int) -> Tensor:
    return torch.linspace(-1.0, 1.0, rows)[:, None] * 3.0 + 5.0


def counts(rows: int) -> Tensor:
    return torch.arange(rows)[:, None] % 4


LIKELIHOODS: dict[str, Case] = {
    "Categorical": (likelihoods.Categorical, 2, labels),
    "Bernoulli": (likelihoods.Bernoulli, 1, labels),
    "Gaussian": (lambda: likelihoods.Gaussian(dim=1), 1, reals),
    "Gaussian predicted": (lambda: likelihoods.Gaussian("predicted"), 2, reals),
    "Gaussian fixed": (lambda: likelihoods.Gaussian(0.5), 1, reals),
    "Poisson": (likelihoods.Poisson, 1, counts),
    "NegativeBinomial": (likelihoods.NegativeBinomial, 2, counts),
    "Quantiles": (lambda: likelihoods.Quantiles((0.1, 0.5, 0.9)), 4, reals),
    "Mixture": (lambda: likelihoods.Mixture(2), 6, reals),
    "Flow": (lambda: likelihoods.Flow("nsf"), 25, reals),
    "Survival": (
        likelihoods.Survival,
        2,
        lambda rows: torch.stack([torch.linspace(0.5, 2.0, rows), labels(rows).float()], 1),
    ),
    "Heads": (
        lambda: likelihoods.Heads({"class": likelihoods.Categorical(), "value": likelihoods.Gaussian(0.5)}),
        3,
        lambda rows: {"class": labels(rows), "value": reals(rows)},
    ),
}


class HeadsNetwork(nn.Module):
    """Network with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.label, self.value = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(5, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.body(x))
        return {"class": self.label(features), "value": self.value(features)}


def make_network(name: str) -> nn.Module:
    """Returns a network for a likelihood."""
    if name == "Heads":
        return HeadsNetwork()
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, LIKELIHOODS[name][1]))
