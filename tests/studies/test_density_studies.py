"""The studies of densities and autoencoders of images, at settings of a second, on data that are generated."""

from dataclasses import replace

import pytest
import torch

from flowbnn.density import Density
from flowbnn_studies import get_study
from flowbnn_studies.report import load_results
from flowbnn_studies.runner.run import run_study

FIGURES = {
    "dlgm-planar": ["curves", "images"],
    "autoencoder-vs-vae": ["images"] * 4,
    "novelty-by-density": ["histogram"] * 2,
    "images": ["images"],
    "tabular-densities": [],
}


@pytest.mark.parametrize("name", FIGURES)
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # of trainings that are far too short
def test_a_study_runs_and_its_results_can_be_read(name, tmp_path):
    study = get_study(name)
    settings = study.make_settings(quick=True)
    results = run_study(
        study, settings=settings, seeds=1, out=tmp_path, progress=False, accelerator="cpu", trial=True
    )
    assert load_results(tmp_path / name) == results
    assert [figure["kind"] for figure in results["figures"]] == FIGURES[name]
    assert all(row["values"] for row in results["rows"])


def test_published_numbers_of_autoencoders_stand_beside_ours():
    from flowbnn.compare.results import Parts

    study = get_study("dlgm-planar")
    contents = {("planar-80", 0): {"values": {"nll": 85.0}}, ("planar-0", 0): {"values": {"nll": 90.0}}}
    found = study.findings(study.make_settings(), Parts([0], contents))
    assert [row["values"]["nll"]["published"] for row in found.rows] == [89.9, 85.1]
    assert "falls with every step" in found.answer


def test_pictures_lie_in_a_grid_row_by_row():
    from flowbnn_studies.runner.findings import image_grid

    images = torch.arange(6).view(6, 1, 1, 1).expand(6, 3, 2, 1) / 10
    grid = torch.tensor(image_grid(images, 3))
    assert grid.shape == (4, 3, 3)
    torch.testing.assert_close(grid[..., 0], torch.tensor([[0.0, 0.1, 0.2]] * 2 + [[0.3, 0.4, 0.5]] * 2))


def test_a_flow_of_images_keeps_to_a_budget_of_less_than_an_epoch_and_goes_on_after_a_kill(
    tmp_path, monkeypatch
):
    from flowbnn_studies.flows import image_flows

    study = get_study("images")
    values = study.make_settings(quick=True)
    settings = replace(values, minutes=1.0, batch=8, flows=("glow",))
    monkeypatch.setattr(image_flows, "estimate_steps", lambda *_: 4)  # of the 8 steps of an epoch
    given = {"settings": settings, "out": tmp_path, "progress": False, "accelerator": "cpu"}
    whole = run_study(study, **given)
    assert whole["rows"][0]["values"]["epochs"]["mean"] == 0.5
    evaluate = Density.bits_per_dimension
    monkeypatch.setattr(Density, "bits_per_dimension", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run_study(study, **given)
    monkeypatch.setattr(Density, "bits_per_dimension", evaluate)
    monkeypatch.setattr(image_flows, "estimate_steps", lambda *_: 9)  # another estimate, which does not count
    resumed = run_study(study, resume=True, **given)
    assert resumed["rows"][0]["values"]["bits"] == whole["rows"][0]["values"]["bits"]
