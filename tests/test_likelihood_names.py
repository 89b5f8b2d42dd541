"""The likelihood that ``"auto"`` chooses, and what it refuses to guess."""

import math

import pytest
import torch
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Categorical, Gaussian, Likelihood, make_likelihood
from flowbnn.predictive import CategoricalPredictive
from flowbnn.regression import set_noise_scale


def test_labels_as_real_numbers_are_not_taken_for_regression():
    one_hot = torch.eye(3)[[0, 2, 1, 0]]
    with pytest.raises(
        FlowBNNError, match=r"look like one-hot labels; give integers \(targets.argmax\(1\)\)"
    ):
        make_likelihood("auto", torch.zeros(4, 3), one_hot)
    with pytest.raises(FlowBNNError, match="all 0 or 1; say likelihood='bernoulli'"):
        make_likelihood("auto", torch.zeros(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))
    for named in ("gaussian", "bernoulli"):
        assert (
            type(
                make_likelihood(named, torch.zeros(4, 1), torch.tensor([0.0, 1.0, 1.0, 0.0]))
            ).__name__.lower()
            == named
        )


def test_real_numbers_are_regression():
    for targets in (
        torch.tensor([0.0, 0.5, 1.0]),
        torch.ones(3, 2),
        torch.tensor([1.0, 2.0, 0.0]),
    ):
        outputs = torch.zeros(3, 1 if targets.ndim == 1 else 2)
        assert type(make_likelihood("auto", outputs, targets)).__name__ == "Gaussian"


def test_several_labels_of_an_example_are_refused_with_advice():
    several = torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    with pytest.raises(FlowBNNError, match="3 columns of 0 and 1: several labels of one example"):
        make_likelihood("auto", torch.zeros(2, 3), several)
    assert isinstance(make_likelihood("gaussian", torch.zeros(2, 3), several), Gaussian)
    with pytest.raises(FlowBNNError, match="several labels of one example are no classes"):
        Categorical().check(torch.zeros(2, 3), several.long())
    with pytest.raises(FlowBNNError, match=r"one-hot labels give labels.argmax"):
        Categorical().check(torch.zeros(2, 3), torch.eye(3).long()[:2])


@pytest.mark.parametrize("unit", [1e-6, 1.0, 6e4, 1e9])
def test_noise_is_learned_in_any_unit(unit):
    generator = torch.Generator().manual_seed(0)
    outputs, targets = (unit * torch.randn(5000, 2, generator=generator) for _ in range(2))
    targets = torch.tensor([0.1, 3.0]) * targets + outputs
    learned = Gaussian(dim=2)
    set_noise_scale(learned, [(outputs, targets)])
    _, variance = learned.moments(outputs)
    torch.testing.assert_close(variance[0].sqrt(), unit * torch.tensor([0.1, 3.0]), rtol=0.03, atol=0.0)
    predicted = Gaussian("predicted")
    raw = torch.cat([outputs, torch.full_like(outputs, 2.0 * math.log(unit))], -1)
    torch.testing.assert_close(
        predicted.moments(raw)[1], torch.full_like(outputs, unit**2), rtol=1e-4, atol=0.0
    )
    expected = torch.distributions.Normal(outputs.double(), unit).log_prob(targets.double()).sum(-1)
    torch.testing.assert_close(predicted.log_prob(raw, targets).double(), expected, rtol=1e-4, atol=1e-3)


def test_noise_of_an_exact_fit_stays_within_the_targets_own_scale():
    targets = 100.0 + 5.0 * torch.randn(400, 1, generator=torch.Generator().manual_seed(0))
    for truth, expected in ((targets, 1e-4 * targets.std().item()), (torch.zeros(4, 1), 1e-4)):
        likelihood = Gaussian()
        set_noise_scale(likelihood, [(truth.clone(), truth)])
        assert likelihood.log_scale.exp().item() == pytest.approx(expected, rel=0.01)


