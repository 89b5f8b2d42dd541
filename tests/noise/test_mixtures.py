"""Tests that concatenated mixtures have the draws, densities and gradients of the single layers."""

import copy
import math
import pickle
import warnings

import pytest
import torch
from prepared_context import prepared_context
from torch import nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

import flowbnn as fb
from flowbnn.distributions import Flow, MixtureBase, NormalBase, NormalMixture
from flowbnn.distributions.draws import select_normal
from flowbnn.noise import mixtures, noise_layers, noise_mode
from flowbnn.noise.batched import divergences
from flowbnn.noise.contexts import RowShard
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.mixtures import Mixtures
from flowbnn.objectives import ELBO
from flowbnn.transforms import Affine, Compose

PLAIN = {"*": fb.noise.NormalAffine(components=3)}
FLOWS = {"*": fb.noise.NormalAffine(components=3), "2": fb.noise.NormalPlanar(2, components=3)}
BOTH = {
    "0": fb.noise.NormalAffine(components=3),
    "2": fb.noise.NormalAffine(components=3),
    "*": fb.noise.NormalAffine(),
}


def network(rules=PLAIN, dtype=torch.float32, convolutions=2):
    """With one convolution it has two layers that are not the first, and compiles in less time."""
    torch.manual_seed(0)
    first = [
        nn.Conv2d(3, 4, 3),
        nn.ReLU(),
        *([nn.Conv2d(4, 5, 3)] if convolutions == 2 else [nn.MaxPool2d(2)]),
    ]
    last = [nn.Flatten(), nn.Linear(20 if convolutions == 2 else 16, 6), nn.ReLU(), nn.Linear(6, 2)]
    plain = nn.Sequential(*first, *last)
    model = fb.to_stochastic(plain, rules).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "noise" in name:
                parameter += 0.2 * torch.randn_like(parameter)
    return model


def mixture_layers(model):
    return [layer for layer in noise_layers(model).values() if layer.mixture_base is not None]


def by_layer(layer, which, normal):
    """A layer's draws from the base through the whole transform, and their log-density, by torch's own operations."""
    base = layer.base.distribution()
    z = base.loc[which] + base.scale[which] * normal
    x, log_det = layer.transform(z)
    return x, base.log_prob(z) - log_det


