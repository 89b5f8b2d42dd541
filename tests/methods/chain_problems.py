"""Densities and a regression with known moments, for the tests of the samplers."""

import math

import torch
from torch import nn

from flowbnn.diagnostics import standard_error
from flowbnn.methods import ChainPosterior
from flowbnn.methods.mcmc.hamiltonian import make_potential

COVARIANCE = torch.tensor([[1.0, 1.6], [1.6, 4.0]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -1.0], dtype=torch.float64)
PRECISION = torch.linalg.inv(COVARIANCE)


@make_potential
def gaussian(position):
    deviation = position - MEAN
    return 0.5 * ((deviation @ PRECISION) * deviation).sum(-1)


@make_potential
def logistic(position):
    return (position + 2.0 * nn.functional.softplus(-position)).sum(-1)


def exact_draws(count: int, seed: int) -> torch.Tensor:
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return MEAN + noise @ torch.linalg.cholesky(COVARIANCE).T


def assert_gaussian(draws: torch.Tensor, errors: float = 4.0) -> None:
    """Asserts that mean and covariance of independent draws are exact within ``errors`` standard errors."""
    first, second = (draws - MEAN).unbind(1)
    products = torch.stack([first**2, second**2, first * second], 1)
    for values, expected in ((draws, MEAN), (products, COVARIANCE[[0, 1, 0], [0, 1, 1]])):
        error = values.std(0) / math.sqrt(len(values))
        assert ((values.mean(0) - expected).abs() < errors * error).all()


def regression(count: int = 40):
    """Returns a linear regression with known noise, and the mean and covariance of its posterior under the prior N(0, 2^2)."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    inputs[:, 1] += 0.8 * inputs[:, 0]
    noise = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.3 + 0.5 * noise
    design = torch.cat([inputs, torch.ones(count, 1, dtype=torch.float64)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(3, dtype=torch.float64) / 4.0)
    return inputs, targets, covariance @ (design.T @ targets / 0.25)[:, 0], covariance


def assert_recovered(posterior: ChainPosterior, mean: torch.Tensor, covariance: torch.Tensor) -> None:
    """Asserts that the posterior is exact within four Monte Carlo standard errors, by the effective sample size."""
    chains = posterior.chains
    draws = torch.cat([chains["weight"].flatten(2), chains["bias"]], -1)
    assert ((draws.mean((0, 1)) - mean).abs() < 4 * standard_error(draws)).all()
    deviations = draws - mean
    products = deviations[..., :, None] * deviations[..., None, :]
    assert ((products.mean((0, 1)) - covariance).abs() < 4 * standard_error(products)).all()
