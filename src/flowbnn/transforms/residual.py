"""Residual flows: invertible residual blocks with an exact or an estimated log-determinant."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_net
from flowbnn.nets.smooth import AutogradNet, LinearMap, LipschitzConv, LipschitzMLP, SmoothMLP
from flowbnn.numerics import at_least_single, is_concrete, sum_rightmost
from flowbnn.options import Count, Dim, Probability, checked
from flowbnn.transforms.base import Transform, check_dense, check_events, check_vectors, convergence_error
from flowbnn.transforms.compose import broadcast_batch_shapes

EXACT_IN_TRAINING = 8  # largest dimension in which the full Jacobian costs less than an estimate
EXACT_IN_EVAL = 256  # largest dimension in which the exact density of a fitted flow is affordable


class Residual(Transform):
    r"""An invertible residual block :math:`x = z + g(z)` with :math:`\mathrm{Lip}(g) \le L < 1` (i-ResNet, Behrmann et al. 2019).

    .. math:: \log|\det| = \log\det(I + J) = \sum_{k=1}^{\infty} \frac{(-1)^{k+1}}{k} \operatorname{tr} J^k, \qquad
              J = \frac{\partial g}{\partial z}

    ``log_det`` selects the computation of the log-determinant:

    - ``"exact"``: Determinant of :math:`I + J`. It takes :math:`D` products with :math:`J`, is deterministic, and has all
      derivatives.
    - ``"truncated"``: The first ``terms`` terms of the series, with :math:`v^\top J^k v` for the trace and :math:`v` of random signs
      (Hutchinson). The bias is at most :math:`D L^{n+1} / ((n + 1)(1 - L))`.
    - ``"roulette"``: The first ``terms`` terms, and then one more with probability ``continue_probability`` each time. The
      :math:`j`-th of these is divided by its probability, ``continue_probability**j`` (Residual Flows, Chen et al. 2019). The
      estimate is unbiased. Its variance is finite if the squared spectral radius of :math:`J` is below ``continue_probability``.
    - ``None``: Exact up to 8 dimensions, and in ``eval()`` up to 256. Otherwise the roulette, in ``eval()`` with at least 20 terms.

    Both estimates have the gradient :math:`w^\top \frac{\partial J}{\partial\theta} v` with :math:`w = \sum_k (-1)^k (J^\top)^k v`,
    where :math:`w` has the same weights and is held constant (the Neumann series, Chen et al. 2019, section 3.2). Memory does not
    grow with the number of terms. Second derivatives are not available.

    Forward costs one pass. ``inverse`` iterates :math:`z \leftarrow x - g(z)` and attaches the root by two Newton steps with a
    constant Jacobian. First and second derivatives are therefore those of the implicit function. For a density use
    ``Inverse(Residual(dim))``.

    Args:
        dim: Length of the vectors, or shape of an event: an image with channels last, or any shape for a custom net.
        hidden: Widths of the default net, a :class:`~flowbnn.nets.LipschitzMLP` or, for images, a
            :class:`~flowbnn.nets.LipschitzConv`.
        context_dim: Length of the context vectors of the default net.
        lipschitz: Lipschitz constant :math:`L` of the default net.
        log_det: Computation of the log-determinant. ``log_det_kind`` is ``"estimate"`` if it may draw random numbers.
        terms: Number of terms of the series that are always computed.
        continue_probability: Probability of each further term of the roulette.
        net: Module that is called as ``net(z, context)``. Its Lipschitz constant must be below one, which is not checked.

    >>> block = Residual(2, hidden=(8,)).eval()
    >>> x, log_det = block(torch.tensor([[0.5, -1.0]]))
    >>> block.inverse(x)[0]
    tensor([[ 0.5000, -1.0000]], grad_fn=<SubBackward0>)
    """

    inverse_kind = "numerical"
    cheap = "forward"
    solver = "inverse"

    @checked
    def __init__(
        self,
        dim: Dim | Sequence[Count],
        hidden: Sequence[Dim] = (64, 64),
        context_dim: Length = 0,
        lipschitz: Probability = 0.9,
        log_det: Literal["exact", "truncated", "roulette"] | None = None,
        terms: Count = 2,
        continue_probability: Probability = 0.5,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.shape = torch.Size([dim] if isinstance(dim, int) else dim)
        self.event_dim, self.dim = len(self.shape), self.shape.numel()
        if net is None and self.event_dim not in (1, 3):
            raise FlowBNNError(f"Residual(dim={tuple(self.shape)}) needs a net", argument="net")
        if net is None and self.event_dim == 1:
            net = LipschitzMLP(self.dim, self.dim, hidden, context_dim, lipschitz=lipschitz)
        self.net = net or LipschitzConv(tuple(self.shape), hidden, context_dim, lipschitz=lipschitz)  # type: ignore[arg-type]
        check_net(self.net, "Residual")
        self.log_det, self.terms, self.continue_probability = log_det, terms, continue_probability
        exact = self.dim <= EXACT_IN_TRAINING if log_det is None else log_det == "exact"
        self.log_det_kind = "exact" if exact else "estimate"

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(z, context)
        step, vjp, _ = self._net_at(context).linearize(z)
        return z + step, self._log_det(vjp, step)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(x, context)
        net = self._net_at(context)
        with torch.no_grad():
            z = self._fixed_point(net, x)
            _, vjp, jvp = net.linearize(z)
            # an unknown number of products, which a graph cannot hold, costs less than a large matrix
            cheap = isinstance(self.net, SmoothMLP) and is_concrete(x)
            small = self.dim <= (EXACT_IN_TRAINING if cheap else EXACT_IN_EVAL)
            matrix = self._one_plus_jacobian(vjp, z) if small else None
        for step in range(2):
            error = z + net(z) - x
            if matrix is None:
                # the fixed point has half of the digits, after the first step all of them
                z = z - _Solve.apply(error, vjp, jvp, step == 0 and is_concrete(x))
            else:
                flat = at_least_single(error.flatten(-self.event_dim))
                z = z - torch.linalg.solve(matrix, flat).reshape(error.shape).to(z.dtype)
        step, vjp, _ = net.linearize(z)
        return z, -self._log_det(vjp, step)

    def _check(self, value: Tensor, context: Tensor | None) -> None:
        """Raises FlowBNNError for events of another shape or dtype, or a context of another batch shape."""
        check_vectors(value, self.shape[-1], self, next(self.net.parameters(), None))
        batch = check_events(value, self.shape, self)
        if context is not None:
            check_dense(context, self)
            broadcast_batch_shapes(batch, context.shape[:-1], self)

    def _net_at(self, context: Tensor | None) -> Any:
        """Returns the net for one context, with a method ``linearize``."""
        return (
            self.net.at_context(context)
            if isinstance(self.net, SmoothMLP)
            else AutogradNet(self.net, context)
        )

    def _log_det(self, vjp: LinearMap, like: Tensor) -> Tensor:
        r"""Returns the log-determinant for the products :math:`J^\top v`."""
        small = self.dim <= (EXACT_IN_TRAINING if self.training else EXACT_IN_EVAL)
        method = self.log_det or ("exact" if small else "roulette")
        if method == "exact":
            return torch.linalg.slogdet(self._one_plus_jacobian(vjp, like)).logabsdet.to(like.dtype)
        # 20 terms in evaluation mode, as in Chen et al. 2019, appendix E.
        terms = self.terms if self.training or method == "truncated" or self.log_det else 20
        extra = (
            0 if method == "truncated" else int(torch.empty(()).geometric_(1 - self.continue_probability)) - 1
        )
        return self._series(
            vjp, like, [1.0] * terms + [self.continue_probability**-j for j in range(1, extra + 1)]
        )

    def _series(self, vjp: LinearMap, like: Tensor, weights: Sequence[float]) -> Tensor:
        """Returns the weighted power series of the log-determinant, with traces by random signs."""
        sign = torch.empty_like(like).bernoulli_(0.5).mul_(2).sub_(1)
        with torch.no_grad():
            power, neumann, traces = sign, torch.zeros_like(like), torch.zeros_like(like)
            for k, weight in enumerate(weights):
                neumann = neumann.add(power, alpha=(-1) ** k * weight)
                power = vjp(power)
                traces = traces.addcmul(power, sign, value=(-1) ** k * weight / (k + 1))
            total = sum_rightmost(traces, self.event_dim)
        if not torch.is_grad_enabled():
            return total
        slope = sum_rightmost(vjp(neumann) * sign, self.event_dim)
        return total + (slope - slope.detach())

    def _one_plus_jacobian(self, vjp: LinearMap, like: Tensor) -> Tensor:
        """Returns :math:`I + J` for each event."""
        eye = torch.eye(self.dim, dtype=like.dtype, device=like.device)
        batch = like.shape[: like.ndim - self.event_dim]
        rows = vjp(eye.reshape(self.dim, *(1,) * len(batch), *self.shape))
        rows = rows.expand(self.dim, *like.shape)  # the Jacobian of a net without hidden layers is constant
        return at_least_single(eye + rows.flatten(-self.event_dim).movedim(0, -2))

    def _fixed_point(self, net: Any, x: Tensor) -> Tensor:
        """Returns the fixed point of ``z = x - net(z)`` to half of the digits, which the Newton steps double."""
        z, smallest_move, last_progress, tolerance = x, 1.0, 0, torch.finfo(x.dtype).eps ** 0.5
        if not is_concrete(x) or not x.numel():
            for _ in range(200):  # a graph needs a fixed number: 0.9**200 is below half of the digits
                z = x - net(z)
            return z
        # Large entries round the moves of the others.
        largest = x.abs().amax(tuple(range(-self.event_dim, 0)), keepdim=True)
        unit = 1.0 + x.abs() + 8.0 * tolerance * largest
        for count in range(3, 1000, 4):
            for _ in range(4):
                previous, z = z, x - net(z)
            move = float(torch.where(x.isfinite(), (z - previous).abs() / unit, 0.0).amax())
            if move < 0.9 * smallest_move:
                smallest_move, last_progress = move, count
            # A net in TF32 stalls before the tolerance; then all digits that it has are found.
            if move <= tolerance or (count - last_progress > 400 and move < 0.01):
                return z
        raise convergence_error(self, 1000, "decrease lipschitz")


class _Solve(torch.autograd.Function):
    """Product with a constant :math:`(I + J)^{-1}`, in the value if ``solve`` is True, and always in the derivatives.

    At a root the argument is zero up to rounding. The value is then the argument itself.
    """

    @staticmethod
    def forward(ctx: Any, value: Tensor, vjp: LinearMap, jvp: LinearMap, solve: bool = False) -> Tensor:
        ctx.products = vjp, jvp
        result = value.clone()
        if solve:  # iterates result = value - J result
            tolerance = torch.finfo(value.dtype).eps * (value.abs().amax() if value.numel() else 0.0)
            for _ in range(1000):
                previous, result = result, value - jvp(result)
                if not bool(((result - previous).abs() > tolerance).any()):
                    break
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        vjp, jvp = ctx.products
        return _Solve.apply(grads[0], jvp, vjp, True), None, None, None
