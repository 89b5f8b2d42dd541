"""Tests of simulation-based calibration."""

from functools import partial

import pytest
import torch

import flowbnn as fb
from flowbnn.diagnostics.simulation import Ranks
from flowbnn.errors import FlowBNNError
from flowbnn.posterior.noise import NoisePosterior


def test_ranks_are_uniform_for_exact_fits_only(problem):
    def fit(width: float, batches: list) -> NoisePosterior:
        ((_, targets),) = batches
        return problem.posterior(problem.mean_for(targets), width * problem.covariance)

    exact, narrow, wide = (
        fb.diagnostics.simulation_ranks(problem.exact, problem.loader, partial(fit, width))
        for width in (1.0, 0.2, 5.0)
    )
    assert exact.ranks.shape == (64, 5)
    assert repr(exact).startswith("Ranks(64 simulations x 5 dimensions, 63 draws; p-value ")
    assert exact.p_value > 0.01
    assert max(narrow.p_value, wide.p_value) < 1e-4


def test_a_fit_without_noise_is_refused(problem):
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.simulation_ranks(problem.exact, problem.loader, lambda batches: None)
    assert (caught.value.kind, caught.value.argument) == ("shape", "fit")


@pytest.mark.parametrize("draws", [1, 5, 10, 63])
def test_p_values_of_uniform_ranks_have_the_nominal_level(draws):
    uniform = torch.randint(draws + 1, (400, 64, 2), generator=torch.Generator().manual_seed(0))
    rejected = sum(Ranks(ranks, draws).p_value < 0.05 for ranks in uniform)
    assert rejected < 0.05 * 400 + 3 * (0.05 * 0.95 * 400) ** 0.5
    assert Ranks(torch.zeros(64, 2, dtype=torch.long), draws).p_value < 1e-6
