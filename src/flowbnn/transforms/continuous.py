"""Continuous-time flows: solutions of a neural ordinary differential equation, and flow matching, which trains them without a
solver.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributions import Distribution

from flowbnn.errors import FlowBNNError
from flowbnn.nets.mlp import Length, check_context, check_net
from flowbnn.nets.smooth import AutogradNet, FixedContextNet, SmoothMLP
from flowbnn.options import Count, Dim, NonNegative, Positive, check, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_vectors,
    convergence_error,
    transform_error,
)
from flowbnn.transforms.compose import Compose, broadcast_batch_shapes
from flowbnn.transforms.residual import EXACT_IN_EVAL, EXACT_IN_TRAINING

# Function of time, point and tensors that returns velocity and divergence.
Dynamics = Callable[[Tensor, Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
Times = tuple[float, float]


class NeuralODE(BidirectionalTransform):
    r"""Flow of a vector field: :math:`\dot z = f(t, z, c)` from :math:`z(0)` to :math:`x = z(1)`, solved by torchdiffeq.

    .. math:: \log|\det| = \int_0^1 \operatorname{tr} \frac{\partial f}{\partial z}(t, z(t), c)\, dt

    Continuous flows (Chen et al. 2018) and FFJORD (Grathwohl et al. 2019), which estimates the trace by :math:`e^\top J e` with one
    vector :math:`e` of random signs for the whole solution (Hutchinson). For the default net of one or two hidden layers the trace is
    exact in any dimension. It costs one more matrix product, :math:`s_2^\top \left(W_2 \odot (W_1 W_3)^\top\right) s_1` with the
    slopes :math:`s_1, s_2` of the activations.

    Both directions cost a numerical solution (Dormand & Prince, order 5). Every row keeps to the tolerances. Gradients solve the
    adjoint equation backwards in constant memory. Second derivatives, and all derivatives with ``adjoint=False``, pass through the
    steps of the solver. ``torch.func`` is not supported, because the number of steps depends on the values.

    The tolerances bound the error of a step, not that of the solution. An error grows along the solution by a factor of up to
    :math:`e^L`, where :math:`L` is the Lipschitz constant of the field. The log-determinant of a field with weights of standard
    deviation 2, far beyond those of a trained flow, can therefore be off by several nats. Decrease ``rtol`` and ``atol`` and use
    float64 to find out: an accurate result does not change.

    Args:
        dim: Length of the vectors.
        hidden: Widths of the hidden layers of the default net, a :class:`~flowbnn.nets.smooth.SmoothMLP`.
        context_dim: Length of the context vectors.
        trace: ``"exact"`` or ``"hutchinson"``. None is exact for the default net of one or two hidden layers; for other nets it is
            exact up to 8 dimensions, and in ``eval()`` up to 256.
        rtol: Relative tolerance of a step, at least 2e-6 in float32.
        atol: Absolute tolerance of a step, at least 2e-6 in float32.
        adjoint: If True, gradients are computed by the adjoint equation.
        max_evaluations: Largest number of evaluations of the net in one solution; more raise an error.
        net: Module that is called as ``net(z, tc)`` and returns the velocity, where ``tc`` is the time followed by the context.

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
        dim: Dim,
        hidden: Sequence[Dim] = (64, 64),
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
        self.net = net or SmoothMLP(dim, dim, hidden, 1 + context_dim, init_scale=0.1)
        check_net(self.net, "NeuralODE")
        self.closed_form = isinstance(self.net, SmoothMLP) and len(self.net.layers) in (2, 3)
        exact = self.closed_form or dim <= EXACT_IN_TRAINING if trace is None else trace == "exact"
        self.log_det_kind = "exact" if exact else "estimate"
        self.evaluations = 0  #: Number of evaluations of the net in the last solution.
        self.adjoint_evaluations = 0  #: Number of evaluations of the net in the last gradient.

    def velocity(self, time: Tensor | float, z: Tensor, context: Tensor | None = None) -> Tensor:
        """Returns the vector field.

        Args:
            time: A number, or ``(..., 1)`` with one time for each row.
            z: Points ``(..., dim)``.
            context: Context vectors.
        """
        net_at, tensors = self._field(z, context)
        return net_at(torch.as_tensor(time, dtype=z.dtype, device=z.device), tensors)(z)

    def _field(self, like: Tensor, context: Tensor | None) -> tuple[Callable[..., Any], list[Tensor]]:
        """Returns a function of time and tensors that returns the net at that time, and the tensors that need gradients."""
        if self.context_dim:
            context = check_context(context, self.context_dim)
        else:
            context = like.new_zeros(0)
        if isinstance(self.net, SmoothMLP):
            return self._smooth_field(self.net, context)
        names = [name for name, _ in self.net.named_parameters()]

        def net_at(time: Tensor, tensors: Sequence[Tensor]) -> AutogradNet:
            shape = torch.broadcast_shapes(like.shape[:-1], context.shape[:-1], time.shape[:-1])
            inputs = time.reshape(*time.shape[:-1], 1), tensors[-1]
            time_and_context = torch.cat([each.expand(*shape, each.shape[-1]) for each in inputs], -1)
            state = dict(zip(names, tensors, strict=False))
            return AutogradNet(
                lambda z, tc: torch.func.functional_call(self.net, state, (z, tc)), time_and_context
            )

        return net_at, [*self.net.parameters(), context]

    @staticmethod
    def _smooth_field(net: SmoothMLP, context: Tensor) -> tuple[Callable[..., Any], list[Tensor]]:
        """Returns the same as :meth:`_field` for a net whose first layer is linear in the time."""
        fixed = net.at_context(torch.cat([context.new_zeros(*context.shape[:-1], 1), context], -1))
        size, time_weight = len(fixed.weights), net.condition.weight[:, 0]  # type: ignore[union-attr]

        def net_at(time: Tensor, tensors: Sequence[Tensor]) -> FixedContextNet:
            time_weight, first_shift, *others = tensors
            shifts = first_shift + time * time_weight, *others[: size - 1]
            return FixedContextNet(others[size - 1 : 2 * size - 1], shifts, others[2 * size - 1 :])

        return net_at, [time_weight, *fixed.shifts, *fixed.weights, *fixed.rates]

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_vectors(value, self.dim, self, next(self.net.parameters(), None))
        if torch._C._functorch.maybe_current_level() is not None:
            raise transform_error(self, "needs torch.autograd, got torch.func", "functorch")
        net_at, tensors = self._field(value, context)
        if context is not None and self.context_dim:
            batch = broadcast_batch_shapes(value.shape[:-1], context.shape[:-1], self)
            value = value.expand(*batch, self.dim)
        if not value.numel():
            return value.clone(), value.new_zeros(value.shape[:-1])
        dynamics, tensors = self._dynamics(net_at, tensors, value)
        times = (1.0, 0.0) if inverse else (0.0, 1.0)
        if not self.adjoint or not torch.is_grad_enabled():
            return self._integrate(dynamics, times, value, tensors)
        return _Adjoint.apply(self, dynamics, times, value, *tensors)

    def _dynamics(
        self, net_at: Callable[..., Any], tensors: list[Tensor], value: Tensor
    ) -> tuple[Dynamics, list[Tensor]]:
        """Returns a function for the velocity and the divergence, and the tensors that it reads."""
        small = self.trace is None and not self.training and self.dim <= EXACT_IN_EVAL
        exact = small or self.log_det_kind == "exact"
        if exact and self.closed_form:

            def closed_form(time: Tensor, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
                velocity, slopes = net_at(time, tensors[1:]).slopes(z)
                return velocity, FixedContextNet.trace(slopes, tensors[0])

            return closed_form, [net_at(value.new_zeros(()), tensors).trace_kernel(), *tensors]
        if exact:
            vectors = torch.eye(self.dim, dtype=value.dtype, device=value.device)
            vectors = vectors.reshape(self.dim, *(1,) * (value.ndim - 1), self.dim)
        else:
            vectors = torch.empty_like(value).bernoulli_(0.5).mul_(2).sub_(1)

        def by_products(time: Tensor, z: Tensor, tensors: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            velocity, vjp, _ = net_at(time, tensors).linearize(z)
            products = (vjp(vectors) * vectors).sum(-1)
            return velocity, products.sum(0).expand(z.shape[:-1]) if exact else products

        return by_products, tensors

    def _integrate(
        self, dynamics: Dynamics, times: Times, value: Tensor, tensors: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns the value and the log-determinant at the end of the time interval."""
        state = value, value.new_zeros(value.shape[:-1])
        end, self.evaluations = self._solve(lambda time, now: dynamics(time, now[0], tensors), state, times)
        return end[0], end[1]

    def _solve(
        self, function: Callable[..., Any], state: tuple[Tensor, ...], times: Times
    ) -> tuple[tuple[Tensor, ...], int]:
        """Solves an equation from a start to an end time.

        Args:
            function: Velocity of the state, as a function of time and state.
            state: State at the start. Its first two tensors have rows and keep to the tolerances.
            times: Start and end of the time interval.

        Returns:
            The state at the end, and the number of evaluations.
        """
        from torchdiffeq import odeint  # imports scipy.integrate, which is slow

        count = 0

        def counting_function(time: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            nonlocal count
            count += 1
            if count > self.max_evaluations:
                raise self._convergence_error(count)
            return function(time, state)

        def worst_row(errors: tuple[Tensor, ...]) -> Tensor:
            rows = (error if error.ndim == state[0].ndim else error.unsqueeze(-1) for error in errors[:2])
            return torch.maximum(*(row.square().mean(-1).sqrt().amax() for row in rows))

        min_tolerance = 16 * torch.finfo(state[0].dtype).eps
        grid = torch.tensor(times, dtype=state[0].dtype, device=state[0].device)
        steps = {"norm": worst_row, "step_t": grid[1:]}
        tolerances = {"rtol": max(self.rtol, min_tolerance), "atol": max(self.atol, min_tolerance)}
        try:
            path = odeint(counting_function, state, grid, method="dopri5", options=steps, **tolerances)
        except AssertionError:  # torchdiffeq: a step of length zero, or values that are not finite
            raise self._convergence_error(count) from None
        return tuple(tensor[-1] for tensor in path), count

    def _convergence_error(self, count: int) -> FlowBNNError:
        """Returns the error of a solver that does not converge."""
        return convergence_error(self, count, "increase rtol, atol or max_evaluations")


class _Adjoint(torch.autograd.Function):
    r"""Solution whose gradient solves :math:`\dot a = -a^\top \partial_z f - a_\ell\, \partial_z \operatorname{tr} J` backwards."""

    @staticmethod
    def forward(
        ctx: Any, owner: NeuralODE, dynamics: Dynamics, times: Times, value: Tensor, *tensors: Tensor
    ) -> Any:
        solution = owner._integrate(dynamics, times, value, tensors)
        ctx.owner, ctx.dynamics, ctx.times = owner, dynamics, times
        ctx.save_for_backward(value, solution[0], *tensors)
        return solution

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        value, end, *tensors = ctx.saved_tensors
        if torch.is_grad_enabled():
            # this gradient will be differentiated: pass through the steps of the solver
            solution = ctx.owner._integrate(ctx.dynamics, ctx.times, value, tensors)
            inputs = [tensor for tensor in (value, *tensors) if tensor.requires_grad]
            gradients = iter(
                torch.autograd.grad(solution, inputs, grads, create_graph=True, allow_unused=True)
            )
            return (
                None,
                None,
                None,
                *(next(gradients) if t.requires_grad else None for t in (value, *tensors)),
            )
        # The equation is linear, so a common scale keeps small gradients accurate.
        scale = max(grad.abs().max() for grad in grads).clamp(min=torch.finfo(end.dtype).tiny)
        log_det_grad = grads[1] / scale

        def adjoint_dynamics(time: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            with torch.enable_grad():
                point, *leaves = inputs = [t.detach().requires_grad_() for t in (state[0], *tensors)]
                velocity, divergence = ctx.dynamics(time, point, leaves)
                pairs = (velocity, -state[1]), (divergence, -log_det_grad)
                values, weights = zip(*(pair for pair in pairs if pair[0].requires_grad), strict=True)
                slopes = torch.autograd.grad(values, inputs, weights, materialize_grads=True)
            return velocity.detach(), *slopes

        state = end, grads[0] / scale, *(torch.zeros_like(tensor) for tensor in tensors)
        solution, ctx.owner.adjoint_evaluations = ctx.owner._solve(adjoint_dynamics, state, ctx.times[::-1])
        return None, None, None, *(scale * slope for slope in solution[1:])


@checked
def flow_matching_loss(
    transform: Transform,
    base: Distribution,
    data: Tensor,
    context: Tensor | None = None,
    sigma_min: NonNegative = 1e-4,
) -> Tensor:
    r"""Computes the loss of conditional flow matching along straight paths, which trains a :class:`NeuralODE` without a solver.

    .. math:: E \left\lVert f(t, z_t) - (x - (1 - \sigma) z) \right\rVert^2, \qquad z_t = (1 - (1 - \sigma) t)\, z + t x,

    with uniform :math:`t`, :math:`z` from the base and :math:`x` from the data (Lipman et al. 2023, section 4.1). The minimizer is
    the mean velocity of the paths through a point. Its flow maps the base to the data, blurred by :math:`\sigma`.

    Args:
        transform: A ``NeuralODE``, such as the transform of ``fb.flows.FFJORD(dim)``.
        base: Base distribution of one vector, or of as many vectors as there are rows.
        data: Data ``(rows, dim)``.
        context: Context vectors of the rows.
        sigma_min: Blur :math:`\sigma`.

    >>> base = torch.distributions.Independent(torch.distributions.Normal(torch.zeros(2), 1.0), 1)
    >>> flow_matching_loss(NeuralODE(2), base, torch.randn(100, 2)).shape
    torch.Size([])
    """
    ode: Any = transform[0] if isinstance(transform, Compose) and len(transform) == 1 else transform
    check("transform", ode, NeuralODE, "flow_matching_loss")
    check_vectors(data, ode.dim, ode, next(ode.net.parameters(), None))
    rows = data.shape[: data.ndim - len(base.batch_shape) - len(base.event_shape)]
    z = base.sample(rows).to(data)
    time = torch.rand(*data.shape[:-1], 1, dtype=data.dtype, device=data.device)
    path = (1 - (1 - sigma_min) * time) * z + time * data
    return (ode.velocity(time, path, context) - (data - (1 - sigma_min) * z)).square().sum(-1).mean()
