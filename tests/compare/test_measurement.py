"""Tests of the measurement of one fit."""

import pytest
from tests.compare.problems import make_loaders, make_network

import flowbnn as fb
from flowbnn.compare.measurement import count_stored_numbers


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")  # one epoch is too short for the noise
def test_stored_numbers_by_hand():
    train, _, _ = make_loaders()
    weights = 2 * 8 + 8 + 8 * 2 + 2
    options = {"progress": False, "accelerator": "cpu", "seed": 0}
    point = fb.MAP(epochs=1).fit(make_network(), train, **options)
    assert count_stored_numbers(point) == weights
    ensemble = fb.DeepEnsemble(3, epochs=1).fit(make_network(), train, **options)
    assert count_stored_numbers(ensemble) == 3 * weights
    noisy = fb.NodeNoise("gaussian", epochs=1).fit(make_network(), train, **options)
    # a mean and a scale for each input of a layer
    assert count_stored_numbers(noisy) >= weights + 2 * (2 + 8)
