"""Observation models of real-valued targets."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from flowbnn.errors import pluralize
from flowbnn.likelihoods.base import Likelihood, single_precision, stacked
from flowbnn.options import Count, Positive, checked
from flowbnn.predictive import GaussianPredictive
from flowbnn.predictive.base import check_samples


class Gaussian(Likelihood):
    r"""Real-valued targets: :math:`y \sim \mathcal N(f(x), \sigma^2)`.

    Args:
        noise: where :math:`\sigma` comes from: ``"learned"``, one value per output, fitted with the network from whatever value it has
            (``log_scale.requires_grad_(False)`` keeps that value);
            ``"predicted"``, the network gives twice as many outputs and the second half is the log-variance, so that the
            noise may differ from input to input; a number, known and fixed.
        dim: number of targets, needed for ``"learned"``.

    >>> likelihood = Gaussian(noise=2.0)
    >>> round(likelihood.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)).item(), 4)  # -log(2) - log(2 pi) / 2
    -1.6121
    """

    shape: tuple[int, ...] | None = None  # of one target, as the data have it: () for a number

    @checked
    def __init__(self, noise: Literal["learned", "predicted"] | Positive = "learned", dim: Count = 1) -> None:
        super().__init__()
        self.noise, self.dim = noise, dim
        if noise == "learned":
            self.log_scale = nn.Parameter(torch.zeros(dim))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the target for each row of outputs ``[..., D]``."""
        outputs = single_precision(outputs)
        if self.noise == "predicted":
            mean, raw = outputs.chunk(2, -1)
            return mean, raw.clamp(-2.0 * LIMIT, 2.0 * LIMIT).exp()
        if self.noise == "learned":
            return outputs, log_variance(self.log_scale).exp().to(outputs.dtype).expand_as(outputs)
        return outputs, outputs.new_full((), float(self.noise) ** 2).expand_as(outputs)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        mean, variance = self.moments(outputs)
        error = (targets.to(mean.dtype).reshape(mean.shape) - mean).square() / variance
        return -0.5 * (error + variance.log() + math.log(2.0 * math.pi)).flatten(1).sum(-1)

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Stores the shape of one target, so that predictions get the same shape."""
        self.shape = tuple(targets.shape[1:])

    def canonical(self, targets: Tensor) -> Tensor:
        return targets if targets.is_floating_point() else targets.float()

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        """Of a predicted noise, the Gaussian with the mean and the variance of the mixture."""
        if self.noise != "predicted":
            return stacked(outputs).mean(0)
        means, variances = self.moments(stacked(outputs))
        variance = variances.mean(0) + means.var(0, correction=0)
        return torch.cat([means.mean(0), variance.log()], -1)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> GaussianPredictive:
        outputs, _ = check_samples(outputs, "outputs", "[S, B, D]")
        return GaussianPredictive(*self.moments(outputs), sample_counts, self.shape)

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.ndim != 2:
            advice = "; leave out its last squeeze" if outputs.ndim == 1 else "; give outputs.flatten(1)"
            return (
                "a Gaussian likelihood takes outputs of shape (batch, targets), but the network gives "
                f"{tuple(outputs.shape)}{advice}"
            )
        rows, width = outputs.shape
        if self.noise == "predicted" and width % 2:
            given = pluralize(width, "output")
            return f"with noise='predicted' the network gives a mean and a log-variance for each target, but has {given}"
        if self.noise == "learned" and width != self.dim:
            return f"the network gives {width} targets; say Gaussian(dim={width})"
        width = width // 2 if self.noise == "predicted" else width
        if targets.numel() != rows * width or targets.shape[:1] != outputs.shape[:1]:
            labels = (
                "; for class labels give integers (labels.long())" if targets.ndim == 1 and width > 1 else ""
            )
            if 2 * targets.numel() == rows * width:
                labels = "; where the network gives log-variances too, say likelihood=Gaussian('predicted')"
            given = f"{pluralize(rows, 'row')} of {pluralize(width, 'predicted value')}"
            return f"targets of shape {tuple(targets.shape)} do not fit {given}{labels}"
        return ""

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "noise": self.noise, "dim": self.dim, "shape": self.shape}


LIMIT = 30.0  # of the logarithm of a standard deviation: from 1e-13 to 1e13, whose squares float32 holds with room to spare


@checked
def learns_noise(likelihood: Likelihood) -> TypeGuard[Gaussian]:
    """Whether it has a noise level to be learned, which is not frozen (``likelihood.log_scale.requires_grad_(False)``)."""
    return (
        isinstance(likelihood, Gaussian)
        and likelihood.noise == "learned"
        and likelihood.log_scale.requires_grad
    )


def log_variance(log_scale: Tensor) -> Tensor:
    """Of a Gaussian's noise, within what float32 can compute with."""
    return 2.0 * log_scale.clamp(-LIMIT, LIMIT)


def with_level(outputs: Tensor, log_noise: Tensor) -> Tensor:
    """Outputs of a regression with the logarithm of their noise's variance beside them, as ``Gaussian("predicted")`` takes them."""
    return torch.cat([outputs, log_variance(log_noise).to(outputs).expand_as(outputs)], -1)
