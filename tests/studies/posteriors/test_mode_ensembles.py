"""Tests of the study of mode ensembles on generated data."""

import pytest
import torch
from torch import nn

from flowbnn.compare.results import SeedResults
from flowbnn.models import ResidualBlock
from flowbnn_studies import get_study, run_study
from flowbnn_studies.posteriors import mode_ensembles as study
from flowbnn_studies.runner.study import Job


def tiny(architecture, channels, width):
    return nn.Sequential(nn.AvgPool2d(8), ResidualBlock(channels, 4, 2), nn.Flatten(), nn.Linear(16, 10))


@pytest.mark.slow
@pytest.mark.usefixtures("unrefined")
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # networks of one epoch
def test_study_runs_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "make_network", tiny)
    ensemble_study = get_study("mode-ensembles")
    settings = ensemble_study.make_settings(quick=True)
    options = {"settings": settings, "seeds": 1, "out": tmp_path, "progress": False, "accelerator": "cpu"}
    results = run_study(ensemble_study, only=["blobs", "boston", "resnet18-cifar10"], **options)
    rows = {row["key"]: row["values"] for row in results["rows"]}
    assert set(rows) == set(study.ROWS)
    assert "nll_resnet18-cifar10" not in rows["laplace"]
    for key, values in rows.items():
        assert {"nll_blobs", "ece_blobs", "accuracy_blobs", "rmse_boston", "nll_boston"} <= set(values)
        assert ("width_blobs" in values) == (key in ("modes", "laplace", "gaussian"))
    # 2 * 34 numbers for the modes and their energies, on top of the weights of an MLP with 32 hidden units
    plain = rows["plain"]["parameters_blobs"]["mean"]
    assert plain == 3 * 32 + 33 * 2
    assert rows["ensemble"]["parameters_blobs"]["mean"] == 2 * plain
    assert rows["modes"]["parameters_blobs"]["mean"] < 2 * plain
    assert any("blobs 1, boston 1, concrete 0" in note for note in results["notes"])


def test_parts_are_disjoint_and_depend_on_the_seed(tmp_path):
    settings = get_study("mode-ensembles").make_settings(quick=True)
    for name in ("blobs", "concrete", "lenet-fashion", "resnet18-cifar10"):
        first, repeated, other_seed = (
            study._make_problem(Job("mode-ensembles", name, seed, settings, tmp_path)) for seed in (0, 0, 1)
        )
        a, b, c = first.parts
        assert (a.start, a.stop, b.stop, c.stop) == (0, b.start, c.start, sum(first.sizes))
        assert len(first.data[0]) == sum(first.sizes)
        assert torch.equal(first.data[0], repeated.data[0])
        assert not torch.equal(first.data[0], other_seed.data[0])


def test_claims_follow_the_rules_of_the_plan():
    def parts(modes, gaussian, number=3):
        rows = {"modes": modes, "gaussian": gaussian, "temperature": 0.6, "ensemble": 0.3, "laplace": 0.49}
        content = {
            (row, seed): {
                "values": {
                    f"nll_{problem}": value + 0.01 * seed * (seed + len(row)) for problem in study.PROBLEMS
                }
            }
            for row, value in rows.items()
            for seed in range(number)
        }
        return SeedResults(list(range(number)), content)

    near = study.claims(parts(0.3, 0.5))
    assert near[0].startswith("Modes are better than Gaussian noise: met (5 of 5 problems for it, 0 against)")
    assert near[1].startswith("Modes are better than temperature scaling: met")
    assert "A Gaussian at each mode is better than the modes alone: not met (0 of 5" in near[3]
    worse = study.claims(parts(0.5, 0.3))
    assert worse[0].startswith(
        "Modes are better than Gaussian noise: not met (0 of 5 problems for it, 5 against)"
    )
    assert worse[2].startswith("Modes are close to a deep ensemble: not met (0 of 5")
    # two seeds of the large network are too few
    assert "of 4 problems" in study.claims(parts(0.3, 0.5, 2))[0]
    assert study.claims(SeedResults([], {})) == ["There are too few results for an answer."]
