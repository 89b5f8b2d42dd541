"""Tests of predictive distributions of real values: quantiles, CRPS and highest density regions of any density."""

import pytest
import torch

from flowbnn.likelihoods import Flow, Mixture
from flowbnn.predictive import ContinuousPredictive, FlowPredictive, GaussianPredictive, MixturePredictive
from flowbnn.transforms.splines import spline_forward


def make_predictive(kind: str, samples: int = 4, inputs: int = 3, dim: int = 2) -> ContinuousPredictive:
    generator = torch.Generator().manual_seed(0)
    likelihood = {"flow": Flow(bins=5, dim=dim), "mixture": Mixture(3, dim=dim)}.get(kind)
    width = 2 * dim if likelihood is None else likelihood.num_outputs
    outputs = torch.randn(samples, inputs, width, generator=generator, dtype=torch.float64)
    if likelihood is None:
        return GaussianPredictive(outputs[..., :dim], outputs[..., dim:].exp())
    return likelihood.predictive(outputs)


@pytest.fixture(params=["gaussian", "flow", "mixture"])
def predictive(request) -> ContinuousPredictive:
    return make_predictive(request.param)


def test_moments_agree_with_samples(predictive):
    draws = predictive.sample(100_000, seed=0)
    torch.testing.assert_close(draws.mean(0), predictive.mean, atol=0.05, rtol=0)
    torch.testing.assert_close(draws.std(0), predictive.std, atol=0, rtol=0.03)


def test_flow_moments_agree_with_dense_quadrature():
    prediction = make_predictive("flow")
    levels = (torch.arange(100_000, dtype=torch.float64) + 0.5) / 100_000
    z = torch.special.ndtri(levels)
    values = spline_forward(z.expand(*prediction.loc.shape, -1), prediction.knots.unsqueeze(-3))[0]
    torch.testing.assert_close(
        prediction.samples, prediction.loc + prediction.scale * values.mean(-1), atol=1e-4, rtol=1e-4
    )
    expected = prediction.scale.square() * values.var(-1)
    torch.testing.assert_close(prediction.sample_variances, expected, atol=1e-3, rtol=1e-3)


def test_quantiles_invert_the_cdf(predictive):
    levels = [0.001, 0.05, 0.5, 0.95, 0.999]
    quantiles = predictive.quantiles(levels)
    for level, values in zip(levels, quantiles, strict=True):
        torch.testing.assert_close(predictive.cdf(values), torch.full_like(values, level), atol=1e-8, rtol=0)
    low, high = predictive.interval(0.9)
    torch.testing.assert_close(low, quantiles[1])
    torch.testing.assert_close(high, quantiles[3])


def test_crps_agrees_with_the_closed_form():
    prediction = make_predictive("gaussian", samples=7)
    targets = torch.linspace(-4, 4, 6, dtype=torch.float64).reshape(3, 2)
    quadrature = ContinuousPredictive.crps(prediction, targets)
    torch.testing.assert_close(quadrature, prediction.crps(targets), atol=1e-6, rtol=1e-5)


def test_crps_agrees_with_samples(predictive):
    targets = torch.linspace(-3, 3, 6, dtype=torch.float64).reshape(3, 2)
    draws = predictive.sample(100_000, seed=0)
    first, second = draws.split(50_000)
    scores = (draws - targets).abs()
    expected = scores.mean(0) - 0.5 * (first - second).abs().mean(0)
    error = (scores.std(0) + (first - second).std(0)) / 50_000**0.5
    assert bool(((predictive.crps(targets) - expected).abs() < 4 * error).all())