@pytest.mark.parametrize("rules", [PLAIN, FLOWS])
def test_draws_kl_and_gradients_are_those_of_the_layers(rules):
    model = network(rules, torch.float64)
    layers = mixture_layers(model)
    block = Mixtures(layers)
    which, normal = block.draw_components(7, 0, None, None)
    assert which.shape == (7, len(layers))
    assert set(which.unique().tolist()) == {0, 1, 2}
    draws = block.select(which, normal)
    samples, log_dets = block.sample(draws, 0)
    ends = torch.cat(samples, -1)
    parts, total = block.compute_divergences(draws, ends, log_dets)

    truth = []
    for index, (layer, some) in enumerate(zip(layers, normal.split(block.sizes, -1), strict=True)):
        x, log_q = by_layer(layer, which[:, index], some)
        torch.testing.assert_close(ends.split(block.sizes, -1)[index], x)
        kl = (log_q - layer.prior.distribution().log_prob(x)).mean()
        torch.testing.assert_close(parts[layer.key].kl, kl)
        torch.testing.assert_close(parts[layer.key].entropy, -log_q.mean())
        truth.append(kl)
    torch.testing.assert_close(total.kl, sum(truth))
    parameters = [p for layer in layers for p in layer.parameters()]
    found = torch.autograd.grad(total.kl + ends.square().sum(), parameters, retain_graph=True)
    values = [
        by_layer(layer, which[:, index], some)[0].square().sum()
        for index, (layer, some) in enumerate(zip(layers, normal.split(block.sizes, -1), strict=True))
    ]
    for ours, theirs in zip(found, torch.autograd.grad(sum(truth) + sum(values), parameters), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_centers_may_differ():
    rules = {"0": fb.noise.NormalAffine(components=3, base_loc=0.5), "*": fb.noise.NormalAffine(components=3)}
    layers = mixture_layers(network(rules, torch.float64))
    block = Mixtures(layers)
    which, normal = block.draw_components(5, 0, None, None)
    draws = block.select(which, normal).split(block.sizes, -1)
    for index, (layer, x) in enumerate(zip(layers, draws, strict=True)):
        some = normal.split(block.sizes, -1)[index]
        torch.testing.assert_close(x, by_layer(layer, which[:, index], some)[0])


def test_one_component_or_many_the_kl_is_that_of_the_layer_within_its_standard_error():
    model = network()
    layers = noise_layers(model)
    many = 20_000
    for layer in layers.values():
        layer.kl_samples = many
    torch.manual_seed(1)
    found = divergences(layers)
    for name, layer in layers.items():
        q, p = Flow(layer.base.distribution(), layer.transform), layer.prior.distribution()
        x = q.rsample((many,))
        bracket = (q.log_prob(x) - p.log_prob(x)).detach()
        error = bracket.std() / math.sqrt(many)
        assert abs(found[name].kl - bracket.mean()) < 5 * math.sqrt(2) * error
    assert found.total is not None
    torch.testing.assert_close(found.total.kl, sum(piece.kl for piece in found.values()))


@pytest.mark.parametrize("rules", [PLAIN, FLOWS, BOTH])
def test_the_pass_uses_prepared_draws(rules):
    model, given = network(rules), {}
    layers = noise_layers(model)
    context, terms = prepared_context(layers, 6)
    assert terms is not None
    assert set(terms) == set(noise_layers(model))
    torch.testing.assert_close(terms.total.kl, sum(piece.kl for piece in terms.values()))
    draws = {name: context.prepared.tensors[layer.key] for name, layer in layers.items()}
    model[0].register_forward_hook(lambda module, args, output: given.__setitem__("x", args[0]))
    images = torch.randn(6, 3, 6, 6)
    with context:
        assert model(images).shape == (6, 2)
    torch.testing.assert_close(given["x"], images * draws["0"][:, :, None, None])


def test_a_pass_without_prepared_draws_draws_all_mixtures_at_once(monkeypatch):
    model, calls, draw = network(BOTH), [], Mixtures.select
    monkeypatch.setattr(Mixtures, "select", lambda *args: calls.append(len(args[0].sizes)) or draw(*args))
    model(torch.randn(4, 3, 6, 6))
    assert calls == [2]


def test_draws_of_a_pass_have_the_moments_of_the_mixture():
    model = network()
    layers, seen = noise_layers(model), {}
    model[4].register_forward_hook(lambda module, args, output: seen.__setitem__("x", args[0].detach()))
    model[4].register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),), prepend=True)
    model(torch.randn(40_000, 3, 6, 6))
    truth = NormalMixture(*layers["4"]._merged_normals())
    error = truth.variance.sqrt() / math.sqrt(40_000)
    assert ((seen["x"].mean(0) - truth.mean).abs() < 5 * error).all()
    torch.testing.assert_close(seen["x"].var(0), truth.variance, rtol=0.06, atol=0.0)


def test_processes_draw_what_one_would_draw():
    model = network()
    layers = mixture_layers(model)

    def draws(share, rows):
        torch.manual_seed(3)
        block = Mixtures(layers)
        return block.draw_base(rows, 4, None, share)

    whole = draws(None, 10)
    for start, stop in ((0, 4), (4, 10)):
        piece = draws(RowShard(start, stop, 10), stop - start)
        torch.testing.assert_close(piece[: stop - start], whole[start:stop])
        torch.testing.assert_close(piece[stop - start :], whole[10:])  # the fresh draws are the same for all


@pytest.mark.parametrize("site", ["channel", "position"])
@pytest.mark.parametrize("recipe", [fb.noise.NormalAffine, fb.noise.NormalPlanar])
def test_shared_draws_are_those_of_one_seed_at_a_time(site, recipe):
    model = network({"*": recipe(components=3, site=site)})
    layer = noise_layers(model)["2"]
    at = (3, 3) if site == "position" else ()
    sources = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
    together = layer.draw_each(at, sources)
    for seed, draws in zip((5, 6), together, strict=True):
        torch.testing.assert_close(draws, layer.draw(at, torch.Generator().manual_seed(seed)))


