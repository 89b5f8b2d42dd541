"""Tests of test-time augmentation by views."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.posterior import PredictOptions
from flowbnn_studies.data import mirror


def noisy(
    outputs: int = 3, likelihood: fb.likelihoods.Likelihood | None = None
) -> fb.posterior.NoisePosterior:
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, outputs))
    return fb.posterior.NoisePosterior(
        fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}), likelihood or fb.likelihoods.Categorical()
    )


def images(number: int = 6) -> torch.Tensor:
    return torch.randn(number, 1, 3, 4)


@pytest.mark.parametrize("as_loader", [False, True])
def test_predictions_of_each_network_are_averaged_over_the_views(as_loader):
    posterior, x = noisy(), images()
    given = DataLoader(TensorDataset(x, torch.zeros(6).long()), batch_size=4) if as_loader else x
    found = posterior.predict(given, 16, seed=0, views=[mirror, lambda x: -x], progress=False)
    parts = [posterior.predict(view, 16, seed=0).samples for view in (x, x.flip(-1), -x)]
    torch.testing.assert_close(found.samples, torch.stack(parts).mean(0), atol=1e-6, rtol=1e-5)
    assert found.num_samples == 16


def test_two_classes_from_one_logit():
    posterior, x = noisy(1, fb.likelihoods.Bernoulli()), images()
    found = posterior.predict(x, 8, seed=0, views=[mirror])
    parts = [posterior.predict(view, 8, seed=0).samples for view in (x, x.flip(-1))]
    torch.testing.assert_close(found.samples, torch.stack(parts).mean(0), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("noise", [0.3, "predicted"])
def test_views_of_a_regression_have_the_moments_of_the_mixture(noise):
    posterior, x = noisy(2, fb.likelihoods.Gaussian(noise)), images()
    found = posterior.predict(x, 8, seed=0, views=[mirror])
    one, two = (posterior.collect(v, PredictOptions(8, seed=0))[0] for v in (x, x.flip(-1)))
    (mean, variance), (other, variance_there) = (
        posterior.likelihood.moments(one),
        posterior.likelihood.moments(two),
    )
    between = ((mean - other) / 2).square() if noise == "predicted" else 0.0
    torch.testing.assert_close(found.mean, ((mean + other) / 2).mean(0))
    expected = ((variance + variance_there) / 2 + between).mean(0)
    torch.testing.assert_close(found.aleatoric, expected, atol=1e-6, rtol=1e-5)


def test_views_of_a_point_posterior_an_ensemble_and_evaluate():
    x, labels = images(30), torch.arange(30) % 3
    network = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    point = fb.posterior.PointPosterior(network, fb.likelihoods.Categorical())
    expected = (network(x).softmax(-1) + network(x.flip(-1)).softmax(-1)).detach() / 2
    torch.testing.assert_close(point.predict(x, views=(mirror,)).probabilities, expected)
    ensemble = fb.DeepEnsemble(2, epochs=1).fit(network, [(x, labels)], progress=False, seed=0)
    assert ensemble.predict(x, views=[mirror]).num_samples == 2
    report = fb.evaluate(point, (x, labels), views=[mirror], progress=False)
    assert report["nll"] == pytest.approx(float(-expected.log()[torch.arange(30), labels].mean()), abs=1e-5)


def test_adaptive_samples_with_views_are_the_first_of_all_samples():
    posterior, x = noisy(), images(40)
    full = posterior.predict(x, 64, seed=0, views=[mirror])
    quick = posterior.predict(x, 64, seed=0, views=[mirror], adaptive=0.02)
    assert quick.sample_counts.min() < 64
    for row in range(40):
        sample_counts = int(quick.sample_counts[row])
        torch.testing.assert_close(
            quick.samples[:sample_counts, row], full.samples[:sample_counts, row], atol=1e-6, rtol=1e-5
        )


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"views": mirror}, "views"),
        ({"views": 3}, "views"),
        ({"max_batch": "a"}, "max_batch"),
        ({"max_batch": 1.5}, "max_batch"),
        ({"views": ["mirror"]}, "views"),
        ({"views": [lambda x: x[:2]]}, "views"),
        ({"views": [lambda x: None]}, "views"),
        ({"views": [mirror], "shared": False}, "views"),
        ({"views": [lambda x: x @ x[0, :1]]}, None),
    ],
)
def test_bad_views_are_refused(options, argument):
    with pytest.raises(fb.FlowBNNError) as caught:
        noisy().predict(images(), 4, **options)
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)
