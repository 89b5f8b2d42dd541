"""Tests of the posteriors of all methods: thread safety, samples and seeds."""

import threading
import time

import pytest
import torch
from method_cases import NAMES, case_of, fitted
from problems import QUIET, blobs, loader, small
from torch import nn

import flowbnn as fb

pytestmark = pytest.mark.filterwarnings("ignore:.*transitions diverged:flowbnn.errors.FlowBNNWarning")
THREADS, CALLS = 8, 2  # benchmarks/threads.py has 48 calls


@pytest.fixture(scope="module", params=[*NAMES, "dropout-layers"])
def posterior(request):
    """Returns a fit of each method."""
    if request.param == "dropout-layers":
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        return fb.MCDropout(epochs=2).fit(network, loader(blobs()), seed=0, **QUIET)
    if request.param == "laplace":  # a linearized prediction is no function of one network
        return case_of("laplace").make().fit(small(), loader(blobs()), seed=0, **QUIET).use("sampled")
    return fitted(request.param, "classification")


def run_in_threads(function) -> None:
    threads = [threading.Thread(target=function, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_predict_is_thread_safe(posterior):
    x = blobs(16).tensors[0]
    seeds = [[THREADS * call + number for call in range(CALLS)] for number in range(THREADS)]
    expected = {seed: posterior.predict(x, 2, seed=seed).samples for group in seeds for seed in group}
    equal: list[bool] = []

    def predict(number):
        for seed in seeds[number]:
            equal.append(torch.equal(posterior.predict(x, 2, seed=seed).samples, expected[seed]))

    run_in_threads(predict)
    assert len(equal) == THREADS * CALLS
    assert all(equal)


def test_sample_is_the_first_network_of_a_prediction(posterior):
    x = blobs(16).tensors[0]
    for seed in (0, 1, 2):
        sample = posterior.sample(seed)
        with torch.no_grad():
            probabilities = sample(x).softmax(-1)
        for samples in (1, 5):
            first = posterior.predict(x, samples, seed=seed).samples[0]
            torch.testing.assert_close(probabilities, first, rtol=1e-5, atol=1e-6)


def test_networks_are_those_of_a_prediction(posterior):
    x = blobs(16).tensors[0]
    for samples in (3, 33):  # draws are made in blocks of 32
        networks = posterior.networks(samples, seed=4)
        with torch.no_grad():
            probabilities = torch.stack([network(x).softmax(-1) for network in networks])
        expected = posterior.predict(x, samples, seed=4).samples
        torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("predictive", ["linearized", "probit"])
def test_networks_of_laplace_are_those_of_sampled_predictions(predictive):
    method = fb.Laplace("diag", layers="all", epochs=1, predictive=predictive)
    posterior = method.fit(
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)), loader(blobs()), seed=0, **QUIET
    )
    x = blobs(16).tensors[0]
    with torch.no_grad():
        probabilities = torch.stack([network(x).softmax(-1) for network in posterior.networks(3, seed=4)])
    expected = posterior.use("sampled").predict(x, 3, seed=4).samples
    torch.testing.assert_close(probabilities, expected, rtol=1e-5, atol=1e-6)


def test_seeded_predictions_do_not_use_the_global_generator(posterior):
    x, before = blobs(16).tensors[0], torch.get_rng_state()
    posterior.predict(x, 4, seed=0)
    posterior.predict(x, 16, seed=0, adaptive=0.01)
    posterior.sample(0)
    assert torch.equal(torch.get_rng_state(), before)


class Pause(nn.Module):
    """Layer that waits, so that the passes of two threads overlap."""

    def forward(self, x):
        time.sleep(0.005)
        return x


def test_linearized_predictions_of_several_posteriors_are_thread_safe():
    """Torch's levels of forward-mode differentiation belong to the process, not to a posterior."""
    x, posteriors = blobs(16).tensors[0], []
    for seed in range(3):
        torch.manual_seed(seed)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Pause(), nn.Linear(8, 3))
        method = fb.Laplace("diag", layers="all", epochs=1)
        posteriors.append(method.fit(network, loader(blobs()), seed=0, **QUIET).use("linearized"))
    expected, equal = [posterior.predict(x, 2, seed=0).samples for posterior in posteriors], []

    def predict(number):
        index = number % len(posteriors)
        equal.append(torch.equal(posteriors[index].predict(x, 2, seed=0).samples, expected[index]))

    run_in_threads(predict)
    assert equal == [True] * THREADS


@pytest.mark.parametrize("mode", ["shared", "mean", "off"])
def test_noise_mode_is_local_to_a_thread(mode):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), {"*": fb.noise.NormalPlanar(1)}
    )
    x, equal = torch.randn(6, 4), []

    def outputs(seed):
        with torch.no_grad(), fb.noise_mode(model, mode if seed % 2 else "shared", samples=2, seed=seed):
            return model(x)

    expected = [outputs(seed) for seed in range(THREADS)]

    def compare(number):
        for _ in range(10):
            equal.append(torch.equal(outputs(number), expected[number]))

    run_in_threads(compare)
    assert len(equal) == 10 * THREADS
    assert all(equal)
