"""Tests of quantile regression and its predictive distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Quantiles, make_likelihood
from flowbnn.predictive import QuantilePredictive
from slow_cases import mark_slow

LEVELS = (0.05, 0.25, 0.5, 0.8, 0.95)


def random_outputs(likelihood, rows: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, likelihood.num_outputs, generator=generator, dtype=torch.float64)


def test_pseudo_likelihood_is_the_mean_of_asymmetric_laplace_densities():
    likelihood = Quantiles(LEVELS, dim=2)
    outputs, targets = random_outputs(likelihood, 6), torch.randn(6, 2, dtype=torch.float64)
    values = likelihood.quantiles(outputs)
    scale = outputs[:, -2:].exp()
    expected = torch.zeros(6, dtype=torch.float64)
    for index, level in enumerate(LEVELS):
        # scipy: kappa^2 = level / (1 - level), and its scale is s / sqrt(level (1 - level))
        kappa, width = math.sqrt(level / (1 - level)), 1 / math.sqrt(level * (1 - level))
        for target in range(2):
            density = stats.laplace_asymmetric(
                kappa, loc=values[:, target, index].numpy(), scale=(scale[:, target] * width).numpy()
            )
            expected += torch.from_numpy(density.logpdf(targets[:, target].numpy())) / len(LEVELS)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), expected)


@pytest.mark.parametrize("levels", [(0.1, 0.9), LEVELS])
def test_quantiles_never_cross(levels):
    likelihood = Quantiles(levels)
    values = likelihood.quantiles(10.0 * random_outputs(likelihood, 50))
    assert bool((values.diff(dim=-1) > 0).all())
    middle = values[..., len(levels) // 2].flatten()
    torch.testing.assert_close(middle, 10.0 * random_outputs(likelihood, 50)[:, 0])


@pytest.mark.parametrize("value", [-50.0, 50.0])
def test_gradients_are_finite_at_extreme_outputs(value):
    likelihood = Quantiles()
    outputs = torch.full((1, likelihood.num_outputs), value, requires_grad=True)
    log_prob = likelihood.log_prob(outputs, torch.tensor([3.0]))
    (gradient,) = torch.autograd.grad(log_prob.sum(), outputs)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(gradient).all()


def test_predictive_has_the_quantiles_of_one_sample():
    likelihood = Quantiles(LEVELS)
    outputs = random_outputs(likelihood, 4)
    result = likelihood.predictive(outputs[None]).quantiles(LEVELS)
    torch.testing.assert_close(result.movedim(0, -1), likelihood.quantiles(outputs))


def test_predictive_agrees_with_draws():
    likelihood = Quantiles(LEVELS)
    predictive = likelihood.predictive(random_outputs(likelihood, 3).reshape(3, 1, -1))
    draws = predictive.sample(400_000, seed=0).flatten().numpy()
    assert predictive.mean.item() == pytest.approx(draws.mean(), abs=0.01 * draws.std())
    assert predictive.variance.item() == pytest.approx(draws.var(), rel=0.02)
    levels = [0.01, 0.3, 0.9]
    np.testing.assert_allclose(
        predictive.quantiles(levels).flatten(), np.quantile(draws, levels), atol=0.02 * draws.std()
    )
    other = np.random.default_rng(0).permutation(draws)
    crps = np.abs(draws - 0.3).mean() - 0.5 * np.abs(draws - other).mean()
    assert predictive.crps(torch.tensor([[0.3]])).item() == pytest.approx(crps, rel=0.02)
    grid = torch.linspace(float(draws.min()) - 2, float(draws.max()) + 2, 200_001, dtype=torch.float64)
    density = predictive._mean(predictive._log_densities(grid.reshape(1, 1, -1)).exp()).flatten()
    assert torch.trapezoid(density, grid).item() == pytest.approx(1.0, abs=1e-3)


def test_quantiles_of_a_gaussian_give_a_gaussian():
    truth = torch.distributions.Normal(torch.tensor(1.5, dtype=torch.float64), 0.7)
    values = truth.icdf(torch.tensor(LEVELS, dtype=torch.float64)).expand(1, 1, 1, -1)
    predictive, point = QuantilePredictive(values, LEVELS), torch.tensor([[0.2]], dtype=torch.float64)
    torch.testing.assert_close(-predictive.nll(point), truth.log_prob(point)[0])
    assert predictive.std.item() == pytest.approx(0.7)
    torch.testing.assert_close(predictive.rescale(2.0).std, torch.full((1, 1), 1.4, dtype=torch.float64))


def test_curvature_is_the_hessian_of_the_expected_loss():
    likelihood = Quantiles((0.2, 0.6, 0.9))
    outputs = torch.tensor([[0.3, -0.2, 0.4, 0.1]], dtype=torch.float64)
    density = likelihood.predictive(outputs[None])
    grid = torch.linspace(-15, 15, 60_001, dtype=torch.float64)
    mass = density._log_densities(grid.reshape(1, 1, -1)).exp().flatten() * (grid[1] - grid[0])

    def expected_loss(values):
        return -(mass * likelihood.log_prob(values.expand(len(grid), -1), grid)).sum()

    result = likelihood.information(outputs, torch.zeros(1))[0, :3, :3]
    step = 0.05
    for i in range(3):
        for j in range(3):
            corner = torch.zeros(2, 1, 4, dtype=torch.float64)
            corner[0, 0, i], corner[1, 0, j] = step, step
            numeric = sum(
                a * b * expected_loss(outputs + a * corner[0] + b * corner[1])
                for a in (1, -1)
                for b in (1, -1)
            ) / (4 * step**2)
            assert result[i, j].item() == pytest.approx(numeric.item(), abs=0.05 * float(result.abs().max()))


def skewed(rows: int, unit: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, 1, generator=generator) * 2 - 1
    noise = -torch.rand(rows, generator=generator).log()
    return inputs, unit * (inputs[:, 0] + noise)


@pytest.mark.parametrize("unit", [pytest.param(1.0, marks=pytest.mark.slow), 1e4])
def test_quantiles_of_skewed_noise_are_learned_in_any_unit(unit):
    inputs, targets = skewed(1000, unit)
    likelihood = Quantiles((0.1, 0.5, 0.9))
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, likelihood.num_outputs))
    loader = fb.data.TensorLoader(inputs, targets, batch_size=100)
    posterior = fb.MLE(epochs=60, lr=0.01).fit(network, loader, likelihood=likelihood, progress=False, seed=0)
    values = posterior.predict(inputs).quantiles((0.1, 0.5, 0.9)) / unit - inputs[:, 0]
    truth = -torch.tensor([0.9, 0.5, 0.1]).log()
    assert (values.mean(1) - truth).abs().max() < 0.15


METHODS = {
    "node-noise": lambda: fb.NodeNoise(epochs=2),
    "ensemble": lambda: fb.DeepEnsemble(2, epochs=2),
    "dropout": lambda: fb.MCDropout(epochs=2),
    "bbb": lambda: fb.BayesByBackprop(epochs=2),
    "swag": lambda: fb.SWAG(epochs=6),
    "sgld": lambda: fb.SGLD(epochs=4, samples=4, cycles=2),
    "hmc": lambda: fb.HMC(samples=4, warmup=4, chains=2, steps=3, epochs=1),
    "laplace": lambda: fb.Laplace(epochs=2),
    "temperature": lambda: fb.Temperature(fb.MAP(epochs=2)),
}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
@pytest.mark.parametrize("name", mark_slow(METHODS, ["node-noise", "ensemble", "laplace", "temperature"]))
def test_every_method_fits_predicts_saves_and_loads(name, tmp_path):
    inputs, targets = skewed(64)
    torch.manual_seed(0)
    likelihood = Quantiles()
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, likelihood.num_outputs))
    loader = fb.data.TensorLoader(inputs, targets, batch_size=32)
    posterior = METHODS[name]().fit(network, loader, likelihood=likelihood, progress=False, seed=0)
    predictive = posterior.predict(inputs, samples=4, seed=0)
    assert predictive.mean.shape == (64,)
    assert set(fb.evaluate(posterior, loader, samples=4)) == {"rmse", "nll", "crps", "coverage_90"}
    loaded = fb.load_posterior(posterior.save(tmp_path / "file"), network)
    torch.testing.assert_close(
        loaded.predict(inputs, samples=4, seed=0).nll(targets), predictive.nll(targets)
    )


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_calibrate_views_and_adaptive_sampling():
    inputs, targets = skewed(40)
    likelihood = Quantiles((0.1, 0.5, 0.9))
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, likelihood.num_outputs))
    options = {"candidates": ["temperature", "noise"], "folds": 2, "progress": False}
    posterior = fb.calibrate(network, (inputs, targets), likelihood=likelihood, **options)
    assert {"plain", "temperature", "noise"} == set(posterior.calibration.nll)
    averaged = posterior.predict(inputs, views=[lambda x: x, lambda x: x], seed=0)
    torch.testing.assert_close(averaged.mean, posterior.predict(inputs, seed=0).mean, rtol=1e-4, atol=1e-4)
    ensemble = fb.DeepEnsemble(2, epochs=1).fit(
        network, [(inputs, targets)], likelihood=likelihood, progress=False
    )
    assert ensemble.predict(inputs, 20, adaptive=0.5).sample_counts.shape == (40,)


@pytest.mark.parametrize("levels", [(0.5, 0.1), (0.5,), (0.0, 0.5), (0.1, 0.1), (0.1, 1.5)])
def test_levels_that_do_not_ascend_are_refused(levels):
    with pytest.raises(FlowBNNError) as caught:
        Quantiles(levels)
    assert (caught.value.kind, caught.value.argument) == ("value", "levels")


def test_settings_are_saved():
    loaded = make_likelihood(Quantiles(LEVELS, dim=2).to_dict())
    assert (loaded.levels, loaded.dim) == (LEVELS, 2)


def test_sample_counts_of_other_inputs_are_refused():
    likelihood = fb.likelihoods.Quantiles(levels=(0.1, 0.5, 0.9))
    outputs = torch.zeros(2, 5, likelihood.num_outputs)
    with pytest.raises(fb.FlowBNNError) as error:
        likelihood.predictive(outputs, torch.ones(4, dtype=torch.int64))
    assert error.value.argument == "sample_counts"
