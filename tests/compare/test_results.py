"""Tests of the results of seeds: means, standard deviations, pooled bins and recorded warnings."""

import math
import warnings

import pytest

from flowbnn.compare.results import ResultCache, SeedResults, pooled_bins, record_warnings, summary
from flowbnn.errors import FlowBNNWarning


def test_mean_and_standard_deviation():
    result = summary([1.0, 2.0, 4.0], published=3.0)
    assert result["mean"] == pytest.approx(7 / 3, abs=1e-15)
    # ((4/3)^2 + (1/3)^2 + (5/3)^2) / 2 = 42/18
    assert result["std"] == pytest.approx(math.sqrt(7 / 3), abs=1e-15)
    assert result["per_seed"] == [1.0, 2.0, 4.0]
    assert result["published"] == 3.0


def test_one_seed_has_no_standard_deviation_and_missing_values_no_mean():
    assert summary([0.5])["mean"] == 0.5
    assert summary([0.5])["std"] is None
    assert summary([0.5, None])["mean"] is None
    assert summary([0.5, math.inf])["mean"] is None


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


def test_pooled_bins_are_weighted_and_keep_empty_bins():
    def bar(fraction, confidence=None, accuracy=None):
        return {"low": 0.0, "high": 0.5, "fraction": fraction, "confidence": confidence, "accuracy": accuracy}

    empty, full, half = bar(0.0), bar(0.3, 0.4, 0.5), bar(0.1, 0.2, 0.1)
    assert pooled_bins([[empty], [empty]])[0]["accuracy"] is None
    pooled = pooled_bins([[full], [half]])[0]
    assert pooled["fraction"] == pytest.approx(0.2)
    assert pooled["confidence"] == pytest.approx(0.35)  # (0.3 * 0.4 + 0.1 * 0.2) / 0.4
    assert pooled["accuracy"] == pytest.approx(0.4)
    assert pooled_bins([[full], [empty]])[0]["confidence"] == pytest.approx(0.4)


@pytest.mark.parametrize(
    "content", ['{"settings": {}}', '{"settings": 3, "part": {}}', '{"part": 2}', "[]", "{"]
)
def test_stored_results_that_are_incomplete_are_ignored(tmp_path, content):
    cache = ResultCache(tmp_path, {"epochs": 1})
    cache.put("mle", 0, "MLE()", {"values": {"nll": 0.5}})
    assert cache.get("mle", 0, "MLE()") == {"values": {"nll": 0.5}}
    (path,) = tmp_path.rglob("*.json")
    path.write_text(content)
    assert cache.get("mle", 0, "MLE()") is None
