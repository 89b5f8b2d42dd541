"""Tests of counts: Poisson and negative binomial likelihoods and their predictive distribution."""

import math

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import NegativeBinomial, Poisson, make_likelihood
from flowbnn.likelihoods.base import observed_information
from flowbnn.predictive import CountPredictive
from slow_cases import mark_slow

LIKELIHOODS = {
    "poisson": Poisson,
    "negative-binomial": NegativeBinomial,
    "known-dispersion": lambda: NegativeBinomial(0.5),
}


@pytest.fixture(params=LIKELIHOODS)
def likelihood(request):
    return LIKELIHOODS[request.param]()


def negative_binomial(log_mean, log_dispersion):
    """Returns the distribution of scipy with this mean and dispersion."""
    mean, r = np.exp(log_mean), np.exp(-log_dispersion)
    return stats.nbinom(r, r / (r + mean))


# -------------------- log-probabilities


@pytest.mark.parametrize("count", [0, 1, 7, 1_000_000])
def test_poisson_agrees_with_scipy(count):
    log_rates = torch.tensor([-3.0, 0.0, 2.0, 13.8], dtype=torch.float64)
    expected = stats.poisson(log_rates.exp().numpy()).logpmf(count)
    result = Poisson().log_prob(log_rates.unsqueeze(1), torch.full((4,), count))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-9)


@pytest.mark.parametrize("count", [0, 1, 7, 1_000_000])
def test_negative_binomial_agrees_with_scipy(count):
    outputs = torch.tensor([[-3.0, 0.0], [2.0, -4.0], [13.8, -10.0], [1.0, 3.0]], dtype=torch.float64)
    expected = negative_binomial(*outputs.numpy().T).logpmf(count)
    result = NegativeBinomial().log_prob(outputs, torch.full((4,), count))
    np.testing.assert_allclose(result.numpy(), expected, rtol=1e-7)
    known = NegativeBinomial(0.5).log_prob(outputs[:, :1], torch.full((4,), count))
    np.testing.assert_allclose(
        known.numpy(), negative_binomial(outputs[:, 0].numpy(), math.log(0.5)).logpmf(count), rtol=1e-7
    )


def test_a_small_dispersion_is_poisson():
    log_rates = torch.linspace(-2, 6, 9, dtype=torch.float64).unsqueeze(1)
    counts = torch.arange(9) * 20
    expected = Poisson().log_prob(log_rates, counts)
    torch.testing.assert_close(
        NegativeBinomial(1e-6).log_prob(log_rates, counts), expected, rtol=0.02, atol=0
    )


@pytest.mark.parametrize("value", [-50.0, 50.0])
@pytest.mark.parametrize("count", [0, 1_000_000])
def test_gradients_are_finite_at_extreme_outputs(likelihood, value, count):
    outputs = torch.full((1, likelihood.outputs_per_target), value, requires_grad=True)
    log_prob = likelihood.log_prob(outputs, torch.tensor([count]))
    (gradient,) = torch.autograd.grad(log_prob.sum(), outputs)
    assert torch.isfinite(log_prob).all()
    assert torch.isfinite(gradient).all()


def test_gradients_agree_with_finite_differences(likelihood):
    outputs = torch.randn(5, 2 * likelihood.outputs_per_target, dtype=torch.float64, requires_grad=True)
    counts = torch.tensor([[0, 1], [3, 2], [9, 0], [1, 1], [40, 2]])
    assert torch.autograd.gradcheck(lambda values: likelihood.log_prob(values, counts), outputs)


def test_information_is_the_expected_hessian():
    log_means = torch.tensor([[-1.0], [0.5], [2.0]], dtype=torch.float64)
    for likelihood, distribution in (
        (Poisson(), lambda m: stats.poisson(math.exp(m))),
        (NegativeBinomial(0.5), lambda m: negative_binomial(m, math.log(0.5))),
    ):
        for log_mean in log_means:
            counts = torch.arange(400)
            outputs = log_mean.expand(400, 1)
            hessians = observed_information(likelihood, outputs, counts).flatten()
            weights = torch.from_numpy(distribution(float(log_mean)).pmf(counts.numpy()))
            expected = (weights * hessians).sum()
            torch.testing.assert_close(
                likelihood.information(outputs[:1], counts[:1])[0, 0], expected, rtol=1e-5, atol=0
            )


# -------------------- predictive distribution


def mixture(dispersion: float | None):
    """Returns a predictive of three samples and two inputs, and draws from it by numpy."""
    log_means = torch.tensor([[[0.0], [3.0]], [[1.0], [4.0]], [[-2.0], [6.0]]], dtype=torch.float64)
    log_dispersions = None if dispersion is None else torch.full_like(log_means, math.log(dispersion))
    predictive = CountPredictive(log_means, log_dispersions)
    generator, rates = np.random.default_rng(0), log_means.exp().numpy()[:, :, 0]
    chosen = rates[generator.integers(3, size=200_000)]
    if dispersion is not None:
        chosen = chosen * generator.gamma(1 / dispersion, dispersion, size=chosen.shape)
    return predictive, generator.poisson(chosen)


