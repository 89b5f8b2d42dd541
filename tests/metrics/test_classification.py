"""Accuracy, NLL and Brier score on values worked by hand, and the lines for bad input."""

import math

import pytest
import torch
from sklearn.metrics import accuracy_score

from flowbnn import metrics
from flowbnn.errors import FlowBNNError

PROBABILITIES = torch.tensor([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.2, 0.5, 0.3]], dtype=torch.float64)
TARGETS = torch.tensor([0, 1, 1])


def test_values_by_hand() -> None:
    assert metrics.accuracy(PROBABILITIES, TARGETS) == 2 / 3
    by_hand = -(math.log(0.7) + math.log(0.3) + math.log(0.5)) / 3
    assert metrics.negative_log_likelihood(PROBABILITIES, TARGETS) == pytest.approx(by_hand, abs=1e-15)
    # 0.09 + 0.04 + 0.01, then 0.01 + 0.49 + 0.36, then 0.04 + 0.25 + 0.09
    assert metrics.brier_score(PROBABILITIES, TARGETS) == pytest.approx((0.14 + 0.86 + 0.38) / 3, abs=1e-15)


def test_brier_ends() -> None:
    certain = torch.tensor([[1.0, 0.0]])
    assert metrics.brier_score(certain, torch.tensor([0])) == 0.0
    assert metrics.brier_score(certain, torch.tensor([1])) == 2.0


def test_nll_of_an_impossible_target_is_infinite() -> None:
    assert metrics.negative_log_likelihood(torch.tensor([[1.0, 0.0]]), torch.tensor([1])) == math.inf


def test_accuracy_against_sklearn() -> None:
    generator = torch.Generator().manual_seed(0)
    probabilities = torch.rand(50, 4, generator=generator).softmax(-1)
    targets = torch.randint(4, (50,), generator=generator)
    assert metrics.accuracy(probabilities, targets) == accuracy_score(targets, probabilities.argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_precision(dtype: torch.dtype) -> None:
    probabilities = torch.tensor([[0.75, 0.25], [0.5, 0.5]], dtype=dtype)
    assert metrics.brier_score(probabilities, torch.tensor([0, 1])) == (0.125 + 0.5) / 2


BAD = [
    (torch.tensor([[2.0, -1.0]]), torch.tensor([0]), "1 of 1 rows; apply softmax"),
    (torch.tensor([[float("nan"), 1.0], [0.5, 0.5]]), torch.tensor([0, 0]), "must be finite.* 1 of 2 rows"),
    (torch.tensor([0.5, 0.5]), torch.tensor([0]), r"must be \[B, C\]"),
    (torch.full((2, 1, 2), 0.5), torch.tensor([0]), "average over the samples first"),
    (torch.tensor([[1, 0]]), torch.tensor([0]), "must be a floating point tensor"),
    (torch.zeros(0, 2), torch.zeros(0, dtype=torch.long), "at least one row"),
    (torch.tensor([[0.5, 0.5]]), torch.tensor([2]), r"label 2 \(1 of 1 labels are outside the 2 classes\)"),
    (torch.tensor([[0.5, 0.5]]), torch.tensor([-1]), "label -1"),
    (torch.tensor([[0.5, 0.5]]), torch.tensor([0.0]), "targets.long"),
    (torch.tensor([[0.5, 0.5]]), torch.tensor([[0, 1]]), r"targets.argmax\(-1\) of one-hot"),
    (torch.tensor([[0.5, 0.5]]), torch.tensor([0, 1]), r"must be \[1\]"),
    (torch.tensor([[0.5, 0.5]]), [0], "targets=.* must be a dense tensor of real numbers, got a list"),
    ([[0.5, 0.5]], torch.tensor([0]), "probabilities=.* must be a dense tensor of real numbers, got a list"),
]


@pytest.mark.parametrize(("probabilities", "targets", "line"), BAD)
@pytest.mark.parametrize(
    "metric",
    [
        metrics.accuracy,
        metrics.negative_log_likelihood,
        metrics.brier_score,
        metrics.calibration_error,
        metrics.reliability,
    ],
)
def test_bad_input_is_one_line(metric, probabilities, targets, line) -> None:
    with pytest.raises(FlowBNNError, match=line) as caught:
        metric(probabilities, targets)
    assert "\n" not in str(caught.value)


def test_public_names_exist() -> None:
    assert sorted(metrics.__all__) == metrics.__all__
    assert all(hasattr(metrics, name) for name in metrics.__all__)
