"""Tests of the Gaussian likelihood."""

import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Gaussian, make_likelihood
from flowbnn.regression import set_noise_scale


@pytest.mark.parametrize("noise", ["learned", "predicted", 0.7])
def test_log_prob_agrees_with_torch(noise):
    likelihood = Gaussian(noise, dim=2)
    outputs, targets = torch.randn(5, 4 if noise == "predicted" else 2), torch.randn(5, 2)
    if noise == "learned":
        with torch.no_grad():
            likelihood.log_scale.copy_(torch.tensor([0.3, -0.4]))
        scale = torch.tensor([0.3, -0.4]).exp()
    else:
        scale = (0.5 * outputs[:, 2:]).exp() if noise == "predicted" else torch.tensor(0.7)
    expected = torch.distributions.Normal(outputs[:, :2], scale).log_prob(targets).sum(1)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), expected)
    predictive = likelihood.predictive(outputs[None])
    torch.testing.assert_close(predictive.aleatoric, (scale**2).expand(5, 2))
    restored = make_likelihood(likelihood.to_dict())
    assert isinstance(restored, Gaussian)
    assert restored.noise == noise


@pytest.mark.parametrize("unit", [1e-6, 1.0, 6e4, 1e9])
def test_noise_scale_in_any_unit(unit):
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (unit * torch.randn(5000, 2, generator=generator) for _ in range(2))
    targets = torch.tensor([0.1, 3.0]) * targets + outputs
    learned = Gaussian(dim=2)
    set_noise_scale(learned, [(outputs, targets)])
    _, variance = learned.moments(outputs)
    torch.testing.assert_close(variance[0].sqrt(), unit * torch.tensor([0.1, 3.0]), rtol=0.03, atol=0.0)
    predicted = Gaussian("predicted")
    with_log_variance = torch.cat([outputs, torch.full_like(outputs, 2.0 * math.log(unit))], -1)
    expected = torch.full_like(outputs, unit**2)
    torch.testing.assert_close(predicted.moments(with_log_variance)[1], expected, rtol=1e-4, atol=0.0)
    expected = torch.distributions.Normal(outputs.double(), unit).log_prob(targets.double()).sum(-1)
    log_prob = predicted.log_prob(with_log_variance, targets).double()
    torch.testing.assert_close(log_prob, expected, rtol=1e-4, atol=1e-3)


def test_noise_scale_of_an_exact_fit_is_relative_to_the_targets():
    targets = 100.0 + 5.0 * torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    for values, expected in ((targets, 1e-4 * targets.std().item()), (torch.zeros(4, 1), 1e-4)):
        likelihood = Gaussian()
        set_noise_scale(likelihood, [(values.clone(), values)])
        assert likelihood.log_scale.exp().item() == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("likelihood", "outputs", "targets", "argument"),
    [
        (Gaussian(dim=1), torch.zeros(2, 3), torch.zeros(2, 3), "outputs"),
        (Gaussian(0.1), torch.zeros(2, 1, 4), torch.zeros(2, 4), "outputs"),
        (Gaussian(0.1), torch.zeros(2), torch.zeros(2), "outputs"),
        (Gaussian("predicted"), torch.zeros(2, 3), torch.zeros(2), "outputs"),
        (Gaussian("predicted"), torch.zeros(2, 1), torch.zeros(2), "outputs"),
        (Gaussian(0.1), torch.zeros(2, 3), torch.zeros(2), "targets"),
        (Gaussian(0.1), torch.zeros(2, 4), torch.zeros(2, 2), "targets"),
    ],
)
def test_outputs_and_targets_that_do_not_fit_are_refused(likelihood, outputs, targets, argument):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.check(outputs, targets)
    assert (caught.value.kind, caught.value.argument) == (argument, argument)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("noise", [0.0, "guess"])
def test_bad_noise_is_refused(noise):
    with pytest.raises(FlowBNNError) as caught:
        Gaussian(noise)
    assert caught.value.argument == "noise"


class HalvedGaussian(Gaussian):
    """Gaussian whose mean is half of the outputs."""

    def predictive(self, outputs, sample_counts=None):
        return super().predictive(outputs / 2, sample_counts)


def test_subclass_of_a_gaussian_is_saved_and_loaded(tmp_path):
    inputs, network = torch.randn(20, 2), nn.Linear(2, 1)
    options = {"likelihood": HalvedGaussian(), "progress": False}
    posterior = fb.MLE(epochs=1).fit(network, [(inputs, inputs[:, :1])], **options)
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), network)
    assert torch.equal(loaded.predict(inputs).mean, posterior.predict(inputs).mean)
