"""Tests that a trial run is marked as such in every output."""

import pytest
from tiny_study import Tiny, registered

from flowbnn_studies import get_study
from flowbnn_studies.report import console_lines, write_report
from flowbnn_studies.report.tables import make_tables
from flowbnn_studies.runner.run import run_study

TRIAL = "(trial run with generated data)"


@pytest.mark.slow
def test_trial_run_on_generated_images_shows_no_published_or_best_values(tmp_path):
    study = get_study("lenet-fashion")
    changes = {"generated": 40, "shift_images": 4, "*.batch": 20, "*.epochs": 1, "cost_rounds": 0}
    settings = study.make_settings(quick=True, **changes)
    only = ["xiong-longer", "xiong-flow-position", "xiong-gaussian-position"]
    options = {"out": tmp_path, "seeds": 1, "progress": False, "accelerator": "cpu", "only": only}
    real = run_study(study, settings=settings, **options)
    assert any(row.get("cited") for row in real["rows"])
    marked = run_study(study, settings=settings, **options, collect=True, trial=True)
    assert marked["title"] == f"LeNet on Fashion-MNIST {TRIAL}"
    assert "not meaningful" in marked["answer"]
    assert "not meaningful" in marked["notes"][0]
    assert not any(row.get("cited") for row in marked["rows"])
    assert not any(cell["published"] for row in marked["rows"] for cell in row["values"].values())
    first, redrawn = real["figures"][0], marked["figures"][0]
    assert any(line["label"].startswith("Xiong:") for line in first["data"]["panels"][0]["lines"])
    for panel in redrawn["data"]["panels"]:
        assert not any(line["label"].startswith("Xiong:") for line in panel["lines"])
        assert not panel.get("levels")
    assert "Dashed" in first["published"]
    assert not redrawn["published"]
    assert "Dashed" not in redrawn["caption"]
    cells = [cell for row in make_tables(marked)[0].rows for cell in row.cells]
    assert not any(cell.best for cell in cells)
    text = "\n".join(console_lines(marked))
    assert TRIAL in text
    assert "published" not in text.split(TRIAL)[1].split("Xiong's")[0]
    page = write_report([{**marked, "figures": []}], tmp_path / "page.html").read_text()
    assert TRIAL in page
    assert "Bold with a dot: the best" not in page


def test_trial_run_takes_two_seeds_by_default(tmp_path):
    class Many(Tiny):
        seeds = 10

    with registered(Many()) as study:
        options = {"out": tmp_path, "progress": False, "trial": True}
        assert run_study(study, **options)["seeds"] == [0, 1]
        assert run_study(study, **options, seeds=3)["seeds"] == [0, 1, 2]


def test_trial_run_keeps_dashed_lines_that_are_not_published():
    from flowbnn_studies.runner.run import mark_trial

    exact = {"label": "closed form", "x": [0.0], "mean": [1.0], "style": "dashed"}
    panels = [{"title": "Density", "lines": [exact], "levels": [{"label": "limit", "value": 1.0}]}]
    entry = {"kind": "curves", "title": "Densities", "caption": "", "data": {"panels": panels}}
    marked = mark_trial({"title": "Digits", "rows": [], "figures": [entry], "notes": []})
    assert marked["figures"][0]["data"]["panels"] == panels  # nothing in it is published
    assert marked["title"] == "Digits (trial run with tiny settings)"
    assert "generated" not in marked["answer"]
