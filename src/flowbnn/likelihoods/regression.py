"""Observation models of real-valued targets."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

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

    @torch.no_grad()
    def start(self, outputs: Tensor, targets: Tensor) -> None:
        """A learned noise that is still at one starts at the size of the residuals: targets come in all units."""
        self.shape = tuple(targets.shape[1:])
        if self.noise == "learned" and not bool(self.log_scale.any()):
            self.settle([(outputs, targets)])

    @torch.no_grad()
    def settle(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """The learned noise is the size of the residuals over all ``(outputs, targets)``.

        No smaller than a ten-thousandth of the targets' own spread, which a network that interpolates them would ask for.
        """
        if (seen := compared(pairs)) is not None:
            least = least_variance(seen.center, seen.variance)
            self.log_scale.copy_(torch.maximum(seen.error, least).log() / 2)

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


class Compared(NamedTuple):
    """Outputs beside their targets, over all examples: means and variances of both, covariance, mean squared error."""

    examples: int
    center: Tensor
    variance: Tensor
    given_center: Tensor  # of the outputs
    given_variance: Tensor
    covariance: Tensor
    error: Tensor


@torch.no_grad()
def compared(pairs: Iterable[tuple[Tensor, Tensor]]) -> Compared | None:
    """Compare outputs ``[B, D]`` with targets over all pairs, in float64; None where there are none.

    Sums are taken around the means of the first pair, so that targets far from zero keep their digits.

    >>> seen = compared([(torch.zeros(2, 1), torch.tensor([1e6, 1e6 + 2]))])
    >>> seen.center.item(), seen.variance.item()
    (1000001.0, 1.0)
    """
    count, near, sums = 0, None, torch.zeros(6, 1, dtype=torch.float64)
    for outputs, targets in pairs:
        given = outputs.cpu().double()
        truth = targets.cpu().double().reshape(given.shape)
        near = (truth.mean(0), given.mean(0)) if near is None else near
        a, b = truth - near[0], given - near[1]
        sums = sums + torch.stack([a, b, a * a, b * b, a * b, (truth - given).square()]).sum(1)
        count += len(truth)
    if near is None or not count:
        return None
    a, b, aa, bb, ab, error = sums / count
    variances = (aa - a * a).clamp_min(0.0), (bb - b * b).clamp_min(0.0)
    return Compared(count, near[0] + a, variances[0], near[1] + b, variances[1], ab - a * b, error)


def least_variance(center: Tensor, variance: Tensor) -> Tensor:
    """The smallest variance that a noise is learned to, from mean and variance of the targets; of constant ones, from their size."""
    size = torch.where(center != 0, center.square(), torch.ones_like(center))
    return 1e-8 * torch.where(varies(center, variance), variance, size)


def varies(center: Tensor, variance: Tensor) -> Tensor:
    """Whether targets of this mean and variance vary by more than rounding."""
    return variance > 1e-26 * center.square()


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
