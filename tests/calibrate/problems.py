"""Problems for the tests of calibration and natural gradients."""

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributions import MultivariateNormal

import flowbnn as fb
from flowbnn.noise import NormalAffine

NOISE_SCALE, PRIOR_SCALE = 0.3, 0.5


class LinearRegression:
    """Regression ``y = sum_i w_i z_i x_i``, which is linear in the noise ``z``, so that its posterior is Gaussian.

    Args:
        rows: Number of examples.
    """

    def __init__(self, rows: int = 40) -> None:
        generator = torch.Generator().manual_seed(0)
        self.network = nn.Linear(4, 1, bias=False)
        with torch.no_grad():
            self.network.weight.copy_(torch.randn(1, 4, generator=generator))
        self.inputs = torch.randn(rows, 4, generator=generator)
        self.inputs[:, 1] += 0.8 * self.inputs[:, 0]
        noise = NOISE_SCALE * torch.randn(rows, 1, generator=generator)
        self.targets = 0.7 * self.network(self.inputs).detach() + noise
        design = (self.inputs * self.network.weight.detach()).double()
        identity = torch.eye(4, dtype=torch.float64)
        self.precision = design.mT @ design / NOISE_SCALE**2 + identity / PRIOR_SCALE**2
        right = design.mT @ self.targets.double()[:, 0] / NOISE_SCALE**2 + 1.0 / PRIOR_SCALE**2
        self.mean = torch.linalg.solve(self.precision, right)
        covariance = design @ design.mT * PRIOR_SCALE**2
        covariance += NOISE_SCALE**2 * torch.eye(rows, dtype=torch.float64)
        self.evidence = MultivariateNormal(design.sum(1), covariance).log_prob(self.targets.double()[:, 0])
        self.model = fb.to_stochastic(self.network, {"*": NormalAffine()})
        self.likelihood = fb.likelihoods.Gaussian(NOISE_SCALE)

    @property
    def std(self) -> Tensor:
        """Standard deviations of the exact posterior."""
        return self.precision.inverse().diagonal().sqrt()

    @property
    def arguments(self) -> tuple[nn.Module, fb.likelihoods.Gaussian, Tensor, Tensor]:
        """First arguments of ``fit_gaussian``."""
        return self.model, self.likelihood, self.inputs, self.targets


class MemorizedData(NamedTuple):
    """A network that has memorized its training data, and other data of the same distribution."""

    network: nn.Module
    inputs: Tensor
    targets: Tensor
    training: tuple[Tensor, Tensor]


def train_memorizing_network() -> MemorizedData:
    """Trains a network on 60 examples until it has memorized them."""
    generator = torch.Generator().manual_seed(2)
    inputs = torch.randn(240, 2, generator=generator)
    targets = (inputs[:, 0] * inputs[:, 1] + 0.7 * torch.randn(240, generator=generator) > 0).long()
    torch.manual_seed(0)
    network = fb.models.MLP(2, (30, 10), 2)
    training = inputs[:60], targets[:60]
    options = {"seed": 0, "progress": False, "accelerator": "cpu"}
    point = fb.MLE(epochs=150, lr=0.01).fit(network, [training], **options)
    return MemorizedData(point.model, inputs[60:], targets[60:], training)
