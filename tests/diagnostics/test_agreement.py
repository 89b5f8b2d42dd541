"""Tests of the comparison of posteriors with Markov chains."""

import math

import pytest
import torch
from tests.diagnostics.linear_problem import NOISE_SCALE
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.diagnostics.agreement import sliced_wasserstein
from flowbnn.errors import FlowBNNError
from flowbnn.likelihoods import Gaussian
from flowbnn.methods import MemberPosterior
from flowbnn.methods.mcmc.posterior import ChainPosterior
from flowbnn.posterior import PointPosterior


@pytest.mark.slow
def test_exact_posterior_is_within_the_floor(problem):
    exact = fb.diagnostics.agreement(problem.exact, problem.loader, problem.chains, samples=1600)
    assert exact.variation < 1.5 * exact.variation_floor < 0.05
    assert exact.agreement == 1.0
    assert exact.wasserstein < 2 * exact.wasserstein_floor
    assert abs(exact.excess) < 0.02


@pytest.mark.slow
def test_total_variation_of_a_shifted_posterior(problem):
    """The predictive of each input is a normal distribution with a shifted mean."""
    posterior = problem.posterior(problem.mean + 0.5, problem.covariance)
    shifted = fb.diagnostics.agreement(posterior, problem.loader, problem.chains)
    features = problem.features
    std = (NOISE_SCALE**2 + ((features @ problem.covariance) * features).sum(1)).sqrt()
    shift = (0.5 * features.sum(1)).abs() / std
    assert shifted.variation == pytest.approx(float(torch.erf(shift / 8**0.5).mean()), abs=0.02)
    assert shifted.wasserstein > 3 * shifted.wasserstein_floor


def test_sliced_wasserstein_of_two_normals():
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, 4000, 6, generator=generator, dtype=torch.float64)
    # in every direction the distance of N(0, 1) and N(0, 9) is 2 E|z|
    distance = sliced_wasserstein(first, 3.0 * second)
    assert distance == pytest.approx(2.0 * math.sqrt(2.0 / math.pi), rel=0.02)
    assert sliced_wasserstein(first, second) < 0.05


class WeightChains:
    """Linear regression with exact draws of its weights, as if they were Markov chains."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(0)
        self.network = nn.Linear(2, 1, bias=False)
        self.inputs = torch.randn(40, 2, generator=self.generator)
        noise = torch.randn(40, 1, generator=self.generator)
        self.targets = self.inputs.sum(1, keepdim=True) + noise
        # the prior of the weights is a standard normal
        self.covariance = torch.linalg.inv(self.inputs.T @ self.inputs + torch.eye(2))
        self.mean = self.covariance @ self.inputs.T @ self.targets[:, 0]
        self.network.weight.data.copy_(self.mean)
        self.loader = [(self.inputs, self.targets)]
        names = ("energy", "divergent", "acceptance", "gradients", "depth")
        record = {name: torch.zeros(2, 400) for name in names}
        record |= {"outputs": torch.randn(2, 400, 3, generator=self.generator), "step_size": torch.ones(2)}
        self.chains = ChainPosterior(
            self.network, Gaussian(1.0), self.draws(800), record=record, sampler={"method": "nuts"}
        )

    def draws(self, number: int) -> dict[str, Tensor]:
        """Returns draws of the exact posterior of the weights."""
        normal = torch.randn(number, 1, 2, generator=self.generator)
        return {"weight": self.mean + normal @ torch.linalg.cholesky(self.covariance).T}


@pytest.fixture(scope="module")
def regression() -> WeightChains:
    return WeightChains()


def test_exact_posterior_agrees_with_chains_over_weights(regression):
    exact = MemberPosterior(regression.network, Gaussian(1.0), regression.draws(800))
    result = fb.diagnostics.agreement(exact, regression.loader, regression.chains, samples=800)
    assert result.variation < 2 * result.variation_floor < 0.05
    assert result.agreement == 1.0
    assert abs(result.excess) < 0.01
    assert math.isnan(result.wasserstein)


def test_point_estimate_against_chains_over_weights(regression):
    """A single network has the exact means, and a variance of 1 that is too small."""
    inputs, targets = regression.inputs, regression.targets
    point = fb.diagnostics.agreement(
        PointPosterior(regression.network, Gaussian(1.0)),
        regression.loader,
        regression.chains,
        [(3.0 * inputs, 3.0 * targets)],
        samples=800,
    )
    std = (1.0 + ((3.0 * inputs @ regression.covariance) * 3.0 * inputs).sum(1)).sqrt()
    crossing = (2.0 * std.square() * std.log() / (std.square() - 1.0)).sqrt()  # both densities are equal
    variation = torch.erf(crossing / 2**0.5) - torch.erf(crossing / std / 2**0.5)
    assert point.variation == pytest.approx(float(variation.mean()), abs=0.01)
    square = (3.0 * (targets[:, 0] - inputs @ regression.mean)).square()
    excess = 0.5 * (square - square / std.square() - 2.0 * std.log()).mean()
    assert point.excess == pytest.approx(float(excess), abs=0.1)


def test_chains_with_other_outputs_are_refused(regression):
    labels = PointPosterior(nn.Linear(2, 3), fb.likelihoods.Categorical())
    with pytest.raises(FlowBNNError) as caught:
        fb.diagnostics.agreement(labels, regression.loader, regression.chains)
    assert (caught.value.kind, caught.value.argument) == ("shape", "chains")
