"""Tests of means, standard deviations and paired comparisons against exact values."""

import math
import warnings

import numpy as np
import pytest

from flowbnn.compare.results import SeedResults, record_warnings, summary
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn_studies.runner.findings import paired_difference, sign_flip_p_value


def test_mean_and_standard_deviation():
    result = summary([1.0, 2.0, 4.0], published=3.0)
    assert result["mean"] == pytest.approx(7 / 3, abs=1e-15)
    assert result["std"] == pytest.approx(
        math.sqrt(7 / 3), abs=1e-15
    )  # ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2 = 42/18
    assert result["per_seed"] == [1.0, 2.0, 4.0]
    assert result["published"] == 3.0


def test_one_seed_has_no_standard_deviation_and_missing_values_no_mean():
    assert summary([0.5])["mean"] == 0.5
    assert summary([0.5])["std"] is None
    assert summary([0.5, None])["mean"] is None
    assert summary([0.5, math.inf])["mean"] is None


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


def test_warning_of_many_layers_is_counted_for_each():
    from flowbnn.diagnostics import LayerHealth, health_warnings

    names = [f"fc{n}" for n in range(7)]
    content = {}
    for seed, layer_names in enumerate((names, names[:1])):
        with record_warnings() as caught:
            for warning in health_warnings(
                [LayerHealth(name, 0.0, 0.0, 1.0, "prior") for name in layer_names]
            ):
                warnings.warn(warning)
            warnings.warn("something else", FlowBNNWarning)
        content["a", seed] = {"warnings": caught}
    content["b", 0] = {}
    layers, other_line = SeedResults([0, 1], content).warnings({"a": "First", "b": "Second"})
    assert layers.startswith(
        "First: the noise has collapsed to its prior at fc0 (2 of 2 seeds), fc1 (1 of 2 seeds)"
    )
    assert layers.endswith("fc6 (1 of 2 seeds)")
    assert other_line == "First: something else (in 2 of 2 seeds)"


def test_warnings_that_differ_in_numbers_are_merged():
    texts = ("R-hat 2.21, above 1.05", "R-hat 1.9, above 1.05", "3 of 60 diverged")
    content = {("a", seed): {"warnings": [{"text": text, "layer": ""}]} for seed, text in enumerate(texts)}
    assert SeedResults([0, 1, 2], content).warnings({"a": "HMC"}) == [
        "HMC: R-hat 2.21, above 1.05 (in 2 of 3 seeds)",
        "HMC: 3 of 60 diverged (in 1 of 3 seeds)",
    ]


def test_other_warnings_are_not_recorded():
    with pytest.warns(UserWarning, match="not ours"), record_warnings() as caught:
        warnings.warn("not ours")
    assert caught == []


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
