"""Tests of the data of the library: the loader of tensors in memory, clusters, curves and digits."""

import math

import numpy as np
import pytest
import torch

import flowbnn as fb
from flowbnn.data import (
    TensorLoader,
    best_possible,
    clusters,
    curve_points,
    load_digits,
    ring,
    true_curve,
    true_probability,
)
from flowbnn.errors import FlowBNNError
from flowbnn.methods.data_summary import count_examples
from flowbnn_studies import get_study

# -------------------- the loader of tensors


def test_every_example_appears_once_with_its_target():
    inputs = torch.arange(10.0)
    loader = TensorLoader(
        inputs, inputs.long(), batch_size=4, shuffle=True, generator=torch.Generator().manual_seed(0)
    )
    batches = list(loader)
    assert [len(x) for x, _ in batches] == [4, 4, 2]
    assert len(loader) == 3
    order = torch.cat([x for x, _ in batches])
    assert sorted(order.tolist()) == inputs.tolist()
    assert order.tolist() != inputs.tolist()
    assert torch.equal(order.long(), torch.cat([y for _, y in batches]))


def test_orders_depend_on_the_generator():
    generator = torch.Generator().manual_seed(0)
    loader = TensorLoader(torch.arange(50), batch_size=50, shuffle=True, generator=generator)
    state = generator.get_state()
    (first,), (second,) = next(iter(loader)), next(iter(loader))
    generator.set_state(state)
    (again,) = next(iter(loader))
    assert not torch.equal(first, second)
    assert torch.equal(first, again)


def test_arrays_and_lists_are_converted():
    inputs, targets = next(iter(TensorLoader(np.zeros((3, 2)), [0, 1, 0], batch_size=2)))
    assert inputs.dtype == torch.float32
    assert targets.tolist() == [0, 1]


def test_number_of_examples_is_known():
    assert count_examples(TensorLoader(torch.zeros(7, 2), batch_size=3)) == 7


@pytest.mark.parametrize(
    "make",
    [
        lambda: TensorLoader(batch_size=2),
        lambda: TensorLoader(torch.zeros(3), torch.zeros(4), batch_size=2),
        lambda: TensorLoader(torch.zeros(3), batch_size=0),
        lambda: TensorLoader(torch.zeros(3), batch_size=2.5),
        lambda: TensorLoader(torch.tensor(1.0), batch_size=1),
        lambda: TensorLoader(["a", "b"], batch_size=1),
        lambda: TensorLoader(torch.zeros(3), batch_size=4, drop_last=True),
        lambda: TensorLoader(torch.zeros(3), batch_size=4, suffle=True),
    ],
)
def test_invalid_arguments_of_the_loader_are_refused(make):
    with pytest.raises(FlowBNNError) as caught:
        make()
    assert caught.value.kind in ("loader", "strings", "value", "unknown setting")
    assert "\n" not in str(caught.value)


def test_flipped_and_read_only_arrays_are_accepted():
    rows, labels = np.arange(6.0, dtype=np.float32).reshape(3, 2), np.arange(3)
    ((inputs, targets),) = TensorLoader(rows[::-1], labels[::-1], batch_size=3)
    assert inputs.tolist() == [[4.0, 5.0], [2.0, 3.0], [0.0, 1.0]]
    assert targets.tolist() == [2, 1, 0]
    rows.setflags(write=False)
    ((inputs,),) = TensorLoader(rows, batch_size=3)
    assert inputs.tolist() == rows.tolist()
    density = fb.fit_density(fb.flows.NICE(2, hidden=(4,)), rows.repeat(8, 0)[::-1], epochs=1, progress=False)
    assert density.log_prob(rows[::-1]).shape == (3,)


def test_lists_of_rows_are_inputs():
    posterior = fb.posterior.PointPosterior(torch.nn.Linear(2, 2), fb.likelihoods.Categorical())
    assert posterior.predict([[1.0, 2.0], [3.0, 4.0]]).probabilities.shape == (2, 2)


