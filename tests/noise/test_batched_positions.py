"""Tests of noise at positions that is drawn together with the KL."""

from types import SimpleNamespace

import pytest
import torch
from prepared_context import prepared_context
from torch import nn
from torch.utils.checkpoint import checkpoint

import flowbnn as fb
from flowbnn import kernels
from flowbnn.noise import batched, gaussians, noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.noise.contexts import NoiseContext, RowShard, context_of, current_modes, set_row_shard
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
    monkeypatch.setattr(gaussians, "kernels", served)
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


def recorded_shapes(model, images):
    """Returns the positions that the layers draw for in a pass."""
    shapes = {}
    with NoiseContext(current_modes(noise_layers(model).values()), recorded_shapes=shapes):
        model(images)
    return shapes


def prepare(model, rows, shapes):
    """Returns a context with draws for the positions of an earlier pass, and the divergences."""
    return prepared_context(noise_layers(model), rows, dict(shapes))


def test_the_pass_uses_the_prepared_draws():
    model, images, given = network(), torch.randn(6, 3, 6, 6), {}
    assert prepare(model, 6, {})[1] is None  # no pass has told how many positions there are
    context, prepared_terms = prepare(model, 6, recorded_shapes(model, images))
    assert prepared_terms is not None
    layers = noise_layers(model)
    layer_draws = {name: context.prepared.tensors[layers[name].key] for name in ("0", "2")}
    assert len(context.prepared.tensors) == 2
    assert {name: tuple(z.shape) for name, z in layer_draws.items()} == {"0": (6, 6, 6, 3), "2": (6, 4, 4, 4)}
    for name in layer_draws:
        model.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: given.__setitem__(name, args[0])
        )
    with context:
        outputs = model(images)
        first = dict(given)
        model(images)  # nothing is left for the next pass
    torch.testing.assert_close(first["0"], images * layer_draws["0"].movedim(-1, 1))
    inner = torch.relu(nn.functional.conv2d(first["0"], model[0].weight, model[0].bias))
    torch.testing.assert_close(first["2"], inner * layer_draws["2"].movedim(-1, 1))
    assert not torch.equal(given["0"], first["0"])
    ELBO(fb.likelihoods.Categorical(), 10).terms(
        outputs, torch.zeros(6, dtype=torch.long), prepared_terms
    ).loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


def test_the_divergence_is_that_of_the_layers():
    model = network()
    shapes = recorded_shapes(model, torch.randn(6, 3, 6, 6))
    layers = noise_layers(model)
    torch.manual_seed(4)
    _, found = prepare(model, 6, shapes)
    torch.manual_seed(4)
    expected = divergences(layers)  # of the same normals, which are drawn first
    assert found.keys() == expected.keys() == layers.keys()
    for name, entry in expected.items():
        torch.testing.assert_close(found[name].kl, entry.kl)
        torch.testing.assert_close(found[name].entropy, entry.entropy)
    torch.testing.assert_close(found.total.kl, expected.total.kl)


def test_prepared_draws_have_the_distribution_of_the_noise():
    model = network()
    layer = noise_layers(model)["2"]
    context, _ = prepare(model, 400, recorded_shapes(model, torch.randn(400, 3, 6, 6)))
    draws = context.prepared.tensors[layer.key].flatten(0, 2).detach()
    plain = layer.draw((6400,)).detach()
    spread = plain.std(0) / 6400**0.5
    assert ((draws.mean(0) - plain.mean(0)).abs() < 6 * spread).all()
    torch.testing.assert_close(draws.std(0), plain.std(0), rtol=0.05, atol=0.0)  # four standard errors


def test_the_elbo_records_the_positions_of_each_batch_size(monkeypatch):
    model, objective, drew = network(), ELBO(fb.likelihoods.Categorical(), 10), []
    push = batched.kernels.evaluate_many
    monkeypatch.setattr(
        batched.kernels,
        "evaluate_many",
        lambda groups: drew.append([g.allow_tf32 for g in groups]) or push(groups),
    )
    for rows in (6, 4, 6, 4):
        assert objective(model, torch.randn(rows, 3, 6, 6), torch.zeros(rows, dtype=torch.long)).kl > 0
    # the first pass of each size draws for itself
    assert [coarse for coarse in drew if len(coarse) > 1] == [[False, False, False]] * 2


