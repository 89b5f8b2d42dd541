"""Tests of the study of conditional densities, with tiny settings."""

import math

import pytest
import torch

from flowbnn.compare.results import SeedResults
from flowbnn_studies import get_study
from flowbnn_studies.flows.conditional_density import GENERATED, evaluate_quantiles
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import run_study


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the trainings are too short
def test_study_runs_and_results_are_valid(tmp_path):
    study = get_study("conditional-density")
    results = run_study(
        study,
        settings=study.make_settings(quick=True),
        seeds=1,
        out=tmp_path,
        progress=False,
        accelerator="cpu",
        trial=True,
    )
    assert load_results(tmp_path / study.name) == results
    assert len(results["rows"]) == len(study.variants(study.make_settings()))
    for row in results["rows"]:
        assert all(math.isfinite(value["mean"]) for value in row["values"].values())


def test_scores_of_exact_quantiles_are_those_of_the_density():
    levels = (torch.arange(200, dtype=torch.float64) + 0.5) / 200
    targets = torch.randn(4000, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    quantiles = torch.special.ndtri(levels).expand(len(targets), -1)
    scores = evaluate_quantiles(levels, quantiles, targets)
    log_density = -0.5 * targets.square() - 0.5 * math.log(2.0 * math.pi)
    assert scores["log_likelihood"] == pytest.approx(float(log_density.mean()), abs=0.01)
    normal = torch.distributions.Normal(0.0, 1.0)
    crps = targets * (2.0 * normal.cdf(targets) - 1.0) + 2.0 * normal.log_prob(targets).exp() - math.pi**-0.5
    assert scores["crps"] == pytest.approx(float(crps.mean()), abs=0.003)
    assert scores["coverage_90"] == pytest.approx(0.9, abs=0.02)


@pytest.mark.parametrize("name", GENERATED)
def test_generated_targets_are_not_gaussian(name):
    inputs, targets = GENERATED[name](500, torch.Generator().manual_seed(0))
    assert inputs.shape == (500, 3)
    assert targets.shape == (500, 1)
    assert bool(torch.isfinite(targets).all())


def test_answer_compares_the_spline_with_the_better_gaussian():
    values = {"gaussian": 0.1, "predicted": 0.2, "mixture": 0.7, "flow": 0.8}
    contents = {
        (variant, seed): {"values": {"log_likelihood_branches": value + 0.01 * seed * (variant == "flow")}}
        for variant, value in values.items()
        for seed in range(3)
    }
    study = get_study("conditional-density")
    findings = study.findings(study.make_settings(sets=("branches",)), SeedResults([0, 1, 2], contents))
    assert "+0.610" in findings.answer
    assert "+0.110" in findings.answer
