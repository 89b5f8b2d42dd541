"""Means, spreads and paired comparisons, on values worked by hand."""

import math

import pytest
from scipy import stats

from flowbnn.errors import FlowBNNError
from flowbnn_studies.runner.statistics import paired, student_quantile, summary


def test_mean_and_standard_deviation_by_hand():
    found = summary([1.0, 2.0, 4.0], published=3.0)
    assert found["mean"] == pytest.approx(7 / 3, abs=1e-15)
    assert found["std"] == pytest.approx(
        math.sqrt(7 / 3), abs=1e-15
    )  # ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2 = 42/18
    assert found["per_seed"] == [1.0, 2.0, 4.0]
    assert found["published"] == 3.0


def test_one_seed_has_no_spread_and_a_gap_no_mean():
    assert summary([0.5])["mean"] == 0.5
    assert summary([0.5])["std"] is None
    assert summary([0.5, None])["mean"] is None
    assert summary([0.5, math.inf])["mean"] is None


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 10, 15, 40, 200])
def test_the_quantile_of_students_t(freedom):
    assert student_quantile(freedom) == pytest.approx(float(stats.t.ppf(0.975, freedom)), rel=2e-4)


def test_a_paired_comparison_by_hand():
    # differences 1, 2, 3: mean 2, standard deviation 1, so 2 +- 4.3027 / sqrt(3)
    found = paired([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert found.mean == 2.0
    assert found.low == pytest.approx(2 - 4.3027 / math.sqrt(3), abs=1e-12)
    assert found.high == pytest.approx(2 + 4.3027 / math.sqrt(3), abs=1e-12)
    assert not found.clear
    assert paired([2.0, 4.0, 6.0], [1.0, 2.9, 5.1]).clear


def test_one_seed_is_never_clear():
    assert not paired([1.0], [0.0]).clear
    assert "one seed" in paired([1.0], [0.0]).words()


def test_unequal_numbers_of_seeds_are_refused():
    with pytest.raises(FlowBNNError, match="same seeds"):
        paired([1.0, 2.0], [1.0])


def test_a_warning_of_many_layers_counts_for_each():
    import warnings

    from flowbnn.diagnostics import LayerHealth, health_warnings
    from flowbnn_studies.runner.base import Parts, Variant, warned

    names = [f"fc{n}" for n in range(7)]
    content = {}
    for seed, some in enumerate((names, names[:1])):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for one in health_warnings(LayerHealth(name, 0.0, 0.0, 1.0, "prior") for name in some):
                warnings.warn(one)
            warnings.warn("something else")
        content["a", seed] = {"warnings": warned(caught)}
    fates, other = Parts([0, 1], content).warnings([Variant("a", "First")])
    assert fates.startswith(
        "First: the noise has fallen back onto its prior at fc0 (2 of 2 seeds), fc1 (1 of 2 seeds)"
    )
    assert fates.endswith("fc6 (1 of 2 seeds)")
    assert other == "First: something else (in 2 of 2 seeds)"


def test_layers_of_one_fate_are_told_in_one_line():
    from flowbnn_studies.runner.base import Parts, Variant

    point = "the noise of layer '{}' has collapsed to a point (its spread is {}% of the prior's), so it says nothing"
    parts = Parts(
        [0, 1],
        {
            ("a", 0): {
                "warnings": [point.format("conv1", 0.1), point.format("conv2", 1.2), "something else"]
            },
            ("a", 1): {"warnings": [point.format("conv1", 0.2)]},
            ("b", 0): {},
            ("b", 1): {},
        },
    )
    assert parts.warnings([Variant("a", "First"), Variant("b", "Second")]) == [
        "First: the noise has collapsed to a point at conv1 (2 of 2 seeds), conv2 (1 of 2 seeds)",
        "First: something else (in 1 of 2 seeds)",
    ]
