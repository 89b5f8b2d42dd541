"""The candidates, and what the studies of all methods measure, worked out by hand."""

import math

import pytest
import torch

from flowbnn.compare.candidates import CANDIDATES, find_candidates
from flowbnn.data import curve_points, ring, true_curve
from flowbnn.errors import FlowBNNError
from flowbnn.methods import METHODS, NodeNoise
from flowbnn_studies import Parts, get_study
from flowbnn_studies.elephant import accuracy_with_new, threshold_for
from flowbnn_studies.regression_1d import scale_inputs, spread_growth


def test_every_method_has_a_candidate_and_every_candidate_a_method():
    assert {candidate.method for candidate in CANDIDATES} == set(METHODS.values())
    assert (
        len({candidate.key for candidate in CANDIDATES})
        == len({candidate.label for candidate in CANDIDATES})
        == len(CANDIDATES)
    )
    for candidate in CANDIDATES:
        made = candidate.make(epochs=7, lr=0.5, prior_scale=2.0)
        assert type(made) is candidate.method
        assert made.epochs == 7
        assert (
            candidate.method is not NodeNoise or made.prior_scale == 0.5
        )  # that of the noise, not of the weights


def test_short_runs_get_settings_that_suit_them():
    swag, sgld = find_candidates(["swag", "sgld"])
    for epochs in (2, 3, 4, 5):
        made = swag.make(epochs=epochs)
        first = round(made.begin * made.epochs)
        assert first >= 1
        assert (made.epochs - first) * made.snapshots_per_epoch >= 2
    assert repr(swag.make(epochs=6)) == "SWAG(epochs=6)"
    for epochs, batches in ((2, 2), (3, 2), (3, 20), (20, 50)):
        made = sgld.make(epochs=epochs, batches=batches)
        assert len(made.step_schedule(epochs * batches).snapshot_steps) == made.samples >= 2
    assert repr(made) == repr(sgld.make(epochs=20))
    assert sgld.make(epochs=3, batches=20).cycles == 4


def test_candidates_are_found_by_key_or_method():
    assert [candidate.key for candidate in find_candidates(["bayes-by-backprop*", "mle"])] == [
        "mle",
        "bayes-by-backprop",
        "bayes-by-backprop-mixture",
    ]
    assert all(candidate.key.startswith(candidate.method_name) for candidate in CANDIDATES)
    assert CANDIDATES[-1].method_name == "node-noise-planar"
    assert [candidate.key for candidate in find_candidates(["laplace", "map"])] == ["map", "laplace"]
    assert [candidate.key for candidate in find_candidates(["laplace*"])] == ["laplace", "laplace-all"]
    with pytest.raises(FlowBNNError, match="did you mean 'laplace'"):
        find_candidates(["laplac"])


def test_the_curve_by_hand():
    # at x = 0.125 with noise 0.01: u = 0.135, y = u + 0.3 sin(2 pi u) + 0.3 sin(4 pi u)
    u = 0.135
    wanted = u + 0.3 * math.sin(2 * math.pi * u) + 0.3 * math.sin(4 * math.pi * u)
    assert float(true_curve(torch.tensor(0.125), torch.tensor(0.01))) == pytest.approx(wanted, rel=1e-6)
    # sin(pi / 4) = 1 / sqrt 2, sin(pi / 2) = 1
    assert float(true_curve(torch.tensor(0.125))) == pytest.approx(0.125 + 0.3 / math.sqrt(2) + 0.3, rel=1e-6)


