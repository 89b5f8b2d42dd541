"""Planar, radial and Sylvester flows, and chains of planar and LU maps."""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn import kernels
from flowbnn.kernels import Chain, ChainShape, reference
from flowbnn.numerics import safe_norm, tanh_root, tanh_slope
from flowbnn.options import Bounds, Count, Dim, Ge, Positive, check, checked
from flowbnn.transforms.base import BidirectionalTransform, Transform, check_vectors
from flowbnn.transforms.linear import LULinear, normalize_rows, reflect

_LOG_E_MINUS_1 = 0.5413248546129181  # softplus of it is 1, at which planar and radial flows are the identity


class PlanarLU(Transform):
    r"""Chain of planar and LU maps: ``Compose`` of :class:`Planar` and :class:`LULinear` maps in fewer operations.

    The parameters of all maps are stacked, and :mod:`flowbnn.kernels` evaluates the whole chain by the formulas of
    :mod:`flowbnn.kernels.reference`. For short vectors the number of operations costs more than their arithmetic.

    Args:
        dim: Length of the vectors.
        runs: Kinds of maps and their numbers in the order of application: ``("planar", 2), ("lu", 3), ...``.
        margin: Smallest value of :math:`1 + w^\top \hat u` of a planar map, its strongest contraction.
        bound: Largest absolute value of the log-diagonal, as in :class:`LULinear`.
        generator: Generator of the random start, which is near the identity.

    >>> flow = PlanarLU(3, [("planar", 2), ("lu", 1)], generator=torch.Generator().manual_seed(0))
    >>> z = torch.tensor([[0.5, -1.0, 2.0]])
    >>> flow.inverse(flow(z)[0])[0]
    tensor([[ 0.5000, -1.0000,  2.0000]], grad_fn=<ViewBackward0>)
    """

    @checked
    def __init__(
        self,
        dim: Dim,
        runs: Sequence[tuple[Literal["planar", "lu"], Annotated[int, Ge(0)]]],
        margin: Positive = 1e-3,
        bound: Positive = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = dim
        planar: list[tuple[Tensor, Tensor, Tensor]] = []
        linear: list[Tensor] = []
        for kind, size in runs:  # in the order of application, so that a seed gives the same start as Compose
            for _ in range(size):
                if kind == "planar":
                    planar.append(_init_planar(dim, generator))
                else:
                    linear.append(LULinear(dim, bound=bound, generator=generator).factors.detach())
        if planar:
            self.w, self.u, self.b = (nn.Parameter(torch.stack(each)) for each in zip(*planar, strict=True))
        if linear:
            self.factors = nn.Parameter(torch.stack(linear))
        kinds = tuple((kind == "planar", size) for kind, size in runs if size)
        self.chain_shape = ChainShape(dim, kinds, len(planar), len(linear), margin, bound)
        self.linearity = "none" if planar else "affine"
        self.inverse_kind = "numerical" if planar else "exact"

    @property
    def chain(self) -> Chain:
        """The chain as :mod:`flowbnn.kernels` expects it."""
        return Chain.of(self)

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.push(z)  # type: ignore[return-value]

    def push(self, z: Tensor, log_det: bool = True, allow_tf32: bool = False) -> tuple[Tensor, Tensor | None]:
        """Computes :meth:`forward`, optionally without the log-determinant.

        Args:
            z: Vectors ``(..., dim)``.
            log_det: If False, the log-determinant is skipped.
            allow_tf32: If True, allows products in TF32, as in :class:`flowbnn.kernels.Group`.
        """
        chain = self.chain
        check_vectors(z, self.dim, self, *chain.weights[:1])
        x, total = kernels.evaluate(chain, z.reshape(-1, self.dim), log_det, allow_tf32)
        return x.view(z.shape), None if total is None else total.view(z.shape[:-1])

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        chain = self.chain
        check_vectors(x, self.dim, self, *chain.weights[:1])
        z, total = reference.inverse(chain.shape, chain.weights, x.reshape(-1, self.dim))
        return z.view(x.shape), total.view(x.shape[:-1])


def _init_planar(dim: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor, Tensor]:
    """Returns ``w``, ``u`` and ``b`` of a planar map near the identity."""
    w = torch.randn(dim, generator=generator)
    w = w / torch.linalg.vector_norm(w).clamp(min=1e-3)
    # m(log(e - 1)) = 0: the start is the identity along w, and u is small across w.
    u = _LOG_E_MINUS_1 * w + 0.05 * torch.randn(dim, generator=generator)
    return w, u, 0.05 * torch.randn((), generator=generator)


class Planar(PlanarLU):
    r"""Planar flow, which moves points along one direction: :math:`x = z + \hat u \tanh(a)` with :math:`a = w^\top z + b`.

    .. math:: \log|\det| = \log\left(1 + \tanh'(a)\, w^\top \hat u\right), \qquad
              \hat u = u + \left(m(w^\top u) - w^\top u\right) \frac{w}{\lVert w \rVert^2}, \qquad
              m(t) = -1 + \mathrm{softplus}(t)

    The constraint keeps :math:`w^\top \hat u = m > -1`, so that the map is invertible (Rezende & Mohamed, `Variational inference with
    normalizing flows <https://arxiv.org/abs/1505.05770>`_, 2015, appendix A.1; in code: :func:`flowbnn.kernels.reference.constrain`).
    The inverse solves :math:`a + m \tanh(a) = w^\top x + b`, an increasing function of one number, for :math:`a`, and returns
    :math:`z = x - \hat u \tanh(a)`. It carries gradients to :math:`x` and to the parameters, which have a leading axis of length one.

    Args:
        dim: Length of the vectors.
        generator: Generator of the random start, which is near the identity.

    >>> planar = Planar(3, generator=torch.Generator().manual_seed(0))
    >>> z = torch.tensor([[0.5, -1.0, 2.0]])
    >>> x, log_det = planar(z)
    >>> planar.inverse(x)[0]
    tensor([[ 0.5000, -1.0000,  2.0000]], grad_fn=<ViewBackward0>)
    """

    @checked
    def __init__(self, dim: Dim, generator: torch.Generator | None = None) -> None:
        super().__init__(dim, [("planar", 1)], generator=generator)


class Radial(BidirectionalTransform):
    r"""Radial flow, which moves points away from a centre or towards it: :math:`x = z + \frac{\beta}{\alpha + r} (z - z_0)`.

    .. math:: r = \lVert z - z_0 \rVert, \qquad \log|\det| = \log\left(1 + \frac{\alpha\beta}{(\alpha + r)^2}\right)
              + (D - 1) \log\left(1 + \frac{\beta}{\alpha + r}\right)

    The map is invertible because :math:`\alpha = \mathrm{softplus}(\cdot) > 0` and :math:`\beta = -\alpha + s` with
    :math:`s = \mathrm{softplus}(\cdot) > 0` (Rezende & Mohamed 2015, appendix A.2). In terms of :math:`s` nothing cancels. The
    inverse has a closed form: the radius solves :math:`r^2 + (s - \rho) r - \alpha\rho = 0` with
    :math:`\rho = \lVert x - z_0 \rVert`.

    Args:
        dim: Length of the vectors.
        generator: Generator of the random start, which is near the identity.

    >>> radial = Radial(2, generator=torch.Generator().manual_seed(0))
    >>> x, log_det = radial(torch.tensor([3.0, -1.0]))
    >>> torch.allclose(radial.inverse(x)[0], torch.tensor([3.0, -1.0]))
    True
    """

    @checked
    def __init__(self, dim: Dim, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.dim = dim
        self.center = nn.Parameter(0.1 * torch.randn(dim, generator=generator))
        self.raw_alpha = nn.Parameter(_LOG_E_MINUS_1 + 0.05 * torch.randn((), generator=generator))
        self.raw_beta = nn.Parameter(_LOG_E_MINUS_1 + 0.05 * torch.randn((), generator=generator))

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self)
        alpha = F.softplus(self.raw_alpha).clamp(min=1e-3)
        stretch = F.softplus(self.raw_beta).clamp(min=1e-3)  # alpha + beta
        offset = value - self.center
        radius = safe_norm(offset)
        if inverse:
            distance, half = radius, 0.5 * (radius - stretch)
            unit = (half.abs() + alpha).detach()  # in this unit no square overflows
            root = unit * torch.sqrt((half / unit).square() + (alpha / unit) * (distance / unit))
            # The form of the root that adds numbers of one sign, so that nothing cancels.
            total = half.abs() + root
            radius = torch.where(half >= 0, total, alpha * (distance / total))
        reach, stretched = radius + alpha, radius + stretch
        growth = stretched / reach
        slope = torch.addcmul(radius, alpha, growth) / reach
        log_det = torch.add(slope.log(), growth.log(), alpha=self.dim - 1)
        factor = reach / stretched if inverse else growth
        moved = torch.addcmul(self.center, factor.unsqueeze(-1), offset)
        return moved, -log_det if inverse else log_det


class Sylvester(BidirectionalTransform):
    r"""Sylvester flow :math:`x = z + Q R \tanh(\tilde R Q^\top z + b)` in :math:`M` directions (van den Berg et al. 2018).

    .. math:: \log|\det| = \sum_{i=1}^{M} \log\left(1 + \tanh'(a_i)\, R_{ii} \tilde R_{ii}\right), \qquad
              a = \tilde R Q^\top z + b

    :math:`R` and :math:`\tilde R` are upper triangular with diagonals in :math:`(-1, 1)`, which makes the map invertible
    (https://arxiv.org/abs/1803.05649). The inverse solves one increasing equation in one unknown for each direction, from the last to
    the first, and carries gradients. The strict triangles are stored in one square matrix, with the raw diagonal of :math:`R` between
    them. ``basis`` determines the :math:`D \times M` matrix :math:`Q` with orthonormal columns:

    - ``"householder"``: Product of ``size`` reflections :math:`I - 2 v_k v_k^\top / \lVert v_k \rVert^2`, by default :math:`D`, which
      reach every orthogonal matrix. A zero vector :math:`v_k` reflects nothing.
    - ``"orthogonal"``: QR decomposition of a free matrix of ``size`` columns, by default :math:`D`.
    - ``"identity"`` and ``"reversal"`` of the order: Alternate them, so that every coordinate depends on every other.

    Args:
        dim: Length :math:`D` of the vectors.
        basis: Kind of the basis :math:`Q`.
        size: Number of reflections, or number of columns of an orthogonal basis, which is at most ``dim``.
        generator: Generator of the random start, which is near the identity.

    >>> flow = Sylvester(5, "orthogonal", size=2, generator=torch.Generator().manual_seed(0))
    >>> z = torch.arange(5.0)
    >>> x, log_det = flow(z)
    >>> torch.allclose(flow.inverse(x)[0], z, atol=1e-5)
    True
    """

    inverse_kind = "numerical"

    @checked
    def __init__(
        self,
        dim: Dim,
        basis: Literal["householder", "orthogonal", "identity", "reversal"] = "householder",
        size: Count | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        size = size or dim
        if basis == "orthogonal":  # it has at most dim columns
            check("size", size, Annotated[int, Bounds(ge=1, le=dim)], "Sylvester")
        self.dim, self.basis = dim, basis
        self.hidden = hidden = size if basis == "orthogonal" else dim
        self.triangles = nn.Parameter(0.05 * torch.randn(hidden, hidden, generator=generator))
        self.raw_diagonal = nn.Parameter(1 + 0.05 * torch.randn(hidden, generator=generator))
        self.bias = nn.Parameter(0.05 * torch.randn(hidden, generator=generator))
        if basis == "orthogonal":
            self.frame = nn.Parameter(torch.linalg.qr(torch.randn(dim, hidden, generator=generator)).Q)
        elif basis == "householder":
            self.reflections = nn.Parameter(torch.randn(size, dim, generator=generator))

    def _rotations(self) -> tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]:
        r"""Returns two functions of row vectors: the products with :math:`Q` and with :math:`Q^\top`."""
        if self.basis == "householder":
            units = normalize_rows(self.reflections)
            return lambda v: reflect(v, units), lambda v: reflect(v, units.flip(0))
        if self.basis == "orthogonal":
            frame = torch.linalg.qr(self.frame).Q
            return lambda v: torch.matmul(v, frame), lambda v: torch.matmul(v, frame.mT)
        rotate = (lambda v: v.flip(-1)) if self.basis == "reversal" else (lambda v: v)
        return rotate, rotate

    def _factors(self) -> tuple[Tensor, Tensor, Tensor]:
        r"""Returns :math:`R`, :math:`\tilde R` and the slopes at zero, :math:`1 + R_{ii} \tilde R_{ii}`."""
        # The product of two diagonal entries stays above -0.991, so that no slope is below 0.009.
        bound = 0.995
        diagonal = bound * torch.tanh(self.triangles.diagonal())
        tilde_diagonal = bound * torch.tanh(self.raw_diagonal)
        r = self.triangles.triu(1) + torch.diag(diagonal)
        r_tilde = self.triangles.tril(-1).mT + torch.diag(tilde_diagonal)
        return r, r_tilde, 1 + diagonal * tilde_diagonal

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, self.bias)
        r, r_tilde, slopes = self._factors()
        rotate, rotate_back = self._rotations()
        rotated = rotate(value)
        a = self._solve(rotated, r, r_tilde, slopes) if inverse else rotated @ r_tilde.mT + self.bias
        tanh = torch.tanh(a)
        step = rotate_back(tanh @ r.mT)
        log_det = torch.log(tanh * tanh + tanh_slope(a) * slopes).sum(-1)
        return (value - step, -log_det) if inverse else (value + step, log_det)

    def _solve(self, residual: Tensor, r: Tensor, r_tilde: Tensor, slopes: Tensor) -> Tensor:
        r"""Returns the arguments of the tanh for :math:`Q^\top x`."""
        # Row i of v + R tanh(R~ v + b) = Q'x contains v_i, v_{i+1}, ...: solve from the last row upwards.
        offset = self.bias.expand_as(residual)
        rows: list[Tensor] = []
        for i in reversed(range(self.hidden)):
            a = tanh_root(r_tilde[i, i] * residual[..., i] + offset[..., i], slopes[i])
            step = torch.tanh(a).unsqueeze(-1) * r[:, i]
            v = residual[..., i] - step[..., i]
            residual = residual - step
            offset = offset + v.unsqueeze(-1) * r_tilde[:, i]
            rows.append(a)
        return torch.stack(rows[::-1], -1)
