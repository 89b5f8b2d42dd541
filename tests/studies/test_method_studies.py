"""Tests of the studies of all methods, with tiny settings."""

import json

import pytest

from flowbnn.compare.candidates import find_candidates
from flowbnn_studies import get_study
from flowbnn_studies.report import load_results, write_report
from flowbnn_studies.runner.run import run_study

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


@pytest.mark.parametrize("name", SETTINGS)
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