def test_gradients_of_chosen_components_once_and_twice():
    loc, scale = torch.randn(3, 4, dtype=torch.float64), torch.rand(3, 4, dtype=torch.float64) + 0.5
    which, normal = torch.randint(3, (5, 2)), torch.randn(5, 2, 4, dtype=torch.float64)

    def draws(loc, scale):
        return select_normal(loc, scale, which, normal)

    wanted = loc.requires_grad_(), scale.requires_grad_()
    assert torch.autograd.gradcheck(draws, wanted)
    assert torch.autograd.gradgradcheck(lambda *given: draws(*given).square(), wanted)
    torch.testing.assert_close(draws(*wanted), loc[which] + scale[which] * normal)
    batched = torch.vmap(lambda shift: draws(loc + shift, scale))(torch.arange(2.0, dtype=torch.float64))
    torch.testing.assert_close(batched[1] - batched[0], torch.ones(5, 2, 4, dtype=torch.float64))


@pytest.mark.slow
def test_a_step_compiles_in_one_graph_and_is_the_same():
    sites = {
        "0": fb.noise.NormalAffine(components=3, site="position"),
        "*": fb.noise.NormalAffine(components=3),
    }
    model = network(sites, convolutions=1)
    objective, images, labels = (
        ELBO(fb.likelihoods.Categorical(), 10),
        torch.randn(6, 3, 6, 6),
        torch.tensor([0, 1, 0, 1, 1, 0]),
    )

    def loss():
        return objective(model, images, labels).loss

    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = []
    for function in (compiled, loss):
        model.zero_grad()
        torch.manual_seed(0)
        value = function()
        value.backward()
        found.append([value.detach(), *(p.grad.clone() for p in model.parameters())])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_positions_count_in_the_kl():
    counted = network({"*": fb.noise.NormalAffine(components=3, site="position", positions=9)})
    once = network({"*": fb.noise.NormalAffine(components=3, site="position")})
    torch.manual_seed(0)
    nine = divergences(noise_layers(counted))
    torch.manual_seed(0)
    one = divergences(noise_layers(once))
    for name in one:
        torch.testing.assert_close(nine[name].kl, 9 * one[name].kl)
        torch.testing.assert_close(nine[name].entropy, 9 * one[name].entropy)


def test_incompatible_layers_are_drawn_one_by_one():
    model = network({"*": fb.noise.NormalAffine(components=3), "2": fb.noise.NormalAffine(components=2)})
    layers = noise_layers(model)
    assert set(divergences(layers)) == set(layers)
    model(torch.randn(4, 3, 6, 6))
    again = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    with noise_mode(again, "mean"):
        assert again(torch.randn(4, 3, 6, 6)).shape == (4, 2)


def test_ten_layers_cost_a_few_operations_more_than_two():
    class Counted(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    def operations(depth):
        model = fb.to_stochastic(nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth))), PLAIN)
        layers = noise_layers(model)
        with Counted() as counted:
            prepared_context(layers, 5)
        return counted.number

    alone = noise_layers(network())["0"]
    with Counted() as counted:
        alone.divergence()
        alone.draw((5,))
    # views of a layer's share of the whole; by itself it would take as many operations as all together
    assert operations(10) - operations(2) <= 8 * 12 < 8 * counted.number / 3


