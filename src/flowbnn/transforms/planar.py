"""Planar flows."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.numerics import tanh_root, tanh_slope
from flowbnn.transforms.base import Transform, check_dim, check_dtype, check_width

__all__ = ["Planar"]


class Planar(Transform):
    r"""One sheet of shear: :math:`x = z + \hat u \tanh(a)` with :math:`a = w^\top z + b`.

    .. math:: \log|\det| = \log\left(1 + \tanh'(a)\, w^\top \hat u\right), \qquad
              \hat u = u + \left(m(w^\top u) - w^\top u\right) \frac{w}{\lVert w \rVert^2}, \qquad
              m(t) = -1 + \mathrm{softplus}(t)

    The constraint keeps :math:`w^\top \hat u = m > -1`, so that the map is invertible (Rezende & Mohamed, *Variational
    inference with normalizing flows*, 2015, appendix A.1). Two things are added for arithmetic's sake. ``margin`` bounds
    :math:`1 + m` from below, because a slope of zero has no log. And for :math:`\lVert w \rVert^2` < 1e-3 a correction
    that lowers :math:`m` fades out: it would grow as :math:`1 / \lVert w \rVert`, and it is not needed there.

    The inverse finds :math:`a` from :math:`a + m \tanh(a) = w^\top x + b`, an increasing function of one number, and
    then :math:`z = x - \hat u \tanh(a)`. It carries gradients to :math:`x` and to the parameters.

    Args:
        dim: length of the vectors.
        margin: least value of :math:`1 + w^\top \hat u`, the strongest squeeze.
        generator: source of the random start, which is near the identity.

    >>> planar = Planar(3, generator=torch.Generator().manual_seed(0))
    >>> z = torch.tensor([[0.5, -1.0, 2.0]])
    >>> x, log_det = planar(z)
    >>> planar.inverse(x)[0]
    tensor([[ 0.5000, -1.0000,  2.0000]], grad_fn=<AddcmulBackward0>)
    """

    inverse_kind = "numerical"

    def __init__(self, dim: int, margin: float = 1e-3, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.dim = check_dim(dim, self)
        self.margin = margin
        w = torch.randn(dim, generator=generator)
        w = w / torch.linalg.vector_norm(w).clamp(min=1e-3)
        # m(log(e - 1)) = 0: along w the start is the identity, and the rest of u is small
        u = 0.5413248546129181 * w + 0.05 * torch.randn(dim, generator=generator)
        self.w = nn.Parameter(w)
        self.u = nn.Parameter(u)
        self.b = nn.Parameter(0.05 * torch.randn((), generator=generator))

    def constrained(self) -> tuple[Tensor, Tensor]:
        r""":math:`\hat u` and :math:`1 + w^\top \hat u`, computed without their difference from :math:`u`."""
        w, u = self.w, self.u
        square, product = w.dot(w), w.dot(u)
        squeeze = F.softplus(product).clamp(min=self.margin)
        correction = squeeze - 1 - product
        divisor = torch.where(correction < 0, square.clamp(min=1e-3), square)
        share = square / divisor
        u_hat = u + correction / divisor * w
        with (
            torch.no_grad()
        ):  # a long u loses the digits of w.u_hat to cancellation: find them, to put them back
            lost = share * (squeeze - 1) + (1 - share) * product - w.dot(u_hat)
            restored = lost / square.clamp(min=1e-37) * w
        return u_hat + restored, share * squeeze + (1 - share) * (1 + product)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_width(z, self.dim, self)
        check_dtype(z, self.w, self)
        u_hat, squeeze = self.constrained()
        a = z @ self.w + self.b
        tanh = torch.tanh(a)
        return torch.addcmul(z, tanh.unsqueeze(-1), u_hat), _log_slope(a, tanh, squeeze)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_width(x, self.dim, self)
        check_dtype(x, self.w, self)
        u_hat, squeeze = self.constrained()
        a = tanh_root(x @ self.w + self.b, squeeze)
        tanh = torch.tanh(a)
        return torch.addcmul(x, tanh.unsqueeze(-1), u_hat, value=-1), -_log_slope(a, tanh, squeeze)


def _log_slope(a: Tensor, tanh: Tensor, squeeze: Tensor) -> Tensor:
    r""":math:`\log(1 + \tanh'(a) m)` as :math:`\log(\tanh^2 a + \tanh'(a) s)`, a sum of positive terms."""
    return torch.log(tanh * tanh + tanh_slope(a) * squeeze)
