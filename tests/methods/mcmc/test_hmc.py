"""Tests of HMC over the weights of networks, and over the noise on their layers."""

import math

import pytest
import torch
from chain_problems import assert_recovered, regression
from method_cases import fitted_line
from problems import conjugate
from small_problem import QUIET, blobs, loader, network
from torch import nn

import flowbnn as fb
from flowbnn.diagnostics import standard_error
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import ChainPosterior, NoiseChainPosterior
from flowbnn.methods.mcmc.chain_sampler import ChainSampler
from flowbnn.methods.mcmc.potential import NetworkPotential
from flowbnn.posterior import PredictOptions
from flowbnn.training import load_tensors, save_tensors


def test_conjugate_regression_is_exact():
    problem, posterior = conjugate(bias=True)[0], fitted_line("hmc")
    assert_recovered(posterior, problem.mean, problem.covariance)
    diagnostics = posterior.diagnostics()
    assert diagnostics.rhat_outputs < 1.05
    assert diagnostics.rhat_weights < 1.05
    assert diagnostics.ess_outputs > 100
    assert diagnostics.divergences == 0
    assert (diagnostics.chains, diagnostics.draws) == (6, 100)
    assert "6 chains of 100 draws" in str(diagnostics)


def small(**options):
    defaults = {"samples": 6, "warmup": 6, "chains": 2, "steps": 4, "epochs": 0, "prior_scale": 0.5}
    return fb.HMC(**defaults | options)


def test_vectorized_and_sequential_chains_are_equal(monkeypatch):
    data = [blobs(60).tensors]
    net = network().double()
    vectorized = small().fit(net, data, seed=1, **QUIET)

    def unsupported(function):
        raise RuntimeError("vmap is not supported")

    monkeypatch.setattr("flowbnn.methods.mcmc.potential.vmap", unsupported)
    sequential = small().fit(net, data, seed=1, **QUIET)
    for name, value in vectorized.members.items():
        assert torch.allclose(value, sequential.members[name], atol=1e-8)


def test_network_without_vmap_support_is_sampled():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            outputs = self.layer(x)
            # vmap does not support .item()
            return outputs * 0.5 if outputs.detach().sum().item() > 1e9 else outputs

    posterior = small().fit(Branching(), [blobs(30).tensors], seed=0, **QUIET)
    assert len(posterior) == 12


def test_energy_is_negative_log_likelihood_plus_negative_log_prior():
    inputs, labels = blobs(50).tensors
    net = network().double()
    for rows, scale in ((4096, 1.0), (16, 3.0)):
        data = (inputs.double(), labels)
        potential = NetworkPotential(
            net, fb.likelihoods.Categorical(), data, round(50 * scale), 0.7, rows_per_pass=rows
        )
        energy, gradient = potential(potential.start[None])
        loss = scale * nn.functional.cross_entropy(net(inputs.double()), labels, reduction="sum")
        loss = loss + sum(p.square().sum() for p in net.parameters()) / (2 * 0.7**2)
        gradients = torch.autograd.grad(loss, list(net.parameters()))
        assert energy.item() == pytest.approx(loss.item(), rel=1e-12)
        assert torch.allclose(gradient[0], torch.cat([value.flatten() for value in gradients]), atol=1e-10)


def test_frozen_weights_are_fixed():
    net = network()
    net[0].requires_grad_(False)
    posterior = small().fit(net, [blobs(30).tensors], seed=0, **QUIET)
    assert set(posterior.names) == {"2.weight", "2.bias"}


