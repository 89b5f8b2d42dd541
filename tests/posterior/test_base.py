"""Tests of the base class of posteriors: threads, copies, and inputs without a common row axis."""

import copy
import threading

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.methods.calibrators.temperature import TemperedPosterior
from flowbnn.posterior import MemberPosterior, PredictOptions
from flowbnn.posterior.prediction import Prediction, PredictionCache
from flowbnn.posterior.trace import trace_forward


def members() -> MemberPosterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    weights = {
        name: value.detach() + torch.randn(5, *value.shape) for name, value in network.named_parameters()
    }
    return MemberPosterior(network, fb.likelihoods.Categorical(), weights)


def noise() -> fb.posterior.NoisePosterior:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    return fb.posterior.NoisePosterior(
        fb.to_stochastic(network, {"*": fb.noise.NormalPlanar(1)}), fb.likelihoods.Categorical()
    )


@pytest.mark.parametrize("make", [members, noise])
def test_predict_is_thread_safe(make):
    posterior, x = make(), torch.randn(16, 4)
    alone = [posterior.predict(x, 3, seed=seed).probabilities for seed in range(4)]
    draws = [posterior.draws(3, seed=seed) for seed in range(4)]
    wrong: list = []

    def work(seed):
        for _ in range(5):
            if not torch.equal(posterior.predict(x, 3, seed=seed).probabilities, alone[seed]):
                wrong.append("predict")
            if any(
                not torch.equal(value, draws[seed][name])
                for name, value in posterior.draws(3, seed=seed).items()
            ):
                wrong.append("draws")
            posterior.sample(seed=seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_methods_of_a_subclass_are_neither_locked_nor_checked():
    """A method that predicts from two threads deadlocked while the posterior's lock was held around it."""

    class Service(MemberPosterior):
        def predict_many(self, batches: int) -> list:
            found: list = [None] * len(batches)

            def work(index):
                found[index] = self.predict(batches[index], 3, seed=index).probabilities

            threads = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(timeout=20.0)
            return found

        def sample(self, seed: int | None = None):
            return seed

    source = members()
    posterior = Service(source.model, source.likelihood, source.members)
    batches = [torch.randn(4, 4), torch.randn(5, 4)]
    assert [len(found) for found in posterior.predict_many(batches)] == [4, 5]
    assert posterior.sample("any value") == "any value"


def test_copies_start_with_an_empty_cache():
    posterior = members()
    posterior.predict(torch.zeros(2, 4), 2)
    assert posterior.cache.values
    assert not copy.deepcopy(posterior).cache.values
    assert TemperedPosterior(posterior, 2.0).cache is posterior.cache, "one network, one lock"


class Graph(nn.Module):
    """Each node hears its neighbours."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, nodes, edges):
        heard = torch.zeros_like(nodes).index_add(0, edges[1], nodes[edges[0]])
        return self.fc(nodes + heard)


class Bags(nn.Module):
    """Words in bags of different sizes."""

    def __init__(self):
        super().__init__()
        self.words, self.fc = nn.EmbeddingBag(7, 4), nn.Linear(4, 3)

    def forward(self, words, offsets):
        return self.fc(self.words(words, offsets))


@pytest.mark.parametrize(
    ("network", "inputs", "count"),
    [
        (Graph(), (torch.randn(5, 4), torch.randint(5, (2, 9))), 5),
        (Bags(), (torch.randint(7, (9,)), torch.tensor([0, 2, 6])), 3),
        (Bags(), {"words": torch.randint(7, (9,)), "offsets": torch.tensor([0, 2, 6])}, 3),
    ],
)
def test_inputs_without_a_common_row_axis_are_predicted_at_once(network, inputs, count):
    truth = network(**inputs) if isinstance(inputs, dict) else network(*inputs)
    posterior = fb.posterior.PointPosterior(network, fb.likelihoods.Categorical())
    for options in ({}, {"max_batch": 1}, {"adaptive": 0.01, "samples": 20}):
        found = posterior.predict(inputs, **options)
        torch.testing.assert_close(found.probabilities, truth.softmax(-1).detach())
    loader = [(inputs, torch.zeros(count, dtype=torch.long))] * 2
    outputs, _, targets = posterior.collect(loader, PredictOptions())
    assert outputs.shape == (1, 2 * count, 3)
    assert len(targets) == 2 * count


def test_a_trace_is_made_once_per_shape():
    passes: list = []

    class Counted(nn.Linear):
        def forward(self, x):
            passes.append(len(x))
            return super().forward(x)

    posterior = fb.posterior.PointPosterior(Counted(4, 3), fb.likelihoods.Categorical())
    posterior.predict(torch.zeros(50, 4))
    assert passes == [2, 2, 2, 50]  # two passes look for rows that interact
    posterior.predict(torch.zeros(50, 4))
    assert passes == [2, 2, 2, 50, 50]
    failed = trace_forward(nn.Linear(4, 3), torch.zeros(2, 5))
    assert failed.flops_per_row == 0.0
    with Prediction(nn.Linear(4, 3), PredictOptions(), 1, PredictionCache()) as prediction:
        prediction.measure(torch.zeros(2, 5))
        assert prediction.row_limit >= 16


def test_a_trace_has_operations_shapes_and_widths():
    network = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))
    model = fb.to_stochastic(network, {"2": fb.noise.NormalAffine()})
    trace = trace_forward(model, torch.zeros(2, 1, 4, 4))
    assert trace.flops_per_row == 2 * (2 * 4 * 9) + 2 * 8 * 3
    assert trace.prefix_share == 144 / trace.flops_per_row
    assert trace.noise_shapes == [(fb.noise.noise_layers(model)["2"].key, 0, ())]
    assert (trace.bytes_per_row, trace.noisy_bytes_per_row) == (4 * (16 + 8), 4 * (8 + 3))
