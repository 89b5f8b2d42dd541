"""Maximum likelihood, maximum a posteriori and dropout: the penalties that their priors imply, and the rules all methods keep."""

import math

import pytest
import torch
from method_cases import cosine
from problems import NOISE, PRIOR, QUIET, blobs, conjugate, lines, loader, of_kind, small, weights_from
from torch import nn
from torch.nn import functional as F

import flowbnn as fb


def test_weight_decay_is_the_l2_term_of_the_gaussian_prior():
    """Ahn and Lee's lecture: MAP is cross entropy with L2; here gradient by gradient, for one step of plain SGD."""
    inputs, labels = blobs(30).tensors
    network = small().double()
    inputs = inputs.double()
    joint = F.cross_entropy(network(inputs), labels, reduction="sum")
    for parameter in network.parameters():
        joint = joint + parameter.square().sum() / (
            2 * PRIOR**2
        )  # minus the log-density of N(0, PRIOR^2), less a constant
    wanted = torch.autograd.grad(joint / len(labels), list(network.parameters()))
    method = fb.MAP(epochs=1, lr=0.5, optimizer=torch.optim.SGD, prior_scale=PRIOR)
    posterior = method.fit(network, [(inputs, labels)], **QUIET)
    for before, after, slope in zip(network.parameters(), posterior.model.parameters(), wanted, strict=True):
        assert torch.allclose((before - after) / 0.5, slope, rtol=0, atol=1e-12)
    plain = fb.MLE(epochs=1, lr=0.5, optimizer=torch.optim.SGD, prior_scale=PRIOR).fit(
        network, [(inputs, labels)], **QUIET
    )
    slopes = torch.autograd.grad(F.cross_entropy(network(inputs), labels), list(network.parameters()))
    for before, after, slope in zip(network.parameters(), plain.model.parameters(), slopes, strict=True):
        assert torch.allclose((before - after) / 0.5, slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bias", [False, True])
def test_the_optimum_is_ridge_regression(bias):
    problem, network, batches, _ = conjugate(bias)
    method = fb.MAP(epochs=400, lr=0.04, optimizer=torch.optim.SGD, prior_scale=PRIOR)
    posterior = method.fit(network, batches, likelihood=fb.likelihoods.Gaussian(NOISE), **QUIET)
    found = torch.cat([parameter.detach().flatten() for parameter in posterior.model.parameters()])
    ridge = torch.linalg.solve(
        problem.design.T @ problem.design + (NOISE / PRIOR) ** 2 * torch.eye(len(found)).double(),
        problem.design.T @ problem.targets,
    )
    assert torch.allclose(ridge, problem.mean, atol=1e-12)
    assert torch.allclose(found, ridge, rtol=0, atol=1e-6)


def test_dropout_has_the_optimum_of_its_penalties():
    r"""Dropped inputs add p / (1 - p) sum_j w_j^2 |x_j|^2 / 2 sigma^2 to the loss, the prior (1 - p) |w|^2 / 2 s^2."""
    rate = 0.2
    problem, network, batches, probes = conjugate(bias=False)
    gram = problem.design.T @ problem.design / NOISE**2
    penalty = rate / (1 - rate) * torch.diag(gram.diagonal()) + (1 - rate) / PRIOR**2 * torch.eye(3).double()
    optimum = torch.linalg.solve(gram + penalty, problem.design.T @ problem.targets / NOISE**2)
    many = [(batches[0][0].repeat(64, 1), batches[0][1].repeat(64, 1))]  # as many masks in every step
    method = fb.MCDropout(rate, epochs=400, lr=0.1, schedule=cosine, prior_scale=PRIOR)
    posterior = method.fit(
        network, many, likelihood=fb.likelihoods.Gaussian(NOISE), num_data=24, seed=0, **QUIET
    )
    drawn = weights_from(posterior.predict(probes, samples=4000, seed=0).samples.double(), bias=False)
    spread = optimum.abs() * math.sqrt(rate / (1 - rate))
    assert ((drawn.mean(0) - optimum).abs() < 0.02 * problem.mean.abs().max() + 5 * spread / 4000**0.5).all()
    assert torch.allclose(drawn.std(0), spread, rtol=0.1)


def test_a_given_likelihood_is_not_changed_and_serves_every_fit():
    given = fb.likelihoods.Gaussian(dim=2)
    first = fb.MAP(epochs=3, lr=0.1).fit(small(2), loader(lines()), likelihood=given, seed=0, **QUIET)
    assert not given.log_scale.any()
    again = fb.MAP(epochs=3, lr=0.1).fit(small(2), loader(lines()), likelihood=given, seed=0, **QUIET)
    assert torch.equal(first.likelihood.log_scale, again.likelihood.log_scale)


def test_the_noise_of_a_trained_network_is_that_of_all_the_data():
    data = lines()
    network = small(2)
    taken = fb.MAP(epochs=0).fit(network, loader(data), **QUIET)
    residual = data.tensors[1] - network(data.tensors[0])
    assert torch.allclose(taken.likelihood.log_scale.exp(), residual.square().mean(0).sqrt(), rtol=1e-5)
    known = fb.likelihoods.Gaussian(dim=2)
    nn.init.constant_(known.log_scale, 0.3)
    known.requires_grad_(False)
    with pytest.warns(fb.errors.FlowBNNWarning) as caught:
        kept = fb.MAP(epochs=0).fit(network, loader(data), likelihood=known, **QUIET)
    assert of_kind(caught, "noise_level")[0].fields["target"] == 1
    assert torch.equal(kept.likelihood.log_scale, known.log_scale)


def test_one_network_can_be_handed_out():
    posterior = fb.MAP(epochs=1).fit(small(), loader(blobs()), **QUIET)
    one = posterior.sample()
    assert one is not posterior.model
    assert torch.equal(one(torch.ones(1, 4)), posterior.model(torch.ones(1, 4)))
    with pytest.raises(fb.FlowBNNError, match="no density"):
        posterior.log_prob({})