def test_resumed_run_gives_the_same_draws(tmp_path, monkeypatch):
    data, method = loader(blobs(60)), small(epochs=2, samples=8, warmup=52)
    expected = method.fit(network(), data, seed=2, **QUIET)
    advance, calls = ChainSampler.advance, []

    def interrupt(self, number):
        calls.append(number)
        if len(calls) == 56:
            raise KeyboardInterrupt
        advance(self, number)

    monkeypatch.setattr(ChainSampler, "advance", interrupt)
    checkpoint = {"checkpoint": tmp_path, "checkpoint_every": 5, "resume": True}
    with pytest.raises(KeyboardInterrupt):
        method.fit(network(), data, seed=2, **checkpoint, **QUIET)
    numbers = []
    monkeypatch.setattr(
        ChainSampler, "advance", lambda self, number: (numbers.append(number), advance(self, number))
    )
    resumed = method.fit(network(), data, seed=2, **checkpoint, **QUIET)
    assert numbers[0] == 55  # only the interrupted transition is repeated
    for name, value in expected.members.items():
        assert torch.equal(value, resumed.members[name])
    assert torch.equal(expected.record["energy"], resumed.record["energy"])
    with pytest.raises(FlowBNNError) as error:
        small(epochs=2, samples=8, warmup=52, steps=5).fit(network(), data, seed=2, **checkpoint, **QUIET)
    assert (error.value.kind, error.value.argument) == ("resume", "steps")


def test_resume_detects_different_data_and_damaged_files(tmp_path):
    inputs, targets = blobs(60).tensors
    checkpoint = {"seed": 2, "checkpoint": tmp_path, "resume": True, **QUIET}
    small().fit(network(), [(inputs, targets)], **checkpoint)
    with pytest.warns(FlowBNNWarning) as caught:
        small(samples=8).fit(network(), [(inputs.flip(0), targets)], **checkpoint)
    assert caught[0].message.fields["kind"] == "changed data"
    path = tmp_path / "chains.safetensors"
    tensors, document = load_tensors(path)
    mass = next(name for name in tensors if name.startswith("warmup/") and tensors[name].ndim)
    wrong = {"draws/position": torch.zeros(2, 8, 10_000), mass: tensors[mass][:1], "more": torch.zeros(1)}
    for name, value in wrong.items():
        save_tensors(path, tensors | {name: value}, document)
        with pytest.raises(FlowBNNError) as error:
            small(samples=10).fit(network(), [(inputs.flip(0), targets)], **checkpoint)
        assert error.value.kind == "architecture"


def test_loaded_posterior_predicts_the_same(tmp_path):
    inputs = blobs().tensors[0]
    for method, kind in ((small(), ChainPosterior), (small(variables="noise"), NoiseChainPosterior)):
        posterior = method.fit(network(), [blobs(60).tensors], seed=0, **QUIET)
        path = posterior.save(tmp_path / f"{kind.kind}.safetensors")
        loaded = fb.load_posterior(path, network())
        assert type(loaded) is kind
        assert torch.equal(loaded.predict(inputs).probabilities, posterior.predict(inputs).probabilities)
        assert loaded.diagnostics() == posterior.diagnostics()
        assert repr(loaded) == repr(posterior)


def test_learned_noise_is_sampled_with_the_weights(tmp_path):
    """Compares with quadrature for a constant with unknown noise, whose weight is integrated in closed form."""
    generator = torch.Generator().manual_seed(0)
    targets = 0.4 + 0.05 * torch.randn(12, 1, generator=generator, dtype=torch.float64)
    inputs = torch.ones_like(targets)
    net = nn.Linear(1, 1, bias=False).double()
    with torch.no_grad():
        net.weight.fill_(0.4)
    posterior = fb.HMC(samples=40, warmup=40, chains=20, steps=5, epochs=0).fit(
        net, [(inputs, targets[:, 0])], seed=0, **QUIET
    )
    center = 0.5 * (targets - 0.4).square().mean().log()
    grid = center + torch.linspace(-3, 3, 2001, dtype=torch.float64)
    identity = torch.eye(12, dtype=torch.float64)
    covariance = grid.exp().square()[:, None, None] * identity + 1.0
    normal = torch.distributions.MultivariateNormal(torch.zeros(12, dtype=torch.float64), covariance)
    weight = (normal.log_prob(targets[:, 0]) - 0.5 * (grid - center).square()).softmax(0)
    mean = (weight * grid).sum()
    variance = (weight * (grid - mean).square()).sum()
    levels = posterior.record["log_noise"].double()
    assert ((levels.mean((0, 1)) - mean).abs() < 4 * standard_error(levels)).all()
    squares = (levels - mean).square()
    assert ((squares.mean((0, 1)) - variance).abs() < 4 * standard_error(squares)).all()
    predictive = posterior.predict(inputs[:3])
    assert predictive.mean.shape == (3,)
    assert torch.allclose(
        predictive.sample_variances[:, 0, 0].double(), (2 * posterior.log_noise[:, 0]).exp(), rtol=1e-5
    )
    loaded = fb.load_posterior(posterior.save(tmp_path / "chains.safetensors"), net)
    assert torch.equal(loaded.predict(inputs[:3]).sample_variances, predictive.sample_variances)


