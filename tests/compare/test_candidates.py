"""Tests of the candidates of a comparison."""

import pytest

from flowbnn.compare.candidates import CANDIDATES, find_candidates
from flowbnn.errors import FlowBNNError
from flowbnn.methods import METHODS, NodeNoise


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
        assert (method if candidate.inner is None else method.method).epochs == 7
        # the scale of the noise, not of the weights
        assert candidate.method is not NodeNoise or method.prior_scale == 0.5


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
