"""Tests of the refinement of a Gaussian posterior of the noise, against a maximum of the ELBO by quadrature."""

import pytest
import torch
from torch import Tensor, nn
from torch.quasirandom import SobolEngine

import flowbnn as fb
from flowbnn.likelihoods import Categorical
from flowbnn.methods.variational.hessian_refinement import HessianRefinement
from flowbnn.methods.variational.natural_gradient import fit_gaussian
from flowbnn.methods.variational.noisy_network import NoisyNetwork
from flowbnn.noise import NormalAffine

DIM = 6  # two inputs and four hidden units


def make_problem(count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """Returns a 2-4-3 tanh network with noise, inputs, and labels that are drawn from the network."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(3.0)
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, 2, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(network(inputs).detach().softmax(-1), 1, generator=generator)[:, 0]
    return fb.to_stochastic(network, {"*": NormalAffine()}), inputs, labels


def normal_points(count: int) -> Tensor:
    """Returns quasi-random standard normal points with their mirror images, whose second moments are exact."""
    uniform = SobolEngine(DIM, scramble=True, seed=0).draw(count, dtype=torch.float64)
    points = torch.special.ndtri(uniform.clamp(1e-9, 1 - 1e-9))
    points = torch.cat([points, -points])
    root = torch.linalg.cholesky(points.mT @ points / len(points))
    return torch.linalg.solve_triangular(root, points.mT, upper=False).mT


class Elbo:
    """ELBO of a Gaussian by a fixed set of quasi-random points, up to the error of the quadrature."""

    def __init__(self, model: nn.Module, inputs: Tensor, labels: Tensor, points: int) -> None:
        self.network = NoisyNetwork(model, Categorical())
        self.points, self.count = normal_points(points), len(labels)
        self.inputs, self.labels = inputs.repeat(2 * points, 1), labels.repeat(2 * points)

    def __call__(self, mean: Tensor, root: Tensor, prior_scale: float = 0.5) -> Tensor:
        vectors = (mean + self.points @ root.mT).repeat_interleave(self.count, 0)
        log_prob = -nn.functional.cross_entropy(
            self.network.outputs(self.inputs, vectors), self.labels, reduction="sum"
        )
        square = root.square().sum() + (mean - 1.0).square().sum()
        log_det = root.diagonal().abs().log().sum()
        prior = DIM * torch.tensor(prior_scale).double().log()
        kl = 0.5 * square / prior_scale**2 + prior - 0.5 * DIM - log_det
        return log_prob / len(self.points) - kl


def maximize(elbo: Elbo, mean: Tensor, root: Tensor) -> tuple[Tensor, Tensor]:
    """Returns mean and root of the full Gaussian with the largest ELBO, by L-BFGS."""
    mean, root = (
        value.clone(memory_format=torch.contiguous_format).requires_grad_() for value in (mean, root)
    )
    optimizer = torch.optim.LBFGS([mean, root], max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = -elbo(mean, root.tril())
        loss.backward()
        return loss

    optimizer.step(closure)
    return mean.detach(), root.detach().tril()


@pytest.mark.parametrize("count", [15, pytest.param(60, marks=pytest.mark.slow)])
def test_full_gaussian_maximizes_the_elbo(count):
    """Steps with the Gauss-Newton matrix alone end 0.025 and 0.034 nats below the maximum."""
    model, inputs, labels = make_problem(count)
    fit = fit_gaussian(model, Categorical(), inputs, labels, "full", prior="fixed", scale=0.5)
    elbo, root = Elbo(model, inputs, labels, 128), torch.linalg.cholesky(fit.gaussian.covariance())
    mean, best_root = maximize(elbo, fit.gaussian.mean, root)
    truth = Elbo(model, inputs, labels, 512)
    with torch.no_grad():
        assert float(truth(mean, best_root) - truth(fit.gaussian.mean, root)) < 0.02
    eigenvalues = torch.linalg.eigvalsh(best_root @ best_root.mT)
    ratio = torch.linalg.eigvalsh(fit.gaussian.covariance())[0] / eigenvalues[0]
    assert float(ratio.sqrt()) == pytest.approx(1.0, abs=0.03)
    std = (best_root @ best_root.mT).diagonal().sqrt()
    ratios = fit.gaussian.variances().sqrt() / std
    assert float(ratios[std.argmin()]) == pytest.approx(1.0, abs=0.03)
    assert float((ratios - 1.0).abs().max()) < 0.06


@pytest.mark.parametrize("structure", [pytest.param("layers", marks=pytest.mark.slow), "factorized"])
def test_refined_structures_have_a_larger_elbo(structure):
    model, inputs, labels = make_problem(15)
    arguments = model, Categorical(), inputs, labels, structure
    fits = [fit_gaussian(*arguments, prior="fixed", scale=0.5, precise=precise) for precise in (False, True)]
    elbo = Elbo(model, inputs, labels, 512)
    with torch.no_grad():
        values = [elbo(fit.gaussian.mean, torch.linalg.cholesky(fit.gaussian.covariance())) for fit in fits]
    assert values[1] > values[0]


def test_expected_hessian_agrees_with_autograd():
    model, inputs, labels = make_problem(8)
    q = fit_gaussian(model, Categorical(), inputs, labels, "full", prior="fixed", precise=False).gaussian
    refinement = HessianRefinement(NoisyNetwork(model, Categorical()), inputs, labels, q, seed=0)
    refinement.draws_per_example = 500
    estimate = refinement.estimate(q)
    vectors = q.mean + q.deviations(normal_points(64))
    total = torch.zeros(DIM, DIM, dtype=torch.float64)

    def nll(vector: Tensor) -> Tensor:
        outputs = refinement.network.outputs(inputs, vector.expand(len(inputs), -1))
        return nn.functional.cross_entropy(outputs, labels, reduction="sum")

    for vector in vectors:
        total += torch.autograd.functional.hessian(nll, vector) / len(vectors)
    whitened = [q.roots[0].mT @ matrix @ q.roots[0] for matrix in (estimate.blocks[0], total)]
    torch.testing.assert_close(*whitened, rtol=0.0, atol=0.05)
