"""Noise at positions drawn ahead of the pass, side by side: the draws of the pass, its KL, and when it is left alone."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import flowbnn as fb
from flowbnn import kernels
from flowbnn.noise import batched, batched_normals, noise_layers
from flowbnn.noise.batched import ahead, divergences
from flowbnn.noise.passes import NoisePass, RowShard, pass_of, share_batch
from flowbnn.objectives import ELBO

RULES = {
    "*": fb.noise.NormalAffine(site="position"),
    "0": fb.noise.NormalInvConv(site="position"),
    "2": fb.noise.NormalInvConv(site="position"),
}


@pytest.fixture(autouse=True)
def as_on_a_device(monkeypatch):
    """Draw ahead as where there are kernels for many flows; without them the groups go one after the other."""
    served = SimpleNamespace(**{**vars(kernels), "available": lambda z: True})
    monkeypatch.setattr(batched_normals, "kernels", served)
    monkeypatch.setattr(batched, "kernels", served)


def network(rules=RULES):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3), nn.Flatten(), nn.Linear(20, 2))
    model = fb.to_stochastic(plain, rules)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "noise" in name:
                parameter += 0.1 * torch.randn_like(parameter)
    return model


def run(model, images):
    """A pass that tells at which positions the layers draw."""
    state = NoisePass({layer.key: layer.setting for layer in noise_layers(model).values()})
    with state:
        model(images)
    return state


def prepare(model, rows, asked):
    """A pass with draws made ahead for what an earlier one has asked for, and its KL."""
    layers = noise_layers(model)
    state = NoisePass({layer.key: pass_of(layer).settings[layer.key] for layer in layers.values()})
    state.asked = dict(asked)
    return state, ahead(layers, rows, state)


def test_the_pass_is_given_the_draws_that_were_made_ahead():
    model, images, given = network(), torch.randn(6, 3, 6, 6), {}
    assert prepare(model, 6, {})[1] is None  # no pass has told how many positions there are
    state, known = prepare(model, 6, run(model, images).asked)
    assert known is not None
    layers = noise_layers(model)
    drawn = {name: state.prepared[layers[name].key] for name in ("0", "2")}
    assert len(state.prepared) == 2
    assert {name: tuple(z.shape) for name, z in drawn.items()} == {"0": (6, 6, 6, 3), "2": (6, 4, 4, 4)}
    for name in drawn:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: given.__setitem__(name, args[0])
        )
    with state:
        outputs = model(images)
    torch.testing.assert_close(given["0"], images * drawn["0"].movedim(-1, 1))
    inner = torch.relu(nn.functional.conv2d(given["0"], model[0].weight, model[0].bias))
    torch.testing.assert_close(given["2"], inner * drawn["2"].movedim(-1, 1))
    ELBO(fb.likelihoods.Categorical(), 10).terms(
        outputs, torch.zeros(6, dtype=torch.long), known
    ).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    first = given["0"]
    with state:
        model(images)  # nothing is left for the next pass
    assert not torch.equal(given["0"], first)


def test_the_divergence_is_that_of_the_layers():
    model = network()
    asked = run(model, torch.randn(6, 3, 6, 6)).asked
    layers = noise_layers(model)
    torch.manual_seed(4)
    _, found = prepare(model, 6, asked)
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
    state, _ = prepare(model, 400, run(model, torch.randn(400, 3, 6, 6)).asked)
    ahead = state.prepared[layer.key].flatten(0, 2).detach()
    plain = layer.draw((6400,)).detach()
    spread = plain.std(0) / 6400**0.5
    assert ((ahead.mean(0) - plain.mean(0)).abs() < 6 * spread).all()
    torch.testing.assert_close(ahead.std(0), plain.std(0), rtol=0.05, atol=0.0)  # four standard errors


def test_the_objective_remembers_the_positions_of_each_size_of_batch(monkeypatch):
    model, objective, drew = network(), ELBO(fb.likelihoods.Categorical(), 10), []
    push = batched.kernels.evaluate_many
    monkeypatch.setattr(
        batched.kernels,
        "evaluate_many",
        lambda groups: drew.append([g.allow_tf32 for g in groups]) or push(groups),
    )
    for rows in (6, 4, 6, 4):
        assert objective(model, torch.randn(rows, 3, 6, 6), torch.zeros(rows, dtype=torch.long)).kl > 0
    assert [coarse for coarse in drew if len(coarse) > 1] == [
        [False, False, False]
    ] * 2  # the first pass of each size draws for itself


def test_a_layer_called_twice_draws_anew():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return torch.stack([self.first(x), self.first(x)]) + self.second(x)

    torch.manual_seed(0)
    model = fb.to_stochastic(Twice(), {"*": fb.noise.NormalInvConv(site="position")})
    state, known = prepare(model, 5, run(model, torch.randn(5, 3, 2, 2)).asked)
    assert known is not None
    with state:
        one, two = model(torch.ones(5, 3, 2, 2))
    assert not torch.equal(one, two)


def test_a_compiled_step_draws_ahead_as_the_uncompiled_one_and_outlives_a_batch_of_another_size():
    model, images = network(), torch.randn(6, 3, 6, 6)
    objective, labels, compiles = ELBO(fb.likelihoods.Categorical(), 10), torch.zeros(6, dtype=torch.long), []

    def loss():
        return objective(model, images, labels).loss

    def count(module, inputs):
        compiles.append(module)
        return module.forward

    loss()
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=count)
    found = []
    for function in (loss, compiled):
        torch.manual_seed(7)
        found.append(function())
    torch.testing.assert_close(*found)
    second = compiled()
    objective(model, torch.randn(3, 3, 6, 6), labels[:3])  # the last batch of an epoch, not compiled
    third = compiled()
    assert len(compiles) == 1
    assert len({found[1].item(), second.item(), third.item()}) == 3


def test_a_pass_that_rounds_is_not_served_by_exact_draws_and_the_next_one_is_coarse(monkeypatch):
    """A trial pass without autocast comes first, as in fit."""
    model, images, coarse = network(), torch.randn(6, 3, 6, 6), []
    objective, labels = ELBO(fb.likelihoods.Categorical(), 10), torch.zeros(6, dtype=torch.long)
    push = batched.kernels.evaluate_many
    monkeypatch.setattr(
        batched.kernels,
        "evaluate_many",
        lambda groups: (coarse.append([g.allow_tf32 for g in groups]), push(groups))[1],
    )
    objective(model, images, labels)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            objective(model, images, labels)
    assert [each for each in coarse if len(each) > 1] == [[False, False, False], [False, True, True]]


def test_all_processes_draw_ahead_or_none():
    """Five rows on two processes, then four, then five again: three and two, two and two, three and two."""
    models, objectives = (
        [network(), network()],
        [ELBO(fb.likelihoods.Categorical(), 10), ELBO(fb.likelihoods.Categorical(), 10)],
    )
    for total in (5, 4, 5):
        cut, kls, states = (total + 1) // 2, [], []
        for model, objective, (start, stop) in zip(models, objectives, ((0, cut), (cut, total)), strict=True):
            share_batch(RowShard(start, stop, total))
            torch.manual_seed(total)
            terms = objective(model, torch.ones(stop - start, 3, 6, 6), torch.zeros(stop - start).long())
            share_batch(None)
            kls.append(terms.kl.item())
            states.append(torch.rand(1).item())
        assert kls[0] == kls[1]
        assert states[0] == states[1], "the generators are in the same state"
    assert set(objectives[0]._asked) == {5, 4}


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
            "*": fb.noise.NormalAffine(site="position"),
            "0.inner": fb.noise.NormalInvConv(site="position"),
            "1": fb.noise.NormalInvConv(site="position"),
        },
    )
    images, layers = torch.randn(6, 3, 6, 6), noise_layers(model)
    asked = run(model, images).asked
    assert set(asked) == {layers["1"].key}
    state, _ = prepare(model, 6, asked)
    assert set(state.prepared) == {layers["1"].key}
    objective, labels = ELBO(fb.likelihoods.Categorical(), 10), torch.zeros(6, dtype=torch.long)
    objective(model, images, labels).loss.backward()
    torch._dynamo.reset()
    step = torch.compile(lambda: objective(model, images, labels).loss, fullgraph=True, backend="eager")
    step().backward()


def test_a_layer_called_at_two_sizes_is_served_right():
    class TwoSizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.first(x[..., :2]).sum() + self.first(x).sum() + self.second(x).sum()

    torch.manual_seed(0)
    model = fb.to_stochastic(TwoSizes(), {"*": fb.noise.NormalInvConv(site="position")})
    state, _ = prepare(model, 5, run(model, torch.randn(5, 3, 4, 4)).asked)
    given = []
    model.first.register_forward_hook(lambda module, args, output: given.append(args[0]))
    with state:
        model(torch.ones(5, 3, 4, 4))
    assert [tuple(x.shape) for x in given] == [(5, 3, 4, 2), (5, 3, 4, 4)]


def test_two_converted_parts_of_one_model_each_get_their_draws():
    other = nn.ModuleList([nn.Sequential(network(), nn.Identity()), network()])
    asked = {}
    for part in (other[0][0], other[1]):
        asked |= run(part, torch.randn(6, 3, 6, 6)).asked
    state, known = prepare(other, 6, asked)
    assert known is not None
    assert len(state.prepared) == 4
    with state:
        other[0](torch.randn(6, 3, 6, 6))
        assert len(state.prepared) == 2
        other[1](torch.randn(6, 3, 6, 6))
    assert state.prepared == {}


@pytest.mark.parametrize("mode", ["shared", "mean", "off"])
def test_other_modes_are_left_alone(mode):
    model = network()
    asked = run(model, torch.randn(6, 3, 6, 6)).asked
    with fb.noise_mode(model, mode):
        assert prepare(model, 6, asked)[1] is None


def test_where_there_are_no_kernels_nothing_is_drawn_ahead(monkeypatch):
    monkeypatch.undo()
    model = network()
    assert prepare(model, 6, run(model, torch.randn(6, 3, 6, 6)).asked)[1] is None
