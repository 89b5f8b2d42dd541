"""Runs of planar and LU maps, evaluated together."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError
from flowbnn.kernels import planar_lu_numpy as by_hand
from flowbnn.kernels.planar_lu_numpy import Plan
from flowbnn.numerics import soft_clamp, tanh_root, tanh_slope
from flowbnn.transforms.base import Transform, check_dim, check_dtype, check_width
from flowbnn.transforms.linear import LULinear
from flowbnn.transforms.planar import Planar

__all__ = ["PlanarLU"]


class PlanarLU(Transform):
    r"""Planar and LU maps one after the other: what ``Compose`` of :class:`Planar` and :class:`LULinear` computes, in fewer steps.

    The maps of a noise flow are short vectors times small matrices. What they cost is not arithmetic but the number of
    operations, forward and back. Here the parameters of all maps lie side by side, the constraint on all :math:`\hat u` is worked
    out at once, and :math:`K` planar maps in a row, :math:`x = z + \sum_k \hat u_k \tanh(a_k)`, need two matrix products
    however many they are, because each :math:`a_k` follows from products that are known beforehand:

    .. math:: a_k = w_k^\top z + b_k + \sum_{j<k} (w_k^\top \hat u_j) \tanh(a_j) .

    An LU map stays two triangular products and is never formed. On a processor the chain and its gradient are one function
    written by hand (:mod:`flowbnn.kernels.planar_lu_numpy`) instead of a graph of some hundred nodes.

    Args:
        dim: length of the vectors.
        runs: ``("planar", 2), ("lu", 3), ...``: kinds and how many of each, in the order of application.
        margin: as in :class:`Planar`.
        bound: as in :class:`LULinear`.
        generator: source of the random start, which is near the identity.

    >>> flow = PlanarLU(3, [("planar", 2), ("lu", 1)], generator=torch.Generator().manual_seed(0))
    >>> z = torch.tensor([[0.5, -1.0, 2.0]])
    >>> flow.inverse(flow(z)[0])[0]
    tensor([[ 0.5000, -1.0000,  2.0000]], grad_fn=<ViewBackward0>)
    """

    def __init__(
        self,
        dim: int,
        runs: Sequence[tuple[Literal["planar", "lu"], int]],
        margin: float = 1e-3,
        bound: float = 4.0,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = check_dim(dim, self)
        for kind, size in runs:
            if kind not in ("planar", "lu") or size < 0:
                raise FlowBNNError(
                    f"the runs of PlanarLU are ('planar', n) or ('lu', n), not {(kind, size)!r}"
                )
        planar: list[Planar] = []
        linear: list[LULinear] = []
        for kind, size in runs:  # in the order of application, so that a seed gives what Compose would have
            for _ in range(size):
                if kind == "planar":
                    planar.append(Planar(dim, margin, generator))
                else:
                    linear.append(LULinear(dim, bound=bound, generator=generator))
        self.plan = Plan(tuple((kind == "planar", n) for kind, n in runs if n), len(planar), margin, bound)
        if planar:
            self.w, self.u, self.b = (
                nn.Parameter(torch.stack([getattr(part, name).detach() for part in planar])) for name in "wub"
            )
        if linear:
            self.factors = nn.Parameter(torch.stack([part.factors.detach() for part in linear]))
        self.linearity = "none" if planar else "affine"
        self.inverse_kind = "numerical" if planar else "exact"

    def _weights(self) -> tuple[Tensor, ...]:
        planar = (self.w, self.u, self.b) if self.plan.planar else ()
        return (*planar, self.factors) if hasattr(self, "factors") else planar

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        x, log_det = self.push(z)
        return x, z.new_zeros(z.shape[:-1]) if log_det is None else log_det

    def push(self, z: Tensor, log_det: bool = True) -> tuple[Tensor, Tensor | None]:
        """:meth:`forward`, which ``log_det=False`` spares what only the density needs."""
        weights = self._weights()
        check_width(z, self.dim, self)
        if not weights:
            return z, None
        check_dtype(z, weights[0], self)
        rows = z.reshape(-1, self.dim)
        if not torch.compiler.is_compiling() and _small(rows):
            x, total = _ByHand.apply(self.plan, log_det, rows, *weights)
        else:
            x, total = _forward(self.plan, log_det, rows, weights)
        return x.view(z.shape), None if total is None else total.view(z.shape[:-1])

    def plain(self, z: Tensor, log_det: bool = True) -> tuple[Tensor, Tensor | None]:
        """:meth:`push` on rows ``[rows, dim]``, by torch's own operations on any device."""
        weights = self._weights()
        return _forward(self.plan, log_det, z, weights) if weights else (z, None)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        check_width(x, self.dim, self)
        weights = self._weights()
        rows, total = x.reshape(-1, self.dim), x.new_zeros(x.shape[:-1]).reshape(-1)
        if weights:
            check_dtype(x, weights[0], self)
        if self.plan.planar:
            u_hat, squeeze = _constrain(self.w, self.u, self.plan.margin)
        if hasattr(self, "factors"):
            lower, upper, logs = _triangles(self.factors, self.plan.bound)
        k, index = self.plan.planar, sum(n for planar, n in self.plan.runs if not planar)
        for planar, size in reversed(self.plan.runs):
            for _ in range(size):
                if planar:
                    k -= 1
                    a = tanh_root(rows @ self.w[k] + self.b[k], squeeze[k])
                    tanh = torch.tanh(a)
                    rows = torch.addcmul(rows, tanh.unsqueeze(-1), u_hat[k], value=-1)
                    total = total - torch.log(tanh * tanh + tanh_slope(a) * squeeze[k])
                else:
                    index -= 1
                    rows = torch.linalg.solve_triangular(
                        lower[index].mT, rows, upper=True, left=False, unitriangular=True
                    )
                    rows = torch.linalg.solve_triangular(upper[index].mT, rows, upper=False, left=False)
                    total = total - logs[index].sum()
        return rows.view(x.shape), total.view(x.shape[:-1])

    def extra_repr(self) -> str:
        return f"{self.dim}, {[('planar' if planar else 'lu', size) for planar, size in self.plan.runs]}"


