"""Predictions do not change the network of the posterior, which other threads may use at the same time."""

import threading
from copy import deepcopy

import pytest
import torch
from sampling_helpers import one_at_a_time, sample_outputs
from small_problem import QUIET
from torch import nn

import flowbnn as fb
from flowbnn.posterior.prediction import clone_sharing_tensors

CALLBACKS: list = []  # called in a pass of the prediction, as another thread might do


class Probe(nn.Module):
    """Calls back in the middle of a pass."""

    def forward(self, x):
        if CALLBACKS:
            CALLBACKS.pop()()
        return x


INPUTS = torch.randn(12, 4, generator=torch.Generator().manual_seed(0))
FITS = {
    "ensemble": fb.DeepEnsemble(2, epochs=1),
    "swag": fb.SWAG(epochs=6),
    "bayes by backprop": fb.BayesByBackprop(epochs=1),
    "laplace": fb.Laplace("diag", layers="all", predictive="sampled", epochs=1),
    "laplace linearized": fb.Laplace("diag", layers="all", epochs=1),
    "dropout": fb.MCDropout(epochs=1),
    "point": fb.MLE(epochs=1),
}


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("name", FITS)
def test_the_network_is_unchanged_during_predictions(name):
    drop = nn.Dropout(0.5 if name == "dropout" else 0.0)
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), drop, Probe(), nn.Linear(6, 3))
    posterior = FITS[name].fit(network, [(INPUTS, torch.arange(12) % 3)], seed=0, **QUIET)
    own, seen = posterior.model, []

    def look():
        copy = deepcopy(own)
        seen.append((own(INPUTS), copy(INPUTS), own.state_dict()["0.weight"].clone(), own.training))
        if len(seen) < 5:
            CALLBACKS.append(look)

    with torch.no_grad():
        look()
        posterior.predict(INPUTS, 4, seed=1)
        if hasattr(posterior, "functional_variance"):
            posterior.functional_variance(INPUTS[:2])
    CALLBACKS.clear()
    assert len(seen) > 1
    for found in seen[1:]:
        for one, other in zip(found, seen[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


class Tangled(nn.Module):
    """Holds its layers in a list, a bound method, a hook and an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.recurrent = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)
        self.steps, self.again = [self.first], self.apply_second
        self.first.register_forward_hook(self.hook)
        self.holder = Holder(self.second)

    def hook(self, module, args, output):
        return output + self.second.bias

    def apply_second(self, x):
        return self.second(x)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.recurrent(self.again(x) + self.holder.layer(x))[0]


class Holder:
    def __init__(self, layer) -> None:
        self.layer = layer


def doubled(network: nn.Module) -> nn.Module:
    """A copy with twice the weights."""
    copy = deepcopy(network)
    for value in copy.parameters():
        value.data.mul_(2.0)
    return copy


@torch.no_grad()
def test_weights_of_a_clone_are_those_that_its_passes_use():
    network, x = Tangled(), torch.randn(3, 4)
    before, clone = network(x), clone_sharing_tensors(network)
    assert torch.equal(clone(x), before)
    for module in clone.modules():
        for name, value in module._parameters.items():
            module._parameters[name] = nn.Parameter(2.0 * value)
    torch.testing.assert_close(clone(x), doubled(network)(x))
    assert torch.equal(network(x), before)
    clone.register_forward_hook(lambda *_: torch.zeros(()))
    assert torch.equal(network(x), before)


@pytest.mark.filterwarnings("ignore:.torch.jit.trace.*is deprecated:DeprecationWarning")
def test_a_network_that_cannot_be_copied_is_returned_itself():
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert clone_sharing_tensors(network) is not network
    scripted = torch.jit.trace(network, torch.zeros(1, 2))
    assert clone_sharing_tensors(scripted) is scripted
    network.cache = network[0].weight * 2  # a tensor with a history, which deepcopy alone refuses
    assert clone_sharing_tensors(network) is not network
    network.cache = threading.Lock()  # type: ignore[assignment]
    assert clone_sharing_tensors(network) is network


@pytest.mark.parametrize("copyable", [True, False])
def test_noise_is_right_in_a_network_that_cannot_be_copied(copyable):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    if not copyable:
        network.cache = threading.Lock()
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}, inplace=True).train()
    truth = one_at_a_time(model, INPUTS, 4, 1)
    for strategy in ("vmap", "sequential"):
        torch.testing.assert_close(sample_outputs(model, INPUTS, 4, strategy, seed=1), truth)
    assert model.training