def test_highest_density_region_has_its_mass_and_equal_density_at_its_ends(predictive):
    for mass in (0.5, 0.9):
        low, high = predictive.hdr(mass)
        assert low.shape == high.shape
        covered = torch.zeros(3, 2, dtype=torch.float64)
        for start, stop in zip(low, high, strict=True):
            difference = predictive.cdf(stop.nan_to_num(0.0)) - predictive.cdf(start.nan_to_num(0.0))
            covered += torch.where(start.isnan(), 0.0, difference)
            assert bool((start.isnan() | (start < stop)).all())
        torch.testing.assert_close(covered, torch.full_like(covered, mass), atol=2e-3, rtol=0)
        widths = (high - low).nansum(0)
        interval = predictive.interval(mass)
        assert bool((widths <= interval.high - interval.low + 1e-3).all())


def test_region_of_a_gaussian_is_its_central_interval():
    prediction = GaussianPredictive(torch.tensor([[[1.0]]], dtype=torch.float64), 4.0)
    region, interval = prediction.hdr(0.9), prediction.interval(0.9)
    torch.testing.assert_close(region.low[0], interval.low, atol=2e-3, rtol=0)
    torch.testing.assert_close(region.high[0], interval.high, atol=2e-3, rtol=0)


def test_region_of_two_peaks_has_two_intervals():
    means = torch.tensor([-3.0, 3.0]).reshape(1, 1, 1, 2).expand(1, 2, 1, 2).clone()
    means[0, 1] = 0.0  # one peak
    prediction = MixturePredictive(means, torch.full((1, 2, 1, 2), 0.5), torch.zeros(1, 2, 1, 2))
    low, high = prediction.hdr(0.9)
    assert low.shape == (2, 2, 1)
    assert low[:, 0, 0].tolist() == pytest.approx([-3.822, 2.178], abs=5e-3)
    assert high[:, 0, 0].tolist() == pytest.approx([-2.178, 3.822], abs=5e-3)
    assert bool(low[1, 1].isnan().all())


def test_shapes_follow_the_targets():
    likelihood = Flow()
    likelihood.shape = ()
    prediction = likelihood.predictive(torch.zeros(2, 5, likelihood.num_outputs))
    assert prediction.mean.shape == prediction.crps(torch.zeros(5)).shape == (5,)
    assert prediction.hdr().low.shape == (1, 5)
    assert prediction.sample(3, seed=0).shape == prediction.quantiles([0.1, 0.5, 0.9]).shape == (3, 5)


@pytest.mark.parametrize("kind", ["flow", "mixture"])
def test_inputs_with_fewer_samples_ignore_the_others(kind):
    likelihood = {"flow": Flow(bins=3), "mixture": Mixture(2)}[kind]
    outputs = torch.randn(4, 2, likelihood.num_outputs, generator=torch.Generator().manual_seed(0))
    adaptive = likelihood.predictive(outputs, torch.tensor([4, 2]))
    expected = likelihood.predictive(outputs[:2, 1:])
    targets = torch.tensor([0.3, -0.2])
    for name in ("nll", "crps", "cdf"):
        torch.testing.assert_close(getattr(adaptive, name)(targets)[1:], getattr(expected, name)(targets[1:]))
    torch.testing.assert_close(adaptive.quantiles(0.3)[:, 1:], expected.quantiles(0.3))
    torch.testing.assert_close(adaptive.std[1:], expected.std)


def test_rescaled_predictives_keep_their_mean(predictive):
    scaled = predictive.rescale(2.0)
    torch.testing.assert_close(scaled.mean, predictive.mean)
    torch.testing.assert_close(scaled.std, 2.0 * predictive.std)


def test_gaussian_tensors_are_gaussians(predictive):
    mean, variance = torch.full((4, 3, 2), 1.5), torch.full((4, 3, 2), 4.0)
    tensors = predictive._gaussian_tensors(mean.double(), variance.double())
    gaussian = type(predictive)._from_tensors(*tensors)
    targets = torch.linspace(-1, 3, 6, dtype=torch.float64).reshape(3, 2)
    expected = GaussianPredictive(mean.double(), variance.double()).nll(targets)
    torch.testing.assert_close(gaussian.nll(targets), expected, atol=1e-5, rtol=0)
    assert isinstance(predictive, GaussianPredictive | FlowPredictive | MixturePredictive)