def test_a_layer_called_twice_draws_anew():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return torch.stack([self.first(x), self.first(x)]) + self.second(x)

    torch.manual_seed(0)
    model = fb.to_stochastic(Twice(), {"*": fb.noise.NormalInvConv(site="position")})
    context, prepared_terms = prepare(model, 5, recorded_shapes(model, torch.randn(5, 3, 2, 2)))
    assert prepared_terms is not None
    with context:
        one, two = model(torch.ones(5, 3, 2, 2))
    assert not torch.equal(one, two)


@pytest.mark.slow
def test_a_compiled_step_prepares_the_draws_of_an_uncompiled_one():
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


def test_draws_of_another_precision_are_not_used(monkeypatch):
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


def test_all_processes_prepare_draws_or_none():
    """Five rows on two processes, then four, then five again: three and two, two and two, three and two."""
    models, objectives = (
        [network(), network()],
        [ELBO(fb.likelihoods.Categorical(), 10), ELBO(fb.likelihoods.Categorical(), 10)],
    )
    for total in (5, 4, 5):
        cut, kls, states = (total + 1) // 2, [], []
        for model, objective, (start, stop) in zip(models, objectives, ((0, cut), (cut, total)), strict=True):
            set_row_shard(RowShard(start, stop, total))
            torch.manual_seed(total)
            terms = objective(model, torch.ones(stop - start, 3, 6, 6), torch.zeros(stop - start).long())
            set_row_shard(None)
            kls.append(terms.kl.item())
            states.append(torch.rand(1).item())
        assert kls[0] == kls[1]
        assert states[0] == states[1], "the generators are in the same state"
    assert set(objectives[0]._shapes) == {5, 4}


@pytest.mark.slow
def test_a_checkpointed_layer_draws_for_itself_and_compiles():
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
    shapes = recorded_shapes(model, images)
    assert set(shapes) == {layers["1"].key}
    context, _ = prepare(model, 6, shapes)
    assert set(context.prepared.tensors) == {layers["1"].key}
    objective, labels = ELBO(fb.likelihoods.Categorical(), 10), torch.zeros(6, dtype=torch.long)
    objective(model, images, labels).loss.backward()
    torch._dynamo.reset()
    step = torch.compile(lambda: objective(model, images, labels).loss, fullgraph=True, backend="eager")
    step().backward()


def test_a_layer_called_at_two_sizes_has_draws_of_both_shapes():
    class TwoSizes(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)

        def forward(self, x):
            return self.first(x[..., :2]).sum() + self.first(x).sum() + self.second(x).sum()

    torch.manual_seed(0)
    model = fb.to_stochastic(TwoSizes(), {"*": fb.noise.NormalInvConv(site="position")})
    context, _ = prepare(model, 5, recorded_shapes(model, torch.randn(5, 3, 4, 4)))
    given = []
    model.first.register_forward_hook(lambda module, args, output: given.append(args[0]))
    with context:
        model(torch.ones(5, 3, 4, 4))
    assert [tuple(x.shape) for x in given] == [(5, 3, 4, 2), (5, 3, 4, 4)]


def test_two_converted_submodules_use_their_own_draws():
    other = nn.ModuleList([nn.Sequential(network(), nn.Identity()), network()])
    shapes = {}
    for entry in (other[0][0], other[1]):
        shapes |= recorded_shapes(entry, torch.randn(6, 3, 6, 6))
    context, prepared_terms = prepare(other, 6, shapes)
    assert prepared_terms is not None
    assert len(context.prepared.tensors) == 4
    layer = next(iter(noise_layers(other).values()))
    with context:
        other[0](torch.randn(6, 3, 6, 6))
        assert len(context_of(layer).prepared.tensors) == 2
        other[1](torch.randn(6, 3, 6, 6))
        assert context_of(layer).prepared.tensors == {}
    assert len(context.prepared.tensors) == 4


@pytest.mark.parametrize("mode", ["shared", "mean", "off"])
def test_no_draws_are_prepared_in_other_modes(mode):
    model = network()
    shapes = recorded_shapes(model, torch.randn(6, 3, 6, 6))
    with fb.noise_mode(model, mode):
        assert prepare(model, 6, shapes)[1] is None


def test_no_draws_are_prepared_without_kernels(monkeypatch):
    monkeypatch.undo()
    model = network()
    assert prepare(model, 6, recorded_shapes(model, torch.randn(6, 3, 6, 6)))[1] is None
