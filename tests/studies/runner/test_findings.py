"""Tests of figures as data and of paired comparisons, against exact values."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from flowbnn import to_stochastic
from flowbnn.errors import FlowBNNError
from flowbnn.noise import NormalAffine, NormalPlanar, noise_layers
from flowbnn_studies.runner.findings import (
    curve,
    density_pair,
    density_panels,
    histogram,
    histogram_panels,
    paired_difference,
    sign_flip_p_value,
)


def test_curve_is_the_mean_over_common_epochs():
    line = curve("a", [[1.0, 2.0, 9.0], [3.0, 4.0]], scale=-1.0)
    assert line["x"] == [1, 2]
    assert line["mean"] == [-2.0, -3.0]
    assert line["std"] == pytest.approx([2**0.5, 2**0.5])
    assert curve("a", [[1.0]])["std"] is None


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


def test_paired_difference():
    # differences 1, 2, 3: mean 2, standard deviation 1, so 2 +- t / sqrt(3); two degrees of freedom have t in closed form
    t = 0.95 * math.sqrt(2 / (1 - 0.95**2))
    result = paired_difference([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert result.mean == 2.0
    assert result.low == pytest.approx(2 - t / math.sqrt(3), abs=1e-12)
    assert result.high == pytest.approx(2 + t / math.sqrt(3), abs=1e-12)
    assert not result.significant
    assert paired_difference([2.0, 4.0, 6.0], [1.0, 2.9, 5.1]).significant


def test_one_seed_is_never_significant():
    assert not paired_difference([1.0], [0.0]).significant
    assert "one seed" in paired_difference([1.0], [0.0]).describe()


def test_unequal_numbers_of_seeds_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        paired_difference([1.0, 2.0], [1.0])
    assert caught.value.kind == "seeds"


def test_sign_flip_test_of_many_seeds():
    """The estimate for 20 differences lies within four standard errors of the exact p-value."""
    # fmt: off
    differences = [
        0.3, -0.1, 0.2, 0.05, -0.2, 0.4, 0.1, -0.3, 0.2, 0.1, 0.02, -0.05, 0.3, -0.15, 0.1, 0.2, -0.1, 0.05, 0.1, -0.2,
    ]
    # fmt: on
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums + difference, sums - difference])
    exact = float((np.abs(sums) >= abs(sum(differences)) * (1 - 1e-12)).mean())
    assert abs(sign_flip_p_value(differences) - exact) < 4 * (exact * (1 - exact) / 100_000) ** 0.5
    assert 0 < sign_flip_p_value([1.0] * 30) < 1e-4


def test_sign_flip_test_of_few_seeds():
    # sums of +-1 +-2 +-4: only equal signs reach 7
    assert sign_flip_p_value([1.0, 2.0, 4.0]) == 2 / 8
    # 1 + 2 - 4 = -1, and |sum| >= 1 for all signs
    assert sign_flip_p_value([1.0, 2.0, -4.0]) == 1.0
    assert sign_flip_p_value([0.3, 0.1, 0.2, 0.4, 0.5]) == 2 / 32