class OfPixels(Likelihood):
    """A class for each pixel: outputs ``[B, C, H, W]``, targets ``[B, H, W]``."""

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return -nn.functional.cross_entropy(outputs, targets, reduction="none").flatten(1).sum(1)

    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        return CategoricalPredictive(outputs.movedim(2, -1).flatten(1, -2), sample_counts)


def test_labels_of_pixels_take_a_likelihood_of_ones_own_which_is_saved_and_loaded(tmp_path):
    inputs, targets = torch.randn(20, 1, 4, 4), torch.randint(3, (20, 4, 4))
    network, loader = nn.Conv2d(1, 3, 3, padding=1), TensorLoader(inputs, targets, batch_size=10)
    with pytest.raises(FlowBNNError, match="pixels or tokens give fb.fit a subclass of fb.likelihoods.Likel"):
        fb.calibrate(network, [(inputs, targets)], progress=False)
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(model, loader, epochs=1, likelihood=OfPixels(), progress=False)
    again = fb.load_posterior(posterior.save(tmp_path / "one"), network)
    assert isinstance(again.likelihood, OfPixels)
    expected = posterior.predict(inputs, samples=2, seed=0).probabilities
    assert torch.equal(again.predict(inputs, samples=2, seed=0).probabilities, expected)
    assert expected.shape == (20 * 16, 3)


def test_a_loop_of_ones_own_gets_no_wrong_mean_in_silence():
    """Averaged over pixels, too, a log-likelihood is too small beside the KL; labels that are cut off are other labels."""
    inputs, targets = torch.randn(6, 1, 4, 4), torch.randint(3, (6, 4, 4))
    pixels = fb.to_stochastic(nn.Conv2d(1, 3, 3, padding=1), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError, match=r"one number for each of 6 examples, not \(6, 4, 4\); sum over"):
        fb.ELBO(Categorical(), num_data=6)(pixels, inputs, targets)
    assert fb.ELBO(OfPixels(), num_data=6)(pixels, inputs, targets).log_likelihood < -16 * 0.5

    class Unsummed(OfPixels):
        def log_prob(self, outputs, targets):
            return -nn.functional.cross_entropy(outputs, targets, reduction="none")

    loader = TensorLoader(inputs, targets, batch_size=6)
    for method in (fb.MLE(epochs=1), fb.NodeNoise(epochs=1), fb.BayesByBackprop(epochs=1)):
        with pytest.raises(FlowBNNError, match=r"Unsummed.log_prob must give one number for each of 6 exam"):
            method.fit(nn.Conv2d(1, 3, 3, padding=1), loader, likelihood=Unsummed(), progress=False)

    elbo, model = fb.ELBO(Categorical(), 6), fb.to_stochastic(nn.Linear(2, 2), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError, match="the batch has no examples"):
        elbo(model, torch.zeros(0, 2), torch.zeros(0, dtype=torch.long))
    with pytest.raises(FlowBNNError, match="must be integers, but these have fractions"):
        elbo(model, torch.zeros(2, 2), torch.tensor([0.2, 0.9]))


def test_labels_as_real_numbers_pass_the_compiler_and_vmap():
    outputs, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    truth = Categorical().log_prob(outputs, labels)
    compiled = torch.compile(Categorical().log_prob, fullgraph=True, backend="eager")
    assert torch.equal(compiled(outputs, labels.float()), truth)
    each = torch.func.vmap(lambda row, label: Categorical().log_prob(row[None], label[None])[0])
    assert torch.equal(each(outputs, labels.float()), truth)


class Halved(Gaussian):
    """A Gaussian of half the outputs."""

    def predictive(self, outputs, sample_counts=None):
        return super().predictive(outputs / 2, sample_counts)


def test_a_kind_of_gaussian_of_ones_own_is_loaded_as_that_kind(tmp_path):
    inputs, network = torch.randn(20, 2), nn.Linear(2, 1)
    posterior = fb.MLE(epochs=1).fit(network, [(inputs, inputs[:, :1])], likelihood=Halved(), progress=False)
    again = fb.load_posterior(posterior.save(tmp_path / "one"), network)
    assert torch.equal(again.predict(inputs).mean, posterior.predict(inputs).mean)
