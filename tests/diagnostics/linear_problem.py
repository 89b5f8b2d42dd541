"""A network whose output is linear in its noise, so that its evidence and its posterior have closed forms."""

from functools import cached_property, partial

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.diagnostics.noise_chains import NoiseChains
from flowbnn.diagnostics.report import Report
from flowbnn.likelihoods import Gaussian
from flowbnn.noise.joint import independent_vectors
from flowbnn.posterior.noise import NoisePosterior

NOISE_SCALE = 0.3  # standard deviation of the targets
LAYER_SIZES = [3, 2]


class ParallelLayers(nn.Module):
    """Adds the outputs of two linear layers, and is therefore linear in the noise of both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(3, 1), nn.Linear(2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x[:, :3]) + self.two(x[:, 3:])


class LinearProblem:
    """Data, exact evidence, exact posterior, and approximate posteriors of :class:`ParallelLayers`."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.network = ParallelLayers()
        self.inputs = torch.randn(20, 5) @ (torch.eye(5) + 0.5)  # correlated inputs make correlated noise
        self.targets = self.network(self.inputs).detach() + NOISE_SCALE * torch.randn(20, 1)
        self.loader = [(self.inputs[:12], self.targets[:12]), (self.inputs[12:], self.targets[12:])]
        weights = torch.cat([self.network.one.weight, self.network.two.weight], 1).detach()[0]
        features = (self.inputs * weights).double()
        self.features, loc, scale = features, 1.0, 0.5
        centered = self.targets[:, 0].double() - self.network.one.bias.item()
        mean = features.sum(1) * loc
        marginal = NOISE_SCALE**2 * torch.eye(20).double() + scale**2 * features @ features.T
        self.evidence = float(MultivariateNormal(mean, marginal).log_prob(centered))
        self.precision = features.T @ features / NOISE_SCALE**2 + torch.eye(5).double() / scale**2
        self.covariance = torch.linalg.inv(self.precision)
        self.mean = self.mean_for(self.targets)

    def mean_for(self, targets: Tensor) -> Tensor:
        """Returns the mean of the exact posterior for other targets."""
        centered = targets[:, 0].double() - self.network.one.bias.item()
        return self.covariance @ (self.features.T @ centered / NOISE_SCALE**2 + 1.0 / 0.5**2)

    def posterior(self, mean: Tensor, covariance: Tensor) -> NoisePosterior:
        """Returns a Gaussian posterior of the noise."""
        model = fb.to_stochastic(self.network, {"*": fb.noise.NormalAffine()}, joint="full")
        ((vector, _),) = independent_vectors(model)
        vector.set_gaussian(mean, [torch.linalg.cholesky(covariance)])
        return NoisePosterior(model, Gaussian(NOISE_SCALE))

    @cached_property
    def exact(self) -> NoisePosterior:
        """Exact posterior."""
        return self.posterior(self.mean, self.covariance)

    @cached_property
    def factorized(self) -> NoisePosterior:
        """Best posterior without correlations."""
        return self.posterior(self.mean, (1.0 / self.precision.diagonal()).diag())

    @cached_property
    def wide(self) -> NoisePosterior:
        """Posterior with twice the exact covariance."""
        return self.posterior(self.mean, 2.0 * self.covariance)

    @cached_property
    def report(self) -> Report:
        """Report on the factorized posterior, with shorter chains than the default."""
        with pytest.MonkeyPatch.context() as patch:
            short_chains = partial(fb.diagnostics.noise_chains, samples=250, warmup=40)
            patch.setattr("flowbnn.diagnostics.report.noise_chains", short_chains)
            return fb.diagnose(self.factorized, self.loader, progress=False)

    @property
    def chains(self) -> NoiseChains:
        """Chains over the noise."""
        return self.report.chains
