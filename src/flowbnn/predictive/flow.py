"""Predictive distribution of real values whose densities are splines of a normal variable."""

import math
from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from flowbnn.errors import check_shape
from flowbnn.options import checked
from flowbnn.predictive.base import check_finite_samples, check_samples
from flowbnn.predictive.continuous import ContinuousPredictive, gauss_legendre
from flowbnn.transforms.splines import SplineMap, spline_forward, spline_inverse


class FlowPredictive(ContinuousPredictive):
    r"""Predictive distribution of real values, the mixture of S densities of :math:`y = \mu_s + \sigma_s T_s(z)`.

    :math:`z` is a standard normal variable, and :math:`T_s` a monotone rational-quadratic spline
    (:class:`~flowbnn.transforms.SplineMap`). The distribution function of a sample is :math:`\Phi(T_s^{-1}((y - \mu_s) / \sigma_s))`.
    Mean and variance are computed by Gauss-Legendre quadrature in each bin.

    Args:
        loc: Locations :math:`\mu_s`, ``[S, B, D]``.
        scale: Positive scales :math:`\sigma_s`, ``[S, B, D]``.
        knots: Knots ``[S, B, D, 3, K + 1]`` of the splines, from :meth:`~flowbnn.transforms.SplineMap.knots`.
        sample_counts: Number of samples of each input, ``[B]``, with adaptive sampling.
        shape: Shape of a target, ``()`` for a number.

    >>> from flowbnn.likelihoods import Flow
    >>> prediction = Flow("nsf").predictive(torch.zeros(2, 3, 25))  # 2 samples, 3 inputs
    >>> prediction
    FlowPredictive(samples=2, inputs=3, outputs=1; variance 1 = aleatoric 1 + epistemic 0)
    >>> prediction.quantiles(0.5).shape
    torch.Size([1, 3, 1])
    """

    @checked
    def __init__(
        self,
        loc: Tensor,
        scale: Tensor,
        knots: Tensor,
        sample_counts: Tensor | None = None,
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = shape
        loc, self._sample_counts = check_samples(loc, "loc", sample_counts)
        check_shape("scale", scale, loc.shape)
        check_shape("knots", knots, (*loc.shape, 3, "K + 1"))
        self._tensors = (loc, scale, knots)
        tensors = [self._fill_missing(tensor, 1.0) for tensor in self._tensors]
        finite = [torch.isfinite(tensor).reshape(*loc.shape, -1).all(-1) for tensor in tensors]
        check_finite_samples(~torch.stack(finite).all(0))
        self._tensors = (self._fill_missing(loc, math.nan), self._fill_missing(scale, math.nan), knots)

    @property
    def loc(self) -> Tensor:
        """Locations of each sample, ``[S, B, D]``."""
        return self._tensors[0]

    @property
    def scale(self) -> Tensor:
        """Scales of each sample, ``[S, B, D]``."""
        return self._tensors[1]

    @property
    def knots(self) -> Tensor:
        """Knots of the spline of each sample, ``[S, B, D, 3, K + 1]``."""
        return self._tensors[2]

    @property
    def _values_per_point(self) -> int:  # type: ignore[override]
        return self.knots.shape[-1]

    @property
    def samples(self) -> Tensor:
        """Mean of the density of each sample, ``[S, B, D]``."""
        return self._moments[0]

    @property
    def sample_variances(self) -> Tensor:
        """Variance of the density of each sample, ``[S, B, D]``."""
        return self._moments[1]

    @cached_property
    def _moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of each sample, ``[S, B, D]``."""
        edges = self.knots[..., 0, :]
        nodes, weights = gauss_legendre(8, edges)
        widths = edges.diff(dim=-1).unsqueeze(-1)
        z = (edges[..., :-1, None] + widths * nodes).flatten(-2)
        mass = (widths * weights).flatten(-2) * torch.exp(-0.5 * z.square()) / math.sqrt(2.0 * math.pi)
        values = spline_forward(z, self.knots.unsqueeze(-3))[0]
        # the spline is the identity beyond its bound, where the integral of z is zero and that of its square is known
        bound = edges[..., -1]
        density = torch.exp(-0.5 * bound.square()) / math.sqrt(2.0 * math.pi)
        tails = 2.0 * (bound * density + torch.special.ndtr(-bound))
        first, second = (values * mass).sum(-1), (values.square() * mass).sum(-1) + tails
        return self.loc + self.scale * first, self.scale.square() * (second - first.square())

    def _preimages(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Returns :math:`z` of values ``[B, D, G]``, and the log-slopes of the inverse splines, ``[S, B, D, G]``."""
        scaled = (values - self.loc.unsqueeze(-1)) / self.scale.unsqueeze(-1)
        return spline_inverse(scaled, self.knots.unsqueeze(-3))

    def _log_densities(self, values: Tensor) -> Tensor:
        z, log_slope = self._preimages(values)
        return log_slope - 0.5 * z.square() - 0.5 * math.log(2.0 * math.pi) - self.scale.log().unsqueeze(-1)

    def _cdfs(self, values: Tensor, upper: bool = False) -> Tensor:
        z = self._preimages(values)[0]
        return torch.special.ndtr(-z if upper else z)

    def _part_quantiles(self, z: float) -> Tensor:
        return self.loc + self.scale * spline_forward(torch.full_like(self.loc, z), self.knots)[0]

    def _draws(self, tensors: Sequence[Tensor], generator: torch.Generator) -> Tensor:
        loc, scale, knots = tensors
        normal = torch.randn(loc.shape, generator=generator, device=loc.device, dtype=loc.dtype)
        return loc + scale * spline_forward(normal, knots)[0]

    def _rescaled(self, center: Tensor, factor: float | Tensor) -> Sequence[Tensor]:
        return center + factor * (self.loc - center), factor * self.scale, self.knots

    def _gaussian_tensors(self, mean: Tensor, variance: Tensor) -> Sequence[Tensor]:
        bins = self.knots.shape[-1] - 1
        zeros = torch.zeros(3 * bins - 1, device=mean.device, dtype=mean.dtype)
        identity = SplineMap(bins, float(self.knots[..., 0, -1].amax())).knots(zeros, 1)
        return mean, variance.sqrt(), identity.expand(*mean.shape, 3, bins + 1)
