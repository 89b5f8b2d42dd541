"""Tests of the study of density gates, with tiny settings."""

import math

import pytest
import torch

from flowbnn.metrics import novelty_auroc
from flowbnn_studies import get_study
from flowbnn_studies.flows.density_gate import mahalanobis, neighbour_distances
from flowbnn_studies.runner.run import run_study


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the trainings are too short
def test_study_runs_and_results_are_valid(tmp_path):
    study = get_study("density-gate")
    results = run_study(
        study,
        settings=study.make_settings(quick=True),
        seeds=1,
        out=tmp_path,
        progress=False,
        accelerator="cpu",
        trial=True,
    )
    assert len(results["rows"]) == 3
    for row in results["rows"]:
        assert all(math.isfinite(value["mean"]) for value in row["values"].values())


def test_neighbours_detect_a_hole_that_the_mahalanobis_distance_does_not():
    generator = torch.Generator().manual_seed(0)
    corners = torch.tensor([[-4.0, -4.0], [4.0, 4.0], [-4.0, 4.0], [4.0, -4.0]])
    train, test = (corners.repeat(50, 1) + torch.randn(200, 2, generator=generator) for _ in range(2))
    hole = 0.5 * torch.randn(100, 2, generator=generator)
    assert novelty_auroc(*mahalanobis(train, test, hole)) < 0.1
    assert novelty_auroc(*neighbour_distances(train, test, hole)) > 0.99
