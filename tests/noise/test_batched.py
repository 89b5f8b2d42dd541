"""Tests that noise drawn for the whole network equals the noise that each layer would draw."""

import copy
import pickle

import pytest
import torch
from prepared_context import prepared_context
from torch import nn
from torch.utils.checkpoint import checkpoint

import flowbnn as fb
from flowbnn.distributions.bases import MixtureBase, NormalBase
from flowbnn.noise import noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.noise.contexts import context_of
from flowbnn.objectives import ELBO


class Repeated(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False)

    def forward(self, x):
        return torch.stack([self.layer(x), self.layer(x)])


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.save_memory, self.reentrant, self.seen = False, False, []

    def forward(self, x):
        def block(h):
            hidden = torch.tanh(self.first(h))
            self.seen.append(hidden.detach().clone())
            return self.second(hidden)

        return self.third(
            checkpoint(block, x, use_reentrant=self.reentrant) if self.save_memory else block(x)
        )


def test_packed_draws_have_each_layers_own_distribution():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model = fb.to_stochastic(
        network, {"0": fb.noise.NormalAffine(), "1": fb.noise.NormalAffine(base_loc=0.5, base_scale=0.8)}
    )
    with torch.no_grad():
        for parameter in fb.noise.noise_parameters(model):
            parameter.add_(0.3 * torch.randn_like(parameter))
    rows = 50_000
    seen = {}
    for name, layer in noise_layers(model).items():
        network_layer = model.get_submodule(name)
        network_layer.register_forward_pre_hook(
            lambda m, args, name=name, layer=layer: seen.update(
                {name: context_of(layer).forward.draws[layer.key]}
            )
        )
    model(torch.ones(rows, 3))
    for name, layer in noise_layers(model).items():
        base, affine = layer.base, layer.transform[0]
        mean, deviation, _ = affine.push_normal(base.loc, base.scale)
        draws = seen[name].double()
        assert draws.shape == (rows, layer.layout.dim)
        assert ((draws.mean(0) - mean).abs() < 4 * deviation / rows**0.5).all()
        assert ((draws.std(0) / deviation - 1).abs() < 4 / (2 * rows) ** 0.5).all()
        correlation = torch.corrcoef(draws.T) - torch.eye(layer.layout.dim)
        assert correlation.abs().max() < 5 / rows**0.5
    across = torch.corrcoef(torch.cat([seen["0"], seen["1"]], 1).T)[:3, 3:]
    assert across.abs().max() < 5 / rows**0.5, "layers are independent"


def test_a_layer_called_twice_keeps_its_draw_within_a_pass():
    model = fb.to_stochastic(Repeated(), {"*": fb.noise.NormalPlanar(1)})
    first, second = model(torch.ones(3, 4))
    assert torch.equal(first, second)
    again, _ = model(torch.ones(3, 4))
    assert not torch.equal(first, again)


def test_a_layer_called_by_itself_draws_for_itself():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"*": fb.noise.NormalAffine()})
    x = torch.ones(3, 4)
    model(x)
    assert not torch.equal(model[0](x), model[0](x))


def test_a_failing_pass_leaves_no_context():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"*": fb.noise.NormalAffine()})
    model(torch.ones(3, 4))
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))
    assert not torch.equal(model[0](torch.ones(3, 4)), model[0](torch.ones(3, 4)))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_parts_draw_the_same_noise_again(reentrant):
    """Each part runs in the forward and again in the backward pass, also when two forwards share one backward."""
    torch.manual_seed(0)
    model = fb.to_stochastic(
        Checkpointed(), {"first": fb.noise.NormalPlanar(1), "*": fb.noise.NormalAffine()}
    )
    model.save_memory, model.reentrant = True, reentrant
    x = torch.ones(5, 4, requires_grad=True)
    (model(x).square().sum() + model(2 * x).square().sum()).backward()
    first, second, *again = model.seen
    assert not torch.equal(first, second)
    assert len(again) == 2
    assert {id(value) for value in again} == {
        id(value) for value in again if any(torch.equal(value, v) for v in (first, second))
    }
    assert not torch.equal(*again)
    assert all(p.grad is not None for p in model.parameters())


