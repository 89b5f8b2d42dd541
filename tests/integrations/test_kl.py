"""Tests of the KL divergence in training loops of other libraries."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.integrations.kl import KLTerm, make_posterior
from flowbnn.noise.batched import divergences

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


def make_network(recipe=None):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    return fb.to_stochastic(layers, {"*": recipe or fb.noise.NormalAffine(base_scale=0.3)})


def test_gradient_is_that_of_the_elbo():
    network, term = make_network(), KLTerm(beta=0.7)
    term.begin(network, [(X, Y)])
    assert term.num_data == 40
    loss = nn.functional.cross_entropy(network(X), Y)
    loss.backward()
    noise = list(fb.noise.noise_parameters(network))
    before = [value.grad.clone() for value in noise]
    term.add_gradient(network)
    kl = divergences(fb.noise.noise_layers(network)).total.kl
    exact = torch.autograd.grad(0.7 / 40 * kl, noise)
    for value, gradient, added in zip(noise, before, exact, strict=True):
        torch.testing.assert_close(value.grad, gradient + added)
    assert term.history == [pytest.approx(kl.item())]


def test_gradient_is_added_to_parameters_of_the_optimizer_only():
    network, term = make_network(fb.noise.NormalPlanar(2)), KLTerm(num_data=10, warmup=0.5)
    noise = list(fb.noise.noise_parameters(network))
    term.add_gradient(network, noise[:2], progress=0.25, seed=3)
    assert all(value.grad is None for value in noise[2:])
    half = [value.grad.clone() for value in noise[:2]]
    for value in noise:
        value.grad = None
    state = torch.random.get_rng_state()
    term.add_gradient(network, noise, progress=1.0, seed=3)
    assert torch.equal(state, torch.random.get_rng_state())
    for value, gradient in zip(noise, half, strict=False):
        torch.testing.assert_close(value.grad, 2.0 * gradient)


def test_networks_without_noise_and_loaders_without_size_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        KLTerm().begin(nn.Linear(2, 2), [(X, Y)])
    assert caught.value.argument == "model"
    with pytest.raises(FlowBNNError) as caught:
        KLTerm().begin(make_network(), iter([(X, Y)]))
    assert (caught.value.kind, caught.value.argument) == ("num_data", "num_data")


def test_posterior_of_a_trained_network():
    posterior = make_posterior(make_network(), (X, Y))
    assert posterior.predict(X, 3).probabilities.shape == (40, 2)
    regression = make_posterior(make_network(), (X, X[:, :2]))
    assert regression.predict(X, 3).mean.shape == (40, 2)
