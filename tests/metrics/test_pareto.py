"""Tests of Pareto smoothing on weights with a known tail or a known mean."""

import math

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.metrics.pareto import _smooth, k_standard_error, log_mean, max_usable_k, pareto_smoothed


@pytest.mark.parametrize("k", [0.2, 0.7, 1.2])
def test_shape_and_scale_of_a_generalized_pareto_tail(k):
    """The excess of GPD(k, 1.5) over a threshold u is GPD(k, 1.5 + k u)."""
    source, shapes, scales = torch.Generator().manual_seed(0), [], []
    for _ in range(40):
        uniform = torch.rand(20_000, generator=source, dtype=torch.float64)
        weights = 1.0 + torch.expm1(-k * torch.log1p(-uniform)) * 1.5 / k
        tail = _smooth(weights.log())
        cutoff = math.exp(tail.cutoff)
        shapes.append(tail.k)
        scales.append(tail.scale * cutoff / (1.5 + k * (cutoff - 1.0)))
    assert abs(sum(shapes) / 40 - k) < 0.04
    assert abs(sum(scales) / 40 - 1.0) < 0.07


@pytest.mark.parametrize("rate", [1.5, 2.0, 4.0])
def test_shape_of_weights_between_exponential_distributions(rate):
    """Weights of Exp(1) under Exp(r) exceed t with probability proportional to t^(-r / (r - 1)), so k is 1 - 1 / r."""
    source, shapes, evidence = torch.Generator().manual_seed(1), [], []
    for _ in range(10):
        uniform = torch.rand(100_000, generator=source, dtype=torch.float64)
        weights = -(rate - 1.0) / rate * torch.log1p(-uniform) - math.log(rate)
        smoothed, k = pareto_smoothed(weights)
        shapes.append(k)
        evidence.append(float(smoothed.exp().mean()))
    expected = 1.0 - 1.0 / rate
    error = (1.0 + expected) / math.sqrt(10 * 948)  # of maximum likelihood, with tails of 948 weights
    assert sum(shapes) / 10 == pytest.approx(expected, abs=3 * error)
    if expected < 0.7:
        assert sum(evidence) / 10 == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("spread", [1e3, 1e6])
def test_k_is_infinite_if_weights_are_too_far_apart_for_floating_point(spread):
    normal = torch.randn(400, generator=torch.Generator().manual_seed(0))
    assert pareto_smoothed(30.0 * normal)[1] > 5.0
    assert pareto_smoothed(spread * normal)[1] == math.inf
    estimate = log_mean(spread * normal)
    assert (estimate.k, estimate.error) == (math.inf, math.inf)


def test_equal_weights_and_ties_at_the_cutoff():
    equal = torch.full((400,), -3.0)
    assert log_mean(equal) == pytest.approx((-3.0, 0.0, 0.0, 400.0), abs=1e-6)
    tied = torch.cat([torch.zeros(345), 10.0 * torch.arange(1.0, 56.0)])  # the tail has 60 weights
    assert pareto_smoothed(tied)[1] > 5.0
    mostly_tied = torch.cat([torch.zeros(390), torch.arange(1.0, 11.0)])
    assert pareto_smoothed(mostly_tied)[1] == math.inf


def test_the_error_covers_the_log_mean_of_a_factorized_gaussian():
    """The best factorized Gaussian approximates a correlated one. The exact log-mean of the weights is 0."""
    source, deviations = torch.Generator().manual_seed(0), []
    for _ in range(200):
        roots = torch.randn(5, 14, generator=source, dtype=torch.float64)
        precision = roots @ roots.T / 14
        width = precision.diagonal().rsqrt()
        normal = torch.randn(400, 5, generator=source, dtype=torch.float64)
        x = width * normal
        weights = 0.5 * (normal.square() - (x @ precision) * x).sum(1) + width.log().sum()
        estimate = log_mean(weights + 0.5 * torch.logdet(precision))
        if estimate.k < max_usable_k(400):
            deviations.append(abs(estimate.value) / estimate.error)
    assert len(deviations) > 60
    # evidence() warns above 4 standard errors
    assert sum(deviation > 4.0 for deviation in deviations) <= 0.01 * len(deviations)
    assert sum(deviation > 2.0 for deviation in deviations) <= 0.15 * len(deviations)


@pytest.mark.parametrize(
    ("log_weights", "kind"),
    [(torch.zeros(10), "shape"), (torch.zeros(5, 5), "shape"), (torch.full((30,), math.nan), "not finite")],
)
def test_bad_weights_are_refused(log_weights, kind):
    with pytest.raises(FlowBNNError) as caught:
        pareto_smoothed(log_weights)
    assert (caught.value.kind, caught.value.argument) == (kind, "log_weights")


@pytest.mark.parametrize("k", [0.2, 0.7])
def test_the_standard_error_of_k_is_the_spread_over_repetitions(k):
    generator = torch.Generator().manual_seed(0)
    uniform = torch.rand(200, 400, generator=generator, dtype=torch.float64)
    weights = 1.0 + ((1.0 - uniform) ** -k - 1.0) / k  # quantiles of a generalized Pareto distribution
    estimates = torch.tensor([pareto_smoothed(row.log())[1] for row in weights])
    # the spread of 200 repetitions has itself an error of 5 %
    assert k_standard_error(k, 400) == pytest.approx(estimates.std().item(), rel=0.2)
