"""Tests of the natural-gradient fit of a Gaussian posterior of the noise, against closed forms."""

import math
from functools import partial
from itertools import pairwise

import pytest
import torch
from tests.calibrate.problems import PRIOR_SCALE, LinearRegression, train_memorizing_network
from torch import nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.methods.calibrators.log_temperature import fit_temperatures
from flowbnn.methods.variational import natural_gradient
from flowbnn.methods.variational.block_gaussian import BlockGaussian
from flowbnn.methods.variational.natural_gradient import fit_gaussian
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.noise import NormalAffine

FIXED_PRIOR = {"prior": "fixed", "scale": PRIOR_SCALE}


@pytest.fixture(scope="module")
def memorized():
    return train_memorizing_network()


def test_full_gaussian_is_the_exact_posterior_of_a_linear_network():
    problem = LinearRegression()
    fit = fit_gaussian(*problem.arguments, "full", **FIXED_PRIOR)
    torch.testing.assert_close(fit.gaussian.covariance(), problem.precision.inverse(), rtol=0.02, atol=1e-4)
    assert ((fit.gaussian.mean - problem.mean) / problem.std).abs().max() < 0.2
    assert abs(fit.elbo - float(problem.evidence)) < 0.1 + 3 * fit.error  # the bound is tight


def test_factorized_gaussian_has_the_diagonal_of_the_exact_precision():
    problem = LinearRegression()
    fit = fit_gaussian(*problem.arguments, "factorized", **FIXED_PRIOR)
    q = fit.gaussian
    torch.testing.assert_close(q.variances(), 1.0 / problem.precision.diagonal(), rtol=0.02, atol=1e-4)
    assert fit.elbo < float(problem.evidence) - 0.1
    # it stores no matrix, because layers have thousands of channels
    assert [tensor.shape for tensor in (*q.blocks, *q.roots)] == [(4,), (4,)]
    torch.testing.assert_close(q.multiply_covariance(q.mean), q.variances() * q.mean)
    exact = (
        MultivariateNormal(q.mean, q.covariance()),
        MultivariateNormal(q.prior_mean, q.prior_variance.diag()),
    )
    assert q.kl() == pytest.approx(float(torch.distributions.kl_divergence(*exact)))


@pytest.mark.usefixtures("unrefined")  # the refinement would correct errors of these draws
@pytest.mark.parametrize("seed", range(3))
def test_few_examples_get_several_draws_each(seed):
    """With one draw per example, means were off by 0.05 to 0.4 standard deviations, and the ELBO by 0.7 nats."""
    problem = LinearRegression(5)
    fit = fit_gaussian(*problem.arguments, "full", **FIXED_PRIOR, seed=seed)
    assert ((fit.gaussian.mean - problem.mean) / problem.std).abs().max() < 0.05
    assert abs(fit.elbo - float(problem.evidence)) < 0.2


def test_chain_is_the_gaussian_of_its_precision():
    generator = torch.Generator().manual_seed(1)
    blocks = [torch.eye(size, dtype=torch.float64) * 5 for size in (2, 3, 2)]
    links = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in ((3, 2), (2, 3))]
    ones = torch.ones(7, dtype=torch.float64)
    q = BlockGaussian(ones, blocks, links, ones, 0.25 * ones).factorize()
    precision = torch.block_diag(*q.blocks) + torch.diag(1.0 / q.prior_variance)
    precision[2:5, :2], precision[5:, 2:5] = q.links[0], q.links[1]
    precision = precision.tril() + precision.tril(-1).mT
    covariance = precision.inverse()
    torch.testing.assert_close(q.covariance(), covariance)
    torch.testing.assert_close(q.variances(), covariance.diagonal())
    vector = torch.arange(7, dtype=torch.float64)
    torch.testing.assert_close(q.multiply_covariance(vector), covariance @ vector)
    prior = MultivariateNormal(q.prior_mean, q.prior_variance.diag())
    exact = torch.distributions.kl_divergence(MultivariateNormal(q.mean, covariance), prior)
    assert q.kl() == pytest.approx(float(exact))


