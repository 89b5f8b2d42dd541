"""Regression scores by hand."""

import math

import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn.metrics import interval_coverage, root_mean_squared_error


def test_by_hand() -> None:
    predictions = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 1.0], [0.0, 6.0]], dtype=torch.float64)
    assert root_mean_squared_error(predictions, targets) == pytest.approx(math.sqrt((1 + 0 + 4 + 9) / 4))
    assert interval_coverage(predictions - 1, predictions + 1, targets) == 0.5


def test_a_vector_of_targets_is_a_column_never_a_broadcast() -> None:
    predictions = torch.tensor([[0.0], [10.0]])
    assert root_mean_squared_error(predictions, torch.tensor([0.0, 10.0])) == 0.0
    assert interval_coverage(predictions - 1, predictions + 1, torch.tensor([0.0, 10.0])) == 1.0
    with pytest.raises(FlowBNNError, match=r"targets must be \[2, 2\], not \[2\]"):
        root_mean_squared_error(torch.zeros(2, 2), torch.zeros(2))


def test_bad_input() -> None:
    column = torch.zeros(2, 1)
    with pytest.raises(FlowBNNError, match="targets not finite in 1 of 2 rows"):
        root_mean_squared_error(column, torch.tensor([0.0, float("nan")]))
    with pytest.raises(FlowBNNError, match="predictions not finite in 1 of 2 rows"):
        root_mean_squared_error(torch.tensor([[0.0], [math.inf]]), column)
    with pytest.raises(FlowBNNError, match=r"predictions must be \[B, D\]"):
        root_mean_squared_error(torch.zeros(2), torch.zeros(2))
    with pytest.raises(FlowBNNError, match="low must not lie above high"):
        interval_coverage(column + 1, column, column)
