"""Flows in continuous time: the solution of a differential equation, and flow matching, which trains it without solving it."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_context, check_net
from flowbnn.nets.smooth import AutogradNet, FixedContextNet, SmoothMLP
from flowbnn.options import Count, NonNegative, Positive, checked
from flowbnn.transforms.base import BidirectionalTransform, Transform, check_vectors
from flowbnn.transforms.compose import Compose, broadcast_batch_shapes
from flowbnn.transforms.residual import EXACT_IN_EVAL, EXACT_IN_TRAINING

# time, place, weights: velocity and divergence
Dynamics = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
Ends = tuple[float, float]


class NeuralODE(BidirectionalTransform):
    r"""The flow of a vector field: :math:`\dot z = f(t, z, c)` from :math:`z(0)` to :math:`x = z(1)`, solved by torchdiffeq.

    .. math:: \log|\det| = \int_0^1 \operatorname{tr} \frac{\partial f}{\partial z}(t, z(t), c)\, dt

    Continuous flows (Chen et al. 2018) and FFJORD (Grathwohl et al. 2019), which takes :math:`e^\top J e` for the trace with
    one vector :math:`e` of random signs for the whole solve (Hutchinson). For the network that is made here, of one or two hidden
    layers, the trace is exact in any dimension at the price of one more product of matrices,
    :math:`s_2^\top \left(W_2 \odot (W_1 W_3)^\top\right) s_1` with the slopes :math:`s_1, s_2` of the activations.

    Both directions cost a solve. Steps are chosen so that every row keeps to the tolerances (Dormand & Prince, order 5). A gradient
    solves the adjoint equation backwards, in constant memory; derivatives of gradients, and all of them with ``adjoint=False``, pass
    through the steps of the solver. ``torch.func`` is not served: the number of steps depends on the values.

    Args:
        dim: length of the vectors.
        hidden, context_dim: of the :class:`~flowbnn.nets.smooth.SmoothMLP` that is made when no net is given.
        trace: ``"exact"`` or ``"hutchinson"``; None is exact for that network of one or two hidden layers, else up to 8 dimensions and
            in ``eval()`` up to 256.
        rtol, atol: relative and absolute tolerance of a step, in float32 of at least 2e-6.
        adjoint: gradients by the adjoint equation.
        max_evaluations: of the network in one solve; more are an error.
        net: a module called as ``net(z, tc)`` that gives the velocity, where ``tc`` is the time with the context behind it.

    >>> flow = NeuralODE(2, hidden=(8,)).eval()
    >>> z = torch.tensor([[0.5, -1.0]])
    >>> x, log_det = flow(z)
    >>> torch.allclose(flow.inverse(x)[0], z, atol=1e-4), flow.evaluations < 50
    (True, True)
    """

    inverse_kind = "numerical"
    cheap = "none"
    solver = "both"

    @checked
    def __init__(
        self,
        dim: Count,
        hidden: Sequence[Count] = (64, 64),
        context_dim: Length = 0,
        trace: Literal["exact", "hutchinson"] | None = None,
        rtol: Positive = 1e-5,
        atol: Positive = 1e-5,
        adjoint: bool = True,
        max_evaluations: Count = 10_000,
        net: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.context_dim, self.trace = dim, context_dim, trace
        self.rtol, self.atol, self.adjoint, self.max_evaluations = rtol, atol, adjoint, max_evaluations
        self.net = net or SmoothMLP(dim, dim, hidden, 1 + context_dim, start=0.1)
        check_net(self.net, "NeuralODE")
        self.closed_form = isinstance(self.net, SmoothMLP) and len(self.net.layers) in (2, 3)
        exact = self.closed_form or dim <= EXACT_IN_TRAINING if trace is None else trace == "exact"
        self.log_det_kind = "exact" if exact else "estimate"
        self.evaluations = 0  #: of the network, in the last solve
        self.adjoint_evaluations = 0  #: of the network, in the last gradient by the adjoint equation

    def velocity(self, time: Tensor | float, z: Tensor, context: Tensor | None = None) -> Tensor:
        """The vector field; ``time`` is a number, or ``(..., 1)`` for a time of each row."""
        at, tensors = self._field(z, context)
        return at(torch.as_tensor(time, dtype=z.dtype, device=z.device), tensors)(z)

    def _field(self, like: Tensor, context: Tensor | None) -> tuple[Callable[..., Any], list[Tensor]]:
        """The network at a time, as a function of the time and of the tensors that gradients are wanted for; and these."""
        behind = check_context(context, self.context_dim) if self.context_dim else like.new_zeros(0)
        if isinstance(self.net, SmoothMLP):
            given = self.net.at_context(torch.cat([behind.new_zeros(*behind.shape[:-1], 1), behind], -1))
            size, rate = len(given.weights), self.net.condition.weight[:, 0]  # type: ignore[union-attr]

            def smooth(time: Tensor, tensors: Sequence[Tensor]) -> FixedContextNet:
                rate, first, *rest = tensors
                shifts = first + time * rate, *rest[: size - 1]
                return FixedContextNet(rest[size - 1 : 2 * size - 1], shifts, rest[2 * size - 1 :])

            return smooth, [rate, *given.shifts, *given.weights, *given.rates]
        names = [name for name, _ in self.net.named_parameters()]

        def traced(time: Tensor, tensors: Sequence[Tensor]) -> AutogradNet:
            shape = torch.broadcast_shapes(like.shape[:-1], behind.shape[:-1], time.shape[:-1])
            parts = time.reshape(*time.shape[:-1], 1), tensors[-1]
            both = torch.cat([part.expand(*shape, part.shape[-1]) for part in parts], -1)
            state = dict(zip(names, tensors, strict=False))
            return AutogradNet(lambda z, tc: torch.func.functional_call(self.net, state, (z, tc)), both)

        return traced, [*self.net.parameters(), behind]

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, next(self.net.parameters(), None))
        if torch._C._functorch.maybe_current_level() is not None:
            text = "NeuralODE is not for torch.func: its solver looks at values; use torch.autograd"
            raise FlowBNNError(text, kind="functorch")
        at, tensors = self._field(value, context)
        if context is not None and self.context_dim:
            batch = broadcast_batch_shapes(value.shape[:-1], context.shape[:-1], "the values of NeuralODE")
            value = value.expand(*batch, self.dim)
        if not value.numel():
            return value.clone(), value.new_zeros(value.shape[:-1])
        small = self.trace is None and not self.training and self.dim <= EXACT_IN_EVAL
        exact = small or self.log_det_kind == "exact"
        closed = exact and self.closed_form
        if closed:
            signs = value
            tensors = [at(value.new_zeros(()), tensors).trace_kernel(), *tensors]
        elif exact:
            signs = torch.eye(self.dim, dtype=value.dtype, device=value.device)
            signs = signs.reshape(self.dim, *(1,) * (value.ndim - 1), self.dim)
        else:
            signs = torch.empty_like(value).bernoulli_(0.5).mul_(2).sub_(1)

        def dynamics(time: Tensor, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            if closed:
                velocity, slopes = at(time, tensors[1:]).slopes(z)
                return velocity, FixedContextNet.trace(slopes, tensors[0])
            velocity, pull, _ = at(time, tensors).linearize(z)
            product = (pull(signs) * signs).sum(-1)
            return velocity, product.sum(0) if exact else product

        ends = (1.0, 0.0) if inverse else (0.0, 1.0)
        if not self.adjoint or not torch.is_grad_enabled():
            return self._integrate(dynamics, ends, value, tensors)
        return _Adjoint.apply(self, dynamics, ends, value, *tensors)

    def _integrate(
        self, dynamics: Dynamics, ends: Ends, value: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        state = value, value.new_zeros(value.shape[:-1])
        found, self.evaluations = self._solve(lambda time, at: dynamics(time, at[0], tensors), state, ends)
        return found[0], found[1]

    def _solve(
        self, function: Callable[..., Any], state: tuple[Tensor, ...], ends: Ends
    ) -> tuple[tuple[Tensor, ...], int]:
        """The state at the end, and the number of evaluations; the first two parts, which have rows, keep to the tolerances."""
        from torchdiffeq import odeint  # which imports scipy.integrate

        count = 0

        def counting_velocity(time: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal count
            count += 1
            if count > self.max_evaluations:
                raise self._failure(count)
            return function(time, state)

        def worst_row(errors: tuple[Tensor, ...]) -> Tensor:
            rows = (error if error.ndim == state[0].ndim else error.unsqueeze(-1) for error in errors[:2])
            return torch.maximum(*(row.square().mean(-1).sqrt().amax() for row in rows))

        least = 16 * torch.finfo(state[0].dtype).eps
        times = torch.tensor(ends, dtype=state[0].dtype, device=state[0].device)
        steps = {"norm": worst_row, "step_t": times[1:]}
        tolerances = {"rtol": max(self.rtol, least), "atol": max(self.atol, least)}
        try:
            path = odeint(counting_velocity, state, times, method="dopri5", options=steps, **tolerances)
        except AssertionError:  # torchdiffeq's: a step of no length, or a value that is not finite
            raise self._failure(count) from None
        return tuple(part[-1] for part in path), count

    def _failure(self, count: int) -> FlowBNNError:
        why = f"in {count} evaluations: its field is too steep or not finite at these points"
        remedy = "lower the learning rate, loosen rtol and atol, or raise max_evaluations"
        text = f"NeuralODE: the solver did not converge {why}; {remedy}"
        return FlowBNNError(text, kind="convergence", evaluations=count)


class _Adjoint(torch.autograd.Function):
    r"""A solve whose gradient solves :math:`\dot a = -a^\top \partial_z f - a_\ell\, \partial_z \operatorname{tr} J` backwards."""

    @staticmethod
    def forward(
        ctx: Any, owner: NeuralODE, dynamics: Dynamics, ends: Ends, value: Tensor, *tensors: Tensor
    ) -> Any:
        solution = owner._integrate(dynamics, ends, value, tensors)
        ctx.owner, ctx.dynamics, ctx.ends = owner, dynamics, ends
        ctx.save_for_backward(value, solution[0], *tensors)
        return solution

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        value, end, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():  # gradients of this gradient are asked for
            solution = ctx.owner._integrate(ctx.dynamics, ctx.ends, value, tensors)
            sources = [one for one in (value, *tensors) if one.requires_grad]
            found = iter(torch.autograd.grad(solution, sources, grads, create_graph=True, allow_unused=True))
            every = (next(found) if one.requires_grad else None for one in (value, *tensors))
            return None, None, None, *every
        # the equation is linear
        scale = max(grad.abs().max() for grad in grads).clamp(min=torch.finfo(end.dtype).tiny)
        volume = grads[1] / scale

        def adjoint_dynamics(time: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                place, *leaves = sources = [one.detach().requires_grad_() for one in (state[0], *tensors)]
                velocity, divergence = ctx.dynamics(time, place, leaves)
                both = (velocity, -state[1]), (divergence, -volume)
                values, weights = zip(*(pair for pair in both if pair[0].requires_grad), strict=True)
                # a zero for what neither of them depends on
                slopes = torch.autograd.grad(values, sources, weights, materialize_grads=True)
            return velocity.detach(), *slopes

        state = end, grads[0] / scale, *(torch.zeros_like(one) for one in tensors)
        found, ctx.owner.adjoint_evaluations = ctx.owner._solve(adjoint_dynamics, state, ctx.ends[::-1])
        return None, None, None, *(scale * slope for slope in found[1:])


@checked
def flow_matching_loss(
    transform: Transform,
    base: Distribution,
    data: Tensor,
    context: Tensor | None = None,
    sigma_min: NonNegative = 1e-4,
) -> Tensor:
    r"""Loss of conditional flow matching along straight paths, which trains a :class:`NeuralODE` without solving it.

    .. math:: E \left\lVert f(t, z_t) - (x - (1 - \sigma) z) \right\rVert^2, \qquad z_t = (1 - (1 - \sigma) t)\, z + t x,

    with :math:`t` uniform, :math:`z` from the base and :math:`x` from the data (Lipman et al. 2023, section 4.1). Its minimizer
    is the mean velocity of the paths through a point, whose flow takes the base to the data, blurred by :math:`\sigma`.

    Args:
        transform: a ``NeuralODE``, as that of ``fb.flows.FFJORD(dim)``.
        base: of one vector, or of as many as there are rows.
        data: ``(rows, dim)``.
        context: of each row.
        sigma_min: the blur :math:`\sigma`.

    >>> base = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), 1.0), 1)
    >>> flow_matching_loss(NeuralODE(2), base, torch.randn(100, 2)).shape
    torch.Size([])
    """
    if isinstance(transform, Compose) and len(transform) == 1:
        transform = transform[0]
    if not isinstance(transform, NeuralODE):
        text = f"flow matching trains the vector field of one NeuralODE, not {type(transform).__name__}; any flow takes likelihood"
        raise FlowBNNError(text, argument="transform")
    check_vectors(data, transform.dim, transform, next(transform.net.parameters(), None))
    rows = data.shape[: data.ndim - len(base.batch_shape) - len(base.event_shape)]
    z = base.sample(rows).to(data)
    time = torch.rand(*data.shape[:-1], 1, dtype=data.dtype, device=data.device)
    path = (1 - (1 - sigma_min) * time) * z + time * data
    return (transform.velocity(time, path, context) - (data - (1 - sigma_min) * z)).square().sum(-1).mean()
