"""Multiplicative flows: their bound, their moments, what they keep of a network and what they refuse."""

import math

import pytest
import torch
from problems import NOISE, PRIOR, QUIET, Tied, blobs, conjugate, loader, small
from test_bayes_by_backprop import Reader, cosine, evidence, many_rows, mean_field_bound
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, vmap

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.variational.base import FLOWS
from flowbnn.methods.variational.mnf import MultiplicativeLayer, MultiplicativeWeights, served_layers
from flowbnn.transforms import Planar


def part_for(layer: nn.Module, flow: str = "planar", z_std: float = 0.3) -> MultiplicativeLayer:
    torch.manual_seed(1)
    filters = not isinstance(layer, nn.Linear)
    part = MultiplicativeLayer(layer.weight, layer.bias, filters, 0.2, z_std, FLOWS[flow]().transforms)
    with torch.no_grad():
        for parameter in (part.b1, part.b2, part.c):
            parameter.add_(0.5 * torch.randn_like(parameter))
    return part


@pytest.mark.parametrize("flow", ["planar", "coupling", "gaussian"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(3, 2), (1, 3)),
        (lambda: nn.Conv2d(2, 3, 2, stride=2, bias=False), (1, 2, 4, 4)),
        (lambda: nn.Conv1d(2, 4, 3, groups=2), (1, 2, 5)),
    ],
)
def test_local_outputs_have_the_moments_of_drawn_weights(make, shape, flow):
    torch.manual_seed(0)
    network = nn.Sequential(make()).double()
    part = part_for(network[0], flow)
    x, own = torch.randn(shape, dtype=torch.float64), dict(network[0].named_parameters())
    served = served_layers(network, ["0"], x)
    assert [one.way for one in served] == ["local"]
    model = MultiplicativeWeights(network, served, [part])
    count = 5_000
    with torch.no_grad():
        local = model(x.expand(count, *shape[1:]))  # every example its own z and noise
        normal = torch.randn(count, part.size, dtype=torch.float64)
        z = part.z(normal[:20, : part.dim])
        drawn = vmap(lambda row: dict(zip(own, part.draw(row), strict=False)))(normal)
        for row, weight in enumerate(drawn["weight"][:20]):
            noise = normal[row, part.dim :][: weight.numel()].view_as(weight)
            assert torch.allclose(weight, part.scaled(z[row]) + part.log_std.exp() * noise)
        direct = vmap(lambda values: functional_call(network[0], values, x)[0])(drawn)
    error = (local.var(0) / count + direct.var(0) / count).sqrt()
    assert ((local.mean(0) - direct.mean(0)).abs() < 5.0 * error).all()
    # the fourth moment gives the error of a variance, whatever the distribution
    spread = [((d - d.mean(0)).pow(4).mean(0) - d.var(0).square()) / len(d) for d in (local, direct)]
    assert ((local.var(0) - direct.var(0)).abs() < 5.0 * (spread[0] + spread[1]).sqrt()).all()


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), lambda: nn.Conv2d(2, 3, 2)])
def test_bound_is_the_formula_at_drawn_weights(make):
    """On the same draws of z, the closed forms agree with log-densities at drawn weights, in the mean."""
    torch.manual_seed(0)
    layer = make().double()
    part = part_for(layer)
    count, scale = 2000, 0.7
    zero = torch.zeros((), dtype=torch.float64)

    def log_prob(value, loc, std):
        return Normal(loc, std, validate_args=False).log_prob(value).sum()

    def at_drawn_weights(normal):
        weight, bias = part.draw(normal)
        start = normal[: part.dim]
        log_q = log_prob(weight, part.scaled(part.z(start)), part.log_std.exp())
        log_q = (
            log_q + log_prob(bias, part.bias_mean, part.bias_log_std.exp()) + log_prob(start, zero, zero + 1)
        )
        log_p = log_prob(weight, zero, zero + scale) + log_prob(bias, zero, zero + scale)
        t = torch.tanh(part.c @ part._columns(weight)).mean()
        # r's density of z: back to the normal numbers by the inverse of q's flow, whose log-det q has too, and on from there
        end, log_det = start, zero
        for step in part.back:
            end, found = step(end)
            log_det = log_det + found
        return log_q - log_p - log_prob(end, part.b1 * t, (0.5 * part.b2 * t).exp()) - log_det

    with torch.no_grad():
        direct = vmap(at_drawn_weights)(torch.randn(count, part.size, dtype=torch.float64))
        columns = part.mean.numel() // part.dim
        each = torch.stack(
            [
                part.kl_bound(
                    torch.randn(100, part.dim, dtype=torch.float64),
                    scale,
                    torch.randn(100, columns, dtype=torch.float64),
                )
                for _ in range(100)
            ]
        )
    error = math.sqrt(direct.var().item() / count + each.var().item() / 100)
    assert abs(direct.mean() - each.mean()) < 4.0 * error
    assert error < 0.1


