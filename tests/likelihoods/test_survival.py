"""Tests of censored times: accelerated failure time models and their predictive distributions."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Survival, make_likelihood
from flowbnn.likelihoods.base import observed_information
from flowbnn.predictive.survival import concordance
from slow_cases import mark_slow

DISTRIBUTIONS = ("lognormal", "weibull")


def scipy_distribution(name, loc, scale):
    """Returns the distribution of times of scipy."""
    if name == "lognormal":
        return stats.lognorm(scale, scale=np.exp(loc))
    return stats.weibull_min(1.0 / scale, scale=np.exp(loc))


def random_targets(rows: int = 12):
    generator = torch.Generator().manual_seed(0)
    times = torch.randn(rows, generator=generator, dtype=torch.float64).exp()
    return torch.stack([times, (torch.arange(rows) % 3 > 0).double()], 1)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_log_prob_agrees_with_scipy(distribution):
    outputs = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    targets = random_targets()
    truth = scipy_distribution(distribution, outputs[:, 0].numpy(), outputs[:, 1].exp().numpy())
    times, events = targets.numpy().T
    expected = np.where(events == 1, truth.logpdf(times), truth.logsf(times))
    result = Survival(distribution).log_prob(outputs, targets)
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-8)
    known = Survival(distribution, scale=0.7).log_prob(outputs[:, :1], targets)
    truth = scipy_distribution(distribution, outputs[:, 0].numpy(), 0.7)
    expected = np.where(events == 1, truth.logpdf(times), truth.logsf(times))
    np.testing.assert_allclose(known.numpy(), expected, rtol=1e-8)
    predictive = Survival(distribution).predictive(outputs[None])
    np.testing.assert_allclose(-predictive.nll(targets).numpy(), result.numpy(), rtol=1e-8)


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("event", [0.0, 1.0])
@pytest.mark.parametrize("outputs", [(50.0, 0.0), (-50.0, 0.0), (50.0, -50.0), (-50.0, -50.0), (0.0, 50.0)])
def test_gradients_are_finite_at_extreme_outputs(distribution, event, outputs):
    leaf = torch.tensor([outputs], requires_grad=True)
    log_prob = Survival(distribution).log_prob(leaf, torch.tensor([[3.0, event]]))
    (gradient,) = torch.autograd.grad(log_prob.sum(), leaf)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_curvature_of_the_location_is_the_exact_hessian(distribution):
    likelihood = Survival(distribution, scale=0.6)
    outputs, targets = torch.randn(12, 1, dtype=torch.float64), random_targets()
    expected = observed_information(likelihood, outputs, targets)
    torch.testing.assert_close(likelihood.information(outputs, targets), expected)
    both = Survival(distribution).information(torch.randn(12, 2, dtype=torch.float64), targets)
    assert bool((torch.linalg.eigvalsh(both) > -1e-9).all())


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_predictive_agrees_with_draws(distribution):
    generator = np.random.default_rng(0)
    outputs = torch.tensor([[[0.0, -1.0]], [[0.5, -0.5]], [[-1.0, -1.5]]], dtype=torch.float64)
    predictive = Survival(distribution).predictive(outputs)
    parts = [
        scipy_distribution(distribution, loc, math.exp(scale)).rvs(100_000, random_state=generator)
        for loc, scale in outputs[:, 0].tolist()
    ]
    draws = np.concatenate(parts)
    assert predictive.mean.item() == pytest.approx(draws.mean(), rel=0.01)
    assert predictive.variance.item() == pytest.approx(draws.var(), rel=0.05)
    levels = [0.05, 0.5, 0.95]
    np.testing.assert_allclose(predictive.quantiles(levels).flatten(), np.quantile(draws, levels), rtol=0.02)
    assert predictive.survival(torch.tensor([0.8])).item() == pytest.approx((draws > 0.8).mean(), abs=0.005)
    own = predictive.sample(100_000, seed=0).flatten()
    np.testing.assert_allclose(np.quantile(own, levels), np.quantile(draws, levels), rtol=0.03)
    other = generator.permutation(draws)
    crps = np.abs(draws - 0.8).mean() - 0.5 * np.abs(draws - other).mean()
    assert predictive.crps(torch.tensor([[0.8, 1.0]])).item() == pytest.approx(crps, rel=0.02)
    grid = np.linspace(0.0, 0.8, 2001)
    before = np.trapezoid(np.searchsorted(np.sort(draws), grid) ** 2 / len(draws) ** 2, grid)
    assert predictive.crps(torch.tensor([[0.8, 0.0]])).item() == pytest.approx(before, rel=0.02)


def test_concordance_agrees_with_brute_force():
    generator = torch.Generator().manual_seed(0)
    predicted, times = (
        torch.randint(5, (40,), generator=generator).double(),
        torch.randint(9, (40,), generator=generator),
    )
    events = torch.rand(40, generator=generator) < 0.6
    pairs = agreeing = 0.0
    for i in range(40):
        for j in range(40):
            if events[i] and times[i] < times[j]:
                pairs += 1
                agreeing += float(predicted[i] < predicted[j]) + 0.5 * float(predicted[i] == predicted[j])
    assert concordance(predicted, times, events) == pytest.approx(agreeing / pairs)


def survival_data(rows: int, unit: float = 1.0):
    """Returns inputs, and times of which about a third are censored."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, 1, generator=generator) * 2 - 1
    times = (inputs[:, 0] + 0.5 * torch.randn(rows, generator=generator)).exp()
    limits = 3.0 * torch.rand(rows, generator=generator) + 0.2
    return inputs, torch.stack([unit * torch.minimum(times, limits), (times <= limits).float()], 1)


