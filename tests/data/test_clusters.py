"""The four blobs: their points, their exact posterior, and what nobody can do better."""

import math

import pytest
import torch

from flowbnn.data import best_possible, clusters, true_probability
from flowbnn.errors import FlowBNNError


def test_the_best_accuracy_and_likelihood_agree_with_monte_carlo():
    spread, number = 1.95, 100_000
    points, targets = clusters(number, spread, torch.Generator().manual_seed(3))
    one = true_probability(points.double(), spread)
    right = ((one > 0.5).long() == targets).double()
    nll = -torch.where(targets == 1, one, 1 - one).log()
    best = best_possible(spread)
    assert abs(right.mean() - best.accuracy) < 4 * right.std() / math.sqrt(number)
    assert abs(nll.mean() - best.nll) < 4 * nll.std() / math.sqrt(number)


def test_the_quadrature_has_converged():
    fine, coarse = best_possible(1.95), best_possible(1.95, nodes=557)
    assert abs(coarse.accuracy - fine.accuracy) < 1e-5
    assert abs(coarse.nll - fine.nll) < 1e-9


def test_the_posterior_by_hand():
    # at (-4, 0) the first and the fourth blob are equally near, the others 48 and 80 further in square
    spread = 2.0
    far = math.exp(-48 / 8) + math.exp(-80 / 8)
    expected = 1 / (2 + far)
    found = true_probability(torch.tensor([-4.0, 0.0], dtype=torch.float64), spread)
    assert abs(float(found) - expected) < 1e-12


def test_points_come_from_the_seed_and_lie_where_they_should():
    points, targets = clusters(20_000, 1.5, torch.Generator().manual_seed(0))
    again, _ = clusters(20_000, 1.5, torch.Generator().manual_seed(0))
    other, _ = clusters(20_000, 1.5, torch.Generator().manual_seed(1))
    assert torch.equal(points, again)
    assert not torch.equal(points, other)
    assert abs(targets.double().mean() - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 20_000)
    purple = points[targets == 1]
    assert torch.allclose(purple.mean(0), torch.tensor([-3.0, -3.0]), atol=4 * 1.5 / math.sqrt(len(purple)))
    assert abs(purple.std() - 1.5) < 0.05


@pytest.mark.parametrize(
    "call", [lambda: clusters(0, 1.0), lambda: clusters(5, 0.0), lambda: best_possible(-1.0)]
)
def test_bad_requests_are_told_in_a_line(call):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert "\n" not in str(caught.value)
