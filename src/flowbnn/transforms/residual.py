"""Residual flows: a step by a contraction, whose log-determinant is exact in low dimension and estimated in high."""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_net
from flowbnn.nets.smooth import AutogradNet, LinearMap, LipschitzConv, LipschitzMLP, SmoothMLP
from flowbnn.numerics import at_least_single, is_concrete, sum_rightmost
from flowbnn.options import Count, Probability, checked
from flowbnn.transforms.base import Transform, check_dense, check_events, check_vectors, transform_error
from flowbnn.transforms.compose import broadcast_batch_shapes

EXACT_IN_TRAINING = 8  # dimensions up to which the whole Jacobian costs less than an estimate ...
EXACT_IN_EVAL = 256  # ... and up to which a fitted density is given exactly
EVAL_TERMS = 20  # of the roulette in eval(), as in Chen et al. 2019, appendix E


class Residual(Transform):
    r"""An invertible residual block :math:`x = z + g(z)` with :math:`\mathrm{Lip}(g) \le L < 1` (i-ResNet, Behrmann et al. 2019).

    .. math:: \log|\det| = \log\det(I + J) = \sum_{k=1}^{\infty} \frac{(-1)^{k+1}}{k} \operatorname{tr} J^k, \qquad
              J = \frac{\partial g}{\partial z}

    How the log-determinant is found (``log_det``):

    - ``"exact"``: the determinant of :math:`I + J`. :math:`D` products with :math:`J`, deterministic, every derivative.
    - ``"truncated"``: the first ``terms`` terms of the series with :math:`v^\top J^k v` for the trace, :math:`v` of random signs
      (Hutchinson). Biased by what is cut off, at most :math:`D L^{n+1} / ((n + 1)(1 - L))`.
    - ``"roulette"``: ``terms`` terms, and then one more with probability ``continue_probability`` each time. The :math:`j`-th of these
      is divided by its probability, ``continue_probability**j`` (Residual Flows, Chen et al. 2019). Unbiased; the variance is
      finite if the squared spectral radius of :math:`J` is below ``continue_probability``.
    - ``None``: exact up to 8 dimensions, in ``eval()`` up to 256; else the roulette, in ``eval()`` with 20 terms at least.

    Both estimates have the gradient :math:`w^\top \frac{\partial J}{\partial\theta} v` with :math:`w = \sum_k (-1)^k (J^\top)^k v`,
    weighted likewise and held fixed (the Neumann series, Chen et al. 2019, section 3.2): memory does not grow with the number of
    terms. It is a first derivative only.

    One pass takes :math:`z` to :math:`x`. ``inverse`` iterates :math:`z \leftarrow x - g(z)` and attaches the root by two Newton steps
    with the Jacobian held fixed, so that first and second derivatives are those of the implicit function. For a density, run the
    block backwards: ``Inverse(Residual(dim))``.

    Args:
        dim: length of the vectors, or the shape of one event: that of an image with the channels last, or any for a net of one's own.
        hidden, context_dim, lipschitz: of the :class:`~flowbnn.nets.LipschitzMLP` that is made when no net is given, for images of
            the :class:`~flowbnn.nets.LipschitzConv`.
        log_det: one of the above; ``log_det_kind`` is ``"estimate"`` where random numbers may be drawn for it.
        terms: how many terms of the series are always computed.
        continue_probability: probability of each further term of the roulette.
        net: a module called as ``net(z, context)`` with a Lipschitz constant below one, which is not checked.

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
        dim: Count | Sequence[Count],
        hidden: Sequence[Count] = (64, 64),
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
            raise FlowBNNError(f"Residual({tuple(self.shape)}) needs a net of its own", argument="net")
        if net is None and self.event_dim == 1:
            net = LipschitzMLP(self.dim, self.dim, hidden, context_dim, lipschitz=lipschitz)
        self.net = net or LipschitzConv(tuple(self.shape), hidden, context_dim, lipschitz=lipschitz)  # type: ignore[arg-type]
        check_net(self.net, "Residual")
        self.log_det, self.terms, self.continue_probability = log_det, terms, continue_probability
        exact = self.dim <= EXACT_IN_TRAINING if log_det is None else log_det == "exact"
        self.log_det_kind = "exact" if exact else "estimate"

    def forward(self, z: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(z, context)
        step, pull, _ = self._given(context).linearize(z)
        return z + step, self._log_det(pull, step)

    def inverse(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor]:
        self._check(x, context)
        step = self._given(context)
        with torch.no_grad():
            z = self._root(step, x)
            _, pull, push = step.linearize(z)
            matrix = self._one_plus_jacobian(pull, z) if self.dim <= EXACT_IN_EVAL else None
        for _ in range(2):
            rest = z + step(z) - x
            if matrix is None:
                z = z - _Solve.apply(rest, pull, push)
            else:
                flat = at_least_single(rest.flatten(-self.event_dim))
                z = z - torch.linalg.solve(matrix, flat).reshape(rest.shape).to(z.dtype)
        moved, pull, _ = step.linearize(z)
        return z, -self._log_det(pull, moved)

    def _check(self, value: Tensor, context: Tensor | None) -> None:
        check_vectors(value, self.shape[-1], self, next(self.net.parameters(), None))
        batch = check_events(value, self.shape, self)
        if context is not None:
            check_dense(context, self)
            broadcast_batch_shapes(batch, context.shape[:-1], "the values of Residual")

    def _given(self, context: Tensor | None) -> Any:
        return (
            self.net.at_context(context)
            if isinstance(self.net, SmoothMLP)
            else AutogradNet(self.net, context)
        )

    def _log_det(self, pull: LinearMap, like: Tensor) -> Tensor:
        small = self.dim <= (EXACT_IN_TRAINING if self.training else EXACT_IN_EVAL)
        how = self.log_det or ("exact" if small else "roulette")
        if how == "exact":
            return torch.linalg.slogdet(self._one_plus_jacobian(pull, like)).logabsdet.to(like.dtype)
        terms = self.terms if self.training or how == "truncated" or self.log_det else EVAL_TERMS
        extra = (
            0 if how == "truncated" else int(torch.empty(()).geometric_(1 - self.continue_probability)) - 1
        )
        return self._series(
            pull, like, [1.0] * terms + [self.continue_probability**-j for j in range(1, extra + 1)]
        )

    def _series(self, pull: LinearMap, like: Tensor, weights: Sequence[float]) -> Tensor:
        sign = torch.empty_like(like).bernoulli_(0.5).mul_(2).sub_(1)
        with torch.no_grad():
            power, neumann, traces = sign, torch.zeros_like(like), torch.zeros_like(like)
            for k, weight in enumerate(weights):
                neumann = neumann.add(power, alpha=(-1) ** k * weight)
                power = pull(power)
                traces = traces.addcmul(power, sign, value=(-1) ** k * weight / (k + 1))
            total = sum_rightmost(traces, self.event_dim)
        if not torch.is_grad_enabled():
            return total
        slope = sum_rightmost(pull(neumann) * sign, self.event_dim)
        return total + (slope - slope.detach())

    def _one_plus_jacobian(self, pull: LinearMap, like: Tensor) -> Tensor:
        eye = torch.eye(self.dim, dtype=like.dtype, device=like.device)
        batch = like.shape[: like.ndim - self.event_dim]
        rows = pull(eye.reshape(self.dim, *(1,) * len(batch), *self.shape))
        return at_least_single(eye + rows.flatten(-self.event_dim).movedim(0, -2))

    def _root(self, step: Any, x: Tensor) -> Tensor:
        """Fixed point of ``z = x - step(z)`` to half of the digits, which Newton steps double, or all that a net in TF32 has."""
        z, least, since, half = x, 1.0, 0, torch.finfo(x.dtype).eps ** 0.5
        if not is_concrete(x) or not x.numel():
            for _ in range(200):  # a number that is the same for all: 0.9**200 is below half of the digits
                z = x - step(z)
            return z
        # a large entry rounds what the others move by
        largest = x.abs().amax(tuple(range(-self.event_dim, 0)), keepdim=True)
        size = 1.0 + x.abs() + 8.0 * half * largest
        for count in range(3, 1000, 4):
            for _ in range(4):
                last, z = z, x - step(z)
            move = float(torch.where(x.isfinite(), (z - last).abs() / size, 0.0).amax())
            least, since = (move, count) if move < 0.9 * least else (least, since)
            if move <= half or (count - since > 400 and move < 0.01):
                return z
        text = "has no inverse to find: z = x - net(z) did not settle in 1000 steps; give a net that contracts, or a smaller lipschitz"
        raise transform_error(self, text, "convergence")


class _Solve(torch.autograd.Function):
    r"""A constant :math:`(I + J)^{-1}` for the derivatives; near a root, where its argument is zero, the value is the argument."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, pull: LinearMap, push: LinearMap, solve: bool = False) -> Tensor:
        ctx.products = pull, push
        result = value.clone()
        if solve:  # result = value - J result, by iteration
            tolerance = torch.finfo(value.dtype).eps * (value.abs().amax() if value.numel() else 0.0)
            for _ in range(1000):
                last, result = result, value - push(result)
                if not bool(((result - last).abs() > tolerance).any()):
                    break
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        pull, push = ctx.products
        return _Solve.apply(grads[0], push, pull, True), None, None, None
