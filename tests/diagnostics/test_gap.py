"""Tests of the gap between evidence and ELBO."""

import pytest
import torch

import flowbnn as fb


def test_gap_is_split_into_correlation_within_and_across_layers(problem):
    precision = problem.precision
    blocks = [torch.linalg.slogdet(precision[block, block])[1] for block in (slice(0, 3), slice(3, 5))]
    diagonal, full = precision.diagonal().log().sum(), torch.linalg.slogdet(precision)[1]
    within, across = 0.5 * float(diagonal - sum(blocks)), 0.5 * float(sum(blocks) - full)
    assert min(within, across) > 0.1
    gap = fb.diagnostics.elbo_gap(problem.factorized, problem.loader, problem.chains, samples=4000)
    assert gap.within_layers == pytest.approx(within, abs=0.05)
    assert gap.across_layers == pytest.approx(across, abs=0.05)
    assert abs(gap.remainder) < 0.15
    assert gap.per_example == pytest.approx(gap.nats / 20)
    assert gap.per_dimension == pytest.approx(gap.nats / 5)
