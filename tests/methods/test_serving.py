"""Posteriors of every method serve many threads, and hand out the networks that they predict with."""

import threading

import pytest
import torch
from method_cases import NAMES, case_of, fitted
from problems import QUIET, blobs, loader, small
from torch import nn

import flowbnn as fb

pytestmark = pytest.mark.filterwarnings("ignore:.*transitions diverged:flowbnn.errors.FlowBNNWarning")
THREADS, CALLS = 8, 2  # benchmarks/threads.py has 48 calls


@pytest.fixture(scope="module", params=[*NAMES, "own-dropout"])
def posterior(request):
    """One fit of each method."""
    if request.param == "own-dropout":
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3))
        return fb.MCDropout(epochs=2).fit(network, loader(blobs()), seed=0, **QUIET)
    if request.param == "laplace":  # the linearized network is not the one with the drawn weights
        return case_of("laplace").make().fit(small(), loader(blobs()), seed=0, **QUIET).use("sampled")
    return fitted(request.param, "classes")


def in_threads(work) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_many_threads_get_the_answers_of_one(posterior):
    x = blobs(16).tensors[0]
    seeds = [[THREADS * call + number for call in range(CALLS)] for number in range(THREADS)]
    alone = {seed: posterior.predict(x, 2, seed=seed).samples for own in seeds for seed in own}
    right: list[bool] = []

    def work(number):
        for seed in seeds[number]:
            right.append(torch.equal(posterior.predict(x, 2, seed=seed).samples, alone[seed]))

    in_threads(work)
    assert len(right) == THREADS * CALLS
    assert all(right)


def test_a_sample_is_the_first_network_of_a_prediction(posterior):
    x = blobs(16).tensors[0]
    for seed in (0, 1, 2):
        one = posterior.sample(seed)
        with torch.no_grad():
            found = one(x).softmax(-1)
        for samples in (1, 5):
            first = posterior.predict(x, samples, seed=seed).samples[0]
            torch.testing.assert_close(found, first, rtol=1e-5, atol=1e-6)


def test_a_seed_leaves_torchs_generator_alone(posterior):
    x, before = blobs(16).tensors[0], torch.get_rng_state()
    posterior.predict(x, 4, seed=0)
    posterior.predict(x, 16, seed=0, adaptive=0.01)
    posterior.sample(0)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("mode", ["shared", "mean", "off"])
def test_noise_held_in_one_thread_is_not_held_in_another(mode):
    torch.manual_seed(0)
    model = fb.to_stochastic(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), {"*": fb.noise.NormalPlanar(1)}
    )
    x, right = torch.randn(6, 4), []

    def outputs(seed):
        with torch.no_grad(), fb.noise_mode(model, mode if seed % 2 else "shared", samples=2, seed=seed):
            return model(x)

    alone = [outputs(seed) for seed in range(THREADS)]

    def work(number):
        for _ in range(10):
            right.append(torch.equal(outputs(number), alone[number]))

    in_threads(work)
    assert len(right) == 10 * THREADS
    assert all(right)
