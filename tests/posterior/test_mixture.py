"""Tests of flowbnn.posterior.mixture."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.posterior import MixturePosterior, PointPosterior


def make_members(count):
    torch.manual_seed(0)
    return [PointPosterior(nn.Linear(3, 4), fb.likelihoods.Categorical()) for _ in range(count)]


def test_probabilities_have_the_weights(tmp_path):
    members, inputs = make_members(3), torch.randn(5, 3)
    mixture = MixturePosterior(members, [5, 2, 1])
    each = torch.stack([member.predict(inputs).probabilities for member in members])
    expected = torch.einsum("k,kbc->bc", torch.tensor([5.0, 2.0, 1.0]) / 8, each)
    assert mixture.default_samples == 64
    torch.testing.assert_close(mixture.predict(inputs).probabilities, expected)
    loaded = fb.load_posterior(mixture.save(tmp_path / "mixture"), nn.Linear(3, 4))
    assert loaded.weights == mixture.weights
    assert torch.equal(loaded.predict(inputs).samples, mixture.predict(inputs).samples)


def test_members_take_turns_by_weight():
    mixture = MixturePosterior(make_members(3), [0.6, 0.3, 0.1])
    for samples in (1, 7, 10, 64):
        turns = [member for member, _ in mixture.schedule(samples)]
        for member, weight in enumerate(mixture.weights):
            assert abs(turns.count(member) - weight * samples) < 1.0
    assert MixturePosterior(make_members(3)).schedule(4) == [(0, 0), (1, 0), (2, 0), (0, 1)]


def test_networks_are_those_of_a_prediction():
    mixture, inputs = MixturePosterior(make_members(2), [3, 1]), torch.randn(5, 3)
    logits = torch.stack([network(inputs) for network in mixture.networks(4, seed=0)])
    torch.testing.assert_close(logits.softmax(-1), mixture.predict(inputs, 4, seed=0).samples)


def test_mixtures_have_no_energy():
    """Their outputs are log-probabilities, whose energy is zero up to rounding."""
    member, inputs = make_members(1)[0], torch.randn(20, 3)
    assert "energy" in fb.posterior.novelty_scores(member.predict(inputs))
    assert "energy" not in fb.posterior.novelty_scores(MixturePosterior([member, member]).predict(inputs))


def test_gated_members_are_refused():
    """Mixtures average calibrated predictions, and the fallback of a gate is none."""
    inputs, targets = torch.randn(60, 3), torch.arange(60) % 4
    safe = fb.gated(make_members(1)[0], (inputs, targets), false_alarm=0.5, epochs=1)
    for wrap in (lambda: MixturePosterior([safe, safe]), lambda: fb.methods.TemperedPosterior(safe, 2.0)):
        with pytest.raises(fb.errors.FlowBNNError) as caught:
            wrap()
        assert (caught.value.kind, caught.value.argument) == ("unsupported", "posterior")
