"""Tests of Markov chains over the noise."""

import math

import pytest
import torch
from tests.diagnostics.linear_problem import LAYER_SIZES

import flowbnn as fb
from flowbnn.diagnostics.noise_chains import estimate_seconds
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.errors import FlowBNNError


def test_chains_sample_the_exact_posterior(problem):
    chains = problem.chains
    assert chains.converged
    assert chains.divergences == 0
    vectors = chains.vectors.flatten(0, 1)
    error = (problem.covariance.diagonal() / chains.effective).sqrt()
    assert bool(((vectors.mean(0) - problem.mean).abs() < 4 * error).all())
    root = torch.linalg.cholesky(problem.precision)
    whitened = root.T @ vectors.T.cov() @ root  # the identity, up to a standard error of sqrt(2 / draws)
    assert torch.allclose(whitened, torch.eye(5).double(), atol=4 * math.sqrt(2 / chains.effective))
    assert [layer.shape[-1] for layer in chains.draws.values()] == LAYER_SIZES
    assert list(chains.draws) == ["one", "two"]


def test_running_time_is_infinite_beyond_the_limit(problem):
    target = NoiseTarget(problem.exact, problem.loader)
    assert estimate_seconds(target, 1e-6) == math.inf
    assert 0.0 < estimate_seconds(target, math.inf) < math.inf


def test_chains_of_another_density_are_refused(problem):
    other = [(problem.inputs, problem.targets + 1.0)]
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.elbo_gap(problem.exact, other, problem.chains)
    assert caught.value.argument == "chains"


def test_too_many_dimensions_are_refused(problem, monkeypatch):
    monkeypatch.setattr("flowbnn.diagnostics.noise_target.MAX_DENSE_DIM", 3)
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.noise_chains(problem.exact, problem.loader)
    assert caught.value.kind == "size"
    assert caught.value.fields["size"] == 5
    assert fb.diagnostics.pareto_k(problem.exact, problem.loader, samples=50).samples == 50
