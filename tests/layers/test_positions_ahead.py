"""Noise at positions drawn ahead of the pass, side by side: the draws of the pass, its KL, and when it is left alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.layers import divergences, noise_layers, packing
from flowbnn.objectives import ELBO
from flowbnn.transforms import fused

RULES = {
    "*": fb.NormalAffine(site="position"),
    "0": fb.NormalInvConv(site="position"),
    "2": fb.NormalInvConv(site="position"),
}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Draw ahead as where there are kernels for many flows; without them the groups go one after the other."""
    served = SimpleNamespace(**{**vars(fused), "available": lambda z: True})
    monkeypatch.setattr(packing, "fused", served)


def network(rules=RULES):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 2))
    model = fb.to_stochastic(plain, rules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "noise" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def test_the_pass_is_given_the_draws_that_were_made_ahead():
    model, images = network(), torch.randn(6, 3, 6, 6)
    objective, given = ELBO(fb.Categorical(), 10), {}
    assert objective.ahead(model, 6) is None  # no pass has told how many positions there are
    model(images)
    assert objective.ahead(model, 5) is None  # that was of six rows
    known = objective.ahead(model, 6)
    assert known is not None
    drawn = {
        name: z for name, noise in noise_layers(model).items() for n, z in noise.group.prepared if n is noise
    }
    assert {name: tuple(z.shape) for name, z in drawn.items()} == {"0": (6, 6, 6, 3), "2": (6, 4, 4, 4)}
    for name in drawn:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: given.__setitem__(name, args[0])
        )
    outputs = model(images)
    torch.testing.assert_close(given["0"], images * drawn["0"].movedim(-1, 1))
    inner = torch.relu(nn.functional.conv2d(given["0"], model[0].weight, model[0].bias))
    torch.testing.assert_close(given["2"], inner * drawn["2"].movedim(-1, 1))
    objective(model, outputs, torch.zeros(6, dtype=torch.long), known=known).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    first = given["0"]
    model(images)  # nothing is left for the next pass
    assert not torch.equal(given["0"], first)


def test_the_divergence_is_that_of_the_layers():
    model = network()
    model(torch.randn(6, 3, 6, 6))
    layers = noise_layers(model)
    torch.manual_seed(4)
    found = packing.ahead(layers, 6)
    torch.manual_seed(4)
    expected = divergences(layers)  # of the same normals, which are drawn first
    assert found.keys() == expected.keys() == layers.keys()
    for name, part in expected.items():
        torch.testing.assert_close(found[name].kl, part.kl)
        torch.testing.assert_close(found[name].entropy, part.entropy)
    torch.testing.assert_close(found.total.kl, expected.total.kl)


def test_draws_made_ahead_have_the_distribution_of_the_noise():
    model = network()
    layer = noise_layers(model)["2"]
    model(torch.randn(400, 3, 6, 6))
    packing.ahead(noise_layers(model), 400)
    ahead = dict(layer.group.prepared)[layer].flatten(0, 2).detach()
    plain = layer.draw((6400,)).detach()
    spread = plain.std(0) / 6400**0.5
    assert ((ahead.mean(0) - plain.mean(0)).abs() < 6 * spread).all()
    torch.testing.assert_close(ahead.std(0), plain.std(0), rtol=0.1, atol=0.0)


def test_a_pass_of_another_size_draws_for_itself():
    model = network()
    model(torch.randn(6, 3, 6, 6))
    assert packing.ahead(noise_layers(model), 6) is not None
    assert model(torch.randn(4, 3, 6, 6)).shape == (4, 2)
    assert noise_layers(model)["0"].seen == (4, (6, 6), False)


def test_a_layer_called_twice_draws_anew():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return torch.stack([self.first(x), self.first(x)]) + self.second(x)

    torch.manual_seed(0)
    model = fb.to_stochastic(Twice(), {"*": fb.NormalInvConv(site="position")})
    model(torch.randn(5, 3, 2, 2))
    assert packing.ahead(noise_layers(model), 5) is not None
    one, two = model(torch.ones(5, 3, 2, 2))
    assert not torch.equal(one, two)


def test_a_compiled_step_draws_ahead_and_agrees_with_the_uncompiled_one():
    model, images = network(), torch.randn(6, 3, 6, 6)
    objective, labels = ELBO(fb.Categorical(), 10), torch.zeros(6, dtype=torch.long)
    model(images)

    def loss():
        known = objective.ahead(model, 6)
        assert known is not None
        return objective(model, model(images), labels, known=known).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for function in (loss, compiled):
        torch.manual_seed(7)
        found.append(function())
    torch.testing.assert_close(*found)


def test_copies_carry_no_draws():
    model = network()
    model(torch.randn(6, 3, 6, 6))
    packing.ahead(noise_layers(model), 6)
    twin = noise_layers(copy.deepcopy(model))["0"]
    assert twin.group.prepared == []
    assert twin.ready is None


@pytest.mark.parametrize("mode", ["shared", "mean", "off"])
def test_other_modes_are_left_alone(mode):
    model = network()
    model(torch.randn(6, 3, 6, 6))
    with fb.noise(model, mode):
        assert packing.ahead(noise_layers(model), 6) is None


def test_where_there_are_no_kernels_nothing_is_drawn_ahead(monkeypatch):
    monkeypatch.undo()
    model = network()
    model(torch.randn(6, 3, 6, 6))
    assert packing.ahead(noise_layers(model), 6) is None
