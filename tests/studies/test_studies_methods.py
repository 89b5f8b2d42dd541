"""Tests of the studies of all methods, with tiny settings."""

import json
import math

import pytest
import torch

from flowbnn.compare.candidates import find_candidates
from flowbnn.errors import FlowBNNError
from flowbnn_studies import SeedResults, get_study
from flowbnn_studies.elephant import accuracy_with_new, threshold_for
from flowbnn_studies.regression_1d import scale_inputs, spread_growth
from flowbnn_studies.report import load_results, write_report
from flowbnn_studies.runner.run import run_study
from slow_cases import mark_slow

FEW = ("mle", "mc-dropout", "node-noise-gaussian")
SETTINGS = {
    "regression-1d": {"epochs": 3, "test": 20, "samples": 4, "grid": 9, "hidden": 6},
    "clusters-2d": {
        "epochs": 2,
        "train": 60,
        "test": 50,
        "ring": 20,
        "samples": 4,
        "grid": 5,
        "hidden": (4,),
    },
    "elephant": {"epochs": 1, "samples": 4, "plotted_samples": 3, "width": 2, "hidden": 8, "batch": 500},
    "compare": {"network": "mlp", "data": "clusters", "epochs": 2, "train": 60, "test": 50, "samples": 4},
}
FIGURES = {
    "regression-1d": ["bands"],
    "clusters-2d": ["map", "map", "reliability"],
    "elephant": ["draws", "histogram"],
    "compare": ["pareto", "reliability"],
}


@pytest.mark.parametrize("name", mark_slow(SETTINGS, [name for name in SETTINGS if name != "compare"]))
def test_study_runs_and_results_follow_the_schema(name, tmp_path, sketched):
    study = get_study(name)
    settings = study.make_settings(quick=True, methods=FEW, **SETTINGS[name])
    results = run_study(study, settings=settings, seeds=1, out=tmp_path, progress=False)
    folder = tmp_path / study.folder(settings)
    assert load_results(folder) == results
    assert [figure["kind"] for figure in results["figures"]] == FIGURES[name]
    assert {row["key"] for row in results["rows"]} == set(FEW)
    assert {row["key"] for row in results["rows"]} == {candidate.key for candidate in find_candidates(FEW)}
    for row in results["rows"]:
        assert row["values"]["nll"]["mean"] == row["values"]["nll"]["per_seed"][0]
    page = write_report([results], tmp_path / "page.html").read_text()
    assert "MC dropout" in page
    assert len(json.dumps(results)) < 1_000_000


def test_only_unfinished_methods_are_trained(tmp_path):
    study = get_study("regression-1d")
    settings = study.make_settings(quick=True, methods=FEW[:2], **SETTINGS["regression-1d"])
    first = run_study(study, settings=settings, seeds=1, out=tmp_path, progress=False)
    parts = tmp_path / "regression-1d" / "parts"
    stamps = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert set(stamps) == {"mle-seed0.json", "mc-dropout-seed0.json"}
    more_settings = study.make_settings(quick=True, methods=FEW, **SETTINGS["regression-1d"])
    again = run_study(study, settings=more_settings, seeds=1, out=tmp_path, progress=False, resume=True)
    assert {name: (parts / name).stat().st_mtime_ns for name in stamps} == stamps
    assert again["rows"][:2] == first["rows"]
    assert [row["key"] for row in again["rows"]] == list(FEW)
    assert any("reused from an earlier run" in note for note in again["notes"])


def test_failing_method_is_noted_and_others_are_evaluated(tmp_path, monkeypatch):
    from flowbnn.errors import FlowBNNError
    from flowbnn.methods import MCDropout

    def refuse(self, *arguments, **options):
        raise FlowBNNError("layer 'fc1' is not supported; use MAP")

    monkeypatch.setattr(MCDropout, "fit", refuse)
    study = get_study("clusters-2d")
    settings = study.make_settings(quick=True, methods=FEW[:2], **SETTINGS["clusters-2d"])
    results = run_study(study, settings=settings, seeds=1, out=tmp_path, progress=False)
    assert [row["key"] for row in results["rows"]] == ["mle"]
    assert "MC dropout could not be fitted: layer 'fc1' is not supported; use MAP." in results["notes"]


