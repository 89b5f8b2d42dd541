"""Predictions put weights, masks and hooks into a twin of the posterior's network, which other threads may use meanwhile."""

import weakref
from copy import deepcopy

import pytest
import torch
from small_problem import QUIET
from torch import nn

import flowbnn as fb
from flowbnn.posterior.twin import twin

LOOK: list = []  # what a pass of a twin calls, as another thread might


class Probe(nn.Module):
    """Lets others look at the network in the midst of a pass."""

    def forward(self, x):
        if LOOK:
            LOOK.pop()()
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
def test_the_network_stays_as_it_is_while_others_predict(name):
    drop = nn.Dropout(0.5 if name == "dropout" else 0.0)
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), drop, Probe(), nn.Linear(6, 3))
    posterior = FITS[name].fit(network, [(INPUTS, torch.arange(12) % 3)], seed=0, **QUIET)
    own, seen = posterior.model, []

    def look():
        copy = deepcopy(own)
        seen.append((own(INPUTS), copy(INPUTS), own.state_dict()["0.weight"].clone(), own.training))
        if len(seen) < 5:
            LOOK.append(look)

    with torch.no_grad():
        look()
        posterior.predict(INPUTS, 4, seed=1)
        if hasattr(posterior, "functional_variance"):
            posterior.functional_variance(INPUTS[:2])
    LOOK.clear()
    assert len(seen) > 1
    for found in seen[1:]:
        for one, other in zip(found, seen[0], strict=True):
            torch.testing.assert_close(one, other, rtol=0.0, atol=0.0)


class Tangled(nn.Module):
    """Reaches its layers by a list, a weak reference, a bound method and an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.recurrent = nn.Linear(4, 4), nn.Linear(4, 4), nn.LSTM(4, 4)
        self.steps, self.again = [self.first], self.apply_second
        vars(self)["back"] = weakref.ref(self)
        self.first.register_forward_hook(self.hook)
        self.holder = Holder(self.second)

    def hook(self, module, args, output):
        return output + self.second.bias

    def apply_second(self, x):
        return self.second(x)

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return self.recurrent(self.again(x) + self.back().first(x) + self.holder.layer(x))[0]


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
def test_weights_of_a_twin_are_those_that_its_passes_use():
    network, x = Tangled(), torch.randn(3, 4)
    vars(network)["back"] = weakref.ref(network)
    before, other = network(x), twin(network)
    assert torch.equal(other(x), before)
    for module in other.modules():
        for name, value in module._parameters.items():
            module._parameters[name] = nn.Parameter(2.0 * value)
    copy = doubled(network)
    vars(copy)["back"] = weakref.ref(copy)
    torch.testing.assert_close(other(x), copy(x))
    assert torch.equal(network(x), before)
    other.register_forward_hook(lambda *_: torch.zeros(()))
    assert torch.equal(network(x), before)


def test_a_network_that_functions_hold_is_its_own_twin():
    network = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert twin(network) is not network
    network.register_forward_hook(lambda module, args, output: output * network[0].bias)
    assert twin(network) is network
    bound = nn.Linear(2, 2)
    vars(bound)["forward"] = (lambda called: lambda x: called(x))(bound.forward)  # as torch.compile does
    assert twin(bound) is bound