def test_many_rows_are_drawn_layer_by_layer_with_the_same_result(monkeypatch):
    layers = mixture_layers(network(dtype=torch.float64))
    block = Mixtures(layers)
    which, normal = block.draw_components(9, 0, None, None)
    parameters = [p for layer in layers for p in layer.parameters()]

    def found():
        draws = block.select(which, normal)
        return draws, *torch.autograd.grad(draws.square().sum(), parameters, retain_graph=True)

    together = found()
    monkeypatch.setattr(mixtures.Mixtures, "gather_limit", 1)
    for ours, theirs in zip(found(), together, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_half_precision_leaves_the_choice_exact():
    loc, scale = torch.rand(3, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True)
    which, normal = torch.tensor([0, 2, 1, 1]), torch.randn(4, 4)
    truth = loc[which] + scale[which] * normal
    expected = torch.autograd.grad(truth.square().sum(), (loc, scale))

    def draws(loc, scale):
        return select_normal(loc, scale, which, normal)

    torch._dynamo.reset()
    whole = torch.compile(draws, fullgraph=True, backend="aot_eager")
    # torch traces the way back of a compiled step under autocast, so that there its products round as those of the layers do
    for function, error in ((draws, 1e-6), (whole, 2.0**-7)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = function(loc, scale)
        gradients = torch.autograd.grad(found.square().sum(), (loc, scale))
        torch.testing.assert_close(found, truth)
        for ours, theirs in zip(gradients, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


def test_methods_of_subclasses_are_used():
    class Narrow(MixtureBase):
        def distribution(self):
            return NormalMixture(self.loc, 0.01 * self.log_scale.exp())

    class Loud(InputNoise):
        def draw(self, shape, generator=None):
            return super().draw(shape, generator).clamp(min=0.9)

    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), PLAIN)
    layers = noise_layers(model)
    narrow = {
        name: InputNoise(
            Narrow(4, 3, init_std=0.0), Compose(Affine(4, center=1.0)), NormalBase(4), layer.layout
        )
        for name, layer in layers.items()
    }
    found = divergences(narrow)
    torch.manual_seed(0)
    for name, layer in narrow.items():
        assert layer.draw((1000,)).std() < 0.01
        torch.testing.assert_close(found[name].kl, layer.divergence().kl, rtol=0.2, atol=0.0)
    for layer in layers.values():
        layer.__class__ = Loud
    seen = []
    model[1].register_forward_hook(lambda module, args, output: seen.append(args[0].detach()) or None)
    model[1].register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),), prepend=True)
    model(torch.randn(500, 4))
    assert seen[0].min() == 0.9


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")  # torch's own derivatives are scripts
def test_batches_of_several_sizes_compile_and_forward_derivatives_and_traces_work():
    torch._dynamo.reset()
    compiled = torch.compile(network(convolutions=1), backend="eager")
    for rows in (8, 5, 6):
        assert compiled(torch.randn(rows, 3, 6, 6)).shape == (rows, 2)
    loc, scale = torch.rand(3, 4, requires_grad=True), torch.rand(3, 4, requires_grad=True)
    which, normal = torch.tensor([0, 2, 1, 1]), torch.randn(4, 4)
    with forward_ad.dual_level():
        duals = (
            forward_ad.make_dual(loc, torch.ones(3, 4)),
            forward_ad.make_dual(scale, torch.full((3, 4), 2.0)),
        )
        tangent = forward_ad.unpack_dual(select_normal(*duals, which, normal)).tangent
    torch.testing.assert_close(tangent, 1.0 + 2.0 * normal)
    model = network({"*": fb.noise.NormalAffine(components=3, site="position")})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is leaving its traces behind
        traced = torch.jit.trace(model, torch.randn(2, 3, 6, 6), check_trace=False)
    assert traced(torch.randn(2, 3, 6, 6)).shape == (2, 2)


def test_mixtures_that_are_not_prepared_have_their_kl_computed_together(monkeypatch):
    rules = {
        "*": fb.noise.NormalAffine(components=3),
        "0": fb.noise.NormalAffine(components=3, site="position"),
        "2": fb.noise.NormalAffine(components=3, site="position"),
    }
    model, sizes, make = network(rules), [], Mixtures.__init__
    monkeypatch.setattr(
        Mixtures, "__init__", lambda self, layers: sizes.append(len(layers)) or make(self, layers)
    )
    layers = noise_layers(model)
    _, terms = prepared_context(layers, 6)
    assert sizes == [2, 2]
    assert set(terms) == set(noise_layers(model))
    torch.testing.assert_close(terms.total.kl, sum(piece.kl for piece in terms.values()))
