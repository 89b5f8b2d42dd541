"""Planar and radial flows, planar ones also in chains with LU maps."""

from collections.abc import Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.kernels import Chain, ChainShape, reference
from flowbnn.numerics import safe_norm
from flowbnn.options import Count, Ge, Positive, checked
from flowbnn.transforms.base import Transform, check_vectors
from flowbnn.transforms.linear import LULinear


class PlanarLU(Transform):
    r"""Planar and LU maps one after the other: ``Compose`` of :class:`Planar` and :class:`LULinear` maps, in fewer steps.

    The parameters of all maps lie side by side, and :mod:`flowbnn.kernels` evaluates the chain at once, by the formulas of
    :mod:`flowbnn.kernels.reference`: short vectors cost the number of operations, not their arithmetic.

    Args:
        dim: length of the vectors.
        runs: ``("planar", 2), ("lu", 3), ...``: kinds and how many of each, in the order of application.
        margin, bound: as in :class:`Planar` and :class:`LULinear`.
        generator: source of the random start, which is near the identity.

    >>> flow = PlanarLU(3, [("planar", 2), ("lu", 1)], generator=torch.Generator().manual_seed(0))
    >>> z = torch.tensor([[0.5, -1.0, 2.0]])
    >>> flow.inverse(flow(z)[0])[0]
    tensor([[ 0.5000, -1.0000,  2.0000]], grad_fn=<ViewBackward0>)
    """

    @checked
    def __init__(
        self,
        dim: Count,
        runs: Sequence[tuple[Literal["planar", "lu"], Annotated[int, Ge(0)]]],
        margin: Positive = 1e-3,
        bound: Positive = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        planar: list[tuple[Tensor, Tensor, Tensor]] = []
        linear: list[Tensor] = []
        for kind, size in runs:  # in the order of application, so that a seed gives what Compose would have
            for _ in range(size):
                if kind == "planar":
                    planar.append(_planar_start(dim, generator))
                else:
                    linear.append(LULinear(dim, bound=bound, generator=generator).factors.detach())
        if planar:
            self.w, self.u, self.b = (nn.Parameter(torch.stack(some)) for some in zip(*planar, strict=True))
        if linear:
            self.factors = nn.Parameter(torch.stack(linear))
        kinds = tuple((kind == "planar", size) for kind, size in runs if size)
        self.plan = ChainShape(dim, kinds, len(planar), len(linear), margin, bound)
        self.linearity = "none" if planar else "affine"
        self.inverse_kind = "numerical" if planar else "exact"

    @property
    def chain(self) -> Chain:
        """What :mod:`flowbnn.kernels` needs."""
        planar = (self.w, self.u, self.b) if self.plan.planar else ()
        return Chain(self.plan, (*planar, self.factors) if self.plan.linear else planar)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.push(z)  # type: ignore[return-value]

    def push(self, z: Tensor, log_det: bool = True, coarse: bool = False) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward`; ``log_det=False`` spares what only the density needs, ``coarse`` is as in :class:`flowbnn.kernels.Group`."""
        chain = self.chain
        check_vectors(z, self.dim, self, *chain.weights[:1])
        x, total = kernels.evaluate(chain, z.reshape(-1, self.dim), log_det, coarse)
        return x.view(z.shape), None if total is None else total.view(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        chain = self.chain
        check_vectors(x, self.dim, self, *chain.weights[:1])
        z, total = reference.inverse(chain.plan, chain.weights, x.reshape(-1, self.dim))
        return z.view(x.shape), total.view(x.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.dim}, {[('planar' if planar else 'lu', size) for planar, size in self.plan.runs]}"


def _planar_start(dim: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """``w``, ``u`` and ``b`` of a map near the identity."""
    w = torch.randn(dim, generator=generator)
    w = w / torch.linalg.vector_norm(w).clamp(min=1e-3)
    # m(log(e - 1)) = 0: along w the start is the identity, and the rest of u is small
    u = 0.5413248546129181 * w + 0.05 * torch.randn(dim, generator=generator)
    return w, u, 0.05 * torch.randn((), generator=generator)


class Planar(PlanarLU):
    r"""A planar flow, which moves along one direction: :math:`x = z + \hat u \tanh(a)` with :math:`a = w^\top z + b`.

    .. math:: \log|\det| = \log\left(1 + \tanh'(a)\, w^\top \hat u\right), \qquad
              \hat u = u + \left(m(w^\top u) - w^\top u\right) \frac{w}{\lVert w \rVert^2}, \qquad
              m(t) = -1 + \mathrm{softplus}(t)

    The constraint keeps :math:`w^\top \hat u = m > -1`, so that the map is invertible (Rezende & Mohamed, `Variational inference with
    normalizing flows <https://arxiv.org/abs/1505.05770>`_, 2015, appendix A.1; in code: :func:`flowbnn.kernels.reference.constrain`).
    The inverse finds :math:`a` from :math:`a + m \tanh(a) = w^\top x + b`, an increasing function of one number, and then
    :math:`z = x - \hat u \tanh(a)`. It carries gradients to :math:`x` and to the parameters, which have a leading axis of length one.

    Args:
        dim: length of the vectors.
        margin: least value of :math:`1 + w^\top \hat u`, the strongest squeeze.
        generator: source of the random start, which is near the identity.

    >>> planar = Planar(3, generator=torch.Generator().manual_seed(0))
    >>> z = torch.tensor([[0.5, -1.0, 2.0]])
    >>> x, log_det = planar(z)
    >>> planar.inverse(x)[0]
    tensor([[ 0.5000, -1.0000,  2.0000]], grad_fn=<ViewBackward0>)
    """

    @checked
    def __init__(self, dim: Count, margin: Positive = 1e-3, generator: torch.Generator | None = None) -> None:
        super().__init__(dim, [("planar", 1)], margin, generator=generator)


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
