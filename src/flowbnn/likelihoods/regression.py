"""Observation models of real-valued targets."""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

from flowbnn.errors import check_shape, value_error
from flowbnn.likelihoods.base import Likelihood, misfit_error, stack_outputs
from flowbnn.numerics import at_least_single
from flowbnn.options import Count, Positive, checked
from flowbnn.predictive import GaussianPredictive
from flowbnn.predictive.base import check_samples

MAX_LOG_SCALE = 30.0  # standard deviations from 1e-13 to 1e13, whose squares float32 represents


class RealLikelihood(Likelihood):
    """Base class for observation models of real-valued targets, whose units a fit may standardize."""

    shape: tuple[int, ...] | None = None  # shape of a target in the data, () for a number
    outputs_per_target: int | None = None  # None if targets of pixels or tokens are not supported

    @abstractmethod
    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean of :meth:`link` of the targets, ``[B, D]``, for outputs of the network."""

    def link(self, targets: Tensor) -> Tensor:
        """Returns targets on the scale of the outputs, ``[B, D]``. The default is the targets themselves."""
        return targets

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of the outputs of a network in standard units, so that its targets get these units.

        Args:
            loc: Location of each target, ``[D]``.
            scale: Scale of each target, ``[D]``.
        """
        return loc, scale

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Stores the shape of one target, so that predictions get the same shape."""
        self.shape = tuple(targets.shape[1:])

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns targets as floating point numbers."""
        return targets if targets.is_floating_point() else targets.double()

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {**super().to_dict(), "shape": self.shape}


class Gaussian(RealLikelihood):
    r"""Likelihood of real-valued targets, :math:`y \sim \mathcal N(f(x), \sigma^2)`.

    Args:
        noise: Source of the noise scale :math:`\sigma`. ``"learned"`` fits one value per output with the network;
            ``log_scale.requires_grad_(False)`` freezes it. With ``"predicted"`` the network has twice as many outputs, and the second
            half is the log-variance of each input. A number is a known scale.
        dim: Number of targets, needed for ``"learned"``.

    >>> likelihood = Gaussian(noise=2.0)
    >>> round(likelihood.log_prob(torch.zeros(1, 1), torch.zeros(1, 1)).item(), 4)  # -log(2) - log(2 pi) / 2
    -1.6121
    """

    @checked
    def __init__(self, noise: Literal["learned", "predicted"] | Positive = "learned", dim: Count = 1) -> None:
        super().__init__()
        self.noise, self.dim = noise, dim
        self.outputs_per_target = 2 if noise == "predicted" else 1
        if noise == "learned":
            self.log_scale = nn.Parameter(torch.zeros(dim))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the mean and the variance of the targets for outputs ``[..., D]``."""
        outputs = at_least_single(outputs)
        if self.noise == "predicted":
            mean, log_var = outputs.chunk(2, -1)
            return mean, log_var.clamp(-2.0 * MAX_LOG_SCALE, 2.0 * MAX_LOG_SCALE).exp()
        if self.noise == "learned":
            return outputs, log_variance(self.log_scale).exp().to(outputs.dtype).expand_as(outputs)
        return outputs, outputs.new_full((), float(self.noise) ** 2).expand_as(outputs)

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-density of the targets of each example, ``[B]``.

        Args:
            outputs: Outputs of the network, ``[B, D]``, or ``[B, 2 D]`` with predicted noise.
            targets: Targets ``[B, D]``, or ``[B]`` if D is 1.
        """
        mean, variance = self.moments(outputs)
        error = (targets.to(mean.dtype).reshape(mean.shape) - mean).square() / variance
        return -0.5 * (error + variance.log() + math.log(2.0 * math.pi)).flatten(1).sum(-1)

    def mean(self, outputs: Tensor) -> Tensor:
        """Returns the mean of the targets for outputs ``[..., D]``."""
        return self.moments(outputs)[0]

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of the outputs. The second half of the outputs may be the log-variance."""
        if self.noise != "predicted":
            return loc, scale
        return torch.cat([loc, 2.0 * scale.log()]), torch.cat([scale, torch.ones_like(scale)])

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the mean. With predicted noise, the Gaussian has the mean and the variance of the mixture."""
        if self.noise != "predicted":
            return stack_outputs(outputs).mean(0)
        means, variances = self.moments(stack_outputs(outputs))
        variance = variances.mean(0) + means.var(0, correction=0)
        return torch.cat([means.mean(0), variance.log()], -1)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> GaussianPredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, D]``."""
        outputs = check_samples(outputs, "outputs")[0]
        if self.noise == "learned" and self.dim > 1:  # one value broadcasts
            check_shape("outputs", outputs, ("samples", "batch", self.dim), owner="Gaussian")
        if self.noise == "predicted" and outputs.shape[-1] % 2:
            raise value_error("outputs", "means and log-variances", tuple(outputs.shape), kind="shape")
        return GaussianPredictive(*self.moments(outputs), sample_counts, self.shape)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if outputs and targets do not have the same number of values.

        Args:
            outputs: Outputs of the network, ``[B, D]``, or ``[B, 2 D]`` with predicted noise.
            targets: Targets ``[B, D]``, or ``[B]`` if D is 1.
        """
        if outputs.ndim > 2:
            number = "two outputs" if self.noise == "predicted" else "one output"
            raise misfit_error(outputs, targets, f"Gaussian needs {number} per target", "outputs")
        check_shape("outputs", outputs, ("batch", "targets"), "remove squeeze(-1)", "outputs", "Gaussian")
        rows, width = outputs.shape
        if self.noise == "learned":
            advice = f"use Gaussian(dim={width})"
            check_shape("outputs", outputs, ("batch", self.dim), advice, "outputs", "Gaussian")
        if self.noise == "predicted" and width % 2:
            raise misfit_error(
                outputs, targets, "return a mean and a log-variance for each target", "outputs"
            )
        width = width // 2 if self.noise == "predicted" else width
        if targets.numel() != rows * width or targets.shape[:1] != outputs.shape[:1]:
            hint = "use labels.long() for classes" if targets.ndim == 1 and width > 1 else ""
            hint = "use Gaussian('predicted')" if 2 * targets.numel() == rows * width else hint
            raise misfit_error(outputs, targets, hint, "targets")

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {**super().to_dict(), "noise": self.noise, "dim": self.dim}


@checked
def learns_noise(likelihood: Likelihood) -> TypeGuard[Gaussian]:
    """Returns True if a likelihood has a learned noise scale that is not frozen."""
    return (
        isinstance(likelihood, Gaussian)
        and likelihood.noise == "learned"
        and likelihood.log_scale.requires_grad
    )


def log_variance(log_scale: Tensor) -> Tensor:
    """Returns the log-variance of a log-scale, clamped to the range of float32."""
    return 2.0 * log_scale.clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)


def append_log_variance(outputs: Tensor, log_scale: Tensor) -> Tensor:
    """Appends the log-variance of the noise to outputs, as ``Gaussian("predicted")`` expects them."""
    return torch.cat([outputs, log_variance(log_scale).to(outputs).expand_as(outputs)], -1)
