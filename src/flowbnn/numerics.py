"""Numerically stable functions of tensors."""

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

# torch numbers the levels of forward-mode differentiation once per process, so two threads at a time get wrong derivatives
FORWARD_MODE_LOCK = threading.RLock()


def sum_rightmost(value: Tensor, dims: int) -> Tensor:
    """Sums over the last ``dims`` axes.

    >>> sum_rightmost(torch.ones(2, 3, 4), 2)
    tensor([12., 12.])
    """
    return value if dims == 0 else value.flatten(-dims).sum(-1) if dims > 1 else value.sum(-1)


def full_precision(tensor: Tensor) -> AbstractContextManager[Any]:
    """Returns a context manager that switches autocast off, because flows and densities are inaccurate in half precision."""
    device = tensor.device.type
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def is_concrete(value: Tensor) -> bool:
    """Returns True if Python code may read the values of a tensor.

    This is not possible in a compiled or recorded graph, or under ``torch.func``.
    """
    tracing = torch.compiler.is_compiling() or torch.jit.is_tracing()
    if tracing or torch._C._functorch.maybe_current_level() is not None:
        return False
    return not (value.is_cuda and torch.cuda.is_current_stream_capturing())


def at_least_single(value: Tensor) -> Tensor:
    """Converts half precision to float32, because torch solves no equations in half precision.

    >>> at_least_single(torch.ones(1, dtype=torch.bfloat16)).dtype
    torch.float32
    """
    return value.float() if value.dtype.itemsize < 4 else value


def solve_triangular(matrix: Tensor, value: Tensor, **options: bool) -> Tensor:
    """Solves a triangular system as ``torch.linalg.solve_triangular``, and accepts half precision.

    >>> solve_triangular(torch.eye(1, dtype=torch.bfloat16), torch.ones(1, 1, dtype=torch.bfloat16), upper=True)
    tensor([[1.]], dtype=torch.bfloat16)
    """
    solution: Tensor = torch.linalg.solve_triangular(
        at_least_single(matrix), at_least_single(value), **options
    )
    return solution.to(value.dtype)


def soft_clamp(value: Tensor, bound: float) -> Tensor:
    r"""Maps values smoothly into :math:`(-b, b)` by :math:`b \tanh(x / b)`, whose slope at zero is one.

    >>> soft_clamp(torch.tensor([-1e30, 0.0, 1e30]), 2.0)
    tensor([-2.,  0.,  2.])
    """
    return bound * torch.tanh(value * (1.0 / bound))


def inverse_soft_clamp(value: Tensor, bound: float, fraction: float = 0.99) -> Tensor:
    """Returns the inverse of :func:`soft_clamp`.

    Args:
        value: Values of :func:`soft_clamp`.
        bound: Bound of :func:`soft_clamp`.
        fraction: Fraction of the bound to which larger values are clamped.

    >>> soft_clamp(inverse_soft_clamp(torch.tensor([0.5, 9.0]), 2.0), 2.0)
    tensor([0.5000, 1.9800])
    """
    return bound * torch.atanh((value / bound).clamp(-fraction, fraction))


def inverse_softplus(value: Tensor) -> Tensor:
    r"""Returns :math:`\log(e^y - 1)` for :math:`y > 0`, computed as :math:`y + \log(-\mathrm{expm1}(-y))`.

    >>> inverse_softplus(torch.nn.functional.softplus(torch.tensor([-3.0, 0.0, 90.0])))
    tensor([-3.,  0., 90.])
    """
    return value + torch.log(-torch.expm1(-value))


def safe_norm(value: Tensor) -> Tensor:
    """Returns the Euclidean norm of the last axis.

    Its first and second derivatives at zero are zero instead of NaN, and its squares neither overflow nor underflow.

    >>> x = torch.zeros(3, requires_grad=True)
    >>> safe_norm(x).backward()
    >>> x.grad
    tensor([0., 0., 0.])
    """
    scale = value.detach().abs().amax(-1, keepdim=True)
    is_zero = scale == 0
    # the norm has no second derivative at zero, so that a zero vector is replaced by ones, whose norm is multiplied by zero
    unit = torch.addcdiv(is_zero.to(value.dtype), value, scale.masked_fill(is_zero, 1.0))
    return scale.squeeze(-1) * torch.linalg.vector_norm(unit, dim=-1)


