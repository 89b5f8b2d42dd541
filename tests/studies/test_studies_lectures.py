"""Tests of the studies of Ahn and Lee's lecture and Ravenda's report, with tiny settings on generated data."""

import pytest
import torch

from flowbnn_studies import get_study
from flowbnn_studies.linear_regression import (
    GaussianMoments,
    Settings,
    distances,
    exact_posterior,
    make_problem,
)
from flowbnn_studies.report import load_results, write_report
from flowbnn_studies.rotated_mnist import rotate
from flowbnn_studies.runner.run import run_study
from slow_cases import mark_slow

SETTINGS = {
    "linear-regression": {"inputs": (1,), "draws": 12, "warmup": 2, "steps": 2, "fit_steps": 5},
    "mnist-mlp": {"units": (4, 6), "batch": 150, "samples": 2},
    "elephant-fashion": {"batch": 150, "methods": ("mle", "bayes-by-backprop"), "samples": 2},
    "rotated-mnist": {"batch": 150, "methods": ("mle", "mnf"), "samples": 2, "angles": 3, "num_rotated": 8},
    "cifar-5": {"batch": 100, "methods": ("mc-dropout", "fflu", "mnf", "mnf-moved"), "samples": 2},
}
FIGURES = {
    "linear-regression": ["density", "bands", "curves", "curves"],
    "mnist-mlp": ["curves"],
    "elephant-fashion": ["draws", "histogram"],
    "rotated-mnist": ["shares", "curves"],
    "cifar-5": ["curves", "histogram"],
}


@pytest.mark.parametrize("name", mark_slow(SETTINGS, ["linear-regression", "mnist-mlp", "cifar-5"]))
@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # the trainings are too short
def test_study_runs_and_is_reported(name, tmp_path, sketched):
    study = get_study(name)
    settings = study.make_settings(quick=True, **SETTINGS[name])
    results = run_study(
        study, settings=settings, seeds=1, out=tmp_path, progress=False, accelerator="cpu", trial=True
    )
    assert load_results(tmp_path / name) == results
    assert [figure["kind"] for figure in results["figures"]] == FIGURES[name]
    assert all(row["values"] for row in results["rows"])
    assert not any(cell["published"] for row in results["rows"] for cell in row["values"].values())
    page = write_report([results], tmp_path / "page.html").read_text()
    assert all(row["label"] in page for row in results["rows"])


def test_published_numbers_are_shown():
    from flowbnn.compare.results import SeedResults

    for name, key, metric, value in (
        ("mnist-mlp", "mixture-1200", "error_1200", 0.0132),
        ("cifar-5", "mnf", "error", 0.16),
    ):
        study = get_study(name)
        settings = study.make_settings()
        histograms = {group: {"edges": [0.0, 1.0], "fraction": [1.0]} for group in ("known", "novel")}
        content = {"values": {metric: 0.5}, "below": {"x": [0.0], "share": [1.0]}, "entropy": histograms}
        (row,) = study.findings(settings, SeedResults([0], {(key, 0): content})).rows
        assert row["values"][metric]["published"] == value


@pytest.mark.parametrize("name", ["mnist-mlp", "cifar-5"])
def test_choosing_settings_ignores_test_images(name, tmp_path, monkeypatch):
    from flowbnn_studies.images import data

    study = get_study(name)
    extra = {"methods": ("mnf-kl1",)} if name == "cifar-5" else {}
    settings = study.make_settings(quick=True, choose=True, **{**SETTINGS[name], **extra})
    variant = study.variants(settings)[0].key
    generate = data.generated_images

    def with_wrong_labels(number, dataset, split):
        images = generate(number, dataset, split)
        if split == "test":
            images.labels[images.labels < 5] = 4 - images.labels[images.labels < 5]
        return images

    values = []
    for make in (generate, with_wrong_labels):
        monkeypatch.setattr(data, "generated_images", make)
        folder = tmp_path / make.__name__
        results = run_study(
            study, settings=settings, seeds=1, out=folder, progress=False, accelerator="cpu", only=[variant]
        )
        assert (folder / f"{name}-choice" / "results.json").exists()
        values.append(next(iter(results["rows"][0]["values"].values()))["mean"])
    assert values[0] == values[1]


def test_exact_posterior_is_the_mode_with_the_right_curvature():
    settings = Settings()
    inputs, targets = make_problem(settings, 3, seed=0)

    def energy(weights):
        columns = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=torch.float64)], 1)
        error = (targets[:, 0] - columns @ weights) / settings.noise
        return 0.5 * error.square().sum() + 0.5 * (weights / settings.prior).square().sum()

    exact = exact_posterior(inputs, targets, settings)
    mean = exact.mean.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(energy(mean), mean)
    hessian = torch.autograd.functional.hessian(energy, exact.mean)
    assert gradient.abs().max() < 1e-8
    torch.testing.assert_close(hessian @ exact.covariance, torch.eye(4, dtype=torch.float64))


def test_distances_equal_torch_distributions():
    source = torch.Generator().manual_seed(0)

    def normal():
        root = torch.randn(3, 3, generator=source, dtype=torch.float64)
        return GaussianMoments(
            torch.randn(3, generator=source, dtype=torch.float64), root @ root.T + torch.eye(3)
        )

    first, second = normal(), normal()
    truth = torch.distributions.kl_divergence(
        torch.distributions.MultivariateNormal(*first), torch.distributions.MultivariateNormal(*second)
    )
    assert distances(first, second)["kl"] == pytest.approx(float(truth))
    assert max(map(abs, distances(first, first).values())) < 1e-7


def test_rotation_by_90_and_180_degrees():
    images = torch.rand(2, 1, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(rotate(images, 90.0), images.rot90(1, (2, 3)))
    torch.testing.assert_close(rotate(images, 180.0), images.flip(2, 3))
