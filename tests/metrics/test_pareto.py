"""Pareto smoothing on weights whose tail or whose mean is known."""

import math

import pytest
import torch

from flowbnn.metrics.pareto import generalized_pareto, log_mean, pareto_smoothed, usable


def test_a_generalized_pareto_distribution_is_found():
    source = torch.Generator().manual_seed(0)
    for k in (0.2, 0.7, 1.2):
        uniform = torch.rand(20_000, generator=source, dtype=torch.float64)
        excess = (torch.expm1(-k * torch.log1p(-uniform)) * 1.5 / k).sort().values
        found, scale = generalized_pareto(excess)
        assert abs(found - k) < 0.04
        assert abs(scale - 1.5) < 0.1
        # weights of which one in five has that tail
        assert abs(pareto_smoothed((1.0 + excess).log())[1] - k) < 0.15


@pytest.mark.parametrize("rate", [1.5, 2.0, 4.0])
def test_weights_have_the_tail_that_their_densities_give_them(rate):
    """Exp(1) by draws of Exp(r): the weights exceed t with probability proportional to t^(-r / (r - 1)), so k is 1 - 1 / r."""
    source, found, evidence = torch.Generator().manual_seed(1), [], []
    for _ in range(10):
        uniform = torch.rand(100_000, generator=source, dtype=torch.float64)
        weights = -(rate - 1.0) / rate * torch.log1p(-uniform) - math.log(rate)
        smoothed, k = pareto_smoothed(weights)
        found.append(k)
        evidence.append(float(smoothed.exp().mean()))
    true = 1.0 - 1.0 / rate
    error = (1.0 + true) / math.sqrt(10 * 949)  # of maximum likelihood, in tails of 949 weights
    assert sum(found) / 10 == pytest.approx(true, abs=3 * error)
    if true < 0.7:
        assert sum(evidence) / 10 == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_weights_too_far_apart_for_floating_point_have_no_tail_to_trust(spread):
    normal = torch.randn(400, generator=torch.Generator().manual_seed(0))
    assert pareto_smoothed(30.0 * normal)[1] > 5.0
    assert pareto_smoothed(spread * normal)[1] == math.inf
    found = log_mean(spread * normal)
    assert (found.k, found.error) == (math.inf, math.inf)


def test_equal_weights_are_perfect_and_a_tie_at_the_cutoff_is_no_tail_of_equals():
    equal = torch.full((400,), -3.0)
    assert log_mean(equal) == pytest.approx((-3.0, 0.0, 0.0, 400.0), abs=1e-6)
    tied = torch.cat([torch.zeros(345), 10.0 * torch.arange(1.0, 56.0)])  # of which 60 make the tail
    assert pareto_smoothed(tied)[1] > 5.0


def test_the_error_of_the_mean_covers_what_a_factorized_gaussian_misses():
    """The best factorized Gaussian of a correlated one: the exact log-mean of the weights is 0."""
    source, away = torch.Generator().manual_seed(0), []
    for _ in range(200):
        roots = torch.randn(5, 14, generator=source, dtype=torch.float64)
        precision = roots @ roots.T / 14
        width = precision.diagonal().rsqrt()
        normal = torch.randn(400, 5, generator=source, dtype=torch.float64)
        x = width * normal
        weights = 0.5 * (normal.square() - (x @ precision) * x).sum(1) + width.log().sum()
        found = log_mean(weights + 0.5 * torch.logdet(precision))
        if found.k < usable(400):
            away.append(abs(found.value) / found.error)
    assert len(away) > 60
    assert sum(one > 4.0 for one in away) <= 0.01 * len(away)  # where evidence() would warn of modes
    assert sum(one > 2.0 for one in away) <= 0.15 * len(away)
