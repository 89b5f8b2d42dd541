"""Tests that fits and predictions leave nothing behind: the number of live objects does not grow."""

import contextlib
import gc
import os
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from tests.stress.cases import FITS, Fit, loader, vectors
from torch import nn

import flowbnn as fb
from likelihood_cases import LIKELIHOODS, make_network
from slow_cases import mark_slow

QUIET = {"seed": 0, "progress": False}


def growth(call: Callable[[], object], count: int) -> int:
    """Returns the growth of the number of live objects by some calls, after two calls that fill caches.

    It is measured twice, and the smaller number is returned, because other threads make objects as well.

    Args:
        call: Function to call.
        count: Number of measured calls.
    """
    sizes = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in (2, count, count):
            for _ in range(number):
                call()
            gc.collect()
            objects = gc.get_objects()
            sizes.append(len(objects))
            del objects
    return min(sizes[1] - sizes[0], sizes[2] - sizes[1])


def use(fit: Fit, folder: str) -> None:
    """Fits, predicts, evaluates, samples, saves and loads."""
    result = fit()
    if isinstance(result, fb.Posterior):
        result.predict(vectors(5, 3), 4, seed=0)
        fb.evaluate(result, loader(8, fit.regression), samples=2, progress=False)
        with contextlib.suppress(fb.FlowBNNError):  # not every posterior has draws
            result.sample(0)
            result.draws(2, 0)
    if hasattr(result, "save"):
        fit.load(result.save(f"{folder}/saved.safetensors"))


QUICK = ["mle", "swag", "fit_density"]


@pytest.mark.parametrize("name", mark_slow(FITS, QUICK))
def test_fits_and_predictions_leave_nothing_behind(name, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    assert growth(lambda: use(Fit(name), str(tmp_path)), 4) < 4


@pytest.mark.slow
@pytest.mark.parametrize("regression", [False, True])
@pytest.mark.parametrize("name", ["map", "swag", "deep-ensemble", "mc-dropout", "laplace", "node-noise"])
def test_many_fits_leave_nothing_behind(name, regression, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda file: None)
    assert growth(lambda: use(Fit(name, (), regression), str(tmp_path)), 60) < 30


@pytest.mark.parametrize("name", mark_slow(LIKELIHOODS, ["Categorical", "Heads"]))
@pytest.mark.parametrize("method", [fb.MLE(epochs=1), fb.NodeNoise(epochs=1)], ids=["mle", "node-noise"])
def test_fits_with_any_likelihood_leave_nothing_behind(name, method):
    make, _, targets = LIKELIHOODS[name]
    data = [(torch.randn(8, 4), targets(8))]

    def call() -> None:
        posterior = method.fit(make_network(name), data, likelihood=make(), **QUIET)
        posterior.predict(data[0][0], 3, seed=0)

    assert growth(call, 4) < 4


def image_network() -> nn.Module:
    layers = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4, 2))


@pytest.mark.parametrize("method", [fb.MAP(epochs=1), fb.NodeNoise(epochs=1)], ids=["map", "node-noise"])
def test_classes_of_users_are_freed_with_their_networks(method):
    """Classes that are defined in a function hold what the function holds."""

    def use_class() -> list[weakref.ref]:
        class Network(nn.Sequential):
            def forward(self, first, second):
                return super().forward(first + second)

        inputs = vectors(8, 3), vectors(8, 3)
        posterior = method.fit(Network(nn.Linear(3, 2)), [(inputs, torch.arange(8) % 2)], **QUIET)
        posterior.predict(inputs, 2)
        return [weakref.ref(Network), weakref.ref(posterior), weakref.ref(posterior.model)]

    references = use_class()
    gc.collect()
    assert [reference() for reference in references] == [None, None, None]


def test_measurements_of_many_shapes_of_inputs_are_limited(monkeypatch):
    monkeypatch.setattr("flowbnn.posterior.prediction.MAX_TRACES", 3)
    posterior = fb.posterior.PointPosterior(image_network(), fb.likelihoods.Categorical())
    for size in range(3, 8):
        posterior.predict(torch.zeros(2, 3, size, size))
    assert len(posterior.cache.values["traces"]) == 3
    assert growth(lambda: [posterior.predict(torch.zeros(2, 3, n, n)) for n in range(3, 8)], 2) < 2


def test_inputs_on_which_a_network_fails_are_freed():
    posterior = fb.posterior.PointPosterior(nn.Linear(3, 2), fb.likelihoods.Categorical())
    inputs = torch.zeros(2, 4)
    reference = weakref.ref(inputs)
    with pytest.raises(fb.FlowBNNError):
        posterior.predict(inputs)
    del inputs
    gc.collect()
    assert reference() is None
