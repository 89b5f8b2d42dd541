r"""A flow on top of a Gaussian over the noise of all layers: it begins at the Gaussian, and never ends below it.

.. math:: \nabla_\theta \mathrm{ELBO} = E_{u}\Big[\Big(\frac{\partial z}{\partial \theta}\Big)^{\!\top}
          \nabla_z \big(\log p(D, z) - \log q_\theta(z)\big)\Big], \qquad z = f_\theta(u)

This "sticking the landing" gradient (Roeder et al. 2017, https://arxiv.org/abs/1703.09194) leaves out the score of the density, whose
mean is zero, and has no variance where the flow is the exact posterior: every draw goes through all the data. A flow without an exact
inverse takes the whole derivative.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.noise.flow_noise import InputNoise
from flowbnn.noise.joint import independent_vectors
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.training.progress import track
from flowbnn.transforms.linear import BlockTriangular

STEPS, DRAWS = 300, 32  # of the training, and in a step
CHECKS = 12  # of the ELBO on the same draws, along the training
JUDGED = 256  # draws of the verdict


@dataclass(frozen=True)
class FlowFit:
    """What :func:`fit_flow` gives.

    Args:
        posterior: the flow, or the Gaussian where the flow is no better.
        gain, error: of the flow's ELBO over the Gaussian's in nats, and its standard error, on the same fresh draws.
    """

    posterior: NoisePosterior
    gain: float
    error: float

    @property
    def better(self) -> bool:
        return self.gain > 2.0 * self.error


def fit_flow(
    gaussian: NoisePosterior,
    flow: NoisePosterior,
    inputs: Any,
    targets: Tensor,
    *,
    steps: int = STEPS,
    draws: int = DRAWS,
    lr: float = 5e-3,
    seed: int = 0,
    show: bool = False,
) -> FlowFit:
    """Train a flow that has been set to a Gaussian, and take the better of the two by the ELBO.

    The covariance stays; the flow lies before it, where the Gaussian is a standard normal.

    Args:
        gaussian, flow: posteriors of the same noise under the same prior, the flow about where the Gaussian is.
        inputs, targets: all the data, on the network's device.
        steps, draws, lr: of the training by Adam, whose rate falls along a cosine.
        seed: of all draws.
        show: a progress bar.
    """
    target = NoiseTarget(flow, [(inputs, targets)], seed)
    vectors = [vector for vector, _ in independent_vectors(flow.model)]
    trained = _trained(vectors)
    if trained:
        _train(target, vectors, trained, steps, draws, lr, seed, show)
    former = [vector for vector, _ in independent_vectors(gaussian.model)]
    apart = _bounds(vectors, target, JUDGED, 2) - _bounds(former, target, JUDGED, 2)
    fit = FlowFit(flow, float(apart.mean()), float(apart.std()) / JUDGED**0.5)
    return fit if fit.better else FlowFit(gaussian, fit.gain, fit.error)


def _trained(vectors: list[InputNoise]) -> list[nn.Parameter]:
    """The parameters of the flows; the matrix of a covariance, which is at its best, is left alone."""
    still = {
        id(parameter)
        for vector in vectors
        for part in vector.transform.modules()
        if isinstance(part, BlockTriangular)
        for parameter in part.parameters()
    }
    return [p for vector in vectors for p in vector.transform.parameters() if id(p) not in still]


def _train(
    target: NoiseTarget,
    vectors: list[InputNoise],
    trained: list[nn.Parameter],
    steps: int,
    draws: int,
    lr: float,
    seed: int,
    show: bool,
) -> None:
    """Leave the parameters where the ELBO was highest, of those places where it was looked at."""
    optimizer = torch.optim.Adam(trained, lr=lr)
    source = torch.Generator(target.device).manual_seed(seed + 1)
    every = max(1, steps // CHECKS)
    best, kept = -math.inf, [p.detach().clone() for p in trained]
    for number in track(range(1, steps + 1), "flow", show):
        drawn = [vector.posterior().rsample_and_log_prob((draws,), source) for vector in vectors]
        vector_of_all = target.join([value for value, _ in drawn])
        _, slope = target.gradient(vector_of_all.detach())
        gain = (slope * vector_of_all).sum()
        for vector, (value, density) in zip(vectors, drawn, strict=True):
            if vector.transform.inverse_kind == "exact":
                gain = gain - (score(vector, value) * value).sum()
            else:
                gain = gain - density.sum()
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1.0 + math.cos(math.pi * number / steps))
        optimizer.zero_grad()
        (-gain / draws).backward()
        optimizer.step()
        if number % every == 0:
            with torch.no_grad():
                bound = float(_bounds(vectors, target, 2 * draws, 1).mean())
            if bound > best:
                best, kept = bound, [p.detach().clone() for p in trained]
    with torch.no_grad():
        for parameter, last in zip(trained, kept, strict=True):
            parameter.copy_(last)


def score(vector: InputNoise, value: Tensor) -> Tensor:
    """The gradient of the log-density in the value alone."""
    leaf = value.detach().requires_grad_()
    return torch.autograd.grad(vector.posterior().log_prob(leaf).sum(), leaf)[0]


@torch.no_grad()
def _bounds(vectors: list[InputNoise], target: NoiseTarget, draws: int, number: int) -> Tensor:
    """What each draw adds to the ELBO, ``[S]``; the same numbers of the base for all posteriors of a shape."""
    source = torch.Generator(target.device).manual_seed(target.seed + 7919 * number)
    drawn = [vector.posterior().rsample_and_log_prob((draws,), source) for vector in vectors]
    density = torch.stack([one.double() for _, one in drawn]).sum(0)
    return target.log_joint(target.join([value for value, _ in drawn])) - density