def test_a_checkpoint_around_a_layer_outside_a_pass():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"*": fb.noise.NormalAffine()})
    model(torch.ones(3, 4))
    h = torch.ones(3, 4, requires_grad=True)
    checkpoint(lambda x: torch.tanh(model[0](x)), h, use_reentrant=False).sum().backward()
    assert h.grad is not None


def test_inference_mode():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)), {"*": fb.noise.NormalAffine()})
    with torch.inference_mode():
        model(torch.ones(2, 4))
    objective = ELBO(fb.likelihoods.Categorical(), 10)
    objective(model, torch.ones(2, 4), torch.tensor([0, 1])).loss.backward()
    assert model[0].weight.grad is not None


def test_a_converted_network_goes_to_another_process():
    rules = {"0": fb.noise.FlowNoise(lambda dim: fb.transforms.Radial(dim)), "*": fb.noise.NormalAffine()}
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), rules)
    model(torch.ones(3, 4))
    duplicate = pickle.loads(pickle.dumps(model))
    with fb.noise_mode(model, "shared", seed=2), fb.noise_mode(duplicate, "shared", seed=2):
        assert torch.equal(model(torch.ones(3, 4)), duplicate(torch.ones(3, 4)))


def test_held_noise_follows_its_parameters_and_moves_with_the_network():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 2)), {"*": fb.noise.NormalAffine()})
    x = torch.ones(1, 4)
    for mode in ("mean", "shared"):
        with fb.noise_mode(model, mode, seed=0):
            before = model(x)
            with torch.no_grad():
                noise_layers(model)["0"].transform[0].shift.add_(0.5)
            assert not torch.equal(model(x), before), mode
            model.double()
            assert model(x.double()).dtype == torch.float64
            model.float()


def test_inputs_whose_rows_the_root_does_not_know():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, batch):
            return self.layer(batch["x"]), self.layer(batch["x"])

    model = fb.to_stochastic(Named(), {"*": fb.noise.NormalAffine()})
    rows, again = model({"x": torch.ones(5, 4)})
    assert (rows[0] - rows[1]).abs().max() > 1e-4
    assert torch.equal(rows, again), "called twice in a pass, it keeps its draw"


def test_copies_do_not_share_draws():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), {"*": fb.noise.NormalAffine()})
    model(torch.ones(3, 4))
    duplicate = copy.deepcopy(model)
    assert duplicate(torch.ones(3, 4)).shape == (3, 2)
    for other in (duplicate, pickle.loads(pickle.dumps(model)), copy.deepcopy(duplicate)):
        keys = [{layer.key for layer in noise_layers(network).values()} for network in (model, other)]
        assert not keys[0] & keys[1]
        with fb.noise_mode(model, "off"):
            assert torch.equal(model(torch.ones(3, 4)), model(torch.ones(3, 4)))
            assert not torch.equal(other(torch.ones(3, 4)), other(torch.ones(3, 4))), (
                "a pass governs its own network"
            )


def test_prepared_draws_agree_with_the_second_run_of_reentrant_checkpointing():
    torch.manual_seed(0)
    outputs = []
    inner = fb.to_stochastic(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), {"*": fb.noise.NormalAffine()}
    )
    inner.register_forward_hook(lambda module, args, output: outputs.append(output.detach().clone()))
    objective = ELBO(fb.likelihoods.Categorical(), 10)
    x = torch.randn(6, 4, requires_grad=True)
    terms = objective(
        inner,
        x,
        torch.zeros(6, dtype=torch.long),
        forward=lambda inputs: checkpoint(inner, inputs, use_reentrant=True),
    )
    terms.loss.backward()
    assert len(outputs) == 2
    assert torch.equal(*outputs)


