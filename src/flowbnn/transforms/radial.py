"""Radial flows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.numerics import safe_norm
from flowbnn.options import Count, Positive, checked
from flowbnn.transforms.base import Transform, check_vectors


class Radial(Transform):
    r"""Pushes away from a centre, or draws towards it: :math:`x = z + \frac{\beta}{\alpha + r} (z - z_0)`.

    .. math:: r = \lVert z - z_0 \rVert, \qquad \log|\det| = \log\left(1 + \frac{\alpha\beta}{(\alpha + r)^2}\right)
              + (D - 1) \log\left(1 + \frac{\beta}{\alpha + r}\right)

    Invertible because :math:`\alpha = \mathrm{softplus}(\cdot) > 0` and :math:`\beta = -\alpha + s` with
    :math:`s = \mathrm{softplus}(\cdot) > 0` (Rezende & Mohamed 2015, appendix A.2); in terms of :math:`s` nothing cancels. The inverse
    is closed: the radius solves :math:`r^2 + (s - \rho) r - \alpha\rho = 0` with :math:`\rho = \lVert x - z_0 \rVert`.

    Args:
        dim: length of the vectors.
        margin: least value of :math:`\alpha` and of :math:`s`.
        generator: source of the random start, which is near the identity.

    >>> radial = Radial(2, generator=torch.Generator().manual_seed(0))
    >>> x, log_det = radial(torch.tensor([3.0, -1.0]))
    >>> radial.inverse(x)[0]
    tensor([ 3., -1.], grad_fn=<AddBackward0>)
    """

    @checked
    def __init__(self, dim: Count, margin: Positive = 1e-3, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.margin = margin
        one = 0.5413248546129181  # softplus(log(e - 1)) = 1
        self.center = nn.Parameter(0.1 * torch.randn(dim, generator=generator))
        self.raw_alpha = nn.Parameter(one + 0.05 * torch.randn((), generator=generator))
        self.raw_beta = nn.Parameter(one + 0.05 * torch.randn((), generator=generator))

    def _sizes(self) -> tuple[Tensor, Tensor]:
        """``alpha`` and ``alpha + beta``."""
        alpha, stretch = F.softplus(self.raw_alpha), F.softplus(self.raw_beta)
        return alpha.clamp(min=self.margin), stretch.clamp(min=self.margin)

    def _log_det(self, radius: Tensor, alpha: Tensor, stretch: Tensor) -> Tensor:
        reach = alpha + radius
        near, far, center = alpha / reach, radius / reach, stretch / reach
        return torch.log(far * (1 + near) + near * center) + (self.dim - 1) * torch.log(far + center)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(z, self.dim, self)
        alpha, stretch = self._sizes()
        offset = z - self.center
        radius = safe_norm(offset)
        factor = (radius + stretch) / (radius + alpha)
        return self.center + factor.unsqueeze(-1) * offset, self._log_det(radius, alpha, stretch)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_vectors(x, self.dim, self)
        alpha, stretch = self._sizes()
        offset = x - self.center
        distance = safe_norm(offset)
        half = distance - stretch
        # the root of the quadratic that adds numbers of one sign, whichever sign `half` has
        total = half.abs() + torch.sqrt(half * half + 4 * alpha * distance)
        radius = torch.where(half >= 0, total / 2, 2 * alpha * distance / total)
        factor = (radius + alpha) / (radius + stretch)
        return self.center + factor.unsqueeze(-1) * offset, -self._log_det(radius, alpha, stretch)
