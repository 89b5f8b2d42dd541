"""The risk-coverage curve by hand, with ties against all their orders."""

from itertools import permutations

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import risk_coverage


def test_by_hand() -> None:
    curve = risk_coverage(
        torch.tensor([0.4, 0.1, 0.3, 0.2, 0.5]), torch.tensor([True, True, False, True, False])
    )
    assert curve.coverage.tolist() == [0.2, 0.4, 0.6, 0.8, 1.0]
    by_hand = [0, 0, 1 / 3, 1 / 4, 2 / 5]
    assert curve.risk.tolist() == pytest.approx(by_hand, abs=1e-15)
    assert curve.area == pytest.approx(sum(by_hand) / 5, abs=1e-15)
    assert curve.risk_at(0.6) == pytest.approx(1 / 3)
    assert curve.risk_at(0.61) == pytest.approx(1 / 4)


def test_ties_are_the_mean_over_all_orders() -> None:
    uncertainty = [0.1, 0.2, 0.2, 0.2, 0.3]
    wrong = [0.0, 1.0, 0.0, 0.0, 1.0]
    areas = []
    for middle in permutations(wrong[1:4]):
        ordered = [wrong[0], *middle, wrong[4]]
        areas.append(sum(sum(ordered[:k]) / k for k in range(1, 6)) / 5)
    curve = risk_coverage(torch.tensor(uncertainty), torch.tensor(wrong) == 0)
    assert curve.area == pytest.approx(sum(areas) / len(areas), abs=1e-15)


def test_a_constant_uncertainty_gives_the_error_rate() -> None:
    curve = risk_coverage(torch.ones(4), torch.tensor([True, False, True, True]))
    assert curve.area == 0.25
    assert curve.risk.tolist() == [0.25] * 4


def test_bad_input() -> None:
    with pytest.raises(FlowBNNError, match="uncertainty .*without NaN"):
        risk_coverage(torch.tensor([float("nan")]), torch.tensor([True]))
    with pytest.raises(FlowBNNError, match=r"correct must be a boolean tensor of shape \[2\]"):
        risk_coverage(torch.zeros(2), torch.tensor([1, 0]))
    with pytest.raises(FlowBNNError, match="boolean tensor"):
        risk_coverage(torch.zeros(2), torch.tensor([True]))
    with pytest.raises(FlowBNNError, match="correct=.* must be a dense tensor"):
        risk_coverage(torch.zeros(2), [True, False])
    with pytest.raises(FlowBNNError, match="coverage=.*above 0 and of at most 1"):
        risk_coverage(torch.zeros(1), torch.tensor([True])).risk_at(0.0)
