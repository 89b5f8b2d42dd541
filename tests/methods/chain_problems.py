"""Densities and a regression whose moments are known, for the samplers."""

import math

import torch
from torch import nn

from flowbnn.diagnostics import standard_error
from flowbnn.methods import ChainPosterior
from flowbnn.methods.mcmc.hamiltonian import with_gradient

COVARIANCE = torch.tensor([[1.0, 1.6], [1.6, 4.0]], dtype=torch.float64)
MEAN = torch.tensor([1.0, -1.0], dtype=torch.float64)
PRECISION = torch.linalg.inv(COVARIANCE)


@with_gradient
def gaussian(position):
    away = position - MEAN
    return 0.5 * ((away @ PRECISION) * away).sum(-1)


@with_gradient
def logistic(position):
    return (position + 2.0 * nn.functional.softplus(-position)).sum(-1)


def exact_draws(count: int, seed: int) -> torch.Tensor:
    noise = torch.randn(count, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return MEAN + noise @ torch.linalg.cholesky(COVARIANCE).T


def assert_gaussian(draws: torch.Tensor, errors: float = 4.0) -> None:
    """Mean and covariance of independent draws within so many standard errors."""
    away = draws - MEAN
    products = torch.stack([away[:, 0] ** 2, away[:, 1] ** 2, away[:, 0] * away[:, 1]], 1)
    for found, true in ((draws, MEAN), (products, COVARIANCE[[0, 1, 0], [0, 1, 1]])):
        error = found.std(0) / math.sqrt(len(found))
        assert ((found.mean(0) - true).abs() < errors * error).all()


def regression(count: int = 40):
    """Linear regression with known noise, and the mean and covariance of its posterior under the prior N(0, 2^2)."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    inputs[:, 1] += 0.8 * inputs[:, 0]
    noise = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    targets = inputs @ torch.tensor([[1.0], [-2.0]], dtype=torch.float64) + 0.3 + 0.5 * noise
    design = torch.cat([inputs, torch.ones(count, 1, dtype=torch.float64)], 1)
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(3, dtype=torch.float64) / 4.0)
    return inputs, targets, covariance @ (design.T @ targets / 0.25)[:, 0], covariance


def assert_recovered(posterior: ChainPosterior, mean: torch.Tensor, covariance: torch.Tensor) -> None:
    """Within four Monte Carlo standard errors, by the effective sample size."""
    chains = posterior.chains
    draws = torch.cat([chains["weight"].flatten(2), chains["bias"]], -1)
    assert ((draws.mean((0, 1)) - mean).abs() < 4 * standard_error(draws)).all()
    away = draws - mean
    products = away[..., :, None] * away[..., None, :]
    assert ((products.mean((0, 1)) - covariance).abs() < 4 * standard_error(products)).all()