# -------------------- clusters, curves and rings


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
def test_invalid_arguments_of_clusters_are_refused(call, argument):
    with pytest.raises(FlowBNNError) as caught:
        call()
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)


def test_true_curve_equals_the_formula():
    # at x = 0.125 with noise 0.01: u = 0.135, y = u + 0.3 sin(2 pi u) + 0.3 sin(4 pi u)
    u = 0.135
    expected = u + 0.3 * math.sin(2 * math.pi * u) + 0.3 * math.sin(4 * math.pi * u)
    assert float(true_curve(torch.tensor(0.125), torch.tensor(0.01))) == pytest.approx(expected, rel=1e-6)
    # sin(pi / 4) = 1 / sqrt 2, sin(pi / 2) = 1
    assert float(true_curve(torch.tensor(0.125))) == pytest.approx(0.125 + 0.3 / math.sqrt(2) + 0.3, rel=1e-6)


def test_noise_of_the_curve_follows_from_the_formula():
    x, y = curve_points(200_000, torch.Generator().manual_seed(0))
    assert 0 <= float(x.min()) < 1e-4 < 0.4999 < float(x.max()) <= 0.5
    at = (x - 0.25).abs() < 0.01
    # at 0.25 the slope in epsilon is 1 + 0.6 pi cos(pi / 2) + 1.2 pi cos(pi) = 1 - 1.2 pi
    residual = (y - true_curve(x))[at]
    assert float(residual.std()) == pytest.approx(0.02 * abs(1 - 1.2 * math.pi), rel=0.05)
    # assumed by all methods: the root mean square of the slope, sqrt(1 + 0.6^2 pi^2 / 2 + 1.2^2 pi^2 / 2)
    slope = math.sqrt(1 + 0.18 * math.pi**2 + 0.72 * math.pi**2)
    assert get_study("regression-1d").settings().noise == pytest.approx(0.02 * slope, rel=0.01)


def test_ring_has_its_radius():
    points = ring(500, 10.0, torch.Generator().manual_seed(0), thickness=0.1)
    reach = points.norm(dim=-1)
    assert 9.0 <= float(reach.min()) < 9.2
    assert 10.8 < float(reach.max()) <= 11.0
    assert float(points.mean(0).norm()) < 1.5
    with pytest.raises(FlowBNNError) as caught:
        ring(5, -1.0)
    assert caught.value.argument == "radius"


# -------------------- digits


def rows(images):
    return {tuple(image.flatten().tolist()) for image in images}


def test_splits_are_disjoint_and_complete():
    digits = load_digits(novel=8, seed=1)
    splits = [digits.train[0], digits.validation[0], digits.test[0], digits.novel[0]]
    assert sum(len(images) for images in splits) == 1797
    assert sum(len(rows(images)) for images in splits) == len(rows(torch.cat(splits)))


def test_labels_index_the_known_digits_and_splits_are_stratified():
    digits = load_digits(novel=3, seed=0)
    assert digits.known == (0, 1, 2, 4, 5, 6, 7, 8, 9)
    assert set(digits.novel[1].tolist()) == {3}
    for _, labels in (digits.train, digits.validation, digits.test):
        assert set(labels.tolist()) == set(range(9))
    counts = [torch.bincount(labels, minlength=9).double() for _, labels in (digits.train, digits.test)]
    assert torch.allclose(counts[0] / counts[1], torch.tensor(0.6 / 0.25, dtype=torch.float64), rtol=0.06)


def test_splits_depend_on_the_seed():
    first, again, other = load_digits(seed=4), load_digits(seed=4), load_digits(seed=5)
    assert torch.equal(first.test[0], again.test[0])
    assert rows(first.test[0]) != rows(other.test[0])
    assert float(first.train[0].min()) == 0.0
    assert float(first.train[0].max()) == 1.0


@pytest.mark.parametrize("arguments", [{"novel": 10}, {"novel": True}, {"seed": "a"}])
def test_invalid_arguments_of_digits_are_refused(arguments):
    with pytest.raises(FlowBNNError) as caught:
        load_digits(**arguments)
    assert caught.value.argument in arguments
    assert "\n" not in str(caught.value)
