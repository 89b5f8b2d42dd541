r"""Training of a flow on top of a Gaussian posterior of the noise of all layers.

The flow starts at the Gaussian, and is dropped if it does not improve the ELBO. It is trained by

.. math:: \nabla_\theta \mathrm{ELBO} = E_{u}\Big[\Big(\frac{\partial z}{\partial \theta}\Big)^{\!\top}
          \nabla_z \big(\log p(D, z) - \log q_\theta(z)\big)\Big], \qquad z = f_\theta(u) .

This "sticking the landing" gradient (Roeder et al. 2017, https://arxiv.org/abs/1703.09194) leaves out the score of the density, whose
mean is zero. It has no variance if the flow is the exact posterior. A flow without an exact inverse uses the full derivative.
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


@dataclass(frozen=True)
class FlowFit:
    """Result of :func:`fit_flow`.

    Args:
        posterior: Posterior with the flow, or the Gaussian posterior if the flow is not better.
        gain: ELBO of the flow minus the ELBO of the Gaussian, in nats, with draws that were not used in training.
        error: Standard error of the gain.
    """

    posterior: NoisePosterior
    gain: float
    error: float

    @property
    def better(self) -> bool:
        """True if the gain exceeds two standard errors."""
        return self.gain > 2.0 * self.error

    @property
    def label(self) -> str | None:
        """Description of the flow, or None if it is not better than the Gaussian."""
        return independent_vectors(self.posterior.model)[0][0].label if self.better else None


def fit_flow(
    gaussian: NoisePosterior,
    flow: NoisePosterior,
    inputs: Any,
    targets: Tensor,
    *,
    steps: int = 300,
    draws: int = 32,
    lr: float = 5e-3,
    seed: int = 0,
    progress: bool = False,
) -> FlowFit:
    """Trains a flow that starts at a Gaussian, and returns the better of the two by the ELBO.

    The covariance stays fixed. The flow precedes it, in coordinates in which the Gaussian is a standard normal.

    Args:
        gaussian: Gaussian posterior of the noise.
        flow: Posterior of the same noise, with the same prior. Its flow starts close to the Gaussian.
        inputs: All inputs, on the device of the network.
        targets: All targets, on the device of the network.
        steps: Number of training steps.
        draws: Number of draws of a step.
        lr: Initial learning rate of Adam. It decays by a cosine schedule.
        seed: Seed of all draws.
        progress: If True, shows a progress bar.
    """
    target = NoiseTarget(flow, [(inputs, targets)], seed)
    flow_vectors = [vector for vector, _ in independent_vectors(flow.model)]
    if parameters := _trainable_parameters(flow_vectors):
        _train(target, flow_vectors, parameters, steps, draws, lr, progress)
    gaussian_vectors = [vector for vector, _ in independent_vectors(gaussian.model)]
    num_draws = 256  # of the comparison
    gains = _elbo_terms(flow_vectors, target, num_draws, 2) - _elbo_terms(
        gaussian_vectors, target, num_draws, 2
    )
    fit = FlowFit(flow, float(gains.mean()), float(gains.std()) / num_draws**0.5)
    return fit if fit.better else FlowFit(gaussian, fit.gain, fit.error)


def _trainable_parameters(vectors: list[InputNoise]) -> list[nn.Parameter]:
    """Returns the parameters of the flows without the matrix of the covariance, which is optimal already."""
    covariance = {
        id(parameter)
        for vector in vectors
        for module in vector.transform.modules()
        if isinstance(module, BlockTriangular)
        for parameter in module.parameters()
    }
    return [p for vector in vectors for p in vector.transform.parameters() if id(p) not in covariance]


def _train(
    target: NoiseTarget,
    vectors: list[InputNoise],
    parameters: list[nn.Parameter],
    steps: int,
    draws: int,
    lr: float,
    progress: bool,
) -> None:
    """Trains the parameters and keeps the values with the highest ELBO among twelve evaluations."""
    optimizer = torch.optim.Adam(parameters, lr=lr)
    generator = torch.Generator(target.device).manual_seed(target.seed + 1)
    interval = max(1, steps // 12)
    best_elbo, best_values = -math.inf, [p.detach().clone() for p in parameters]
    for step in track(range(1, steps + 1), "flow", progress):
        optimizer.param_groups[0]["lr"] = lr * 0.5 * (1.0 + math.cos(math.pi * step / steps))
        optimizer.zero_grad()
        (-_elbo_surrogate(target, vectors, draws, generator) / draws).backward()
        optimizer.step()
        if step % interval == 0:
            elbo = float(_elbo_terms(vectors, target, 2 * draws, 1).mean())
            if elbo > best_elbo:
                best_elbo, best_values = elbo, [p.detach().clone() for p in parameters]
    with torch.no_grad():
        for parameter, value in zip(parameters, best_values, strict=True):
            parameter.copy_(value)


def _elbo_surrogate(
    target: NoiseTarget, vectors: list[InputNoise], draws: int, generator: torch.Generator
) -> Tensor:
    """Returns a scalar with the same gradient as the ELBO, summed over draws."""
    samples = [vector.posterior().rsample_and_log_prob((draws,), generator) for vector in vectors]
    noise = target.join([value for value, _ in samples])
    _, slope = target.gradient(noise.detach())
    surrogate = (slope * noise).sum()
    for vector, (value, density) in zip(vectors, samples, strict=True):
        if vector.transform.inverse_kind == "exact":
            surrogate = surrogate - (score(vector, value) * value).sum()
        else:
            surrogate = surrogate - density.sum()
    return surrogate


def score(vector: InputNoise, value: Tensor) -> Tensor:
    """Returns the gradient of the log-density with respect to the value, with fixed parameters."""
    leaf = value.detach().requires_grad_()
    return torch.autograd.grad(vector.posterior().log_prob(leaf).sum(), leaf)[0]


@torch.no_grad()
def _elbo_terms(vectors: list[InputNoise], target: NoiseTarget, draws: int, stream: int) -> Tensor:
    """Returns the contribution of each draw to the ELBO, ``[S]``.

    Args:
        vectors: Noise vectors with the posterior.
        target: Log-density of data and noise.
        draws: Number of draws.
        stream: Number of the stream of random numbers. Posteriors of equal shape share the numbers of a stream.
    """
    generator = torch.Generator(target.device).manual_seed(target.seed + 7919 * stream)
    samples = [vector.posterior().rsample_and_log_prob((draws,), generator) for vector in vectors]
    density = torch.stack([log_prob.double() for _, log_prob in samples]).sum(0)
    return target.log_joint(target.join([value for value, _ in samples])) - density
