"""Tests of the studies of densities with tiny settings, and of the distributions with known density."""

import math

import pytest
import torch

from flowbnn_studies import get_study
from flowbnn_studies.flows.densities_2d import TOYS
from flowbnn_studies.report import load_results, write_report
from flowbnn_studies.runner.run import run_study

SETTINGS = {
    "densities-2d": ({"data": ("rings",)}, ["nsf"], ["map"]),
    "change-of-variables": ({}, None, ["curves"]),
    "energies": ({"energies": (3,)}, ["planar-2"], ["map"]),
    "why-flows": ({}, None, []),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_study_runs_and_is_reported(name, tmp_path, sketched):
    changes, only, kinds = SETTINGS[name]
    study = get_study(name)
    settings = study.make_settings(quick=True, **changes)
    results = run_study(
        study, settings=settings, seeds=1, out=tmp_path, progress=False, only=only, trial=True
    )
    assert load_results(tmp_path / name) == results
    assert [figure["kind"] for figure in results["figures"]] == kinds
    assert all(row["values"] for row in results["rows"])
    page = write_report([results], tmp_path / "page.html").read_text()
    assert all(row["label"] in page for row in results["rows"])


@pytest.mark.parametrize("name", TOYS)
def test_toy_densities_are_normalized_and_match_their_draws(name):
    toy = TOYS[name]
    draws = toy.sample(2000, torch.Generator().manual_seed(0)).double()
    assert draws.abs().max() < 4
    cells = 40 if name == "checkerboard" else 80  # midpoints: at most a standard deviation apart, or exact
    axis = 4 * ((2 * torch.arange(cells, dtype=torch.float64) + 1) / cells - 1)
    log_prob = toy.log_prob(torch.cartesian_prod(axis, axis))
    mass = log_prob.exp() * (8 / cells) ** 2
    assert mass.sum() == pytest.approx(1.0, abs=2e-4)
    entropy = -float((mass * log_prob.nan_to_num(neginf=0.0)).sum())
    log_prob_of_draws = toy.log_prob(draws)
    assert -float(log_prob_of_draws.mean()) == pytest.approx(
        entropy, abs=4 * float(log_prob_of_draws.std()) / math.sqrt(2000) + 1e-3
    )
