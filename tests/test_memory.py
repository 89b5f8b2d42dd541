"""Tests of the refusal of results that do not fit the memory."""

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.memory import check_memory

QUIET = {"seed": 0, "progress": False}


def make_network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))


def fit(method: fb.methods.Method) -> fb.Posterior:
    return method.fit(make_network(), [(torch.randn(8, 3), torch.arange(8) % 2)], **QUIET)


def prediction() -> fb.predictive.CategoricalPredictive:
    return fb.predictive.CategoricalPredictive(torch.randn(4, 5, 3))


def density(context: int = 0) -> fb.density.Density:
    return fb.density.Density(fb.flows.RealNVP(2, context_dim=context))


POSTERIORS = {
    "point": lambda: fit(fb.MAP(epochs=1)),
    "members": lambda: fit(fb.DeepEnsemble(2, epochs=1)),
    "noise": lambda: fit(fb.NodeNoise(epochs=1)),
    "weights": lambda: fit(fb.BayesByBackprop(epochs=1)),
    "dropout": lambda: fit(fb.MCDropout(0.1, epochs=1)),
    "laplace": lambda: fit(fb.Laplace("diag", layers="all", predictive="sampled", epochs=1)),
}
CALLS = {
    "draws of a prediction": ("number", lambda count: prediction().sample(count)),
    "draws of a regression": (
        "number",
        lambda count: fb.predictive.GaussianPredictive(torch.randn(4, 5, 1), 1.0).sample(count),
    ),
    "draws of a density": ("count", lambda count: density().sample(count)),
    "draws for contexts": ("count", lambda count: density(1).sample(count // 3, torch.zeros(3, 1))),
    "draws of an autoencoder": (
        "count",
        lambda count: fb.vae.VAE((4,), 2, hidden=(4,)).sample(count),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_huge_numbers_of_draws_are_refused(name):
    argument, call = CALLS[name]
    with pytest.raises(fb.FlowBNNError) as caught:
        call(10**12)
    assert (caught.value.kind, caught.value.argument) == ("memory", argument)


@pytest.mark.parametrize("name", POSTERIORS)
def test_samples_that_do_not_fit_the_memory_are_refused(name, monkeypatch):
    posterior, inputs = POSTERIORS[name](), torch.randn(40, 3)
    posterior.predict(inputs, 100, seed=0, keep_samples=True)
    monkeypatch.setattr("flowbnn.memory.SMALL_BYTES", 0)
    monkeypatch.setattr("flowbnn.memory.free_memory", lambda device: 10_000.0)
    refused = [
        lambda: posterior.predict(inputs, 100, seed=0, keep_samples=True),
        lambda: posterior.networks(1000, 0),
        lambda: posterior.draws(1000, 0),
    ]
    for call in refused:
        with pytest.raises(fb.FlowBNNError) as caught:
            call()
        if caught.value.kind != "unsupported":  # some posteriors have no draws or networks
            assert (caught.value.kind, caught.value.argument) == ("memory", "samples")


@pytest.mark.parametrize("kind", [fb.transforms.LULinear, fb.transforms.Sylvester, fb.transforms.GlowStep])
def test_modules_that_do_not_fit_the_memory_are_refused(kind):
    with pytest.raises(fb.FlowBNNError) as caught:
        kind(10**7)  # the matrix has 364 TiB, more than a process can address
    assert caught.value.kind == "memory"
    assert "10000000" in str(caught.value)


def test_draws_of_densities_do_not_depend_on_their_chunks(monkeypatch):
    flow = density(1)
    context = torch.randn(3, 1)
    whole = flow.sample(64, context, seed=0)
    monkeypatch.setattr("flowbnn.density.density.CHUNK_NUMBERS", 100)
    chunked = flow.sample(64, context, seed=0)
    assert chunked.shape == whole.shape == (64, 3, 2)
    assert torch.equal(chunked, flow.sample(64, context, seed=0))


def test_available_memory_is_used():
    check_memory("samples", 1, 1e6, torch.device("cpu"))
    with pytest.raises(fb.FlowBNNError) as caught:
        check_memory("samples", 1, 1e15, torch.device("cpu"))
    assert caught.value.fields["needed"] == 1e15