class ParallelLayers(nn.Module):
    """Adds the outputs of three linear layers. It is linear in their noise, and the inputs of all layers are correlated."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = (nn.Linear(2, 1, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x[:, :2]) + self.two(x[:, 2:4]) + self.three(x[:, 4:])


def test_chain_is_optimal_if_distant_layers_are_correlated():
    torch.manual_seed(0)
    network, inputs = ParallelLayers().double(), torch.randn(15, 6).double() @ (torch.eye(6) + 0.4).double()
    design = inputs * torch.cat([layer.weight for layer in network.children()], 1).detach()
    exact = design.mT @ design / 0.3**2 + torch.eye(6) / PRIOR_SCALE**2
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    targets = design.sum(1, keepdim=True)
    fit = fit_gaussian(model, fb.likelihoods.Gaussian(0.3), inputs, targets, "chain", **FIXED_PRIOR)

    def divergence(covariance: torch.Tensor) -> torch.Tensor:
        """Returns the KL divergence to the exact posterior from a Gaussian of the same mean."""
        return 0.5 * ((exact @ covariance).trace() - 6.0 - torch.logdet(exact @ covariance))

    # optimize a triangular root of the precision that has the sparsity of a chain
    parameters = torch.eye(6, dtype=torch.float64).requires_grad_()
    mask = torch.ones(6, 6).tril()
    mask[4:, :2] = 0.0

    def loss() -> torch.Tensor:
        root = parameters * mask
        return divergence(torch.linalg.inv(root.mT @ root))

    optimizer = torch.optim.LBFGS([parameters], max_iter=300, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)
    assert float(divergence(fit.gaussian.covariance())) == pytest.approx(loss().item(), abs=2e-3)
    torch.testing.assert_close(fit.gaussian.mean, torch.ones(6).double(), rtol=0, atol=0.02)


def test_derivatives_agree_with_autograd(memorized):
    model = fb.to_stochastic(memorized.network, {"*": NormalAffine()}).double()
    noisy = NoisyNetwork(model, fb.likelihoods.Categorical())
    vectors = torch.rand(3, 42, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.5
    inputs, targets = memorized.inputs[:3].double(), memorized.targets[:3]
    outputs, log_prob, gradient, roots = noisy.derivatives(
        inputs, targets, vectors.clone(), torch.Generator()
    )
    jacobian = torch.autograd.functional.jacobian(lambda z: noisy.outputs(inputs, z), vectors)
    jacobian = torch.stack([jacobian[i, :, i] for i in range(3)])
    p = outputs.softmax(-1)
    torch.testing.assert_close(log_prob, p.log().gather(1, targets[:, None])[:, 0])
    residual = nn.functional.one_hot(targets, 2) - p
    torch.testing.assert_close(gradient, torch.einsum("bc,bcd->d", residual, jacobian))
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    torch.testing.assert_close(roots.mT @ roots, torch.einsum("bcd,bce,bef->df", jacobian, hessian, jacobian))


@pytest.mark.usefixtures("unrefined")
def test_richer_structures_have_a_larger_elbo(memorized):
    model = fb.to_stochastic(memorized.network, {"*": NormalAffine()})
    arguments = model, fb.likelihoods.Categorical(), memorized.inputs, memorized.targets
    fits = [
        fit_gaussian(*arguments, structure, prior="fixed") for structure in ("factorized", "layers", "full")
    ]
    for poorer, richer in pairwise(fits):
        assert richer.elbo > poorer.elbo - 3 * math.hypot(richer.error, poorer.error)
    assert fits[2].elbo > fits[0].elbo + 1.0


@pytest.mark.usefixtures("unrefined")
def test_fitted_prior_has_a_larger_elbo(memorized):
    model = fb.to_stochastic(memorized.network, {"*": NormalAffine()})
    arguments = model, fb.likelihoods.Categorical(), memorized.inputs[:40], memorized.targets[:40]
    fixed_prior, fitted = (fit_gaussian(*arguments, "full", prior=prior) for prior in ("fixed", "fitted"))
    assert fitted.elbo > fixed_prior.elbo
    assert fitted.gaussian.prior_variance.unique().numel() == 3  # one standard deviation per layer


@pytest.mark.parametrize("seed", [0, 2])
def test_outlying_examples_do_not_hide_a_bad_proposal(seed):
    """In a deep network wide noise multiplies up, and a few examples lose everything. Their variance must not hide the loss."""
    torch.manual_seed(seed)
    network = fb.models.MLP(3, (8,) * 12, 3)
    for parameter in network.parameters():
        gain = (2.8 / 8) ** 0.5 if parameter.ndim == 2 else 0.0
        parameter.data = gain * torch.randn(parameter.shape)
    inputs, targets = torch.randn(30, 3), torch.randint(3, (30,))
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    fit = fit_gaussian(model, fb.likelihoods.Categorical(), inputs, targets, "full", prior="fixed", scale=2.0)
    assert min(fit.trace[1:]) > fit.trace[0]
    assert fit.elbo > max(fit.trace) - 10.0
    assert torch.isfinite(fit.gaussian.covariance()).all()


@pytest.mark.usefixtures("unrefined")
def test_chunks_are_halved_if_memory_runs_out(monkeypatch):
    derivatives, sizes = NoisyNetwork.derivatives, []

    def limited(self, inputs, targets, *args, **kwargs):
        sizes.append(len(targets))
        if len(targets) > 16:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return derivatives(self, inputs, targets, *args, **kwargs)

    monkeypatch.setattr(NoisyNetwork, "derivatives", limited)
    problem = LinearRegression()
    fit = fit_gaussian(*problem.arguments, "full", **FIXED_PRIOR)
    torch.testing.assert_close(fit.gaussian.covariance(), problem.precision.inverse(), rtol=0.02, atol=1e-4)
    assert sizes[:5] == [256, 128, 64, 32, 16]


@pytest.mark.parametrize("max_dense_dim", [512, 2])  # by a matrix, and by conjugate gradients
def test_newton_step_uses_the_full_curvature(max_dense_dim):
    generator = torch.Generator().manual_seed(0)
    roots = torch.randn(20, 6, generator=generator, dtype=torch.float64)
    slope, added = torch.randn(2, 6, generator=generator, dtype=torch.float64).abs()
    curvature = 2.0 * roots.T @ roots  # half of the roots are stored, and stand for all
    zero = torch.zeros(())
    estimate = natural_gradient.GaussianEstimate(
        zero, 0.0, slope, [curvature.diagonal()], [], zero, list(roots.split(7))
    )
    expected = torch.linalg.solve(curvature + added.diag(), slope)
    direction = natural_gradient._newton_direction(estimate, added, slope, max_dense_dim)
    torch.testing.assert_close(direction, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("dim", "max_dense_dim", "tolerance"), [(3, 512, 0.2), (60, 2, 0.6)])
def test_mean_of_a_factorized_gaussian_converges_if_inputs_are_correlated(
    dim, max_dense_dim, tolerance, monkeypatch
):
    """With the diagonal of the curvature alone, the mean ended 17 standard deviations away."""
    direction = partial(natural_gradient._newton_direction, max_dense_dim=max_dense_dim)
    monkeypatch.setattr(natural_gradient, "_newton_direction", direction)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, dim, generator=generator, dtype=torch.float64)
    x[:, 1::3] = 0.95 * x[:, ::3] + 0.3 * x[:, 1::3]
    network = nn.Linear(dim, 1, bias=False, dtype=torch.float64).requires_grad_(False)
    nn.init.ones_(network.weight)
    weights = torch.tensor([[1.4], [0.6], [0.8]]).double().repeat(dim // 3, 1)
    y = x @ weights + 0.01 * torch.randn(300, 1, generator=generator).double()
    precision = x.T @ x / 0.01**2 + torch.eye(dim).double() / PRIOR_SCALE**2
    mean = torch.linalg.solve(precision, x.T @ y[:, 0] / 0.01**2 + 1.0 / PRIOR_SCALE**2)
    model = fb.to_stochastic(network, {"*": NormalAffine()})
    fit = fit_gaussian(model, fb.likelihoods.Gaussian(0.01), x, y, "factorized", **FIXED_PRIOR)
    assert float(((fit.gaussian.mean - mean) * precision.diagonal().sqrt()).abs().max()) < tolerance
    std = fit.gaussian.variances().sqrt()
    torch.testing.assert_close(std, precision.diagonal().rsqrt(), rtol=1e-3, atol=0.0)


@pytest.mark.usefixtures("unrefined")
def test_fit_of_an_overconfident_network_starts_at_its_temperature(memorized):
    """Both starts end at the same ELBO. At the temperature, the first estimates are far larger, and fewer steps are rejected."""
    model = fb.to_stochastic(memorized.network, {"*": NormalAffine()})
    arguments = model, fb.likelihoods.Categorical(), memorized.inputs, memorized.targets
    outputs = memorized.network(memorized.inputs).detach().double()[None]
    plain = fb.methods.PointPosterior(memorized.network, fb.likelihoods.Categorical())
    (temperature,) = fit_temperatures(plain, outputs, memorized.targets)
    assert temperature.temperature > 2.0
    cold, tempered = (
        fit_gaussian(*arguments, "full", prior="fixed", temperature=value)
        for value in (1.0, temperature.temperature)
    )
    assert tempered.trace[0] > cold.trace[0] + 10.0
    assert len(tempered.trace) <= len(cold.trace)
    assert abs(tempered.elbo - cold.elbo) < 3 * math.hypot(tempered.error, cold.error) + 0.5


def test_first_step_takes_the_curvature_of_the_data():
    """With the exact covariance, the gap of the ELBO to the evidence is the KL divergence of Gaussians with different means."""
    problem = LinearRegression(5)
    trace = fit_gaussian(*problem.arguments, "full", **FIXED_PRIOR).trace
    deviation = problem.mean - 1.0
    gap = 0.5 * float(deviation @ problem.precision @ deviation)
    assert trace[1] == pytest.approx(float(problem.evidence) - gap, abs=0.1)
    assert trace[1] > trace[0] + 1.0


@pytest.mark.usefixtures("unrefined")
def test_the_mean_of_a_layer_that_is_not_the_last_is_not_divided_if_this_lowers_the_elbo(memorized):
    model = fb.to_stochastic(memorized.network, {"fc1": NormalAffine()})
    arguments = model, fb.likelihoods.Categorical(), memorized.inputs, memorized.targets
    cold, divided = (fit_gaussian(*arguments, prior="fixed", temperature=value) for value in (1.0, 8.0))
    assert divided.trace[0] >= cold.trace[0] - 1e-6


@pytest.mark.usefixtures("unrefined")
def test_a_fit_that_converges_in_its_last_passes_has_converged(monkeypatch):
    arguments = LinearRegression(5).arguments
    monkeypatch.setattr(natural_gradient, "has_converged", lambda trace, error: False)
    fit = fit_gaussian(*arguments, "full", **FIXED_PRIOR)
    assert not fit.converged
    length = len(fit.trace) - 3
    monkeypatch.setattr(natural_gradient, "has_converged", lambda trace, error: len(trace) == length)
    assert fit_gaussian(*arguments, "full", **FIXED_PRIOR).converged