def test_spread_growth_is_the_ratio_of_outside_to_inside():
    inputs = torch.tensor([-0.2, 0.0, 0.25, 0.5, 0.6])
    assert spread_growth(inputs, torch.tensor([4.0, 1.0, 2.0, 3.0, 8.0])) == pytest.approx(6.0 / 2.0)
    assert spread_growth(inputs, torch.zeros(5)) is None
    assert scale_inputs(torch.tensor([0.0, 0.25, 0.5])).tolist() == [-2.0, 0.0, 2.0]


def test_threshold_keeps_its_fraction():
    scores = torch.arange(1.0, 21.0)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    assert threshold_for(scores, 0.95) == 19.0
    assert threshold_for(scores, 1.0) == 20.0
    assert threshold_for(scores, 0.01) == 1.0
    with pytest.raises(FlowBNNError) as caught:
        threshold_for(scores, 0.0)
    assert caught.value.argument == "keep"


def test_accuracy_with_rejection():
    # known: right and kept, right but rejected, wrong and kept, wrong and rejected; novel: two found, one missed
    labels, targets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 0])
    familiar, novel = torch.tensor([0.1, 0.9, 0.2, 0.8]), torch.tensor([0.7, 0.6, 0.5])
    rejection = accuracy_with_new(labels, targets, familiar, novel, threshold=0.5)
    assert rejection == {"accuracy": (1 + 2) / 7, "found": 2 / 3, "lost": 0.5}
    never = accuracy_with_new(labels, targets, familiar, novel, threshold=math.inf)
    assert never == {"accuracy": 2 / 7, "found": 0.0, "lost": 0.0}


def test_two_good_seeds_of_three_do_not_exceed_chance():
    from flowbnn_studies.clusters_2d import exceeds_chance

    assert not exceeds_chance([0.55, 0.47, 0.83])
    assert not exceeds_chance([0.9])
    assert exceeds_chance([0.80, 0.81, 0.82])


def test_answers_follow_from_the_numbers():
    from flowbnn_studies.clusters_2d import answer as ring_answer
    from flowbnn_studies.regression_1d import answer as curve_answer

    candidates = find_candidates(["map", "mc-dropout"])

    def parts(**values):
        return SeedResults(
            [0], {(key.replace("_", "-"), 0): {"values": value} for key, value in values.items()}
        )

    map_values = {"nll": 0.1, "growth": None, "coverage_outside": 0.2}
    dropout_values = {"nll": 0.2, "growth": 5.0, "coverage_outside": 0.9}
    text = curve_answer(parts(map=map_values, mc_dropout=dropout_values), candidates)
    assert "(1 seed): MAP 0.100, MC dropout 0.200" in text
    assert "outside: MC dropout 5.0" in text
    assert "intervals cover: MC dropout 90%, MAP 20%" in text
    common = {"ece": 0.1, "ring_entropy": 0.3, "auroc_hole": 0.6}
    aurocs = {
        "map": (0.2, 0.9, 0.6),
        "mc-dropout": (0.8, 0.81, 0.82),
    }  # only the second is reliably above 0.5
    results = {
        (key, seed): {"values": {"auroc": value, **common}}
        for key, values in aurocs.items()
        for seed, value in enumerate(values)
    }
    text = ring_answer(SeedResults([0, 1, 2], results), candidates)
    assert "MC dropout detected novel points better than chance" in text
    assert "MAP detected" not in text
    assert "MC dropout 0.810, MAP 0.567" in text
    text = ring_answer(SeedResults([0], results), candidates)
    assert "no method detected novel points better than chance" in text
