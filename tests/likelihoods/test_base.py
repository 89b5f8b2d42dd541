"""Tests of likelihoods that a user writes."""

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical, Likelihood
from flowbnn.posterior import PointPosterior, load_posterior
from flowbnn.predictive import CategoricalPredictive, GaussianPredictive


class PixelLabels(Likelihood):
    """Likelihood of a class label for each pixel: outputs ``[B, C, H, W]``, targets ``[B, H, W]``."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)

    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        return CategoricalPredictive(outputs.movedim(2, -1).flatten(1, -2), sample_counts)


class UnsummedPixelLabels(PixelLabels):
    """Likelihood that forgets to sum over pixels."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(outputs, targets, reduction="none")


def make_segmentation(examples: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a network, images, and labels of their pixels."""
    network = nn.Conv2d(1, 3, 3, padding=1)
    return network, torch.randn(examples, 1, 4, 4), torch.randint(3, (examples, 4, 4))


def test_likelihood_of_pixel_labels_is_saved_and_loaded(tmp_path):
    network, inputs, targets = make_segmentation(20)
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    loader = TensorLoader(inputs, targets, batch_size=10)
    posterior = fb.fit(model, loader, epochs=1, likelihood=PixelLabels(), progress=False, validation=None)
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior"), network)
    assert isinstance(loaded.likelihood, PixelLabels)
    expected = posterior.predict(inputs, samples=2, seed=0).probabilities
    assert torch.equal(loaded.predict(inputs, samples=2, seed=0).probabilities, expected)
    assert expected.shape == (20 * 16, 3)


def test_pixel_labels_need_no_likelihood_of_their_own():
    network, inputs, targets = make_segmentation(20)
    outputs = network(inputs)
    torch.testing.assert_close(
        Categorical().log_prob(outputs, targets), PixelLabels().log_prob(outputs, targets)
    )


def test_elbo_refuses_log_likelihoods_that_are_not_summed():
    network, inputs, targets = make_segmentation(6)
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    assert fb.ELBO(PixelLabels(), num_data=6)(model, inputs, targets).log_likelihood < -16 * 0.5
    with pytest.raises(FlowBNNError) as caught:
        fb.ELBO(UnsummedPixelLabels(), num_data=6)(model, inputs, targets)
    assert (caught.value.kind, caught.value.argument) == ("shape", "likelihood")


@pytest.mark.parametrize(
    "method", [fb.MLE(epochs=1), fb.NodeNoise(epochs=1), fb.BayesByBackprop(epochs=1)], ids=lambda m: m.name
)
def test_methods_refuse_log_likelihoods_that_are_not_summed(method):
    network, inputs, targets = make_segmentation(6)
    loader = TensorLoader(inputs, targets, batch_size=6)
    with pytest.raises(FlowBNNError) as caught:
        method.fit(network, loader, likelihood=UnsummedPixelLabels(), progress=False)
    assert (caught.value.kind, caught.value.argument) == ("shape", "likelihood")


@pytest.mark.parametrize(
    ("inputs", "targets"),
    [
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)),
        (torch.zeros(2, 2), torch.tensor([0.2, 0.9])),
    ],
)
def test_elbo_refuses_empty_batches_and_fractional_labels(inputs, targets):
    model = fb.to_stochastic(nn.Linear(2, 2), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError):
        fb.ELBO(Categorical(), 6)(model, inputs, targets)


class LaplaceNoise(Likelihood):
    """Likelihood of CONTRIBUTING.md, which has a setting and no ``to_dict``."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def log_prob(self, outputs, targets):
        return -((targets.reshape(outputs.shape) - outputs).abs() / self.scale).sum(1)

    def predictive(self, outputs, sample_counts=None):
        return GaussianPredictive(outputs, 2.0 * self.scale**2, sample_counts)


class HiddenScale(LaplaceNoise):
    """Likelihood that stores its setting under another name."""

    def __init__(self, width: float) -> None:
        super().__init__(2.0 * width)


def test_likelihoods_with_settings_are_saved_and_loaded(tmp_path):
    posterior = PointPosterior(nn.Linear(2, 1), LaplaceNoise(0.3))
    loaded = load_posterior(posterior.save(tmp_path / "a.safetensors"), nn.Linear(2, 1))
    assert loaded.likelihood.scale == 0.3
    with pytest.raises(FlowBNNError) as caught:
        PointPosterior(nn.Linear(2, 1), HiddenScale(0.3)).save(tmp_path / "b.safetensors")
    assert (caught.value.kind, caught.value.argument) == ("unsupported", "width")


class ScaledGaussian(fb.likelihoods.RealLikelihood):
    """Likelihood of a user with a setting of its own and without ``to_dict``."""

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        self.width = width

    def mean(self, outputs):
        return outputs

    def log_prob(self, outputs, targets):
        return torch.distributions.Normal(outputs, self.width).log_prob(targets).sum(-1)

    def predictive(self, outputs, sample_counts=None):
        return fb.predictive.GaussianPredictive(outputs, torch.full_like(outputs, self.width**2))


def test_settings_of_a_real_likelihood_without_to_dict_are_saved():
    assert ScaledGaussian(3.0).to_dict()["width"] == 3.0
