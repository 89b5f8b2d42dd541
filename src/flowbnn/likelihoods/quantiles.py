"""Observation model of quantile regression."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import value_error
from flowbnn.likelihoods.base import stack_outputs
from flowbnn.likelihoods.densities import ConditionalDensity
from flowbnn.likelihoods.regression import MAX_LOG_SCALE
from flowbnn.options import Count, Probability, checked
from flowbnn.predictive.continuous import gauss_legendre
from flowbnn.predictive.quantiles import QuantilePredictive, normal_quantiles


class Quantiles(ConditionalDensity):
    r"""Quantile regression: the network predicts quantiles :math:`q_l(x)` of the targets at levels :math:`\tau_l`.

    The pseudo-likelihood is the mean over levels of asymmetric Laplace log-densities
    ([Yu and Moyeed 2001](https://doi.org/10.1016/S0167-7152(01)00124-9)),

    .. math:: \log p(y \mid x) = \frac1L \sum_l \Big[ \log \frac{\tau_l (1 - \tau_l)}{s} - \rho_{\tau_l}\Big(\frac{y - q_l}{s}\Big)
              \Big], \qquad \rho_\tau(u) = u (\tau - 1[u < 0]) ,

    whose maximum in :math:`q` minimizes the pinball loss. The outputs are the middle quantile, logarithms of the distances between
    neighbours, and :math:`\log s`, so quantiles never cross. The predictive interpolates the quantile function between the levels
    (:class:`~flowbnn.predictive.QuantilePredictive`), and its ``nll`` is that of the resulting density.

    Args:
        levels: Levels in ascending order, at least two.
        dim: Number of targets, each with its own quantiles.

    >>> likelihood = Quantiles((0.1, 0.5, 0.9))
    >>> likelihood.num_outputs
    4
    >>> likelihood.quantiles(torch.zeros(1, 4))
    tensor([[[-1.,  0.,  1.]]])
    """

    @checked
    def __init__(self, levels: Sequence[Probability] = (0.05, 0.5, 0.95), dim: Count = 1) -> None:
        super().__init__()
        self.levels, self.dim = tuple(float(level) for level in levels), dim
        if len(self.levels) < 2 or list(self.levels) != sorted(set(self.levels)):
            raise value_error("levels", "two or more, ascending", list(self.levels))

    def extra_repr(self) -> str:
        return f"{self.levels}" + (f", dim={self.dim}" if self.dim > 1 else "")

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the network, ``(levels + 1) dim``."""
        return (len(self.levels) + 1) * self.dim

    def _signs(self, like: Tensor) -> Tensor:
        """Returns the derivative of each quantile in the distances, ``[L, L - 1]``: -1 below the middle, 1 above it, or 0."""
        rows, columns = torch.arange(len(self.levels))[:, None], torch.arange(len(self.levels) - 1)[None]
        middle = len(self.levels) // 2
        above, below = (rows > columns) & (columns >= middle), (rows <= columns) & (columns < middle)
        return above.to(like) - below.to(like)

    def _parameters_of(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the middle quantile ``[..., D, 1]``, distances ``[..., D, L - 1]`` and scales ``[..., D, 1]``."""
        columns = outputs.unflatten(-1, (len(self.levels) + 1, self.dim)).mT
        middle, logarithms = columns[..., :1], columns[..., 1:].clamp(-MAX_LOG_SCALE, MAX_LOG_SCALE)
        return middle, logarithms[..., :-1].exp(), logarithms[..., -1:].exp()

    def quantiles(self, outputs: Tensor) -> Tensor:
        """Returns the quantiles ``[..., D, L]`` for outputs ``[..., num_outputs]``."""
        middle, distances, _ = self._parameters_of(outputs)
        return middle + distances @ self._signs(outputs).mT

    def log_densities(self, outputs: Tensor, values: Tensor) -> Tensor:
        """Returns the pseudo-log-likelihood of each target, ``[B, D]``, with gradients.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
            values: Targets ``[B, D]``.
        """
        middle, distances, scale = self._parameters_of(outputs)
        levels = torch.tensor(self.levels, dtype=outputs.dtype, device=outputs.device)
        residual = (values.unsqueeze(-1) - middle - distances @ self._signs(outputs).mT) / scale
        loss = torch.maximum(levels * residual, (levels - 1.0) * residual)
        return ((levels * (1.0 - levels)).log() - scale.log() - loss).mean(-1)

    def _make(self, outputs: Tensor) -> QuantilePredictive:
        values = self.quantiles(outputs)
        normals = normal_quantiles(self.levels, values).expand_as(values)
        return QuantilePredictive._from_tensors(values, normals, shape=self.shape)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> QuantilePredictive:
        """Returns the predictive distribution of samples of outputs ``[S, B, num_outputs]``."""
        values = self.quantiles(self._checked_outputs(outputs).double())
        return QuantilePredictive(values, self.levels, sample_counts, self.shape)

    def nodes(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Returns points and weights of a quadrature rule, by a Gauss-Legendre rule for the normal variable.

        Args:
            outputs: Outputs of the network, ``[B, num_outputs]``.
        """
        density = self._make(outputs.unsqueeze(0))
        fractions, weights = gauss_legendre(64, outputs)
        z = 12.0 * fractions - 6.0
        points = torch.cat([density._part_quantiles(value) for value in z.tolist()])
        mass = (weights * torch.exp(-0.5 * z.square())).view(-1, 1, 1)
        return points, (mass / mass.sum(0)).expand_as(points)

    def information(self, outputs: Tensor, targets: Tensor) -> Tensor:
        r"""Returns the expected Hessian of the loss in the outputs, ``[B, C, C]``.

        The expected pinball loss has the second derivative :math:`f(q_l)` in a quantile, with the density :math:`f` of the predictive.
        """
        density = self._make(outputs.double().unsqueeze(0))
        _, distances, scale = self._parameters_of(outputs.double())
        slopes, normals = density._slopes[0], density._tensors[1][0]
        slopes = torch.cat([slopes[..., :1], slopes, slopes[..., -1:]], -1)
        at_levels = torch.exp(-0.5 * normals.square()) / math.sqrt(2.0 * math.pi)
        at_levels = at_levels / (0.5 * (slopes[..., 1:] + slopes[..., :-1]))
        weights = at_levels / (len(self.levels) * scale)  # [B, D, L]
        ones = torch.ones_like(normals).unsqueeze(-1)
        jacobian = torch.cat([ones, self._signs(distances) * distances.unsqueeze(-2)], -1)  # [B, D, L, L]
        blocks = jacobian.mT @ (weights.unsqueeze(-1) * jacobian)
        size, rows = len(self.levels) + 1, len(outputs)
        matrices = blocks.new_zeros(rows, size, self.dim, size, self.dim)
        for target in range(self.dim):
            matrices[:, :-1, target, :-1, target] = blocks[:, target]
            matrices[:, -1, target, -1, target] = 1.0  # of the log-scale, at its optimum
        return matrices.reshape(rows, self.num_outputs, self.num_outputs).to(outputs.dtype)

    def output_units(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Returns location and scale of all outputs: those of the targets for quantiles, and a shift of the logarithms."""
        number = len(self.levels)
        return torch.cat([loc, scale.log().repeat(number)]), torch.cat(
            [scale, torch.ones_like(scale).repeat(number)]
        )

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the outputs whose quantiles are the means of the quantiles."""
        stacked = stack_outputs(outputs)
        middle, logarithms = stacked.split([self.dim, self.num_outputs - self.dim], -1)
        means = logarithms.logsumexp(0) - math.log(len(outputs))
        return torch.cat([middle.mean(0), means], -1)

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {**super().to_dict(), "levels": list(self.levels), "dim": self.dim}
