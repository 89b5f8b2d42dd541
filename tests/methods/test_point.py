"""Tests of MLE, MAP and MCDropout: the penalties of their priors, and their likelihoods."""

import math

import pytest
import torch
from method_cases import cosine
from problems import NOISE, PRIOR, QUIET, blobs, conjugate, lines, loader, of_kind, small, weights_from
from torch import nn
from torch.nn import functional as F

import flowbnn as fb


def test_weight_decay_is_the_l2_penalty_of_the_gaussian_prior():
    """Compares one step of SGD with the gradient of cross entropy plus an L2 penalty."""
    inputs, labels = blobs(30).tensors
    network = small().double()
    inputs = inputs.double()
    joint = F.cross_entropy(network(inputs), labels, reduction="sum")
    for parameter in network.parameters():
        # the negative log-density of N(0, PRIOR^2), up to a constant
        joint = joint + parameter.square().sum() / (2 * PRIOR**2)
    expected = torch.autograd.grad(joint / len(labels), list(network.parameters()))
    method = fb.MAP(epochs=1, lr=0.5, optimizer=torch.optim.SGD, prior_scale=PRIOR)
    posterior = method.fit(network, [(inputs, labels)], **QUIET)
    for before, after, gradient in zip(
        network.parameters(), posterior.model.parameters(), expected, strict=True
    ):
        assert torch.allclose((before - after) / 0.5, gradient, rtol=0, atol=1e-12)
    plain = fb.MLE(epochs=1, lr=0.5, optimizer=torch.optim.SGD, prior_scale=PRIOR).fit(
        network, [(inputs, labels)], **QUIET
    )
    gradients = torch.autograd.grad(F.cross_entropy(network(inputs), labels), list(network.parameters()))
    for before, after, gradient in zip(
        network.parameters(), plain.model.parameters(), gradients, strict=True
    ):
        assert torch.allclose((before - after) / 0.5, gradient, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_map_is_ridge_regression(bias):
    problem, network, batches, _ = conjugate(bias)
    method = fb.MAP(epochs=400, lr=0.04, optimizer=torch.optim.SGD, prior_scale=PRIOR)
    posterior = method.fit(network, batches, likelihood=fb.likelihoods.Gaussian(NOISE), **QUIET)
    weights = torch.cat([parameter.detach().flatten() for parameter in posterior.model.parameters()])
    ridge = torch.linalg.solve(
        problem.design.T @ problem.design + (NOISE / PRIOR) ** 2 * torch.eye(len(weights)).double(),
        problem.design.T @ problem.targets,
    )
    assert torch.allclose(ridge, problem.mean, atol=1e-12)
    assert torch.allclose(weights, ridge, rtol=0, atol=1e-6)


def test_dropout_has_the_optimum_of_its_penalty():
    r"""Dropped inputs add p / (1 - p) sum_j w_j^2 |x_j|^2 / 2 sigma^2 to the loss, the prior (1 - p) |w|^2 / 2 s^2."""
    rate = 0.2
    problem, network, batches, probes = conjugate(bias=False)
    gram = problem.design.T @ problem.design / NOISE**2
    penalty = rate / (1 - rate) * torch.diag(gram.diagonal()) + (1 - rate) / PRIOR**2 * torch.eye(3).double()
    optimum = torch.linalg.solve(gram + penalty, problem.design.T @ problem.targets / NOISE**2)
    repeated = [(batches[0][0].repeat(64, 1), batches[0][1].repeat(64, 1))]  # 64 masks in every step
    method = fb.MCDropout(rate, epochs=400, lr=0.1, schedule=cosine, prior_scale=PRIOR)
    posterior = method.fit(
        network, repeated, likelihood=fb.likelihoods.Gaussian(NOISE), num_data=24, seed=0, **QUIET
    )
    draws = weights_from(posterior.predict(probes, samples=4000, seed=0).samples.double(), bias=False)
    std = optimum.abs() * math.sqrt(rate / (1 - rate))
    assert ((draws.mean(0) - optimum).abs() < 0.02 * problem.mean.abs().max() + 5 * std / 4000**0.5).all()
    assert torch.allclose(draws.std(0), std, rtol=0.1)


def test_fit_does_not_change_the_likelihood_of_the_caller():
    likelihood = fb.likelihoods.Gaussian(dim=2)
    first = fb.MAP(epochs=3, lr=0.1).fit(small(2), loader(lines()), likelihood=likelihood, seed=0, **QUIET)
    assert not likelihood.log_scale.any()
    second = fb.MAP(epochs=3, lr=0.1).fit(small(2), loader(lines()), likelihood=likelihood, seed=0, **QUIET)
    assert torch.equal(first.likelihood.log_scale, second.likelihood.log_scale)


def test_noise_of_a_trained_network_is_fitted_to_its_residuals():
    data = lines()
    network = small(2)
    posterior = fb.MAP(epochs=0).fit(network, loader(data), **QUIET)
    residual = data.tensors[1] - network(data.tensors[0])
    assert torch.allclose(posterior.likelihood.log_scale.exp(), residual.square().mean(0).sqrt(), rtol=1e-5)
    fixed_noise = fb.likelihoods.Gaussian(dim=2)
    nn.init.constant_(fixed_noise.log_scale, 0.3)
    fixed_noise.requires_grad_(False)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        posterior = fb.MAP(epochs=0).fit(network, loader(data), likelihood=fixed_noise, **QUIET)
    assert of_kind(caught, "noise_level")[0].fields["target"] == 1
    assert torch.equal(posterior.likelihood.log_scale, fixed_noise.log_scale)


def test_sample_is_a_copy_of_the_network():
    posterior = fb.MAP(epochs=1).fit(small(), loader(blobs()), **QUIET)
    sample = posterior.sample()
    assert sample is not posterior.model
    assert torch.equal(sample(torch.ones(1, 4)), posterior.model(torch.ones(1, 4)))
    with pytest.raises(fb.FlowBNNError) as error:
        posterior.log_prob({})
    assert error.value.kind == "unsupported"