def test_the_noise_of_the_curve_is_what_its_formula_gives():
    x, y = curve_points(200_000, torch.Generator().manual_seed(0))
    assert 0 <= float(x.min()) < 1e-4 < 0.4999 < float(x.max()) <= 0.5
    at = (x - 0.25).abs() < 0.01
    # at 0.25 the slope in epsilon is 1 + 0.6 pi cos(pi / 2) + 1.2 pi cos(pi) = 1 - 1.2 pi
    residual = (y - true_curve(x))[at]
    assert float(residual.std()) == pytest.approx(0.02 * abs(1 - 1.2 * math.pi), rel=0.05)
    # what all methods are told: the root mean square of the slope, sqrt(1 + 0.6^2 pi^2 / 2 + 1.2^2 pi^2 / 2)
    slope = math.sqrt(1 + 0.18 * math.pi**2 + 0.72 * math.pi**2)
    assert get_study("regression-1d").settings().noise == pytest.approx(0.02 * slope, rel=0.01)


def test_growth_is_outside_over_inside():
    inputs = torch.tensor([-0.2, 0.0, 0.25, 0.5, 0.6])
    assert spread_growth(inputs, torch.tensor([4.0, 1.0, 2.0, 3.0, 8.0])) == pytest.approx(6.0 / 2.0)
    assert spread_growth(inputs, torch.zeros(5)) is None
    assert scale_inputs(torch.tensor([0.0, 0.25, 0.5])).tolist() == [-2.0, 0.0, 2.0]


def test_the_ring_is_a_ring():
    points = ring(500, 10.0, torch.Generator().manual_seed(0), thickness=0.1)
    reach = points.norm(dim=-1)
    assert 9.0 <= float(reach.min()) < 9.2
    assert 10.8 < float(reach.max()) <= 11.0
    assert float(points.mean(0).norm()) < 1.5
    with pytest.raises(FlowBNNError, match="radius"):
        ring(5, -1.0)


def test_the_threshold_keeps_the_share_it_says():
    scores = torch.arange(1.0, 21.0)[torch.randperm(20, generator=torch.Generator().manual_seed(0))]
    assert threshold_for(scores, 0.95) == 19.0
    assert threshold_for(scores, 1.0) == 20.0
    assert threshold_for(scores, 0.01) == 1.0
    with pytest.raises(FlowBNNError, match="kept"):
        threshold_for(scores, 0.0)


def test_rejecting_by_hand():
    # known: right and kept, right but rejected, wrong and kept, wrong and rejected; novel: two found, one missed
    labels, targets = torch.tensor([0, 1, 2, 3]), torch.tensor([0, 1, 0, 0])
    known, novel = torch.tensor([0.1, 0.9, 0.2, 0.8]), torch.tensor([0.7, 0.6, 0.5])
    found = accuracy_with_new(labels, targets, known, novel, threshold=0.5)
    assert found == {"accuracy": (1 + 2) / 7, "found": 2 / 3, "lost": 0.5}
    never = accuracy_with_new(labels, targets, known, novel, threshold=math.inf)
    assert never == {"accuracy": 2 / 7, "found": 0.0, "lost": 0.0}


def test_answers_follow_the_numbers():
    from flowbnn_studies.clusters_2d import answer as ring_answer
    from flowbnn_studies.regression_1d import answer as curve_answer

    chosen = find_candidates(["map", "mc-dropout"])

    def parts(**values):
        return Parts([0], {(key.replace("_", "-"), 0): {"values": value} for key, value in values.items()})

    one = {"nll": 0.1, "growth": None, "coverage_outside": 0.2}
    two = {"nll": 0.2, "growth": 5.0, "coverage_outside": 0.9}
    told = curve_answer(parts(map=one, mc_dropout=two), chosen)
    assert "those of MAP 0.100, MC dropout 0.200" in told
    assert "grows most with MC dropout 5.0" in told
    assert "hold MC dropout 90%, MAP 20% of the targets" in told
    common = {"ece": 0.1, "ring_entropy": 0.3}
    told = ring_answer(parts(map={"auroc": 0.2, **common}, mc_dropout={"auroc": 0.8, **common}), chosen)
    assert "best by MC dropout 0.800" in told
    assert "1 of 2 methods are no better than guessing" in told
