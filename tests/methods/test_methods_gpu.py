"""Every method on a CUDA device: what it is held to on a CPU, and a posterior that moves between the two."""

import math

import pytest
import test_suite as suite
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
    """The suite's own tests train on the GPU."""
    monkeypatch.setitem(QUIET, "accelerator", "cuda")


@pytest.mark.parametrize("kind", ["classes", "numbers"])
@every_method
def test_it_is_judged_by_the_same_code(name, kind, on_gpu):
    suite.test_it_is_judged_by_the_same_code(name, kind)


@every_method
def test_the_same_seed_gives_the_same_result(name, on_gpu):
    suite.test_the_same_seed_gives_the_same_result(name)


@every_method
def test_labels_that_do_not_fit_are_refused_in_one_line(name, on_gpu):
    suite.test_labels_that_do_not_fit_are_refused_in_one_line(name)


@every_method
def test_tied_weights_stay_tied_and_count_once(name, on_gpu):
    suite.test_tied_weights_stay_tied_and_count_once(name)


@every_method
def test_a_network_on_the_gpu_is_trained_and_predicts_there(name):
    """Network and data are there already; single networks and draws are handed out there, too."""
    network = normalized().cuda()
    inputs, labels = (part.cuda() for part in blobs().tensors)
    batches = [(inputs[i : i + 40], labels[i : i + 40]) for i in range(0, len(inputs), 40)]
    posterior = case_of(name).make().fit(network, batches, seed=0, **GPU)
    found = posterior.predict(inputs, samples=4, seed=1)
    assert found.probabilities.device.type == "cuda"
    assert found.evaluate(labels)["accuracy"] > 0.85
    if type(posterior).sample is not fb.methods.Posterior.sample:
        assert posterior.sample(0)(inputs).device.type == "cuda"
        drawn = posterior.draws(3, seed=0)
        assert {value.device.type for value in drawn.values()} <= {"cuda"}


@every_method
def test_a_posterior_of_the_gpu_is_used_on_a_cpu_and_the_other_way_round(name, tmp_path):
    data = lines()
    inputs = lines(64).tensors[0]
    makers = {
        "cuda": case_of(name).make().fit(small(2), loader(data), seed=0, **GPU),
        "cpu": case_of(name).make().fit(small(2), loader(data), seed=0, **QUIET),
    }
    for home, posterior in makers.items():
        path = posterior.save(tmp_path / f"{home}.safetensors")
        samples = min(posterior.default_samples, 64)
        before = posterior.predict(inputs.to(home), samples=samples, seed=2)
        for device in ("cpu", "cuda"):
            loaded = fb.load_posterior(path, small(2).to(device))
            after = loaded.predict(inputs.to(device), samples=samples, seed=2)
            assert after.samples.device.type == device
            # other devices draw other numbers: the means agree up to the spread of as many draws
            spread = before.samples.std(0, correction=0).cpu() / math.sqrt(samples)
            apart = (after.mean.cpu() - before.mean.cpu()).abs()
            assert bool((apart <= 6.0 * spread + 1e-3).all()), (home, device)
