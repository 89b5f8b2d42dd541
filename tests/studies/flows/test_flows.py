"""Tests of the studies of densities and autoencoders of images, with tiny settings on generated data."""

from dataclasses import replace

import pytest
import torch

from flowbnn.density import Density
from flowbnn_studies import get_study
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import run_study
from slow_cases import mark_slow

FIGURES = {
    "dlgm-planar": ["curves", "images"],
    "autoencoder-vs-vae": ["images"] * 4,
    "novelty-by-density": ["histogram"] * 2,
    "images": ["images"],
    "tabular-densities": [],
}


@pytest.mark.parametrize("name", mark_slow(FIGURES, [name for name in FIGURES if name != "images"]))
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the trainings are too short
def test_study_runs_and_results_are_valid(name, tmp_path):
    study = get_study(name)
    settings = study.make_settings(quick=True)
    results = run_study(
        study, settings=settings, seeds=1, out=tmp_path, progress=False, accelerator="cpu", trial=True
    )
    assert load_results(tmp_path / name) == results
    assert [figure["kind"] for figure in results["figures"]] == FIGURES[name]
    assert all(row["values"] for row in results["rows"])


def test_published_numbers_of_autoencoders_are_shown():
    from flowbnn.compare.results import SeedResults

    study = get_study("dlgm-planar")
    contents = {("planar-80", 0): {"values": {"nll": 85.0}}, ("planar-0", 0): {"values": {"nll": 90.0}}}
    findings = study.findings(study.make_settings(), SeedResults([0], contents))
    assert [row["values"]["nll"]["published"] for row in findings.rows] == [89.9, 85.1]
    assert "decreases with every increase" in findings.answer


def test_image_grid_is_arranged_by_rows():
    from flowbnn_studies.runner.findings import image_grid

    images = torch.arange(6).view(6, 1, 1, 1).expand(6, 3, 2, 1) / 10
    grid = torch.tensor(image_grid(images, 3))
    assert grid.shape == (4, 3, 3)
    torch.testing.assert_close(grid[..., 0], torch.tensor([[0.0, 0.1, 0.2]] * 2 + [[0.3, 0.4, 0.5]] * 2))


def test_image_flow_keeps_its_budget_and_continues_after_interruption(tmp_path, monkeypatch):
    from flowbnn_studies.flows import image_flows

    study = get_study("images")
    values = study.make_settings(quick=True)
    settings = replace(values, minutes=1.0, batch=8, flows=("glow",))
    monkeypatch.setattr(image_flows, "estimate_steps", lambda *_: 4)  # an epoch has 8 steps
    options = {"settings": settings, "out": tmp_path, "progress": False, "accelerator": "cpu"}
    complete = run_study(study, **options)
    assert complete["rows"][0]["values"]["epochs"]["mean"] == 0.5
    evaluate = Density.bits_per_dimension
    monkeypatch.setattr(Density, "bits_per_dimension", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_study(study, **options)
    monkeypatch.setattr(Density, "bits_per_dimension", evaluate)
    monkeypatch.setattr(image_flows, "estimate_steps", lambda *_: 9)  # the resumed run ignores this estimate
    resumed = run_study(study, resume=True, **options)
    assert resumed["rows"][0]["values"]["bits"] == complete["rows"][0]["values"]["bits"]
