"""Tests of the candidates, and of the metrics of the studies of all methods."""

import math

import pytest
import torch

from flowbnn.compare.candidates import CANDIDATES, find_candidates
from flowbnn.data import curve_points, ring, true_curve
from flowbnn.errors import FlowBNNError
from flowbnn.methods import METHODS, NodeNoise
from flowbnn_studies import SeedResults, get_study
from flowbnn_studies.elephant import accuracy_with_new, threshold_for
from flowbnn_studies.regression_1d import scale_inputs, spread_growth


def test_methods_and_candidates_correspond():
    assert {candidate.method for candidate in CANDIDATES} == set(METHODS.values())
    assert (
        len({candidate.key for candidate in CANDIDATES})
        == len({candidate.label for candidate in CANDIDATES})
        == len(CANDIDATES)
    )
    for candidate in CANDIDATES:
        method = candidate.make(epochs=7, lr=0.5, prior_scale=2.0)
        assert type(method) is candidate.method
        assert method.epochs == 7
        assert (
            candidate.method is not NodeNoise or method.prior_scale == 0.5
        )  # the scale of the noise, not of the weights


def test_short_runs_have_valid_settings():
    swag, sgld = find_candidates(["swag", "sgld"])
    for epochs in (2, 3, 4, 5):
        method = swag.make(epochs=epochs)
        first = round(method.begin * method.epochs)
        assert first >= 1
        assert (method.epochs - first) * method.snapshots_per_epoch >= 2
    assert repr(swag.make(epochs=6)) == "SWAG(epochs=6)"
    for epochs, batches in ((2, 2), (3, 2), (3, 20), (20, 50)):
        method = sgld.make(epochs=epochs, batches=batches)
        assert len(method.step_schedule(epochs * batches).snapshot_steps) == method.samples >= 2
    assert repr(method) == repr(sgld.make(epochs=20))
    assert sgld.make(epochs=3, batches=20).cycles == 4


def test_candidates_are_selected_by_key_or_glob():
    assert [candidate.key for candidate in find_candidates(["bayes-by-backprop*", "mle"])] == [
        "mle",
        "bayes-by-backprop",
        "bayes-by-backprop-mixture",
    ]
    assert all(candidate.key.startswith(candidate.method_name) for candidate in CANDIDATES)
    assert CANDIDATES[-1].method_name == "node-noise-planar"
    assert [candidate.key for candidate in find_candidates(["laplace", "map"])] == ["map", "laplace"]
    assert [candidate.key for candidate in find_candidates(["laplace*"])] == ["laplace", "laplace-all"]
    with pytest.raises(FlowBNNError) as caught:
        find_candidates(["laplac"])
    assert caught.value.argument == "methods"


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


def test_spread_growth_is_the_ratio_of_outside_to_inside():
    inputs = torch.tensor([-0.2, 0.0, 0.25, 0.5, 0.6])
    assert spread_growth(inputs, torch.tensor([4.0, 1.0, 2.0, 3.0, 8.0])) == pytest.approx(6.0 / 2.0)
    assert spread_growth(inputs, torch.zeros(5)) is None
    assert scale_inputs(torch.tensor([0.0, 0.25, 0.5])).tolist() == [-2.0, 0.0, 2.0]


def test_ring_has_the_given_radius():
    points = ring(500, 10.0, torch.Generator().manual_seed(0), thickness=0.1)
    reach = points.norm(dim=-1)
    assert 9.0 <= float(reach.min()) < 9.2
    assert 10.8 < float(reach.max()) <= 11.0
    assert float(points.mean(0).norm()) < 1.5
    with pytest.raises(FlowBNNError) as caught:
        ring(5, -1.0)
    assert caught.value.argument == "radius"


def test_threshold_keeps_the_given_fraction():
    scores = torch.arange(1.0, 21.0)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    assert threshold_for(scores, 0.95) == 19.0
    assert threshold_for(scores, 1.0) == 20.0
    assert threshold_for(scores, 0.01) == 1.0
    with pytest.raises(FlowBNNError) as caught:
        threshold_for(scores, 0.0)
    assert caught.value.argument == "keep"


def test_accuracy_with_rejection():
    # known: right and kept, right but rejected, wrong and kept, wrong and rejected; novel: two found, one missed
    labels, targets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 0])
    known, novel = torch.tensor([0.1, 0.9, 0.2, 0.8]), torch.tensor([0.7, 0.6, 0.5])
    rejection = accuracy_with_new(labels, targets, known, novel, threshold=0.5)
    assert rejection == {"accuracy": (1 + 2) / 7, "found": 2 / 3, "lost": 0.5}
    never = accuracy_with_new(labels, targets, known, novel, threshold=math.inf)
    assert never == {"accuracy": 2 / 7, "found": 0.0, "lost": 0.0}


def test_answers_follow_from_the_numbers():
    from flowbnn_studies.clusters_2d import answer as ring_answer
    from flowbnn_studies.regression_1d import answer as curve_answer

    candidates = find_candidates(["map", "mc-dropout"])

    def parts(**values):
        return SeedResults(
            [0], {(key.replace("_", "-"), 0): {"values": value} for key, value in values.items()}
        )

    map_values = {"nll": 0.1, "growth": None, "coverage_outside": 0.2}
    dropout_values = {"nll": 0.2, "growth": 5.0, "coverage_outside": 0.9}
    text = curve_answer(parts(map=map_values, mc_dropout=dropout_values), candidates)
    assert "(1 seed): MAP 0.100, MC dropout 0.200" in text
    assert "outside: MC dropout 5.0" in text
    assert "intervals cover: MC dropout 90%, MAP 20%" in text
    common = {"ece": 0.1, "ring_entropy": 0.3}
    text = ring_answer(parts(map={"auroc": 0.2, **common}, mc_dropout={"auroc": 0.8, **common}), candidates)
    assert "best MC dropout 0.800" in text
    assert "1 of 2 methods are no better than chance" in text