def monotone_root(
    function: Callable[[Tensor], tuple[Tensor, Tensor]], lower: Tensor, upper: Tensor, iterations: int = 30
) -> Tensor:
    r"""Finds the root of an elementwise increasing function by Newton's method inside a shrinking bracket.

    A Newton step that leaves the bracket, or stalls, is replaced by a bisection, so convergence does not depend on the start. The loop
    has a fixed length and no data-dependent branch, so it compiles. No gradient flows through it. Callers add one differentiable Newton
    step.

    Args:
        function: Function that returns :math:`(g(t), g'(t))` with :math:`g` increasing.
        lower: Points with :math:`g(lower) \le 0`.
        upper: Points with :math:`g(upper) \ge 0`.
        iterations: Number of iterations.

    >>> cube = lambda t: (t**3 - 8, 3 * t**2)
    >>> monotone_root(cube, torch.tensor([-5.0]), torch.tensor([10.0]))
    tensor([2.])
    """
    with torch.no_grad():
        low, high = lower.clone(), upper.clone()
        root = 0.5 * (low + high)
        for step in range(iterations):
            value, slope = function(root)
            low = torch.where(value <= 0, root, low)
            high = torch.where(value >= 0, root, high)
            middle = 0.5 * (low + high)
            newton = root - value / slope
            usable = (newton >= low) & (newton <= high) & torch.isfinite(newton)
            # every third step is a bisection, so that a slow Newton iteration still halves the bracket
            root = torch.where(usable, newton, middle) if step % 3 != 2 else middle
        value, slope = function(root)
        polished = (root - value / slope).clamp(low, high)
        return torch.where(torch.isfinite(polished), polished, root)


def tanh_slope(value: Tensor) -> Tensor:
    r"""Returns :math:`\tanh'(x) = 4 \sigma(2x) \sigma(-2x)`, which is exact in the tails.

    >>> tanh_slope(torch.tensor([0.0, 10.0, 1e30]))
    tensor([1.0000e+00, 8.2446e-09, 0.0000e+00])
    """
    return 4.0 * torch.sigmoid(2.0 * value) * torch.sigmoid(-2.0 * value)


def tanh_root(target: Tensor, slope_at_zero: Tensor) -> Tensor:
    r"""Solves :math:`a + m \tanh a = c` for :math:`a`, where :math:`s = 1 + m > 0` is the slope at zero.

    For :math:`c > 0` the left side is concave in :math:`a > 0` if :math:`m > 0` and convex if :math:`m < 0`. Newton's method is
    therefore monotone: it increases from :math:`\max(c - m, c / s)` or decreases from the minimum of the two. It needs 16 steps for
    :math:`s` from 1e-3 to 1e5 in float64. The last two steps are differentiable. One Newton step from a constant has the first
    derivatives of the implicit function, and a second step those up to the third order.

    Args:
        target: Values of :math:`c`.
        slope_at_zero: Values of :math:`s`.

    >>> tanh_root(torch.tensor([1.0 + torch.tanh(torch.tensor(1.0))]), torch.tensor(2.0))
    tensor([1.])
    """

    def step(root: Tensor, target: Tensor) -> Tensor:
        tanh = torch.tanh(root)
        slope = tanh * tanh + tanh_slope(root) * slope_at_zero
        return root - (root + (slope_at_zero - 1.0) * tanh - target) / slope

    with torch.no_grad():
        size, m = target.abs(), slope_at_zero - 1.0
        by_slope, by_limit = size / slope_at_zero, size - m
        root = torch.where(m > 0, torch.maximum(by_slope, by_limit), torch.minimum(by_slope, by_limit))
        for _ in range(18):
            root = step(root, size)
        root = torch.where(target < 0, -root, root)
    return step(step(root, target), target)


def constant(make: Callable[[], Tensor]) -> Tensor:
    """Calls ``make`` outside of the tracing of ``torch.export``, so that the result is a constant of the graph.

    Args:
        make: Function without arguments that returns a tensor.
    """
    if not torch.compiler.is_exporting():
        return make()
    from torch._subclasses.fake_tensor import unset_fake_temporarily
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    with unset_fake_temporarily(), disable_proxy_modes_tracing():
        return make()
