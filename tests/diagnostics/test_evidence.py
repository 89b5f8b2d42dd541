"""Tests of importance sampling and of estimates of the log-evidence, against closed forms."""

import warnings
from inspect import signature

import pytest
import scipy.stats
import torch
from tests.diagnostics.linear_problem import NOISE_SCALE
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.diagnostics.evidence import Evidence, _tempered_evidence, warn_if_different
from flowbnn.errors import FlowBNNWarning
from flowbnn.noise.joint import independent_vectors


def test_draws_of_the_exact_posterior_have_equal_weights(problem):
    result = fb.diagnostics.pareto_k(problem.exact, problem.loader, samples=200)
    assert result.elbo == pytest.approx(problem.evidence, abs=1e-3)
    assert result.evidence == pytest.approx(problem.evidence, abs=1e-3)
    assert result.effective > 199


def test_importance_sampling_estimates_the_evidence(problem):
    wide = fb.diagnostics.pareto_k(problem.wide, problem.loader, samples=4000)
    assert wide.verdict == "good"
    assert abs(wide.evidence - problem.evidence) < 4 * wide.evidence_error < 0.2
    factorized = fb.diagnostics.pareto_k(problem.factorized, problem.loader, samples=4000)
    log_det = torch.linalg.slogdet(problem.precision)[1]
    gap = 0.5 * float(problem.precision.diagonal().log().sum() - log_det)
    assert abs(problem.evidence - factorized.elbo - gap) < 4 * factorized.elbo_error
    narrow = problem.posterior(problem.mean, 0.05 * problem.covariance)
    assert fb.diagnostics.pareto_k(narrow, problem.loader).verdict == "bad"


@pytest.mark.parametrize("method", ["bridge", "psis", "tempered"])
def test_every_method_estimates_the_evidence(problem, method):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        estimate = fb.diagnostics.evidence(problem.wide, problem.loader, method, problem.chains, samples=2000)
    assert estimate.reliable
    assert abs(estimate.value - problem.evidence) < 4 * estimate.error + 1e-3
    assert estimate.error < 0.3


def test_number_of_particle_groups_makes_four_standard_errors_significant():
    """With a standard error from few groups, the deviation has a Student t distribution."""
    num_groups = signature(_tempered_evidence).parameters["num_groups"].default
    assert 2 * scipy.stats.t.sf(4.0, num_groups - 1) < 0.01


def test_estimates_that_disagree_are_warned_about():
    first, second = (Evidence(value, 0.01, "psis", True) for value in (0.0, 1.0))
    with pytest.warns(FlowBNNWarning) as caught:
        warn_if_different(first, second)
    assert caught[0].message.kind == "evidence"
    assert caught[0].message.fields["difference"] == 1.0


def test_the_prior_may_differ_between_layers(problem):
    loc, scale = torch.tensor([0.8] * 3 + [1.2] * 2).double(), torch.tensor([0.3] * 3 + [0.7] * 2).double()
    features = problem.features
    centered = problem.targets[:, 0].double() - problem.network.one.bias.item()
    marginal = NOISE_SCALE**2 * torch.eye(20).double() + (features * scale**2) @ features.T
    evidence = float(MultivariateNormal(features @ loc, marginal).log_prob(centered))
    covariance = torch.linalg.inv(features.T @ features / NOISE_SCALE**2 + (1 / scale**2).diag())
    mean = covariance @ (features.T @ centered / NOISE_SCALE**2 + loc / scale**2)
    posterior = problem.posterior(mean, covariance)
    ((vector, _),) = independent_vectors(posterior.model)
    vector.prior.loc.copy_(loc)
    vector.prior.scale.copy_(scale)
    result = fb.diagnostics.pareto_k(posterior, problem.loader, samples=100)
    assert result.elbo == pytest.approx(evidence, abs=1e-3)
    assert result.effective > 99
