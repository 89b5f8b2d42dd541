"""Tests of the checks of arguments: numbers of other types, paths and names."""

from fractions import Fraction

import numpy as np
import pandas
import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.options import Count, File, Positive, Seed, checked, options


@checked
def numbers(count: Count, *, seed: Seed | None = None, rate: Positive = 1.0, path: File | None = None):
    return count, seed, rate


def test_numbers_of_other_types_become_plain_numbers():
    values = numbers(np.int32(3), seed=np.int64(4), rate=np.float32(0.5))
    assert values == (3, 4, 0.5)
    assert [type(value) for value in values] == [int, int, float]
    assert numbers(1, rate=Fraction(1, 4))[2] == 0.25

    @options
    class Settings:
        seed: Seed = 0

    assert type(Settings(seed=np.uint8(7)).seed) is int


def test_tensors_may_be_arrays():
    labels, values = np.array([0, 1, 1]), np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4]], dtype=np.float32)
    values.flags.writeable = False
    expected = fb.metrics.brier_score(torch.tensor(values.tolist()), torch.tensor([0, 1, 1]))
    assert fb.metrics.brier_score(values, pandas.Series(labels)) == expected
    prediction = fb.predictive.CategoricalPredictive(torch.zeros(2, 3, 2))
    assert torch.equal(prediction.nll(labels.astype(np.uint8)), prediction.nll(torch.tensor([0, 1, 1])))
    for strings in (np.array(["a", "b", "c"]), np.array(1.0)):
        with pytest.raises(FlowBNNError) as caught:
            fb.metrics.accuracy(values, strings)
        assert caught.value.argument == "targets"


@pytest.mark.parametrize(
    "use",
    [
        lambda posterior, seed: posterior.predict(torch.zeros(2, 4), 2, seed=seed).sample(2, seed=seed),
        lambda posterior, seed: posterior.draws(2, seed=seed),
        lambda posterior, seed: posterior.sample(seed=seed),
        lambda posterior, seed: posterior.networks(2, seed=seed),
        lambda posterior, seed: fb.evaluate(
            posterior, (torch.zeros(2, 4), torch.arange(2)), seed=seed, samples=2
        ),
        lambda posterior, seed: fb.vae.VAE((1, 4, 4), 2, hidden=(4,)).sample(2, seed=seed),
        lambda posterior, seed: fb.density.Density(fb.flows.RealNVP(2)).sample(3, seed=seed),
        lambda posterior, seed: fb.MAP(epochs=1).fit(
            nn.Linear(4, 3), [(torch.ones(6, 4), torch.arange(6) % 3)], seed=seed, progress=False
        ),
        lambda posterior, seed: fb.fit_density(
            fb.flows.RealNVP(2), torch.randn(40, 2), epochs=1, seed=seed, progress=False
        ),
    ],
)
def test_seeds_may_be_numpy_integers(use):
    model = fb.to_stochastic(nn.Linear(4, 3), {"*": fb.noise.NormalAffine()})
    use(fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()), np.int64(3))


def test_messages_have_one_line():
    assert str(FlowBNNError("layer 'a\nb' is\n missing")) == "layer 'a b' is missing"
    with pytest.raises(FlowBNNError) as caught:
        fb.to_stochastic(nn.Linear(2, 2), {"a\nb": fb.noise.NormalAffine()})
    assert "\n" not in str(caught.value)


def test_settings_of_a_method_are_suggested_as_such():
    data = [(torch.ones(6, 4), torch.arange(6) % 3)]
    for name in ("epoch", "epochs"):
        with pytest.raises(FlowBNNError) as caught:
            fb.MAP().fit(nn.Linear(4, 3), data, **{name: 2})
        assert "MAP(epochs=" in str(caught.value)
