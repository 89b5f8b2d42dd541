"""Tests of the points of a request."""

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn_studies.playground.points import MAX_POINTS, RANGE, Points

CLASSES = {
    "task": "classes",
    "train": [[0, 0, 0], [1, 1, 1], [2, 0.5, 2], [-1, 0, 0]],
    "held_out": [[0, 1, 1]],
}
CURVE = {"task": "curve", "train": [[0, 1], [1, 2], [2, 3], [3, 4]], "held_out": []}


def test_points_become_tensors():
    points = Points.parse(CLASSES)
    assert points.num_inputs == 2
    assert points.num_outputs == 3
    assert torch.equal(points.inputs(points.train), torch.tensor([[0, 0], [1, 1], [2, 0.5], [-1, 0]]))
    assert points.targets(points.train).tolist() == [0, 1, 2, 0]
    curve = Points.parse(CURVE)
    assert (curve.num_inputs, curve.num_outputs) == (1, 1)
    assert curve.targets(curve.train).tolist() == [[1], [2], [3], [4]]
    assert curve.inputs(curve.held_out).shape == (0, 1)


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        ({"task": "pictures"}, "points"),
        ({"train": "all"}, "train"),
        ({"train": [[0, 0, 0]] * 3}, "train"),
        ({"train": [[0, 0, 1]] * 5}, "train"),
        ({"train": [[0, 0, 0]] * (MAX_POINTS + 1)}, "train"),
        ({"held_out": [[0, 0, 0]] * (MAX_POINTS + 1)}, "held_out"),
        ({"held_out": [[0, 0]]}, "held_out"),
        ({"held_out": [[0, 0, 3]]}, "held_out"),
        ({"held_out": [[0, 0, 0.5]]}, "held_out"),
        ({"held_out": [[0, "0", 1]]}, "held_out"),
        ({"held_out": [[0, True, 1]]}, "held_out"),
        ({"held_out": [[0, float("nan"), 1]]}, "held_out"),
        ({"held_out": [[0, 2 * RANGE, 1]]}, "held_out"),
        ({"held_out": [None]}, "held_out"),
    ],
)
def test_invalid_points_are_refused(changes, argument):
    with pytest.raises(FlowBNNError) as caught:
        Points.parse({**CLASSES, **changes})
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("document", [None, [], "points", {}])
def test_documents_of_another_form_are_refused(document):
    with pytest.raises(FlowBNNError) as caught:
        Points.parse(document)
    assert caught.value.argument == "points"
