"""Tests of MNF: its bound and moments, supported networks and refused arguments."""

import math

import pytest
import torch
from problems import NOISE, PRIOR, QUIET, Tied, blobs, conjugate, loader, small
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.func import functional_call, vmap
from variational_problems import Reader, cosine, evidence, mean_field_bound, repeat_rows

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.variational.base import FLOWS
from flowbnn.methods.variational.multiplicative_layers import (
    MultiplicativeLayer,
    MultiplicativeNetwork,
    layer_specs,
)
from flowbnn.transforms import Planar


def multiplicative_layer(module: nn.Module, flow: str = "planar", z_std: float = 0.3) -> MultiplicativeLayer:
    torch.manual_seed(1)
    filters = not isinstance(module, nn.Linear)
    layer = MultiplicativeLayer(module.weight, module.bias, filters, 0.2, z_std, FLOWS[flow]().transforms)
    with torch.no_grad():
        for parameter in (layer.b1, layer.b2, layer.c):
            parameter.add_(0.5 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("flow", ["planar", "coupling", "gaussian"])
@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (lambda: nn.Linear(3, 2), (1, 3)),
        (lambda: nn.Conv2d(2, 3, 2, stride=2, bias=False), (1, 2, 4, 4)),
        (lambda: nn.Conv1d(2, 4, 3, groups=2), (1, 2, 5)),
    ],
)
def test_local_outputs_have_the_moments_of_sampled_weights(make, shape, flow):
    torch.manual_seed(0)
    network = nn.Sequential(make()).double()
    layer = multiplicative_layer(network[0], flow)
    x, parameters = torch.randn(shape, dtype=torch.float64), dict(network[0].named_parameters())
    specs = layer_specs(network, ["0"], x)
    assert [spec.estimator for spec in specs] == ["local"]
    model = MultiplicativeNetwork(network, specs, [layer])
    count = 5_000
    with torch.no_grad():
        local = model(x.expand(count, *shape[1:]))  # every example has its own z and noise
        normal = torch.randn(count, layer.size, dtype=torch.float64)
        z = layer.z(normal[:20, : layer.dim])
        draws = vmap(lambda row: dict(zip(parameters, layer.draw(row), strict=False)))(normal)
        for row, weight in enumerate(draws["weight"][:20]):
            noise = normal[row, layer.dim :][: weight.numel()].view_as(weight)
            assert torch.allclose(weight, layer.scaled_mean(z[row]) + layer.log_std.exp() * noise)
        direct = vmap(lambda values: functional_call(network[0], values, x)[0])(draws)
    error = (local.var(0) / count + direct.var(0) / count).sqrt()
    assert ((local.mean(0) - direct.mean(0)).abs() < 5.0 * error).all()
    # the fourth moment gives the standard error of the variance of any distribution
    errors = [((d - d.mean(0)).pow(4).mean(0) - d.var(0).square()) / len(d) for d in (local, direct)]
    assert ((local.var(0) - direct.var(0)).abs() < 5.0 * (errors[0] + errors[1]).sqrt()).all()


@pytest.mark.parametrize("make", [lambda: nn.Linear(3, 2), lambda: nn.Conv2d(2, 3, 2)])
def test_kl_bound_equals_log_densities_of_sampled_weights(make):
    """The closed forms have the same mean as log-densities at sampled weights."""
    torch.manual_seed(0)
    layer = multiplicative_layer(make().double())
    count, scale = 2000, 0.7
    zero = torch.zeros((), dtype=torch.float64)

    def log_prob(value, loc, std):
        return Normal(loc, std, validate_args=False).log_prob(value).sum()

    def log_ratio(normal):
        weight, bias = layer.draw(normal)
        start = normal[: layer.dim]
        log_q = log_prob(weight, layer.scaled_mean(layer.z(start)), layer.log_std.exp())
        log_q = log_q + log_prob(bias, layer.bias_mean, layer.bias_log_std.exp())
        log_q = log_q + log_prob(start, zero, zero + 1)
        log_p = log_prob(weight, zero, zero + scale) + log_prob(bias, zero, zero + scale)
        t = torch.tanh(layer.c @ layer._columns(weight)).mean()
        # the density r(z | W): the log-determinant of the flow of z cancels with that in q
        end, total = start, zero
        for transform in layer.auxiliary_flow:
            end, log_det = transform(end)
            total = total + log_det
        return log_q - log_p - log_prob(end, layer.b1 * t, (0.5 * layer.b2 * t).exp()) - total

    with torch.no_grad():
        direct = vmap(log_ratio)(torch.randn(count, layer.size, dtype=torch.float64))
        columns = layer.mean.numel() // layer.dim
        bounds = torch.stack(
            [
                layer.kl_bound(
                    torch.randn(100, layer.dim, dtype=torch.float64),
                    scale,
                    torch.randn(100, columns, dtype=torch.float64),
                )
                for _ in range(100)
            ]
        )
    error = math.sqrt(direct.var().item() / count + bounds.var().item() / 100)
    assert abs(direct.mean() - bounds.mean()) < 4.0 * error
    assert error < 0.1


