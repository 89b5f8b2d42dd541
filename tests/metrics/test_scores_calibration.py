"""Tests of calibration errors on hand-computed values, in particular at the edges of the bins."""

import json

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import calibration_error, calibration_floor, reliability


def two_classes(confidences: list[float], dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Returns probabilities of two classes, in which class 0 has these confidences."""
    p = torch.tensor(confidences, dtype=dtype)
    return torch.stack([p, 1 - p], -1)


def test_fifteen_equal_bins_by_hand() -> None:
    # bins of width 1/15: 0.95 and 0.97 share (14/15, 1]; 0.85 has (12/15, 13/15] alone; 0.55 has (8/15, 9/15]
    probabilities = two_classes([0.95, 0.97, 0.85, 0.55])
    targets = torch.tensor([0, 1, 0, 1])
    by_hand = (2 * abs(0.5 - 0.96) + abs(1 - 0.85) + abs(0 - 0.55)) / 4
    assert calibration_error(probabilities, targets) == pytest.approx(by_hand, abs=1e-14)


def test_confidence_of_one_belongs_to_the_last_bin() -> None:
    probabilities, targets = two_classes([1.0, 0.99], torch.float32), torch.tensor([1, 0])
    assert calibration_error(probabilities, targets) == pytest.approx(abs(0.5 - 0.995), abs=1e-7)
    assert reliability(probabilities, targets)[-1]["fraction"] == 1.0


def test_probability_slightly_above_one_is_accepted() -> None:
    probabilities = two_classes([1.0, 0.99], torch.float32)
    above = probabilities.clone()
    above[0, 0] += 2e-7
    targets = torch.tensor([0, 0])
    expected = calibration_error(probabilities, targets)
    assert calibration_error(above, targets) == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("edge", [9, 10, 12, 14])
def test_edge_belongs_to_the_bin_below(edge: int, dtype: torch.dtype) -> None:
    bars = reliability(two_classes([edge / 15], dtype), torch.tensor([0]))
    assert [bar["fraction"] for bar in bars].index(1.0) == edge - 1
    assert bars[edge - 1]["high"] == edge / 15


def test_classwise_error_by_hand() -> None:
    # class 0: p = 1, 1, 0 and is it? 1, 0, 0 -> bin 1: |1/2 - 1| * 2/3, bin 0: 0
    # class 1: p = 0, 0, 1 and is it? 0, 1, 1 -> bin 0: |1/2 - 0| * 2/3, bin 1: 0
    probabilities = two_classes([1.0, 1.0, 0.0])
    targets = torch.tensor([0, 1, 1])
    assert calibration_error(probabilities, targets, kind="classwise") == pytest.approx(1 / 3, abs=1e-15)


def test_classwise_error_detects_errors_of_other_classes() -> None:
    # the most probable class is calibrated; class 1 has probability 0.3 and frequency 0.1, class 2 the reverse
    probabilities = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).expand(10, 3)
    targets = torch.tensor([0] * 6 + [1] + [2] * 3)
    assert calibration_error(probabilities, targets) == pytest.approx(0.0, abs=1e-14)
    assert calibration_error(probabilities, targets, kind="classwise") == pytest.approx(0.4 / 3, abs=1e-14)


def test_adaptive_error_by_hand() -> None:
    probabilities = two_classes([0.6, 0.7, 0.8, 0.9])
    targets = torch.tensor([0, 1, 0, 0])
    by_hand = 0.5 * abs(0.5 - 0.65) + 0.5 * abs(1.0 - 0.85)
    assert calibration_error(probabilities, targets, bins=2, kind="adaptive") == pytest.approx(
        by_hand, abs=1e-15
    )


def test_adaptive_error_does_not_depend_on_the_order_of_ties() -> None:
    probabilities = two_classes([0.9] * 6 + [0.6] * 2)
    targets = torch.tensor([0, 0, 0, 1, 1, 1, 0, 1])
    values = {
        round(calibration_error(probabilities[order], targets[order], bins=4, kind="adaptive"), 12)
        for order in (torch.randperm(8, generator=torch.Generator().manual_seed(seed)) for seed in range(5))
    }
    assert values == {round(6 / 8 * 0.4 + 2 / 8 * 0.1, 12)}


def test_adaptive_ties_belong_to_the_bin_of_their_middle_rank() -> None:
    # ranks 0 | 1 2 3: the three ties have middle rank 2, in the second half
    value = calibration_error(
        two_classes([0.6, 0.9, 0.9, 0.9]), torch.tensor([0, 0, 1, 1]), bins=2, kind="adaptive"
    )
    assert value == pytest.approx(1 / 4 * abs(1 - 0.6) + 3 / 4 * abs(1 / 3 - 0.9), abs=1e-15)
    # ranks 0 1 2 | 3: the ties have middle rank 1, in the first half
    value = calibration_error(
        two_classes([0.6, 0.6, 0.6, 0.9]), torch.tensor([1, 1, 1, 0]), bins=2, kind="adaptive"
    )
    assert value == pytest.approx(3 / 4 * 0.6 + 1 / 4 * 0.1, abs=1e-15)


def test_adaptive_error_with_more_bins_than_inputs() -> None:
    value = calibration_error(two_classes([0.6, 0.8]), torch.tensor([0, 1]), bins=15, kind="adaptive")
    assert value == pytest.approx((0.4 + 0.8) / 2, abs=1e-15)


def test_error_agrees_with_a_loop_over_bins() -> None:
    generator = torch.Generator().manual_seed(1)
    probabilities = (2 * torch.randn(500, 5, generator=generator, dtype=torch.float64)).softmax(-1)
    targets = torch.randint(5, (500,), generator=generator)
    confidence, labels = probabilities.max(-1)
    error = 0.0
    for k in range(15):
        inside = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if inside.any():
            gap = (labels == targets)[inside].double().mean() - confidence[inside].mean()
            error += float(inside.double().mean() * gap.abs())
    assert calibration_error(probabilities, targets) == pytest.approx(error, abs=1e-12)


def test_reliability_bars_sum_to_the_calibration_error() -> None:
    generator = torch.Generator().manual_seed(2)
    probabilities = torch.randn(200, 3, generator=generator).softmax(-1)
    targets = torch.randint(3, (200,), generator=generator)
    bars = json.loads(json.dumps(reliability(probabilities, targets, bins=10)))
    full = [bar for bar in bars if bar["fraction"]]
    total = sum(bar["fraction"] * abs(bar["accuracy"] - bar["confidence"]) for bar in full)
    assert total == pytest.approx(calibration_error(probabilities, targets, bins=10), abs=1e-12)
    assert sum(bar["fraction"] for bar in bars) == pytest.approx(1.0)
    assert all(bar["low"] < bar["confidence"] <= bar["high"] for bar in full)
    assert all(bar["confidence"] is None and bar["accuracy"] is None for bar in bars if not bar["fraction"])


@pytest.mark.parametrize(
    ("function", "options", "argument"),
    [
        (calibration_error, {"kind": "adaptiv"}, "kind"),
        (calibration_error, {"bins": 0}, "bins"),
        (reliability, {"bins": -1}, "bins"),
    ],
)
def test_bad_options_are_refused(function, options, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        function(two_classes([0.6]), torch.tensor([0]), **options)
    assert caught.value.argument == argument


@pytest.mark.slow
def test_floor_is_the_mean_error_of_a_calibrated_classifier() -> None:
    generator = torch.Generator().manual_seed(0)
    confidence = 0.5 + 0.5 * torch.rand(2000, generator=generator, dtype=torch.float64).sqrt()
    probabilities = torch.stack([confidence, 1 - confidence], -1)
    errors = torch.tensor(
        [
            calibration_error(
                probabilities,
                (torch.rand(2000, generator=generator, dtype=torch.float64) > confidence).long(),
            )
            for _ in range(2000)
        ]
    )
    floor = calibration_floor(probabilities)
    assert floor == calibration_floor(reliability(probabilities, torch.zeros(2000, dtype=torch.long)), 2000)
    # confidences in a bin are not quite equal, which raises the floor by less than 1 %
    chance = float(errors.std()) / 2000**0.5
    assert floor == pytest.approx(float(errors.mean()), abs=4 * chance + 0.01 * floor)
    assert 4 * chance < 0.04 * floor


def test_floor_by_hand() -> None:
    # two inputs of confidence 0.75: E|X - 1.5| = 9/16 * 0.5 + 6/16 * 0.5 + 1/16 * 1.5 = 0.5625; one certain input adds nothing
    bars = reliability(two_classes([0.75, 0.75, 1.0]), torch.tensor([0, 0, 0]), bins=4)
    assert calibration_floor(bars, 3) == pytest.approx(0.5625 / 3, abs=1e-14)
    # m p is whole: of four inputs of confidence 0.5, E|X - 2| = 2 * (1/16 * 2 + 4/16 * 1) = 0.75
    bars = reliability(two_classes([0.5] * 4), torch.tensor([0, 1, 1, 1]), bins=4)
    assert calibration_floor(bars, 4) == pytest.approx(0.75 / 4, abs=1e-14)


def test_floor_decreases_with_the_square_root_of_the_number() -> None:
    bars = reliability(two_classes([0.9] * 10), torch.zeros(10, dtype=torch.long))
    assert calibration_floor(bars, 40_000) == pytest.approx(calibration_floor(bars, 10_000) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        (([], 0), "number"),
        ((reliability(two_classes([0.9]), torch.tensor([0])),), "number"),
        ((torch.tensor([[0.9, 0.4]]),), "probabilities"),
    ],
)
def test_bad_arguments_of_the_floor_are_refused(arguments, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        calibration_floor(*arguments)
    assert caught.value.argument == argument
