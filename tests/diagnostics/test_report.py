"""Tests of the report on the quality of a posterior."""

import math
from dataclasses import replace

import pytest

import flowbnn as fb


def test_exact_posterior_is_good_without_chains(problem, capsys):
    report = fb.diagnose(problem.exact, problem.loader, seconds=0.0)
    assert report.good
    assert report.chains is None
    assert report.suggested_upgrade == "none" or report.pareto.k >= 0.5
    assert "log-evidence" in capsys.readouterr().out


def test_factorized_posterior_lacks_correlation(problem):
    report = problem.report
    assert report.chains.converged
    assert abs(report.gap.evidence.value - problem.evidence) < 4 * report.gap.evidence.error + 1e-3
    assert report.suggested_upgrade == max(
        ("within", "across"), key=lambda name: getattr(report.gap, f"{name}_layers")
    )
    assert "could improve" in report.sentence
    assert "total variation" in str(report)
    assert (report.modes, report.missed) == (1, 0)
    assert "modes" not in report.sentence


def test_missed_modes_invalidate_the_verdict(problem):
    report = replace(problem.report, modes=2, missed=1)
    assert not report.verified
    assert "the chains missed 1 of 2 modes" in report.sentence
    for k in (0.1, 0.9):  # importance weights cannot detect missed modes
        unverified = replace(report, pareto=replace(report.pareto, k=k))
        assert not unverified.good
        assert unverified.suggested_upgrade == "unknown"
        assert unverified.sentence.startswith("Importance sampling cannot confirm this posterior (the chains")


def test_posterior_that_is_too_wide_is_not_good_despite_a_small_k(problem):
    """Bounded weights make importance sampling reliable, however far the draws are from the exact posterior."""
    wide = problem.posterior(problem.mean, 4.0 * problem.covariance)
    report = fb.diagnose(wide, problem.loader, seconds=0.0, progress=False)
    divergence = 0.5 * 5 * (4.0 - 1.0 - math.log(4.0))
    assert report.pareto.verdict == "good"
    assert report.pareto.gap == pytest.approx(divergence, rel=0.2)
    assert not report.good
    assert report.suggested_upgrade == "unknown"
    assert f"{report.pareto.gap:.2f}" in str(report)
    assert report.sentence.startswith(
        "Importance sampling cannot confirm this posterior, and chains are needed"
    )


def test_chains_that_would_take_too_long_are_not_run(problem):
    report = fb.diagnose(problem.exact, problem.loader, seconds=1e-3, progress=False)
    assert report.chains is None
    poor = replace(report, pareto=replace(report.pareto, k=0.9))
    assert "(increase seconds)" in poor.sentence
    assert "(about 400 s; increase seconds)" in replace(poor, required_seconds=400.0).sentence
    assert "(at most 6,000 dimensions)" in replace(poor, dimensions=7000).sentence
