"""Elementwise affine maps."""

import math

import torch
from torch import Tensor, nn

from flowbnn.numerics import soft_clamp
from flowbnn.options import Count, Positive, checked
from flowbnn.transforms.base import Transform, check_vectors


class Affine(Transform):
    r"""Elementwise affine map :math:`x = c + t + e^{s} \odot (z - c)` with :math:`\log|\det| = \sum_i s_i`.

    Starts at the identity. The log-scale is bounded softly, :math:`s = b \tanh(a / b)`, so that neither direction can overflow.
    Applied to a normal base it is the learnable Gaussian of an implicit Bayesian network.

    Args:
        dim: length of the vectors.
        bound: largest size :math:`b` of the log-scale.
        center: the fixed point :math:`c` of the scaling. At the mean of the base, shift and scale move the mean and the
            spread of the result apart from each other, which optimizers reward.

    >>> x, log_det = Affine(3)(torch.ones(2, 3))
    >>> x.shape, log_det
    (torch.Size([2, 3]), tensor([0., 0.], grad_fn=<ExpandBackward0>))
    """

    linearity = "diagonal"

    @checked
    def __init__(self, dim: Count, bound: Positive = 8.0, center: float = 0.0) -> None:
        super().__init__()
        self.bound, self.center = bound, center
        self.shift = nn.Parameter(torch.zeros(dim))
        self.raw_log_scale = nn.Parameter(torch.zeros(dim))

    @property
    def log_scale(self) -> Tensor:
        return soft_clamp(self.raw_log_scale, self.bound)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, len(self.shift), self)
        log_scale = self.log_scale
        scale = log_scale.exp()
        return torch.addcmul(self._offset(scale), z, scale), log_scale.sum().expand(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, len(self.shift), self)
        log_scale = self.log_scale
        return (x - self._offset(log_scale.exp())) * (-log_scale).exp(), -log_scale.sum().expand(x.shape[:-1])

    @torch.no_grad()
    def start(self, loc: float, scale: float) -> None:
        """Become the map of standard normal numbers to normal ones of this mean and deviation, as far as the bound allows."""
        log_scale = max(-0.99, min(0.99, math.log(scale) / self.bound))
        self.raw_log_scale.fill_(self.bound * math.atanh(log_scale))
        self.shift.fill_(loc).sub_((1.0 - scale) * self.center)

    def push_normal(self, loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Mean, deviation and log-scale of the image of a diagonal normal: fewer steps than two forward passes."""
        log_scale = self.log_scale
        factor = log_scale.exp()
        return torch.addcmul(self._offset(factor), loc, factor), scale * factor, log_scale

    def _offset(self, scale: Tensor) -> Tensor:
        return self.shift - self.center * (scale - 1.0) if self.center else self.shift