@pytest.mark.parametrize("dispersion", [None, 0.7])
def test_predictive_agrees_with_draws(dispersion):
    predictive, draws = mixture(dispersion)
    np.testing.assert_allclose(predictive.mean.flatten(), draws.mean(0), rtol=0.02)
    np.testing.assert_allclose(predictive.variance.flatten(), draws.var(0), rtol=0.04)
    levels = [0.05, 0.3, 0.5, 0.8, 0.95]
    quantiles = predictive.quantiles(levels).squeeze(-1)
    np.testing.assert_allclose(
        quantiles, np.quantile(draws, levels, axis=0, method="inverted_cdf"), rtol=0.03
    )
    for target in ([0, 3], [2, 60], [9, 900]):
        values = np.array(target)
        other = draws[np.random.default_rng(1).permutation(len(draws))]
        crps = np.abs(draws - values).mean(0) - 0.5 * np.abs(draws - other).mean(0)
        np.testing.assert_allclose(
            predictive.crps(torch.tensor(target).unsqueeze(1)).flatten(), crps, rtol=0.03
        )
        share = (draws == values).mean(0)
        nll = predictive.nll(torch.tensor(target).unsqueeze(1)).numpy()
        seen = share > 1e-3
        np.testing.assert_allclose(nll[seen], -np.log(share[seen]), rtol=0.03)
        np.testing.assert_allclose(
            predictive.cdf(torch.tensor(target).unsqueeze(1)).flatten(), (draws <= values).mean(0), atol=0.005
        )
    own = predictive.sample(100_000, seed=0).squeeze(-1).double()
    np.testing.assert_allclose(own.mean(0), draws.mean(0), rtol=0.03)
    np.testing.assert_allclose(own.var(0), draws.var(0), rtol=0.06)


def test_quantiles_are_those_of_scipy_for_one_sample():
    log_means = torch.tensor([-5.0, 0.0, 2.0, 7.0, 13.8], dtype=torch.float64)
    for level in (0.001, 0.05, 0.5, 0.95, 0.999):
        poisson = CountPredictive(log_means.reshape(1, 5, 1)).quantiles(level).flatten()
        np.testing.assert_array_equal(poisson, stats.poisson(log_means.exp().numpy()).ppf(level))
        dispersion = torch.full((1, 5, 1), math.log(0.3), dtype=torch.float64)
        result = CountPredictive(log_means.reshape(1, 5, 1), dispersion).quantiles(level).flatten()
        np.testing.assert_array_equal(result, negative_binomial(log_means.numpy(), math.log(0.3)).ppf(level))


@pytest.mark.parametrize("log_mean", [-4.0, 0.0, 3.0, 7.0])
def test_ranked_probability_score_is_the_sum_over_counts(log_mean):
    predictive = CountPredictive(torch.full((1, 1, 1), log_mean, dtype=torch.float64))
    distribution = stats.poisson(math.exp(log_mean))
    for target in (0, int(math.exp(log_mean)), int(1.1 * math.exp(log_mean)) + 3):
        counts = np.arange(int(math.exp(log_mean)) * 2 + 60)
        expected = ((distribution.cdf(counts) - (counts >= target)) ** 2).sum()
        assert predictive.crps(torch.tensor([[target]])).item() == pytest.approx(expected, rel=2e-3)


def test_coverage_is_that_of_the_interval():
    predictive = CountPredictive(torch.full((1, 8, 1), 1.0, dtype=torch.float64))
    low, high = predictive.interval(0.9)
    counts = torch.arange(8).unsqueeze(1)
    torch.testing.assert_close(predictive.covered(counts), (counts >= low) & (counts <= high))


def test_adaptive_samples_are_left_out():
    log_means = torch.randn(4, 3, 1, dtype=torch.float64)
    counts = torch.tensor([2, 4, 4])
    predictive = CountPredictive(log_means, torch.zeros_like(log_means), sample_counts=counts)
    part = CountPredictive(log_means[:2], torch.zeros(2, 3, 1, dtype=torch.float64))
    targets = torch.tensor([[1], [0], [2]])
    for name in ("nll", "cdf"):
        torch.testing.assert_close(getattr(predictive, name)(targets)[0], getattr(part, name)(targets)[0])
    # the quadrature uses other points
    torch.testing.assert_close(predictive.crps(targets)[0], part.crps(targets)[0], rtol=1e-3, atol=0)
    torch.testing.assert_close(predictive.quantiles(0.7)[:, 0], part.quantiles(0.7)[:, 0])


