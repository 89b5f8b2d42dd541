"""Tests of the four blobs: points, exact class probabilities and best possible scores."""

import math

import pytest
import torch

from flowbnn.data import best_possible, clusters, true_probability
from flowbnn.errors import FlowBNNError


def test_best_possible_scores_agree_with_monte_carlo():
    spread, number = 1.95, 100_000
    points, targets = clusters(number, spread, torch.Generator().manual_seed(3))
    probability = true_probability(points.double(), spread)
    correct = ((probability > 0.5).long() == targets).double()
    nll = -torch.where(targets == 1, probability, 1 - probability).log()
    best = best_possible(spread)
    assert abs(correct.mean() - best.accuracy) < 4 * correct.std() / math.sqrt(number)
    assert abs(nll.mean() - best.nll) < 4 * nll.std() / math.sqrt(number)


def test_quadrature_has_converged():
    fine, coarse = best_possible(1.95), best_possible(1.95, nodes=557)
    assert abs(coarse.accuracy - fine.accuracy) < 1e-5
    assert abs(coarse.nll - fine.nll) < 1e-9


def test_probability_agrees_with_a_calculation_by_hand():
    # at (-4, 0) the squared distances to the blobs are 10, 58, 90 and 10
    spread = 2.0
    expected = 1 / (2 + math.exp(-48 / 8) + math.exp(-80 / 8))
    probability = true_probability(torch.tensor([-4.0, 0.0], dtype=torch.float64), spread)
    assert abs(float(probability) - expected) < 1e-12


def test_points_depend_on_the_seed_and_have_the_right_moments():
    points, targets = clusters(20_000, 1.5, torch.Generator().manual_seed(0))
    again, _ = clusters(20_000, 1.5, torch.Generator().manual_seed(0))
    other, _ = clusters(20_000, 1.5, torch.Generator().manual_seed(1))
    assert torch.equal(points, again)
    assert not torch.equal(points, other)
    assert abs(targets.double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 20_000)
    blob = points[targets == 1]
    assert torch.allclose(blob.mean(0), torch.tensor([-3.0, -3.0]), atol=4 * 1.5 / math.sqrt(len(blob)))
    assert abs(blob.std() - 1.5) < 0.05


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: clusters(0, 1.0), "number"),
        (lambda: clusters(5, 0.0), "spread"),
        (lambda: best_possible(-1.0), "spread"),
        (lambda: true_probability(torch.zeros(3), 1.0), "points"),
    ],
)
def test_invalid_arguments_are_refused(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)
