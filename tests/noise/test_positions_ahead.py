"""Noise at positions drawn ahead of the pass, side by side: the draws of the pass, its KL, and when it is left alone."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flowbnn as fb
from flowbnn import kernels
from flowbnn.noise import batched as preparing
from flowbnn.noise import divergences, noise_layers
from flowbnn.noise.base import Share
from flowbnn.objectives import ELBO

RULES = {
    "*": fb.NormalAffine(site="position"),
    "0": fb.NormalInvConv(site="position"),
    "2": fb.NormalInvConv(site="position"),
}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Draw ahead as where there are kernels for many flows; without them the groups go one after the other."""
    served = SimpleNamespace(**{**vars(kernels), "available": lambda z: True})
    monkeypatch.setattr(preparing, "kernels", served)


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
    found = preparing.ahead(layers, 6)
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
    preparing.ahead(noise_layers(model), 400)
    ahead = dict(layer.group.prepared)[layer].flatten(0, 2).detach()
    plain = layer.draw((6400,)).detach()
    spread = plain.std(0) / 6400**0.5
    assert ((ahead.mean(0) - plain.mean(0)).abs() < 6 * spread).all()
    torch.testing.assert_close(ahead.std(0), plain.std(0), rtol=0.05, atol=0.0)  # four standard errors


def test_a_pass_of_another_size_draws_for_itself():
    model = network()
    model(torch.randn(6, 3, 6, 6))
    assert preparing.ahead(noise_layers(model), 6) is not None
    assert model(torch.randn(4, 3, 6, 6)).shape == (4, 2)
    assert noise_layers(model)["0"].seen == {6: ((6, 6), False), 4: ((6, 6), False)}


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
    assert preparing.ahead(noise_layers(model), 5) is not None
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


def test_a_batch_of_another_size_between_leaves_the_compiled_step_as_it_is():
    model, images = network(), torch.randn(6, 3, 6, 6)
    compiles = []

    def count(module, inputs):
        compiles.append(module)
        return module.forward

    def step():
        known = preparing.ahead(noise_layers(model), 6)
        return model(images).sum() + known.total.kl

    model(images)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=count)
    first, second = compiled(), compiled()
    model(torch.randn(3, 3, 6, 6))  # the last batch of an epoch, not compiled
    third = compiled()
    assert len(compiles) == 1
    assert len({first.item(), second.item(), third.item()}) == 3


def test_a_pass_that_rounds_is_not_served_by_exact_draws_and_the_next_one_is_coarse(monkeypatch):
    """A trial pass without autocast comes first, as in fit."""
    model, images, asked = network(), torch.randn(6, 3, 6, 6), []
    push = preparing.kernels.evaluate_many
    monkeypatch.setattr(
        preparing.kernels,
        "evaluate_many",
        lambda groups: (asked.append([g.coarse for g in groups]), push(groups))[1],
    )
    model(images)
    for _ in range(2):
        preparing.ahead(noise_layers(model), 6)
        with torch.autocast("cpu", torch.bfloat16):
            model(images)
    assert asked == [[False, False, False], [False, True, True]]


def test_all_processes_draw_ahead_or_none():
    """Five rows on two processes, then four, then five again: three and two, two and two, three and two."""
    models = [network(), network()]
    for total in (5, 4, 5):
        cut, drew = (total + 1) // 2, []
        for model, (start, stop) in zip(models, ((0, cut), (cut, total)), strict=True):
            for noise in noise_layers(model).values():
                noise.share = Share(start, stop, total)
            torch.manual_seed(total)
            known = preparing.ahead(noise_layers(model), stop - start)
            model(torch.ones(stop - start, 3, 6, 6))
            drew.append(None if known is None else known.total.kl.item())
        assert drew[0] == drew[1]
    assert drew[0] is not None  # five rows were seen before


def test_a_part_that_runs_twice_draws_for_itself_and_compiles():
    class Saving(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    plain = nn.Sequential(Saving(nn.Conv2d(3, 4, 3)), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 2))
    model = fb.to_stochastic(
        plain,
        {
            "*": fb.NormalAffine(site="position"),
            "0.inner": fb.NormalInvConv(site="position"),
            "1": fb.NormalInvConv(site="position"),
        },
    )
    images = torch.randn(6, 3, 6, 6)
    model(images).sum().backward()
    layers = noise_layers(model)
    assert layers["0.inner"].seen is None
    assert layers["1"].seen is not None
    preparing.ahead(layers, 6)
    assert [noise for noise, _ in layers["1"].group.prepared] == [layers["1"]]

    def step():
        preparing.ahead(layers, 6)
        return model(images).sum()

    torch._dynamo.reset()
    torch.compile(step, fullgraph=True, backend="aot_eager")().backward()


def test_a_layer_called_at_two_sizes_keeps_its_draw_for_the_one_it_fits():
    class TwoSizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.first(x[..., :2]).sum() + self.first(x).sum() + self.second(x).sum()

    torch.manual_seed(0)
    model = fb.to_stochastic(TwoSizes(), {"*": fb.NormalInvConv(site="position")})
    model(torch.randn(5, 3, 4, 4))
    layer = noise_layers(model)["first"]
    preparing.ahead(noise_layers(model), 5)
    given = []
    drawn = dict(layer.group.prepared)[layer]
    model.first.register_forward_hook(lambda module, args, output: given.append(args[0]))
    model(torch.ones(5, 3, 4, 4))
    assert [tuple(x.shape) for x in given] == [(5, 3, 4, 2), (5, 3, 4, 4)]
    torch.testing.assert_close(given[1], drawn.movedim(-1, 1))


def test_two_converted_parts_of_one_model_each_get_their_draws():
    model = nn.Sequential(network(), nn.Identity())
    other = nn.ModuleList([model, network()])
    for part in (other[0][0], other[1]):
        part(torch.randn(6, 3, 6, 6))
    layers = noise_layers(other)
    assert preparing.ahead(layers, 6) is not None
    groups = {id(noise.group): noise.group for noise in layers.values()}
    assert [len(group.prepared) for group in groups.values()] == [2, 2]


def test_noise_saved_before_it_remembered_anything_still_works():
    model = network()
    for noise in noise_layers(model).values():
        vars(noise).pop("seen", None)
    assert preparing.ahead(noise_layers(model), 6) is None


def test_copies_carry_no_draws():
    model = network()
    model(torch.randn(6, 3, 6, 6))
    preparing.ahead(noise_layers(model), 6)
    twin = noise_layers(copy.deepcopy(model))["0"]
    assert twin.group.prepared == []
    assert twin.ready is None


@pytest.mark.parametrize("mode", ["shared", "mean", "off"])
def test_other_modes_are_left_alone(mode):
    model = network()
    model(torch.randn(6, 3, 6, 6))
    with fb.noise_mode(model, mode):
        assert preparing.ahead(noise_layers(model), 6) is None


def test_where_there_are_no_kernels_nothing_is_drawn_ahead(monkeypatch):
    monkeypatch.undo()
    model = network()
    model(torch.randn(6, 3, 6, 6))
    assert preparing.ahead(noise_layers(model), 6) is None