# -------------------- fits


def counts_data(rows: int = 64, scale: float = 1.0):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, 1, generator=generator) * 2 - 1
    return inputs, torch.poisson(scale * (1.0 + inputs[:, 0]).exp(), generator=generator).long()


METHODS = {
    "map": lambda: fb.MAP(epochs=2),
    "node-noise": lambda: fb.NodeNoise(epochs=2),
    "ensemble": lambda: fb.DeepEnsemble(2, epochs=2),
    "dropout": lambda: fb.MCDropout(epochs=2),
    "bbb": lambda: fb.BayesByBackprop(epochs=2),
    "swag": lambda: fb.SWAG(epochs=6),
    "sgld": lambda: fb.SGLD(epochs=4, samples=4, cycles=2),
    "hmc": lambda: fb.HMC(samples=4, warmup=4, chains=2, steps=3, epochs=1),
    "laplace": lambda: fb.Laplace(epochs=2),
}


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
@pytest.mark.parametrize("name", mark_slow(METHODS, ["map", "node-noise", "ensemble", "hmc", "laplace"]))
def test_every_method_fits_predicts_saves_and_loads(name, likelihood, tmp_path):
    inputs, targets = counts_data()
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, likelihood.outputs_per_target))
    loader = fb.data.TensorLoader(inputs, targets, batch_size=32)
    posterior = METHODS[name]().fit(network, loader, likelihood=likelihood, progress=False, seed=0)
    predictive = posterior.predict(inputs, samples=4, seed=0)
    assert predictive.mean.shape == (64,)
    assert set(fb.evaluate(posterior, loader, samples=4)) == {"rmse", "nll", "crps", "coverage_90"}
    loaded = fb.load_posterior(posterior.save(tmp_path / "file"), network)
    torch.testing.assert_close(
        loaded.predict(inputs, samples=4, seed=0).nll(targets), predictive.nll(targets)
    )


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_rates_of_any_size_are_learned(scale):
    inputs, targets = counts_data(400, scale)
    network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 1))
    loader = fb.data.TensorLoader(inputs, targets, batch_size=100)
    posterior = fb.MLE(epochs=60, lr=0.01).fit(network, loader, likelihood="poisson", progress=False, seed=0)
    error = posterior.predict(inputs).mean.log() - math.log(scale) - 1.0 - inputs[:, 0]
    assert error.square().mean().sqrt() < 0.15


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_views_and_adaptive_sampling(likelihood):
    inputs, targets = counts_data()
    network = nn.Linear(1, likelihood.outputs_per_target)
    posterior = fb.DeepEnsemble(2, epochs=1).fit(
        network, [(inputs, targets)], likelihood=likelihood, progress=False
    )
    averaged = posterior.predict(inputs, views=[lambda x: x, lambda x: x])
    torch.testing.assert_close(averaged.mean, posterior.predict(inputs).mean, rtol=1e-4, atol=0)
    assert posterior.predict(inputs, 20, adaptive=0.5).sample_counts.shape == (64,)


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_calibrate_fits_noise_without_a_temperature(likelihood):
    inputs, targets = counts_data(80)
    network = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, likelihood.outputs_per_target))
    posterior = fb.calibrate(network, (inputs, targets), likelihood=likelihood, folds=2, progress=False)
    assert {"plain", "noise", "refit"} <= set(posterior.calibration.nll)
    assert "temperature" in posterior.calibration.excluded
    with pytest.raises(FlowBNNError) as caught:
        fb.Temperature().fit(network, (inputs, targets), likelihood=likelihood, progress=False)
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "likelihood")


@pytest.mark.parametrize(
    ("targets", "kind"),
    [(torch.tensor([-1, 2]), "targets"), (torch.tensor([0.5, 2.0]), "targets"), (torch.ones(3), "targets")],
)
def test_targets_that_are_no_counts_are_refused(likelihood, targets, kind):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.check(torch.zeros(2, likelihood.outputs_per_target), targets)
    assert (caught.value.kind, caught.value.argument) == (kind, "targets")


def test_counts_are_asked_for_by_name():
    outputs, targets = torch.zeros(4, 3), torch.tensor([0, 1, 2, 1])
    assert type(make_likelihood("auto", outputs, targets)).__name__ == "Categorical"
    assert isinstance(make_likelihood("poisson"), Poisson)
    assert isinstance(make_likelihood("negative_binomial"), NegativeBinomial)
    assert make_likelihood(NegativeBinomial(2.0).to_dict()).dispersion == 2.0


def test_an_odd_number_of_outputs_has_no_dispersions():
    with pytest.raises(fb.FlowBNNError) as error:
        fb.likelihoods.NegativeBinomial().predictive(torch.zeros(2, 4, 3))
    assert (error.value.kind, error.value.argument) == ("shape", "outputs")
