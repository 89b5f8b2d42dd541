"""Tests of predictions that are reduced to means and uncertainties, batch by batch."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.posterior import base
from flowbnn.posterior.prediction import KEPT_BYTES
from flowbnn.predictive import (
    CategoricalPredictive,
    ContinuousPredictive,
    PredictionSummary,
    SummaryCollector,
    summarize,
)

CASES = {
    "classes": (
        fb.likelihoods.Categorical,
        3,
        lambda rows: torch.arange(rows) % 3,
        CategoricalPredictive.summary_properties,
    ),
    "real values": (
        fb.likelihoods.Gaussian,
        1,
        lambda rows: torch.linspace(-1.0, 1.0, rows)[:, None],
        ContinuousPredictive.summary_properties,
    ),
}


def make_posterior(case):
    torch.manual_seed(0)
    likelihood, outputs, targets, names = CASES[case]
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    loader = fb.data.TensorLoader(torch.randn(90, 4), targets(90), batch_size=10)
    return fb.posterior.NoisePosterior(model, likelihood()), loader, names


@pytest.fixture
def small_limit(monkeypatch):
    """Limits the samples in memory to 1 kB and records the number of bytes that a likelihood sees at once."""
    monkeypatch.setitem(KEPT_BYTES, "auto", 1000)
    sizes = []
    predictive = base.Posterior._predictive

    def record(self, outputs, sample_counts=None):
        sizes.append(outputs.numel() * outputs.element_size())
        return predictive(self, outputs, sample_counts)

    monkeypatch.setattr(base.Posterior, "_predictive", record)
    return sizes


@pytest.mark.parametrize("adaptive", [None, 0.05])
@pytest.mark.parametrize("case", CASES)
def test_loaders_are_reduced_to_the_values_of_all_samples(case, adaptive, small_limit):
    posterior, loader, names = make_posterior(case)
    options = {"samples": 16, "seed": 1, "max_batch": 10, "adaptive": adaptive}
    expected, targets = posterior.predict_with_targets(loader, keep_samples=True, **options)
    largest = max(small_limit)
    small_limit.clear()
    found, found_targets = posterior.predict_with_targets(loader, **options)
    if adaptive is None:  # the rounds of adaptive sampling see the rows of one pass
        assert max(small_limit) < largest / 3
    assert isinstance(found, PredictionSummary)
    assert len(found) == len(expected) == 90
    assert torch.equal(found_targets, targets)
    for name in names:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)
    assert found.evaluate(targets) == pytest.approx(expected.evaluate(targets), rel=1e-5)
    for by in expected.uncertainties:
        torch.testing.assert_close(found.uncertainty(by), expected.uncertainty(by))
        torch.testing.assert_close(found.decide(0.3, by), expected.decide(0.3, by), equal_nan=True)
    torch.testing.assert_close(found[3:7].standard_error, expected[3:7].standard_error)


@pytest.mark.parametrize("case", CASES)
def test_few_samples_are_reduced_at_a_time(case, small_limit, monkeypatch):
    """Entropies and variances of all samples in memory would take ten times their memory."""
    posterior, loader, names = make_posterior(case)
    expected = posterior.predict(loader, 16, seed=1, keep_samples=True)
    small_limit.clear()
    monkeypatch.setitem(KEPT_BYTES, False, 600)
    found = posterior.predict(loader, 16, seed=1, keep_samples=False)
    assert max(small_limit) <= 600
    for name in names:
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), msg=name)


@pytest.mark.parametrize("case", CASES)
def test_metrics_do_not_depend_on_the_limit(case, monkeypatch):
    posterior, loader, _ = make_posterior(case)
    expected = fb.evaluate(posterior, loader, novel=3.0 * torch.randn(20, 4), samples=8)
    monkeypatch.setitem(KEPT_BYTES, "auto", 100)
    torch.manual_seed(0)
    found = fb.evaluate(posterior, loader, samples=8)
    assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-5)
    assert any(name.startswith("auroc") for name in expected)


def test_samples_are_kept_on_request():
    posterior, loader, _ = make_posterior("real values")
    assert posterior.predict(loader, 4).samples.shape == (4, 90, 1)
    summary = posterior.predict(loader, 4, seed=0, keep_samples=False)
    assert torch.equal(summary.mean, posterior.predict(loader, 4, seed=0).mean)
    for use in (
        lambda: summary.samples,
        lambda: summary.interval(0.9),
        lambda: summary.nll(torch.zeros(90, 1)),
    ):
        with pytest.raises(FlowBNNError) as caught:
            use()
        assert (caught.value.kind, caught.value.argument) == ("samples", "keep_samples")
    assert not hasattr(summary, "word")


def test_summaries_move_and_are_joined():
    prediction = fb.predictive.CategoricalPredictive(torch.randn(5, 7, 3))
    summary = SummaryCollector([summarize(prediction[:3]), summarize(prediction[3:])]).result().to("cpu")
    torch.testing.assert_close(summary.entropy, prediction.entropy)
    assert torch.equal(summary.credible_set(0.9), prediction.credible_set(0.9))
    assert summarize(object()) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda: fb.transforms.Reverse(10**9),
        lambda: fb.flows.NSF(2, length=10**30),
        lambda: fb.flows.Planar(2, length=10**9),
        lambda: fb.vae.VAE((1, 4, 4), 2, length=10**30),
        lambda: fb.flows.RealNVP(2, hidden=(10**12,)),
        lambda: fb.vae.VAE((1, 4, 4), 10**9),
        lambda: fb.HMC(samples=10**12),
        lambda: fb.SGLD(samples=10**12),
        lambda: fb.DeepEnsemble(10**9),
        lambda: make_posterior("classes")[0].draws(10**9),
        lambda: make_posterior("classes")[0].predict(torch.zeros(1, 4), 10**9),
    ],
)
def test_sizes_that_cannot_fit_into_memory_are_refused(make):
    with pytest.raises(FlowBNNError) as caught:
        make()
    assert caught.value.argument in ("dim", "length", "samples", "hidden", "latent_dim", "members")


def test_hasattr_is_false_for_what_needs_samples():
    summary = summarize(CategoricalPredictive(torch.randn(3, 4, 2)))
    assert hasattr(summary, "entropy")
    assert not hasattr(summary, "samples")
    assert getattr(summary, "samples", None) is None


def test_labels_stay_integers_in_another_precision():
    summary = summarize(CategoricalPredictive(torch.randn(3, 4, 2))).to(torch.float64)
    assert summary.labels.dtype == torch.int64
    assert summary.entropy.dtype == torch.float64


def test_one_batch_with_separate_draws_is_not_divided():
    posterior, loader, _ = make_posterior("classes")
    inputs = torch.cat([batch for batch, _ in loader])
    options = {"samples": 4, "seed": 1, "shared": False}
    expected = posterior.predict(inputs, keep_samples=True, **options)
    found = posterior.predict(inputs, keep_samples=False, **options)
    assert isinstance(found, PredictionSummary)
    torch.testing.assert_close(found.probabilities, expected.probabilities)
