"""Tests of the data sets."""

import pytest

from flowbnn.errors import FlowBNNError
from flowbnn_studies.playground.points import MAX_CLASSES, Points
from flowbnn_studies.playground.presets import MAX_NOISE, NUM_HELD_OUT, PRESETS, make_preset


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_valid_points(name):
    document = make_preset(name, noise=MAX_NOISE)
    points = Points.parse(document)
    assert [list(row) for row in points.train] == document["train"]
    assert len(points.train) == PRESETS[name].number
    assert len(points.held_out) == NUM_HELD_OUT
    if points.task == "classes":
        assert 2 <= points.num_outputs <= MAX_CLASSES
        assert set(points.targets(points.train).tolist()) == set(range(points.num_outputs))


def test_presets_have_the_shapes_that_their_names_promise():
    moons = make_preset("two-moons", 200, 0.0)["train"]
    # each moon is half of a circle of radius 1.5 around its own center
    centers = {0: (-0.75, -0.375), 1: (0.75, 0.375)}
    assert all(
        abs(((x - centers[c][0]) ** 2 + (y - centers[c][1]) ** 2) ** 0.5 - 1.5) < 0.02 for x, y, c in moons
    )
    assert all(
        c == (x > 0) == (y > 0) or c == int((x > 0) == (y > 0))
        for x, y, c in make_preset("xor", 200, 0.0)["train"]
    )
    assert all(
        abs((x**2 + y**2) ** 0.5 - 2.2 * c) < 0.02 for x, y, c in make_preset("ring", 200, 0.0)["train"]
    )
    assert all(
        y == (-1.0 if x < 0 else 1.0) for x, y in make_preset("step", 200, 0.0)["train"] if abs(x) > 0.01
    )
    assert all(0.89 <= abs(x) <= 2.71 for x, _ in make_preset("gap", 200, 0.0)["train"])


def test_seeds_repeat_and_change_the_points():
    assert make_preset("ring", seed=3) == make_preset("ring", seed=3)
    assert make_preset("ring", seed=3)["train"] != make_preset("ring", seed=4)["train"]
    assert not set(map(tuple, make_preset("gap")["train"])) >= set(map(tuple, make_preset("gap")["held_out"]))


def test_unknown_presets_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        make_preset("two-moon")
    assert caught.value.argument == "name"
