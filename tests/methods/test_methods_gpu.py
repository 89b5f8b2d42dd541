"""Tests of all methods on a CUDA device, and of posteriors that move between CPU and GPU."""

import math

import pytest
import test_methods as contract
import torch
from method_cases import NAMES, case_of
from problems import QUIET, blobs, lines, loader, normalized, small

import flowbnn as fb

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:.*transitions diverged:flowbnn.errors.FlowBNNWarning"),
]
every_method = pytest.mark.parametrize("name", NAMES)
GPU = {**QUIET, "accelerator": "cuda"}


@pytest.fixture
def on_gpu(monkeypatch):
    """Lets the tests of the contract train on the GPU."""
    monkeypatch.setitem(QUIET, "accelerator", "cuda")


@pytest.mark.parametrize("kind", ["classification", "regression"])
@every_method
def test_evaluation(name, kind, on_gpu):
    contract.test_evaluation(name, kind)


@every_method
def test_same_seed_gives_the_same_result(name, on_gpu):
    contract.test_same_seed_gives_the_same_result(name)


@every_method
def test_invalid_labels_are_refused(name, on_gpu):
    contract.test_invalid_labels_are_refused(name)


@every_method
def test_tied_weights_stay_tied_and_count_once(name, on_gpu):
    contract.test_tied_weights_stay_tied_and_count_once(name)


@every_method
def test_network_on_the_gpu_is_trained_and_predicts_there(name):
    """Samples and draws of a network on the GPU are on the GPU."""
    network = normalized().cuda()
    inputs, labels = (tensor.cuda() for tensor in blobs().tensors)
    batches = [(inputs[i : i + 40], labels[i : i + 40]) for i in range(0, len(inputs), 40)]
    posterior = case_of(name).make().fit(network, batches, seed=0, **GPU)
    predictive = posterior.predict(inputs, samples=4, seed=1)
    assert predictive.probabilities.device.type == "cuda"
    assert predictive.evaluate(labels)["accuracy"] > 0.85
    if type(posterior).sample is not fb.methods.Posterior.sample:
        assert posterior.sample(0)(inputs).device.type == "cuda"
        draws = posterior.draws(3, seed=0)
        assert {value.device.type for value in draws.values()} <= {"cuda"}


@every_method
def test_posteriors_are_loaded_on_another_device(name, tmp_path):
    data = lines()
    inputs = lines(64).tensors[0]
    posteriors = {
        "cuda": case_of(name).make().fit(small(2), loader(data), seed=0, **GPU),
        "cpu": case_of(name).make().fit(small(2), loader(data), seed=0, **QUIET),
    }
    for origin, posterior in posteriors.items():
        path = posterior.save(tmp_path / f"{origin}.safetensors")
        samples = min(posterior.default_samples, 64)
        before = posterior.predict(inputs.to(origin), samples=samples, seed=2)
        for device in ("cpu", "cuda"):
            loaded = fb.load_posterior(path, small(2).to(device))
            after = loaded.predict(inputs.to(device), samples=samples, seed=2)
            assert after.samples.device.type == device
            # devices draw different numbers, so the means agree up to the standard error
            error = before.samples.std(0, correction=0).cpu() / math.sqrt(samples)
            difference = (after.mean.cpu() - before.mean.cpu()).abs()
            assert bool((difference <= 6.0 * error + 1e-3).all()), (origin, device)
