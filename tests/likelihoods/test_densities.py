"""Tests of conditional densities: flow-shaped and mixture observation noise."""

import math

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.likelihoods import Flow, Gaussian, Mixture, make_likelihood
from flowbnn.methods.laplace.derivatives import output_hessian
from slow_cases import mark_slow

QUIET = {"progress": False, "seed": 0}
LIKELIHOODS = {
    "flow": lambda dim=1: Flow("nsf", bins=5, dim=dim),
    "mixture": lambda dim=1: Mixture(3, dim=dim),
}


@pytest.fixture(params=LIKELIHOODS)
def make(request):
    return LIKELIHOODS[request.param]


def random_outputs(likelihood, rows: int, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return scale * torch.randn(rows, likelihood.num_outputs, generator=generator, dtype=torch.float64)


def test_density_integrates_to_one(make):
    likelihood = make(dim=2)
    outputs = random_outputs(likelihood, 6)
    units = torch.linspace(0.0, 1.0, 50_001, dtype=torch.float64).unsqueeze(1)
    predictive = likelihood.predictive(outputs[None])
    low, high = predictive._part_quantiles(-8.0).amin(0), predictive._part_quantiles(8.0).amax(0)
    for row in range(6):
        grid = low[row] + (high - low)[row] * units
        densities = likelihood.log_densities(outputs[row].expand(len(grid), -1), grid).exp()
        torch.testing.assert_close(
            torch.trapezoid(densities, grid, dim=0), torch.ones(2, dtype=torch.float64), atol=1e-4, rtol=0
        )


def test_log_density_is_the_derivative_of_the_cdf(make):
    likelihood = make()
    outputs, targets = random_outputs(likelihood, 20), torch.linspace(-2, 2, 20, dtype=torch.float64)
    values = targets.clone().requires_grad_()
    predictive = likelihood._make(outputs[None])
    predictive._cdfs(values.reshape(1, -1, 1, 1)[0]).sum().backward()
    torch.testing.assert_close(values.grad.log(), likelihood.log_prob(outputs, targets))


def test_mixture_agrees_with_torch():
    likelihood = Mixture(4)
    outputs, targets = random_outputs(likelihood, 7), torch.linspace(-3, 3, 7, dtype=torch.float64)
    means, log_stds, logits = outputs.chunk(3, 1)
    expected = torch.distributions.MixtureSameFamily(
        torch.distributions.Categorical(logits=logits), torch.distributions.Normal(means, log_stds.exp())
    )
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), expected.log_prob(targets))
    torch.testing.assert_close(likelihood.mean(outputs)[:, 0], expected.mean)
    variance = likelihood.predictive(outputs[None]).variance[:, 0]
    torch.testing.assert_close(variance, expected.variance)


def test_flow_with_an_identity_spline_is_a_gaussian():
    likelihood = Flow(dim=2)
    outputs = torch.zeros(5, likelihood.num_outputs, dtype=torch.float64)
    outputs[:, :4] = torch.randn(5, 4, dtype=torch.float64)
    targets = torch.randn(5, 2, dtype=torch.float64)
    gaussian = torch.cat([outputs[:, :2], 2.0 * outputs[:, 2:4]], 1)
    expected = Gaussian("predicted").log_prob(gaussian, targets)
    torch.testing.assert_close(likelihood.log_prob(outputs, targets), expected)


def test_gradients_agree_with_finite_differences(make):
    likelihood = make()
    outputs, targets = random_outputs(likelihood, 3), torch.tensor([-1.0, 0.1, 4.0], dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda values: likelihood.log_prob(values, targets), outputs.requires_grad_()
    )


def test_quadrature_nodes_give_mean_and_variance(make):
    likelihood = make(dim=2)
    outputs = random_outputs(likelihood, 5, 0.3)
    points, weights = likelihood.nodes(outputs)
    mean = (weights * points).sum(0)
    predictive = likelihood.predictive(outputs[None])
    torch.testing.assert_close(mean, predictive.mean, atol=1e-4, rtol=0)
    variance = (weights * (points - mean).square()).sum(0)
    torch.testing.assert_close(variance, predictive.variance, atol=0, rtol=1e-3)


def test_curvature_is_the_fisher_information(make):
    likelihood = make()
    outputs = random_outputs(likelihood, 2, 0.5)
    hessian = output_hessian(likelihood, outputs, torch.zeros(2), "ggn", torch.Generator())
    predictive = likelihood.predictive(outputs[None])
    for row in range(2):
        grid = predictive.mean[row] + predictive.std[row] * torch.linspace(-12, 12, 40_001).double()
        leaf = outputs[row].repeat(len(grid), 1).requires_grad_()
        log_density = likelihood.log_prob(leaf, grid)
        (gradient,) = torch.autograd.grad(log_density.sum(), leaf)
        mass = log_density.detach().exp() * (grid[1] - grid[0])
        expected = gradient.mT @ (mass.unsqueeze(1) * gradient)
        error = (hessian.matrices[row] - expected).abs().max()
        assert error < 0.01 * expected.abs().max()
    columns = hessian.columns(0, hessian.count)
    torch.testing.assert_close(columns.mT @ columns, hessian.matrices)
    torch.testing.assert_close(hessian.total(), hessian.matrices.sum(0))


