"""Tests of ModeEnsemble on densities with known modes, and of the mixture of its members."""

import math

import pytest
import torch
from problems import QUIET, blobs, lines, loader, small
from torch import nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods.modes.mode_mixture import ModeMixture

NOISE, SCALE = 0.3, 0.5


@pytest.fixture(scope="module")
def linear():
    """Returns a linear network, its data, and mean and covariance of the exact posterior of the noise on its inputs."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator).double()
    network = nn.Linear(3, 1, bias=False).double()
    with torch.no_grad():
        network.weight.copy_(torch.tensor([[1.0, -0.5, 0.7]]))
    truth = torch.tensor([1.5, -0.2, 0.9]).double()
    targets = inputs @ truth + NOISE * torch.randn(40, generator=generator).double()
    design = inputs * network.weight.detach()
    precision = design.T @ design / NOISE**2 + torch.eye(3).double() / SCALE**2
    mean = torch.linalg.solve(precision, design.T @ targets / NOISE**2 + 1.0 / SCALE**2)
    return network, [(inputs, targets[:, None])], mean, torch.linalg.inv(precision)


def fit(linear, **settings):
    method = fb.ModeEnsemble(6, epochs=0, prior_scale=SCALE, steps=200, **settings)
    return method.fit(linear[0], linear[1], likelihood=fb.likelihoods.Gaussian(NOISE), seed=0, **QUIET)


def test_all_members_of_a_linear_network_reach_its_mode(linear):
    posterior = fit(linear)
    assert (posterior.modes[""] - linear[2]).abs().max() < 1e-4
    assert posterior.energy.std() < 1e-6
    assert repr(posterior).startswith("ModePosterior(Linear, 6 members at 1 mode,")
    with pytest.raises(FlowBNNError) as error:
        posterior.log_prob(posterior.draws(2, seed=0))
    assert error.value.kind == "unsupported"


@pytest.mark.parametrize("full", [True, False], ids=["full", "diagonal"])
def test_laplace_width_is_exact_for_a_linear_network(linear, full, monkeypatch, tmp_path):
    monkeypatch.setattr(fb.ModeEnsemble, "max_full_dim", 3 if full else 2)
    posterior = fit(linear, width="laplace")
    _, _, mean, covariance = linear
    if not full:
        covariance = torch.diag(1.0 / torch.linalg.inv(covariance).diagonal())
    draws = posterior.draws(3840, seed=0)
    white = torch.linalg.cholesky(torch.linalg.inv(covariance)).T
    assert (torch.cov((draws[""].double() @ white.T).T) - torch.eye(3)).abs().max() < 5 * math.sqrt(2 / 3840)
    points = {"": draws[""][:5]}
    exact = MultivariateNormal(mean, covariance).log_prob(points[""].double())
    torch.testing.assert_close(posterior.log_prob(points).double(), exact, rtol=0, atol=1e-3)
    loaded = fb.load_posterior(posterior.save(tmp_path / "modes"), linear[0])
    inputs = linear[1][0][0]
    assert posterior.default_samples == loaded.default_samples == 24
    assert torch.equal(posterior.predict(inputs, seed=3).samples, loaded.predict(inputs, seed=3).samples)
    assert torch.equal(posterior.energy, loaded.energy)


def test_covariance_of_classification_is_the_inverse_hessian():
    torch.manual_seed(0)
    network, inputs, labels = nn.Linear(3, 5).double(), torch.randn(30, 3).double(), torch.arange(30) % 5
    method = fb.ModeEnsemble(2, epochs=0, prior_scale=SCALE, steps=50, width="laplace")
    posterior = method.fit(network, [(inputs, labels)], seed=0, **QUIET)

    def energy(z):
        loss = nn.functional.cross_entropy(network(inputs * z), labels, reduction="sum")
        return loss + 0.5 * ((z - 1.0) / SCALE).square().sum()

    hessian = torch.autograd.functional.hessian(energy, posterior.modes[""][0])
    root = posterior.base.root[0].detach()
    torch.testing.assert_close(root @ root.T, torch.linalg.inv(hessian), rtol=1e-6, atol=0)
    torch.testing.assert_close(posterior.energy[0], energy(posterior.modes[""][0]).detach())


def test_mixture_equals_torch_mixture():
    torch.manual_seed(0)
    loc, root = torch.randn(4, 3).double(), torch.randn(4, 3, 3).double().tril()
    root.diagonal(dim1=1, dim2=2).abs_().add_(0.5)
    mixture = ModeMixture(loc, root)
    expected = MixtureSameFamily(
        Categorical(torch.ones(4).double()), MultivariateNormal(loc, scale_tril=root)
    )
    points = torch.randn(7, 3).double()
    torch.testing.assert_close(mixture.log_prob(points), expected.log_prob(points))
    torch.testing.assert_close(mixture.mean, expected.mean)
    torch.testing.assert_close(mixture.variance, expected.variance)
    draws = mixture.rsample((40_000,), torch.Generator().manual_seed(0))
    assert ((draws.var(0) / mixture.variance).log().abs() < 0.05).all()


def two_modes():
    """Returns a network with outputs z1 z2 x and targets 4 x, so that both factors are near 2 or near -2."""
    inputs = torch.linspace(-1, 1, 21).double()[:, None]
    network = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)).double()
    for parameter in network.parameters():
        nn.init.ones_(parameter)
    return network, [(inputs, 4.0 * inputs)], fb.likelihoods.Gaussian(1.0)


def test_both_modes_of_a_known_density_are_found():
    network, batches, likelihood = two_modes()
    method = fb.ModeEnsemble(16, epochs=0, prior_scale=2.0, steps=300)
    posterior = method.fit(network, batches, likelihood=likelihood, seed=0, **QUIET)
    # with z1 = z2 = a the log density is -S (4 - a^2)^2 / 2 - (a - 1)^2 / 4; its derivative is a cubic
    square = float(batches[0][0].square().sum())
    companion = torch.tensor(
        [[0, (8 * square - 0.5) / (2 * square), 0.5 / (2 * square)], [1, 0, 0], [0, 1, 0]]
    )
    low, _, high = torch.linalg.eigvals(companion).real.sort().values.tolist()
    modes = torch.cat(list(posterior.modes.values()), 1).double()
    positive = modes[:, 0] > 0
    assert (modes[positive] - high).abs().max() < 1e-3
    assert (modes[~positive] - low).abs().max() < 1e-3
    assert "16 members at 2 modes" in repr(posterior)
    assert posterior.energy[positive].max() < posterior.energy[~positive].min()


def test_prediction_takes_every_member_once_for_any_seed():
    network, data = small(), blobs()
    posterior = fb.ModeEnsemble(5, epochs=0, prior_scale=2.0, steps=20).fit(
        network, loader(data), seed=0, **QUIET
    )
    inputs = data.tensors[0][:4]
    modes = posterior.modes
    expected = []
    with torch.no_grad():
        for member in range(5):
            hidden = network[1](network[0](inputs * modes["0"][member]))
            expected.append(network[2](hidden * modes["2"][member]).log_softmax(-1))
    for seed in (None, 0, 1):
        samples = posterior.predict(inputs, seed=seed).log_samples
        errors = torch.tensor([[float((a - b).abs().max()) for b in expected] for a in samples])
        assert sorted(errors.argmin(1).tolist()) == list(range(5))
        assert errors.min(1).values.max() < 1e-5


def test_minibatches_end_near_the_mode(linear):
    network, [(inputs, targets)], mean, covariance = linear
    posterior = fit((network, [(inputs, targets)]), batch_size=8)
    assert ((posterior.modes[""] - mean) / covariance.diagonal().sqrt()).abs().max() < 1.0


def test_prior_scale_is_the_best_on_validation_data(tmp_path):
    train, held_out = loader(blobs()), loader(blobs(60))
    method = fb.ModeEnsemble(2, epochs=2, steps=20)
    posterior = method.fit(small(), train, validation=held_out, seed=0, **QUIET)
    assert list(posterior.validation_nll) == [0.25, 0.5, 1.0, 2.0]
    loaded = fb.load_posterior(posterior.save(tmp_path / "modes"), small())
    assert loaded.validation_nll == posterior.validation_nll
    best = min(posterior.validation_nll, key=posterior.validation_nll.__getitem__)
    recipes = posterior.document()["recipes"]
    assert {recipe["prior_scale"] for recipe in recipes.values()} == {best}
    nll = fb.evaluate(posterior, held_out, progress=False)["nll"]
    assert nll == pytest.approx(posterior.validation_nll[best], rel=1e-5)
    with pytest.raises(FlowBNNError) as error:
        fb.ModeEnsemble(2, epochs=0).fit(small(), train, validation=[], **QUIET)
    assert error.value.kind == "loader"
    assert "\n" not in str(error.value)
    empty = [(inputs[:0], targets[:0]) for inputs, targets in train]
    for method in (fb.ModeEnsemble(2, epochs=0), fb.MLE(epochs=1), fb.NodeNoise(epochs=1)):
        with pytest.raises(FlowBNNError) as error:
            method.fit(small(), train, validation=empty, **QUIET)
        assert error.value.kind == "loader"


def test_noise_of_a_frozen_network_is_fitted_to_the_members():
    inputs, targets = lines().tensors
    network = small(2).requires_grad_(False)
    batches = [(inputs, targets)]
    posterior = fb.ModeEnsemble(3, epochs=0, steps=30, layers="2").fit(network, batches, seed=0, **QUIET)
    assert list(posterior.modes) == ["2"]
    other = fb.ModeEnsemble(3, epochs=0, steps=2, side="output").fit(network, batches, seed=0, **QUIET)
    assert [modes.shape[1] for modes in other.modes.values()] == [6, 2]
    residuals = posterior.predict(inputs).samples - targets
    std = residuals.square().mean((0, 1)).sqrt()
    torch.testing.assert_close(posterior.likelihood.log_scale.exp().to(std), std, rtol=1e-4, atol=0)
    parameters = dict(network.named_parameters())
    assert all(
        torch.equal(parameters[name], value)
        for name, value in posterior.sample(0).named_parameters()
        if name in ("0.weight", "2.bias")
    )


def test_laplace_width_of_predicted_noise_is_the_inverse_fisher_information(linear):
    """Outputs are a mean and a log-variance, with Fisher information ``1 / variance`` and ``1 / 2``."""
    torch.manual_seed(0)
    network, (inputs, targets) = nn.Linear(3, 2).double(), linear[1][0]
    method = fb.ModeEnsemble(2, epochs=0, prior_scale=SCALE, steps=100, width="laplace")
    likelihood = fb.likelihoods.Gaussian("predicted")
    posterior = method.fit(network, linear[1], likelihood=likelihood, seed=0, **QUIET)
    draws, weight = posterior.draws(3840, seed=0)[""].double(), network.weight.detach()
    for member, mode in enumerate(posterior.modes[""].double()):
        log_variances = (inputs * mode) @ weight[1] + network.bias.detach()[1]
        rows = torch.cat(
            [inputs * weight[0] * (-0.5 * log_variances).exp()[:, None], inputs * weight[1] * 0.5**0.5]
        )
        precision = rows.T @ rows + torch.eye(3).double() / SCALE**2
        white = (draws[member::2] - mode) @ torch.linalg.cholesky(precision)
        assert (torch.cov(white.T) - torch.eye(3)).abs().max() < 5 * math.sqrt(2 / 1920)
    assert posterior.predict(inputs, seed=0).mean.shape == targets.shape
