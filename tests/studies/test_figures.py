"""Tests of figures as data against exact values."""

import pytest
import torch
from torch import nn

from flowbnn import to_stochastic
from flowbnn.compare.results import pooled_bins
from flowbnn.noise import NormalAffine, NormalPlanar, noise_layers
from flowbnn_studies.runner.findings import (
    curve,
    density_pair,
    density_panels,
    histogram,
    histogram_panels,
)


def test_curve_is_the_mean_over_common_epochs():
    line = curve("a", [[1.0, 2.0, 9.0], [3.0, 4.0]], scale=-1.0)
    assert line["x"] == [1, 2]
    assert line["mean"] == [-2.0, -3.0]
    assert line["std"] == pytest.approx([2**0.5, 2**0.5])
    assert curve("a", [[1.0]])["std"] is None


def test_pooled_bins_are_weighted_and_keep_empty_bins():
    def bar(fraction, confidence=None, accuracy=None):
        return {"low": 0.0, "high": 0.5, "fraction": fraction, "confidence": confidence, "accuracy": accuracy}

    empty, mixed, half = bar(0.0), bar(0.3, 0.4, 0.5), bar(0.1, 0.2, 0.1)
    assert pooled_bins([[empty], [empty]])[0]["accuracy"] is None
    pooled = pooled_bins([[mixed], [half]])[0]
    assert pooled["fraction"] == pytest.approx(0.2)
    assert pooled["confidence"] == pytest.approx(0.35)  # (0.3 * 0.4 + 0.1 * 0.2) / 0.4
    assert pooled["accuracy"] == pytest.approx(0.4)
    assert pooled_bins([[mixed], [empty]])[0]["confidence"] == pytest.approx(0.4)


def test_histogram_counts_every_value_once():
    bins = histogram(torch.tensor([-1.0, 0.0, 0.49, 0.5, 1.0, 7.0]), 0.0, 1.0, 2)
    assert bins["fraction"] == pytest.approx([0.5, 0.5])
    other_bins = {"edges": bins["edges"], "fraction": [1.0, 0.0]}
    (panel,) = histogram_panels({"title": [{"x": bins}, {"x": other_bins}]}, {"x": "label"})
    assert panel["title"] == "title"
    assert panel["groups"][0]["label"] == "label"
    assert panel["groups"][0]["fraction"] == pytest.approx([0.75, 0.25])


def test_density_panels_show_the_most_changed_dimension():
    model = to_stochastic(nn.Sequential(nn.Linear(4, 3)), {"0": NormalPlanar(1)})
    with torch.no_grad():
        noise_layers(model)["0"].transform[0].shift[2] = 1.5  # this dimension differs from its prior
    (panel,) = density_panels(model, ["0"], 1)
    assert panel["title"] == "0, noise dimension 2"
    mass = torch.trapezoid(torch.tensor(panel["posterior"]), torch.tensor(panel["x"]))
    assert abs(float(mass) - 1) < 0.02


def test_density_pair_is_normalized_with_y_in_rows():
    model = to_stochastic(nn.Sequential(nn.Linear(2, 3)), {"0": NormalAffine()})
    pair = density_pair(model, "0", nodes=30, samples=2000)
    density = torch.tensor(pair["density"], dtype=torch.float64)
    x, y = torch.tensor(pair["x"]).double(), torch.tensor(pair["y"]).double()
    assert density.shape == (len(y), len(x))
    assert abs(float(torch.trapezoid(torch.trapezoid(density, x), y)) - 1) < 0.05


def test_headlines_answer_the_question():
    from flowbnn_studies import elephant, regression_1d

    for module, study, expected in (
        (elephant, elephant.Elephant, {"with_new_entropy", "found", "lost"}),
        (regression_1d, regression_1d.Regression1d, {"coverage_90", "growth", "coverage_outside"}),
    ):
        keys = {metric.key for metric in module.METRICS}
        assert expected <= set(study.headline) <= keys
