"""Tests of classification and regression scores on hand-computed values, and of errors for bad input."""

import math

import pytest
import torch
from sklearn.metrics import accuracy_score

from flowbnn import metrics
from flowbnn.errors import FlowBNNError

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.3]], dtype=torch.float64)
TARGETS = torch.tensor([0, 1, 1])


def test_classification_scores_by_hand() -> None:
    assert metrics.accuracy(PROBABILITIES, TARGETS) == 2 / 3
    by_hand = -(math.log(0.7) + math.log(0.3) + math.log(0.5)) / 3
    assert metrics.negative_log_likelihood(PROBABILITIES, TARGETS) == pytest.approx(by_hand, abs=1e-15)
    # 0.09 + 0.04 + 0.01, then 0.01 + 0.49 + 0.36, then 0.04 + 0.25 + 0.09
    assert metrics.brier_score(PROBABILITIES, TARGETS) == pytest.approx((0.14 + 0.86 + 0.38) / 3, abs=1e-15)


def test_brier_score_of_certain_predictions() -> None:
    certain = torch.tensor([[1.0, 0.0]])
    assert metrics.brier_score(certain, torch.tensor([0])) == 0.0
    assert metrics.brier_score(certain, torch.tensor([1])) == 2.0


def test_nll_of_a_target_with_probability_zero_is_infinite() -> None:
    assert metrics.negative_log_likelihood(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf


def test_accuracy_agrees_with_sklearn() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50, 4, generator=generator).softmax(-1)
    targets = torch.randint(4, (50,), generator=generator)
    assert metrics.accuracy(probabilities, targets) == accuracy_score(targets, probabilities.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_floating_point_dtype_is_accepted(dtype: torch.dtype) -> None:
    probabilities = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=dtype)
    assert metrics.brier_score(probabilities, torch.tensor([0, 1])) == (0.125 + 0.5) / 2


HALF = torch.tensor([[0.5, 0.5]])
BAD_ARGUMENTS = [
    (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), "range", "probabilities"),
    (torch.tensor([[math.nan, 1.0], [0.5, 0.5]]), torch.tensor([0, 0]), "range", "probabilities"),
    (torch.tensor([0.5, 0.5]), torch.tensor([0]), "shape", "probabilities"),
    (torch.full((2, 1, 2), 0.5), torch.tensor([0]), "shape", "probabilities"),
    (torch.tensor([[1, 0]]), torch.tensor([0]), "dtype", "probabilities"),
    (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "shape", "probabilities"),
    (HALF, torch.tensor([2]), "range", "targets"),
    (HALF, torch.tensor([-1]), "range", "targets"),
    (HALF, torch.tensor([0.0]), "shape", "targets"),
    (HALF, torch.tensor([[0, 1]]), "shape", "targets"),
    (HALF, torch.tensor([0, 1]), "shape", "targets"),
    (HALF, [0], "value", "targets"),
    ([[0.5, 0.5]], torch.tensor([0]), "value", "probabilities"),
]
CLASSIFICATION_METRICS = [
    metrics.accuracy,
    metrics.negative_log_likelihood,
    metrics.brier_score,
    metrics.calibration_error,
    metrics.reliability,
]


@pytest.mark.parametrize(("probabilities", "targets", "kind", "argument"), BAD_ARGUMENTS)
@pytest.mark.parametrize("metric", CLASSIFICATION_METRICS)
def test_bad_arguments_of_classification_metrics_are_refused(
    metric, probabilities, targets, kind, argument
) -> None:
    with pytest.raises(FlowBNNError) as caught:
        metric(probabilities, targets)
    assert (caught.value.kind, caught.value.argument) == (kind, argument)
    assert "\n" not in str(caught.value)


# -------------------- regression


def test_regression_scores_by_hand() -> None:
    predictions = torch.tensor([[0.0, 1.0], [2.0, 3.0]], dtype=torch.float64)
    targets = torch.tensor([[1.0, 1.0], [0.0, 6.0]], dtype=torch.float64)
    error = metrics.root_mean_squared_error(predictions, targets)
    assert error == pytest.approx(math.sqrt((1 + 0 + 4 + 9) / 4))
    assert metrics.interval_coverage(predictions - 1, predictions + 1, targets) == 0.5


def test_vector_of_targets_is_a_column() -> None:
    predictions, targets = torch.tensor([[0.0], [10.0]]), torch.tensor([0.0, 10.0])
    assert metrics.root_mean_squared_error(predictions, targets) == 0.0
    assert metrics.interval_coverage(predictions - 1, predictions + 1, targets) == 1.0


@pytest.mark.parametrize(
    ("predictions", "targets", "kind", "argument"),
    [
        (torch.zeros(2, 2), torch.zeros(2), "shape", "targets"),
        (torch.zeros(2, 1), torch.tensor([0.0, math.nan]), "not finite", "targets"),
        (torch.tensor([[0.0], [math.inf]]), torch.zeros(2, 1), "not finite", "predictions"),
        (torch.zeros(2), torch.zeros(2), "shape", "predictions"),
    ],
)
def test_bad_arguments_of_regression_metrics_are_refused(predictions, targets, kind, argument) -> None:
    with pytest.raises(FlowBNNError) as caught:
        metrics.root_mean_squared_error(predictions, targets)
    assert (caught.value.kind, caught.value.argument) == (kind, argument)


def test_empty_intervals_are_refused() -> None:
    column = torch.zeros(2, 1)
    with pytest.raises(FlowBNNError) as caught:
        metrics.interval_coverage(column + 1, column, column)
    assert caught.value.kind == "range"


def test_public_names_exist() -> None:
    assert sorted(metrics.__all__) == metrics.__all__
    assert all(hasattr(metrics, name) for name in metrics.__all__)
