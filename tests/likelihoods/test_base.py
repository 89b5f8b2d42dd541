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


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize(
    "method",
    [
        fb.DeepEnsemble(2, epochs=1),
        fb.MCDropout(epochs=1),
        fb.BayesByBackprop(epochs=1),
        fb.NodeNoise(epochs=1),
        fb.SWAG(epochs=6),
        fb.SGLD(epochs=8, samples=2, cycles=1),
        fb.HMC(samples=2, warmup=2, chains=2, steps=2, epochs=1),
    ],
    ids=lambda method: method.name,
)
def test_likelihood_with_two_methods_works_with_methods(method):
    inputs = torch.randn(40, 2)
    loader = [(inputs, inputs.sum(1))]
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    posterior = method.fit(network, loader, likelihood=LaplaceNoise(0.3), progress=False, seed=0)
    assert set(fb.evaluate(posterior, loader, samples=2)) == {"rmse", "nll", "crps", "coverage_90"}


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_likelihood_with_two_methods_is_calibrated_and_refused_by_laplace():
    inputs = torch.randn(60, 2)
    data, network = (inputs, inputs.sum(1) + 0.3 * torch.randn(60)), nn.Linear(2, 1)
    posterior = fb.calibrate(network, data, likelihood=LaplaceNoise(0.3), folds=2, progress=False)
    assert {"plain", "noise"} <= set(posterior.calibration.nll)
    with pytest.raises(FlowBNNError) as caught:
        fb.Laplace(epochs=1).fit(network, [data], likelihood=LaplaceNoise(0.3), progress=False)
    assert (caught.value.kind, caught.value.argument) == ("likelihood", "likelihood")


class NumberedGaussian(LaplaceNoise):
    """Likelihood whose ``to_dict`` has a value that JSON cannot store."""

    def to_dict(self):
        return {"likelihood": "NumberedGaussian", "scale": torch.tensor(1.0)}


@pytest.mark.parametrize(
    "likelihood", [HiddenScale(0.3), NumberedGaussian(0.3)], ids=lambda value: type(value).__name__
)
def test_likelihoods_that_cannot_be_saved_are_refused_before_training(likelihood):
    calls = []
    network = nn.Linear(2, 1)
    network.register_forward_hook(lambda *_: calls.append(1))
    loader = [(torch.randn(8, 2), torch.randn(8))] * 4
    with pytest.raises(FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network, loader, likelihood=likelihood, progress=False)
    assert caught.value.kind == "unsupported"
    assert len(calls) <= 2


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


@pytest.mark.parametrize(
    ("likelihood", "shape"),
    [
        (fb.likelihoods.Gaussian(dim=3), (2, 4, 2)),
        (fb.likelihoods.Gaussian("predicted"), (2, 4, 1)),
        (fb.likelihoods.Survival(), (2, 4)),
        (fb.likelihoods.Survival(), (2, 4, 4)),
        (fb.likelihoods.Survival("weibull", 1.0), (2, 4, 2)),
        (fb.likelihoods.NegativeBinomial(), ()),
        (fb.likelihoods.NegativeBinomial(), (2, 4, 3)),
        (fb.likelihoods.Poisson(), (4,)),
    ],
)
def test_predictive_refuses_outputs_of_another_shape(likelihood, shape):
    with pytest.raises(FlowBNNError) as caught:
        likelihood.predictive(torch.zeros(shape))
    assert (caught.value.kind, caught.value.argument) == ("shape", "outputs")
