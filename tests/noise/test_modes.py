"""Tests of freeze and unfreeze."""

from copy import deepcopy

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.noise import noise_layers


def converted(frozen: bool = True) -> nn.Module:
    network = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    network[0].requires_grad_(not frozen)
    return fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})


def trained(network: nn.Module) -> set[str]:
    return {name for name, parameter in network.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize("copy", [lambda network: network, deepcopy], ids=["itself", "a copy"])
@pytest.mark.parametrize("part", ["weights", "noise"])
def test_what_the_user_froze_stays_frozen(part, copy):
    network = converted()
    noise_layers(network)["2"].requires_grad_(False)
    before = trained(network)
    fb.noise.freeze(network, part)
    fb.noise.freeze(network, part)  # twice is as once
    assert trained(network) < before
    network = copy(network)
    fb.noise.unfreeze(network, part)
    assert trained(network) == before
    fb.noise.unfreeze(network, part)
    assert trained(network) == before


def test_a_layer_that_is_frozen_again_stays_frozen():
    network = converted(frozen=False)
    fb.noise.freeze(network, "weights")
    fb.noise.unfreeze(network, "weights")
    network[0].weight.requires_grad_(False)
    fb.noise.unfreeze(network, "weights")
    assert not network[0].weight.requires_grad


def test_tied_weights_are_unfrozen_in_all_modules():
    network = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    network[1].weight = network[0].weight
    network = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    before = trained(network)
    fb.noise.freeze(network, "weights")
    fb.noise.unfreeze(network[1], "weights")
    assert network[0].weight.requires_grad
    fb.noise.unfreeze(network, "weights")
    assert trained(network) == before


def test_a_frozen_network_keeps_the_statistics_of_its_batch_norm():
    torch.manual_seed(0)
    inputs, targets = 3.0 + 2.0 * torch.randn(40, 4), torch.arange(40) % 3
    plain = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    plain_model = fb.MLE(epochs=2, lr=0.01).fit(plain, [(inputs, targets)], seed=0, progress=False).model
    before = plain_model.eval()(inputs)
    network = fb.to_stochastic(plain_model, {"*": fb.noise.NormalAffine()})
    fb.noise.freeze(network, "weights")
    held = {
        "validation": [(inputs, targets)],
        "seed": 0,
        "progress": False,
    }  # which goes through modes of its own
    posterior = fb.fit(network, [(inputs, targets)] * 3, epochs=2, **held)
    with fb.noise_mode(posterior.model, "off"):
        assert torch.equal(posterior.model(inputs), before)
    fb.noise.unfreeze(posterior.model, "weights")
    again = fb.fit(posterior.model, [(inputs, targets)], epochs=1, **held | {"validation": None})
    assert not torch.equal(again.model[1].running_mean, plain_model[1].running_mean)