def test_noise_of_a_linear_layer_is_exact():
    """For fixed weights w, the regression is linear in the noise z: y = sum_j w_j x_j z_j, z ~ N(1, s^2)."""
    inputs, targets, _, _ = regression()
    net = nn.Linear(2, 1, bias=False).double()
    with torch.no_grad():
        net.weight.copy_(torch.tensor([[0.9, -1.7]]))
    design = inputs * net.weight.detach()
    covariance = torch.linalg.inv(design.T @ design / 0.25 + torch.eye(2, dtype=torch.float64) / 0.4**2)
    mean = covariance @ ((design.T @ targets)[:, 0] / 0.25 + 1.0 / 0.4**2)
    posterior = fb.HMC(
        samples=40, warmup=40, chains=24, steps=5, epochs=0, variables="noise", noise_scale=0.4
    ).fit(net, [(inputs, targets)], likelihood=fb.likelihoods.Gaussian(noise=0.5), seed=0, **QUIET)
    draws = posterior.chains[""]
    deviations = draws - mean
    products = deviations[..., :, None] * deviations[..., None, :]
    assert ((draws.mean((0, 1)) - mean).abs() < 4 * standard_error(draws)).all()
    assert ((products.mean((0, 1)) - covariance).abs() < 4 * standard_error(products)).all()
    expected = inputs[:5] @ (posterior.members[""][7] * net.weight.detach()[0])
    assert torch.allclose(posterior.member(7)(inputs[:5])[:, 0], expected)
    outputs = posterior.collect(inputs[:5], PredictOptions(len(posterior)))[0]
    assert torch.allclose(outputs[7, :, 0], expected)
    draws = posterior.draws(len(posterior))
    assert list(draws) == [""]
    assert torch.equal(draws[""], posterior.members[""])


@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("method", [fb.HMC, fb.NUTS])
def test_noise_is_sampled_with_frozen_weights(method, epochs):
    net = network().requires_grad_(False)
    posterior = method(samples=2, warmup=2, chains=2, variables="noise", epochs=epochs).fit(
        net, [blobs(60).tensors], seed=0, **QUIET
    )
    assert set(posterior.draws(3)) == set(posterior.members)
    assert all(torch.equal(a, b) for a, b in zip(net.parameters(), posterior.model.parameters(), strict=True))


def test_noise_on_selected_convolutions():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.Linear(4, 3)

        def forward(self, x):
            return self.head(self.norm(self.conv(x)).relu().mean((-1, -2)))

    data = [(torch.randn(20, 2, 6, 6), torch.arange(20) % 3)]
    net = Net()
    posterior = small(variables="noise", layers="conv").fit(net, data, seed=0, **QUIET)
    assert posterior.names == ["conv.weight"]
    assert posterior.members["conv"].shape == (12, 2)
    with torch.no_grad():
        net.eval()
        inputs = data[0][0]
        scaled = net.head(
            net.norm(net.conv(inputs * posterior.members["conv"][3].view(1, 2, 1, 1))).relu().mean((-1, -2))
        )
        assert torch.allclose(posterior.member(3)(inputs), scaled, atol=1e-5)


def test_many_weights_raise_a_warning_before_training(monkeypatch):
    net = nn.Linear(4, 3)
    monkeypatch.setattr(fb.HMC, "max_variables", 10)

    def fail(*args, **options):
        raise AssertionError("training has started")

    monkeypatch.setattr(fb.HMC, "fit_point", fail)
    with pytest.raises(FlowBNNWarning) as warning:
        small(epochs=3).fit(net, [blobs(30).tensors], seed=0, **QUIET)
    assert warning.value.fields["kind"] == "size"
    assert warning.value.fields["size"] == 15