@pytest.mark.parametrize("unit", [1.0, 1e4])
def test_censored_times_are_learned_in_any_unit(unit):
    inputs, targets = survival_data(600, unit)
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 2))
    loader = fb.data.TensorLoader(inputs, targets, batch_size=100)
    posterior = fb.MLE(epochs=60, lr=0.01).fit(network, loader, likelihood="survival", progress=False, seed=0)
    median = posterior.predict(inputs).quantiles(0.5)[0].log() - math.log(unit)
    assert (median - inputs[:, 0]).square().mean().sqrt() < 0.15
    metrics = fb.evaluate(posterior, loader)
    assert set(metrics) == {"nll", "crps", "concordance"}
    assert metrics["concordance"] > 0.7


METHODS = {
    "node-noise": lambda: fb.NodeNoise(epochs=2),
    "ensemble": lambda: fb.DeepEnsemble(2, epochs=2),
    "dropout": lambda: fb.MCDropout(epochs=2),
    "bbb": lambda: fb.BayesByBackprop(epochs=2),
    "swag": lambda: fb.SWAG(epochs=6),
    "sgld": lambda: fb.SGLD(epochs=4, samples=4, cycles=2),
    "hmc": lambda: fb.HMC(samples=4, warmup=4, chains=2, steps=3, epochs=1),
    "laplace": lambda: fb.Laplace(epochs=2),
    "laplace-full": lambda: fb.Laplace("full", epochs=2, curvature="sampled"),
    "temperature": lambda: fb.Temperature(fb.MAP(epochs=2)),
}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
@pytest.mark.parametrize("name", mark_slow(METHODS, ["node-noise", "ensemble", "laplace", "temperature"]))
def test_every_method_fits_predicts_saves_and_loads(name, tmp_path):
    inputs, targets = survival_data(64)
    torch.manual_seed(0)
    network, likelihood = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2)), Survival("weibull")
    loader = fb.data.TensorLoader(inputs, targets, batch_size=32)
    posterior = METHODS[name]().fit(network, loader, likelihood=likelihood, progress=False, seed=0)
    predictive = posterior.predict(inputs, samples=4, seed=0)
    assert predictive.mean.shape == (64,)
    assert posterior.predict(loader, samples=4, keep_samples=False).mean.shape == (64,)
    loaded = fb.load_posterior(posterior.save(tmp_path / "file"), network)
    torch.testing.assert_close(
        loaded.predict(inputs, samples=4, seed=0).nll(targets), predictive.nll(targets)
    )


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.slow
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_calibrate_views_and_adaptive_sampling(distribution):
    inputs, targets = survival_data(40)
    likelihood = Survival(distribution)
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2))
    posterior = fb.calibrate(network, (inputs, targets), likelihood=likelihood, folds=2, progress=False)
    assert {"plain", "temperature", "noise", "refit"} <= set(posterior.calibration.nll)
    averaged = posterior.predict(inputs, views=[lambda x: x, lambda x: x], seed=0)
    torch.testing.assert_close(averaged.mean, posterior.predict(inputs, seed=0).mean, rtol=1e-4, atol=0)
    ensemble = fb.DeepEnsemble(2, epochs=1).fit(
        network, [(inputs, targets)], likelihood=likelihood, progress=False
    )
    assert ensemble.predict(inputs, 20, adaptive=0.5).sample_counts.shape == (40,)


@pytest.mark.parametrize(
    "targets",
    [
        torch.tensor([1.0, 2.0]),
        torch.tensor([[-1.0, 1.0], [2.0, 1.0]]),
        torch.tensor([[0.0, 1.0], [2.0, 1.0]]),
        torch.tensor([[1.0, 0.5], [2.0, 1.0]]),
        torch.tensor([[1.0, 2.0], [2.0, 1.0]]),
    ],
)
def test_wrong_targets_are_refused(targets):
    with pytest.raises(FlowBNNError) as caught:
        Survival().check(torch.zeros(2, 2), targets)
    assert (caught.value.kind, caught.value.argument) == ("targets", "targets")
    network, loader = nn.Linear(1, 2), [(torch.zeros(2, 1), targets)]
    with pytest.raises(FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network, loader, likelihood="survival", progress=False)
    assert caught.value.kind == "targets"


def test_settings_are_saved():
    loaded = make_likelihood(Survival("weibull", scale=1.0).to_dict())
    assert (loaded.distribution, loaded.scale) == ("weibull", 1.0)