@pytest.mark.parametrize("components", [1, 3])
def test_set_prior_changes_the_kl(components):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = fb.to_stochastic(network, {"*": fb.noise.NormalAffine(components=components, kl_samples=20_000)})
    layers = noise_layers(model)
    before = {name: block.kl.item() for name, block in divergences(layers).items()}
    layers["1"].set_prior(NormalBase(4, loc=3.0, scale=0.5))
    after = divergences(layers)
    alone = layers["1"].divergence().kl.item()
    assert alone > before["1"] + 10
    assert after["1"].kl.item() == pytest.approx(alone, rel=0.02)
    assert after["0"].kl.item() == pytest.approx(before["0"], rel=0.1, abs=0.05)
    layers["1"].set_prior(MixtureBase(4, 2))  # of another kind: for itself
    mixture_kl = divergences(layers)["1"].kl.item()
    assert mixture_kl == pytest.approx(layers["1"].divergence().kl.item(), rel=0.02, abs=0.05)


class Steps(nn.Module):
    """Its first layer sees each time step as a row of its own."""

    def __init__(self):
        super().__init__()
        self.step, self.wide, self.out = nn.Linear(8, 4), nn.Linear(20, 6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.wide(self.step(x.reshape(-1, 8)).reshape(len(x), -1)))


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("site", ["channel", "position"])
def test_flattened_rows_share_the_draw_of_their_example(components, site):
    """Five time steps of seven examples: seven draws, each for the five rows of its example, as a prediction has it."""
    model = fb.to_stochastic(Steps(), {"*": fb.noise.NormalAffine(components=components, site=site)})
    seen = []
    model.step.register_forward_pre_hook(lambda module, args: (torch.ones_like(args[0]),), prepend=True)
    model.step.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    assert model(torch.randn(7, 5, 8)).shape == (7, 2)
    draws = seen[0].view(7, 5, 8)
    assert torch.equal(draws, draws[:, :1].expand(7, 5, 8))
    assert len(draws[:, 0].unique(dim=0)) == 7


def test_prepared_draws_are_used_by_the_networks_of_their_layers():
    one = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"*": fb.noise.NormalAffine()})
    other = fb.to_stochastic(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), {"*": fb.noise.NormalAffine()})
    both = nn.Sequential(one, other)
    layers = noise_layers(both)
    context, _ = prepared_context(layers, 5)
    prepared = dict(context.prepared.tensors)
    assert list(prepared) == [layer.key for layer in layers.values()]
    used = {}
    for name in layers:
        both.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: used.update(context_of(layers[name]).forward.draws)
        )
    with context:
        assert both(torch.randn(5, 4)).shape == (5, 4)
        assert context_of(layers["0.0"]).prepared.tensors == {}  # a second pass draws anew
    assert all(used[key] is draw for key, draw in prepared.items())
    assert context.prepared.tensors == prepared
    assert context_of(layers["0.0"]).prepared is None


@pytest.mark.parametrize("components", [1, 3])
def test_a_prior_changed_through_data_changes_the_packed_kl(components):
    """``.data`` leaves no trace on a version counter: what is packed is read anew every time."""
    torch.manual_seed(0)
    recipe = fb.noise.NormalAffine(components=components, kl_samples=4096, base_scale=0.5)
    model = fb.to_stochastic(nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 4)), {"*": recipe})
    layers = noise_layers(model)
    with torch.no_grad():
        before = divergences(layers).total.kl
        for layer in layers.values():
            layer.prior.loc.data.add_(1.5)
            layer.prior.scale.data.mul_(0.5)
        found = divergences(layers)
        for name, layer in layers.items():
            torch.testing.assert_close(found[name].kl, layer.divergence().kl, rtol=0.05, atol=0.05)
        if components == 1:  # 11 numbers of N(1, 0.5^2) against N(2.5, 0.25^2)
            closed = 11 * (0.5 * (4.0 + 36.0 - 1.0) - torch.tensor(2.0).log())
            torch.testing.assert_close(found.total.kl, closed, rtol=1e-5, atol=1e-4)
        assert found.total.kl > before + 50
        _, together = prepared_context(layers, 8)
        torch.testing.assert_close(together.total.kl, found.total.kl, rtol=0.05, atol=0.05)