def test_divergences_and_large_rhat_raise_warnings():
    posterior = small().fit(network(), [blobs(30).tensors], seed=0, **QUIET)
    posterior.record["divergent"][0, 0] = True
    with pytest.warns(FlowBNNWarning) as caught:
        posterior.warn_not_converged()
    assert caught[0].message.fields["kind"] == "divergence"
    assert caught[0].message.fields["divergences"] == 1
    posterior.record["divergent"][:] = False
    draws = torch.randn(2, 120, 5)
    draws[0] += 3.0
    posterior.record["outputs"], posterior.record["energy"] = draws, torch.zeros(2, 120)
    with pytest.warns(FlowBNNWarning) as caught:
        posterior.warn_not_converged()
    assert caught[0].message.fields["kind"] == "rhat"
    with pytest.warns(FlowBNNWarning) as caught:
        posterior.warn_not_converged(thin=8)
    fields = caught[0].message.fields
    assert (fields["thin"], fields["warmup"]) == (16, 200)  # longer than the run was


def test_unsupported_networks_are_refused():
    class RandomNetwork(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(nn.functional.dropout(x, 0.5, training=True))

    data = [blobs(30).tensors]
    recurrent = nn.ModuleDict({"layer": nn.GRU(4, 3)})
    recurrent.forward = lambda x: recurrent["layer"](x)[0]
    broken = network()
    with torch.no_grad():
        broken[0].weight[0, 0] = math.nan
    with pytest.raises(FlowBNNError) as error:
        small().fit(RandomNetwork(), data, seed=0, **QUIET)
    assert (error.value.kind, error.value.argument) == ("random network", "network")
    with pytest.raises(FlowBNNError) as error:
        small(variables="noise").fit(recurrent, data, seed=0, **QUIET)
    assert (error.value.kind, error.value.layer) == ("layer", "layer")
    with pytest.raises(FlowBNNError) as error:
        small(variables="noise", layers="fc*").fit(network(), data, seed=0, **QUIET)
    assert (error.value.kind, error.value.argument) == ("layer", "layers")
    with pytest.raises(FlowBNNError) as error:
        small().fit(network(), data, devices=2, **QUIET)
    assert error.value.argument == "devices"
    with pytest.raises(FlowBNNError) as error:
        small().fit(broken, data, **QUIET)
    assert error.value.kind == "not finite"


class FakeSampler:
    """Sampler that records the number of transitions per draw of every round."""

    def __init__(self):
        self.thin, self.rounds = 1, []

    def run(self, resume, progress, description):
        self.rounds.append((self.thin, resume))
        return {"position": torch.zeros(2, 3, 1)}

    def extend(self):
        self.thin *= 2


@pytest.mark.parametrize(
    ("samples", "rhats", "rounds"),
    [
        (None, [1.3, 1.2, 1.0], [1, 2, 4]),
        (None, [1.3] * 4, [1, 2, 4, 8]),
        (200, [1.3], [1]),
        (None, [None], [1]),
    ],
    ids=["until they agree", "budget", "fixed", "unknown"],
)
def test_default_chains_are_extended(monkeypatch, samples, rhats, rounds):
    values, sampler = iter(rhats), FakeSampler()
    monkeypatch.setattr("flowbnn.methods.mcmc.hmc.outputs_rhat", lambda outputs: next(values))
    potential = type("Potential", (), {"function_values": staticmethod(lambda position: position)})
    options = fb.methods.FitOptions(checkpoint="chains", resume=True, **QUIET)
    fb.HMC(samples=samples)._sample(sampler, potential, options)
    assert [thin for thin, _ in sampler.rounds] == rounds
    assert [resume for _, resume in sampler.rounds] == [True] + [False] * (len(rounds) - 1)


def test_thin_of_the_warning_about_chains_is_checked():
    posterior = small(samples=4).fit(network(), [blobs(12).tensors], seed=0, **QUIET)
    with pytest.raises(FlowBNNError) as error:
        posterior.warn_not_converged(thin=-1)
    assert (error.value.kind, error.value.argument) == ("value", "thin")