def _small(rows: Tensor) -> bool:
    """Whether numpy serves: a processor, few numbers (torch has more threads for many), and nobody looking on."""
    return (
        rows.device.type == "cpu"
        and rows.dtype in (torch.float32, torch.float64)
        and 0 < rows.numel() <= 2**16
        and torch._C._functorch.maybe_current_level() is None
    )


def _constrain(w: Tensor, u: Tensor, margin: float) -> tuple[Tensor, Tensor]:
    r"""All :math:`\hat u_k` and :math:`1 + w_k^\top \hat u_k`, by the formula of :meth:`Planar.constrained`."""
    square, product = (w * w).sum(-1), (w * u).sum(-1)
    squeeze = F.softplus(product).clamp(min=margin)
    correction = squeeze - 1 - product
    divisor = torch.where(correction < 0, square.clamp(min=1e-3), square)
    share = square / divisor
    u_hat = torch.addcmul(u, (correction / divisor).unsqueeze(-1), w)
    with torch.no_grad():
        lost = share * (squeeze - 1) + (1 - share) * product - (w * u_hat).sum(-1)
        restored = (lost / square.clamp(min=1e-37)).unsqueeze(-1) * w
    return u_hat + restored, share * squeeze + (1 - share) * (1 + product)


def _triangles(factors: Tensor, bound: float) -> tuple[Tensor, Tensor, Tensor]:
    r""":math:`L` and :math:`U` of every LU map and the logs of :math:`U`'s diagonal."""
    scale = factors.shape[-1] ** -0.5
    logs = soft_clamp(factors.diagonal(dim1=-2, dim2=-1), bound)
    unit = torch.eye(factors.shape[-1], dtype=factors.dtype, device=factors.device)
    return factors.tril(-1) * scale + unit, factors.triu(1) * scale + torch.diag_embed(logs.exp()), logs


def _forward(plan: Plan, log_det: bool, z: Tensor, weights: Sequence[Tensor]) -> tuple[Tensor, Tensor | None]:
    total: Tensor | None = None
    if plan.planar:
        w, u, b = weights[:3]
        u_hat, squeeze = _constrain(w, u, plan.margin)
    if len(weights) != 3:
        lower, upper, logs = _triangles(weights[-1], plan.bound)
        if log_det:
            total = logs.sum().expand(z.shape[0])
    first, linear = 0, 0
    for planar, size in plan.runs:
        if not planar:
            for index in range(linear, linear + size):
                z = z @ upper[index].mT @ lower[index].mT
            linear += size
            continue
        some = slice(first, first + size)
        across = w[some] @ u_hat[some].mT if size > 1 else None
        tanh, bends = _bend(torch.addmm(b[some].unsqueeze(-1), w[some], z.mT), across)
        if log_det:
            inner = torch.addcmul(tanh * tanh, tanh_slope(bends), squeeze[some].unsqueeze(-1))
            found = inner.log().sum(0)
            total = found if total is None else total + found
        z = torch.addmm(z, tanh.mT, u_hat[some])
        first += size
    return z, total


def _bend(lines: Tensor, across: Tensor | None) -> tuple[Tensor, Tensor]:
    r""":math:`\tanh(a_k)` and :math:`a_k`, each row on top of those before it."""
    if across is None:
        return torch.tanh(lines), lines
    bends, tanhs = [lines[0]], [torch.tanh(lines[0])]
    for k in range(1, len(lines)):
        if k == 1:
            bends.append(torch.addcmul(lines[1], across[1, 0], tanhs[0]))
        else:
            bends.append(torch.addmv(lines[k], torch.stack(tanhs, -1), across[k, :k]))
        tanhs.append(torch.tanh(bends[-1]))
    return torch.stack(tanhs), torch.stack(bends)


class _ByHand(torch.autograd.Function):
    """The chain's value and gradient on a processor. A gradient of the gradient falls back on torch's own."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, log_det: bool, z: Tensor, *weights: Tensor) -> Any:
        arrays = [weight.detach().numpy() for weight in weights]
        x, total, ctx.kept = by_hand.forward(plan, log_det, z.detach().numpy(), arrays)
        ctx.plan = plan
        ctx.save_for_backward(z, *weights)
        return torch.from_numpy(x), None if total is None else torch.from_numpy(total)

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_total: Tensor | None) -> Any:
        saved = ctx.saved_tensors  # also: torch's check that no weight was changed in between
        if torch.is_grad_enabled():
            return None, None, *_again(ctx.plan, saved, of_x, of_total)
        of_z, of_weights = by_hand.backward(
            ctx.plan, ctx.kept, of_x.numpy(), None if of_total is None else of_total.numpy()
        )
        return None, None, torch.from_numpy(of_z), *map(torch.from_numpy, of_weights)


def _again(plan: Plan, saved: Sequence[Tensor], of_x: Tensor, of_total: Tensor | None) -> list[Any]:
    inputs = [tensor.detach().requires_grad_() if not tensor.requires_grad else tensor for tensor in saved]
    x, total = _forward(plan, of_total is not None, inputs[0], inputs[1:])
    outputs, gradients = [x], [of_x]
    if total is not None and of_total is not None:
        outputs.append(total)
        gradients.append(of_total)
    return list(torch.autograd.grad(outputs, inputs, gradients, create_graph=True, allow_unused=True))