def test_noise_that_never_moves_is_mean_field():
    layer = nn.Linear(4, 3).double()
    part = MultiplicativeLayer(layer.weight, layer.bias, False, 0.3, 1e-6, FLOWS["gaussian"]().transforms)
    with torch.no_grad():
        part.b1.zero_(), part.b2.zero_()
        found = part.kl_bound(torch.randn(50, 4).double(), 0.9, torch.randn(50, 3).double())
    zero = torch.zeros((), dtype=torch.float64)
    truth = sum(
        kl_divergence(Normal(value, zero + 0.3), Normal(zero, zero + 0.9)).sum()
        for value in layer.parameters()
    )
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flow", ["coupling", "planar"])
def test_elbo_lies_between_mean_field_and_evidence(flow):
    problem, network, batches, _ = conjugate(bias=False)
    rates = {"lr": 0.05, "noise_lr": 0.03, "schedule": cosine}
    method = fb.MNF(flow, epochs=10, kl_samples=16, prior_scale=PRIOR, **rates)
    posterior = method.fit(
        network,
        many_rows(batches, 12) * 25,
        num_data=24,
        likelihood=fb.likelihoods.Gaussian(NOISE),
        seed=0,
        **QUIET,
    )
    with torch.no_grad():
        normal = torch.randn(5_000, posterior.distribution.size, dtype=torch.float64)
        draws = vmap(posterior.distribution.draw)(normal)["weight"][:, 0]
        torch.testing.assert_close(draws[0], posterior.distribution.draw(normal[0])["weight"][0])
        error = problem.targets - draws @ problem.design.T
        log_likelihood = Normal(torch.zeros_like(error), NOISE).log_prob(error).sum(1)
        torch.manual_seed(2)
        kl = torch.stack([posterior.distribution.divergence(PRIOR, 400).kl for _ in range(25)])
    elbo = log_likelihood.mean() - kl.mean()
    deviation = math.sqrt(log_likelihood.var().item() / len(draws) + kl.var().item() / len(kl))
    assert deviation < 0.05
    assert elbo < evidence(problem) + 3.0 * deviation
    assert elbo > mean_field_bound(problem) - 3.0 * deviation
    # the mean of such a posterior is the true one as far as its ELBO is near the evidence
    assert ((draws.mean(0) - problem.mean).abs() / problem.covariance.diagonal().sqrt()).max() < 0.5


def test_every_flow_fits_saves_and_loads(tmp_path):
    x, network = blobs()[:9][0], nn.Linear(4, 3)
    for flow in [*FLOWS, fb.noise.NormalPlanar(length=3)]:
        posterior, again = (
            fb.MNF(flow, epochs=1).fit(network, loader(blobs(32)), seed=0, **QUIET) for _ in range(2)
        )
        probabilities = posterior.predict(x, 4, seed=1).probabilities
        assert torch.equal(probabilities, again.predict(x, 4, seed=1).probabilities), flow
        path = posterior.save(tmp_path / "mnf.safetensors")
        back = fb.load_posterior(path, nn.Linear(4, 3))
        assert torch.equal(probabilities, back.predict(x, 4, seed=1).probabilities), flow
        assert {"elbo", "kl", "log_likelihood"} <= set(posterior.history.names)


def test_flow_of_ones_own():
    posterior = fb.MNF(fb.noise.FlowNoise(lambda dim: Planar(dim)), epochs=1).fit(
        small(), loader(blobs()), seed=0, **QUIET
    )
    assert posterior.draws(2, seed=0)["0.weight"].shape == (2, 6, 4)
    with pytest.raises(FlowBNNError, match="is code and cannot be stored"):
        posterior.save("nowhere.safetensors")
    with pytest.raises(FlowBNNError, match="has no density"):
        posterior.log_prob(posterior.draws(2, seed=0))


def test_convolutions_normalisation_and_ties():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, groups=2),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    before = {name: value.clone() for name, value in network.state_dict().items()}
    batches = [(torch.randn(12, 1, 8, 8), torch.arange(12) % 3)]
    posterior = fb.MNF(epochs=3, lr=0.01).fit(network, batches, seed=0, **QUIET)
    assert all(torch.equal(before[name], value) for name, value in network.state_dict().items())
    assert {one.way for one in posterior.distribution.served} == {"local"}
    assert posterior.sample(seed=0).state_dict().keys() == network.state_dict().keys()
    assert posterior.model[1].num_batches_tracked == 3
    tied = fb.MNF(epochs=2).fit(Tied(), loader(blobs()), seed=0, **QUIET)
    assert tied.model.first.weight is tied.model.second.weight
    assert {one.layer: one.way for one in tied.distribution.served} == {
        "first": "reparameterization",
        "last": "local",
    }


def test_layers_it_cannot_serve_are_named():
    sentences = [(torch.randint(7, (12, 5)), torch.arange(12) % 7)]
    with pytest.warns(FlowBNNWarning, match=r"MNF leaves layer 'reads' \(LSTM\).*BayesByBackprop serves it"):
        posterior = fb.MNF(epochs=1).fit(Reader(), sentences, **QUIET)
    assert {one.layer: one.way for one in posterior.distribution.served}["head"] == "reparameterization"
    with pytest.raises(FlowBNNError, match=r"'reads' \(LSTM\) is not; BayesByBackprop serves it"):
        fb.MNF(layers="reads", epochs=1).fit(Reader(), sentences, **QUIET)


def test_flows_in_half_precision_are_refused():
    data = [(torch.ones(4, 3), torch.arange(4) % 2)]
    with pytest.raises(FlowBNNError, match="bf16-mixed"):
        fb.MNF(epochs=1).fit(nn.Linear(3, 2), data, precision="bf16-true", progress=False)
    with pytest.raises(FlowBNNError, match="bf16-mixed"):
        fb.MNF(epochs=1).fit(nn.Linear(3, 2).bfloat16(), data, progress=False)