def test_constant_noise_is_mean_field():
    linear = nn.Linear(4, 3).double()
    layer = MultiplicativeLayer(linear.weight, linear.bias, False, 0.3, 1e-6, FLOWS["gaussian"]().transforms)
    with torch.no_grad():
        layer.b1.zero_(), layer.b2.zero_()
        bound = layer.kl_bound(torch.randn(50, 4).double(), 0.9, torch.randn(50, 3).double())
    zero = torch.zeros((), dtype=torch.float64)
    truth = sum(
        kl_divergence(Normal(value, zero + 0.3), Normal(zero, zero + 0.9)).sum()
        for value in linear.parameters()
    )
    torch.testing.assert_close(bound, truth, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("flow", [pytest.param("coupling", marks=pytest.mark.slow), "planar"])
def test_elbo_lies_between_mean_field_and_evidence(flow):
    problem, network, batches, _ = conjugate(bias=False)
    rates = {"lr": 0.1, "noise_lr": 0.06, "schedule": cosine}
    method = fb.MNF(flow, epochs=5, kl_samples=16, prior_scale=PRIOR, **rates)
    posterior = method.fit(
        network,
        repeat_rows(batches, 12) * 25,
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
    # the mean is close to the exact one, because the ELBO is close to the evidence
    assert ((draws.mean(0) - problem.mean).abs() / problem.covariance.diagonal().sqrt()).max() < 0.5


@pytest.mark.slow
def test_every_flow_is_fitted_saved_and_loaded(tmp_path):
    x, network = blobs()[:9][0], nn.Linear(4, 3)
    for flow in [*FLOWS, fb.noise.NormalPlanar(length=3)]:
        posterior, repeated = (
            fb.MNF(flow, epochs=1).fit(network, loader(blobs(32)), seed=0, **QUIET) for _ in range(2)
        )
        probabilities = posterior.predict(x, 4, seed=1).probabilities
        assert torch.equal(probabilities, repeated.predict(x, 4, seed=1).probabilities), flow
        path = posterior.save(tmp_path / "mnf.safetensors")
        loaded = fb.load_posterior(path, nn.Linear(4, 3))
        assert torch.equal(probabilities, loaded.predict(x, 4, seed=1).probabilities), flow
        assert {"elbo", "kl", "log_likelihood"} <= set(posterior.history.names)


def test_custom_flow():
    posterior = fb.MNF(fb.noise.FlowNoise(lambda dim: Planar(dim)), epochs=1).fit(
        small(), loader(blobs()), seed=0, **QUIET
    )
    assert posterior.draws(2, seed=0)["0.weight"].shape == (2, 6, 4)
    with pytest.raises(FlowBNNError) as error:
        posterior.save("nowhere.safetensors")
    assert error.value.kind == "unsupported"
    with pytest.raises(FlowBNNError) as error:
        posterior.log_prob(posterior.draws(2, seed=0))
    assert error.value.kind == "unsupported"


def test_convolutions_batch_norm_and_tied_weights():
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
    assert {spec.estimator for spec in posterior.distribution.specs} == {"local"}
    assert posterior.sample(seed=0).state_dict().keys() == network.state_dict().keys()
    assert posterior.model[1].num_batches_tracked == 3
    tied = fb.MNF(epochs=2).fit(Tied(), loader(blobs()), seed=0, **QUIET)
    assert tied.model.first.weight is tied.model.second.weight
    assert {spec.layer: spec.estimator for spec in tied.distribution.specs} == {
        "first": "reparameterization",
        "last": "local",
    }


def test_unsupported_layers():
    sentences = [(torch.randint(7, (12, 5)), torch.arange(12) % 7)]
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.MNF(epochs=1).fit(Reader(), sentences, **QUIET)
    assert caught[0].message.fields["kind"] == "plain"
    assert caught[0].message.fields["layers"][0] == "recurrent"
    estimators = {spec.layer: spec.estimator for spec in posterior.distribution.specs}
    assert estimators["head"] == "reparameterization"
    with pytest.raises(FlowBNNError) as error:
        fb.MNF(layers="recurrent", epochs=1).fit(Reader(), sentences, **QUIET)
    assert (error.value.kind, error.value.layer) == ("layer", "recurrent")


def test_half_precision_is_refused():
    data = [(torch.ones(4, 3), torch.arange(4) % 2)]
    with pytest.raises(FlowBNNError) as error:
        fb.MNF(epochs=1).fit(nn.Linear(3, 2), data, precision="bf16-true", progress=False)
    assert (error.value.kind, error.value.argument) == ("unsupported", "precision")
    with pytest.raises(FlowBNNError) as error:
        fb.MNF(epochs=1).fit(nn.Linear(3, 2).bfloat16(), data, progress=False)
    assert error.value.argument == "precision"
