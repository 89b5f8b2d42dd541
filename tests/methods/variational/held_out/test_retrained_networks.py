"""Retrained networks with and without noise: they have not seen the rows that they are compared on."""

from types import SimpleNamespace

import pytest
import torch
from problems import QUIET
from report_problems import rings
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.methods.variational.held_out import retrained_networks
from flowbnn.methods.variational.held_out.retrained_networks import compare_retrained
from flowbnn.methods.variational.initial_state import InitialState
from flowbnn.methods.variational.noise_fit import NoiseFitOptions
from flowbnn.models import MLP
from flowbnn.noise import NormalAffine
from flowbnn.posterior import NoisePosterior


def test_retrained_networks_have_not_seen_the_rows(monkeypatch):
    torch.manual_seed(0)
    inputs, labels = torch.randn(60, 5), torch.randint(2, (60,))  # nothing to learn
    loader = TensorLoader(inputs, labels, batch_size=20, shuffle=True)
    plain = fb.MLE(epochs=30, lr=0.02).fit(MLP(5, (32,), 2), loader, seed=0, **QUIET)
    model = fb.to_stochastic(plain.model, {"*": NormalAffine()})
    fb.noise.freeze(model, "weights")
    fits, state = [], torch.get_rng_state()

    def maximize_elbo(network, training, options, initial):
        assert not any(weight.requires_grad for weight in fb.noise.weight_parameters(network))
        fits.append((network, training))
        return SimpleNamespace(posterior=NoisePosterior(network, fb.likelihoods.Categorical()))

    options = NoiseFitOptions(validation=0.1, seed=0, **QUIET)
    monkeypatch.setattr(retrained_networks, "maximize_elbo", maximize_elbo)
    gain = compare_retrained(model, InitialState.of(model), loader, options)
    assert 1 <= len(fits) <= 5  # blocks of six rows, until the decision is clear
    assert all(training.num_data == 54 for _, training in fits)
    assert fb.evaluate(plain, (inputs, labels), progress=False)["nll"] < 0.4  # memorized
    assert -gain.before > 0.6  # no better than guessing
    for network, training in fits:
        with fb.noise.noise_mode(network, "off"):
            outputs = network(training.tensors[0])
        assert nn.functional.cross_entropy(outputs, training.tensors[1]) < 0.5  # trained as far
    assert torch.equal(torch.get_rng_state(), state)
    for before, after in zip(plain.model.parameters(), fb.noise.weight_parameters(model), strict=True):
        assert torch.equal(before, after)


def test_weights_that_cannot_be_reset_are_not_retrained(monkeypatch):
    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.factor = nn.Linear(2, 2), nn.Parameter(torch.randn(2))

        def forward(self, x):
            return self.layer(x) * self.factor

    model = fb.to_stochastic(Fixed(), {"*": NormalAffine()})
    monkeypatch.setattr(retrained_networks, "maximize_elbo", pytest.fail)
    options = NoiseFitOptions(validation=0.1, seed=0, **QUIET)
    assert compare_retrained(model, InitialState.of(model), [rings(60, 1)], options) is None
