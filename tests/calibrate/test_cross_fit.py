"""Tests of ``fb.cross_calibrate`` and of the mixture that it returns."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.posterior import MixturePosterior, PointPosterior

QUIET = {"progress": False, "accelerator": "cpu"}
METHOD = fb.MAP(epochs=30, lr=0.02)


def make_data(count: int = 90):
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 2, generator=generator)
    targets = (inputs[:, 0] + 0.5 * torch.randn(count, generator=generator) > 0).long()
    return inputs, targets


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the networks are trained briefly
def test_every_network_is_calibrated_on_its_own_fold(tmp_path):
    data = make_data()
    options = {"folds": 3, "method": METHOD, "candidates": ["temperature", "vector"], **QUIET}
    posterior = fb.cross_calibrate(make_network, data, **options)
    assert isinstance(posterior, MixturePosterior)
    assert [member.calibration.examples for member in posterior.members] == [30, 30, 30]
    weights = [next(member.model.parameters()) for member in posterior.members]
    assert not torch.equal(weights[0], weights[1])
    again = fb.cross_calibrate(make_network, data, **options)
    inputs = torch.randn(7, 2)
    probabilities = posterior.predict(inputs).probabilities
    assert torch.equal(again.predict(inputs).probabilities, probabilities)
    mean = torch.stack([member.predict(inputs).probabilities for member in posterior.members]).mean(0)
    torch.testing.assert_close(probabilities, mean)
    loaded = fb.load_posterior(posterior.save(tmp_path / "mixture"), make_network())
    assert torch.equal(loaded.predict(inputs).probabilities, probabilities)
    assert [member.calibration.choice for member in loaded.members] == [
        member.calibration.choice for member in posterior.members
    ]
    assert fb.evaluate(posterior, [data], progress=False)["accuracy"] > 0.75


@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # few examples for each fold
def test_mixture_of_noise_samples_every_member(tmp_path):
    options = {"folds": 2, "method": METHOD, "batch_size": 16, **QUIET}
    posterior = fb.cross_calibrate(make_network, make_data(40), candidates=["noise"], **options)
    members = [
        fb.calibrate(
            m.model if isinstance(m, PointPosterior) else fb.to_deterministic(m.model),
            make_data(30),
            candidates=["noise"],
            folds=0,
            **QUIET,
        )
        for m in posterior.members
    ]
    mixture = MixturePosterior(members)
    assert mixture.default_samples == 128
    inputs = torch.randn(5, 2)
    samples = mixture.predict(inputs, 6, seed=3).samples
    for index, member in enumerate(members):
        torch.testing.assert_close(samples[index::2], member.predict(inputs, 3, seed=3).samples)
    loaded = fb.load_posterior(mixture.save(tmp_path / "mixture"), make_network())
    assert torch.equal(loaded.predict(inputs, 6, seed=3).samples, samples)
    assert isinstance(mixture.sample(1), nn.Module)
    adaptive = mixture.predict(inputs, 16, seed=0, adaptive=0.5)
    assert adaptive.probabilities.isfinite().all()


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
def test_regression_members_have_their_own_noise():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(80, 2, generator=generator)
    targets = inputs.sum(1, keepdim=True) + 0.3 * torch.randn(80, 1, generator=generator)
    options = {"folds": 2, "method": fb.MAP(epochs=200, lr=0.02), "candidates": ["temperature"], **QUIET}
    posterior = fb.cross_calibrate(lambda: nn.Linear(2, 1), (inputs, targets), **options)
    predictive = posterior.predict(inputs)
    first = posterior.members[0].predict(inputs)
    torch.testing.assert_close(predictive.samples[0], first.samples[0])
    assert float(predictive.std.mean()) == pytest.approx(0.3, rel=0.3)


def test_bad_arguments_are_refused():
    for factory in (make_network(), lambda: None):
        with pytest.raises(FlowBNNError) as caught:
            fb.cross_calibrate(factory, make_data(), **QUIET)
        assert caught.value.argument == "make_network"
    with pytest.raises(FlowBNNError) as caught:
        fb.cross_calibrate(make_network, make_data(8), folds=5, **QUIET)
    assert (caught.value.kind, caught.value.argument) == ("examples", "folds")
    with pytest.raises(FlowBNNError) as caught:
        fb.cross_calibrate(make_network, make_data(), method=fb.DeepEnsemble(2, epochs=1), progress=False)
    assert caught.value.argument == "method"
    with pytest.raises(FlowBNNError) as caught:
        MixturePosterior([])
    assert caught.value.argument == "members"
    member = PointPosterior(make_network(), fb.likelihoods.Categorical())
    with pytest.raises(FlowBNNError) as caught:
        MixturePosterior([member], [0.5, 0.5])
    assert caught.value.argument == "weights"


def test_a_likelihood_without_a_mixture_is_refused_after_one_training():
    likelihood, networks = fb.likelihoods.Mixture(2), list[nn.Module]()

    def make_network() -> nn.Module:
        networks.append(nn.Linear(2, likelihood.num_outputs))
        return networks[-1]

    data, options = (torch.randn(20, 2), torch.randn(20, 1)), {"likelihood": likelihood}
    with pytest.raises(FlowBNNError) as caught:
        fb.cross_calibrate(
            make_network, data, folds=2, method=fb.MAP(epochs=1), options=options, progress=False
        )
    assert (caught.value.argument, len(networks)) == ("likelihood", 1)