@pytest.mark.parametrize(
    ("outputs", "targets", "kind"),
    [
        ((4, 3), (4,), "outputs"),
        ((4,), (4,), "outputs"),
        ((4, None), (4, 2), "targets"),
        ((4, None), (5,), "targets"),
    ],
)
def test_wrong_numbers_of_outputs_and_targets_are_refused(make, outputs, targets, kind):
    likelihood = make()
    shape = [likelihood.num_outputs if size is None else size for size in outputs]
    with pytest.raises(FlowBNNError) as caught:
        likelihood.check(torch.zeros(shape), torch.zeros(targets))
    assert (caught.value.kind, caught.value.argument) == (kind, kind)
    if kind == "outputs":
        assert str(likelihood.num_outputs) in str(caught.value)


def test_settings_are_saved(make):
    likelihood = make(dim=2)
    likelihood.shape = (2,)
    loaded = make_likelihood(likelihood.to_dict())
    assert (repr(loaded), loaded.shape) == (repr(likelihood), (2,))
    assert isinstance(make_likelihood("flow"), Flow)
    assert isinstance(make_likelihood("mixture"), Mixture)


# -------------------- fits


def skewed(rows: int, unit: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns inputs and targets with skewed noise, in a unit."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.rand(rows, 1, generator=generator) * 2 - 1
    noise = -torch.rand(rows, generator=generator).log() * (0.5 + inputs[:, 0].abs())
    return inputs, unit * (inputs[:, 0] + noise)


def network_for(likelihood) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, likelihood.num_outputs))


METHODS = {
    "node-noise": lambda: fb.NodeNoise(epochs=2),
    "ensemble": lambda: fb.DeepEnsemble(2, epochs=2),
    "dropout": lambda: fb.MCDropout(epochs=2),
    "bbb": lambda: fb.BayesByBackprop(epochs=2),
    "mnf": lambda: fb.MNF(epochs=2),
    "swag": lambda: fb.SWAG(epochs=6),
    "sgld": lambda: fb.SGLD(epochs=4, samples=4, cycles=2),
    "laplace": lambda: fb.Laplace(epochs=2),
    "laplace-full": lambda: fb.Laplace("full", epochs=2, curvature="sampled"),
    "temperature": lambda: fb.Temperature(fb.MAP(epochs=2)),
}


@pytest.mark.parametrize("name", mark_slow(METHODS, ["node-noise", "ensemble", "swag", "laplace"]))
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_every_method_fits_predicts_saves_and_loads(name, kind, tmp_path):
    likelihood = LIKELIHOODS[kind]()
    network, (inputs, targets) = network_for(likelihood), skewed(64)
    loader = fb.data.TensorLoader(inputs, targets, batch_size=32)
    posterior = METHODS[name]().fit(network, loader, likelihood=likelihood, **QUIET)
    predictive = posterior.predict(inputs, samples=4, seed=0)
    assert predictive.mean.shape == (64,)
    assert torch.isfinite(predictive.nll(targets)).all()
    loaded = fb.load_posterior(posterior.save(tmp_path / "file"), network)
    torch.testing.assert_close(
        loaded.predict(inputs, samples=4, seed=0).nll(targets), predictive.nll(targets)
    )


@pytest.mark.parametrize("unit", [pytest.param(1.0, marks=pytest.mark.slow), 1e4])
def test_skewed_noise_is_fitted_better_than_by_a_gaussian_in_any_unit(make, unit):
    train, test = skewed(800, unit), skewed(1600, unit)
    test = test[0][800:], test[1][800:]
    nll = {}
    for name, likelihood in (("shaped", make()), ("gaussian", Gaussian("predicted"))):
        width = getattr(likelihood, "num_outputs", 2)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, width))
        loader = fb.data.TensorLoader(*train, batch_size=100)
        posterior = fb.MLE(epochs=40, lr=0.02).fit(network, loader, likelihood=likelihood, **QUIET)
        nll[name] = posterior.predict(test[0]).nll(test[1]).mean().item() - math.log(unit)
    assert nll["shaped"] < nll["gaussian"] - 0.05


@pytest.mark.parametrize("method", [fb.MLE(epochs=1), fb.DeepEnsemble(3, epochs=1)], ids=["one", "ensemble"])
def test_repeated_targets_are_reported_once(make, method):
    inputs, targets = skewed(200)
    targets[:60] = 1.0
    likelihood = make()
    loader = fb.data.TensorLoader(inputs, targets, batch_size=100)
    with pytest.warns(FlowBNNWarning) as caught:
        method.fit(network_for(likelihood), loader, likelihood=likelihood, **QUIET)
    repeated = [item.message for item in caught if item.message.kind == "repeated"]
    assert len(repeated) == 1
    assert repeated[0].fields["share"] == pytest.approx(0.3)


@pytest.mark.usefixtures("unrefined")
def test_calibration_accepts_conditional_densities(make):
    likelihood = make()
    inputs, targets = skewed(200)  # fewer examples need as many draws, in more passes
    posterior = fb.calibrate(
        network_for(likelihood), [(inputs, targets)], likelihood=likelihood, folds=0, **QUIET
    )
    assert torch.isfinite(posterior.predict(inputs, samples=8, seed=0).nll(targets)).all()


def test_constant_targets_are_reported_and_give_finite_predictions(make):
    inputs, likelihood = skewed(64)[0], make()
    loader = fb.data.TensorLoader(inputs, torch.full((64,), 5.0), batch_size=32)
    with pytest.warns(FlowBNNWarning) as caught:
        posterior = fb.MLE(epochs=5).fit(network_for(likelihood), loader, likelihood=likelihood, **QUIET)
    shares = [item.message.fields.get("share") for item in caught if item.message.kind == "repeated"]
    assert shares == [1.0]
    assert torch.isfinite(posterior.predict(inputs).mean).all()
