r"""Limited-memory BFGS for many independent problems at once.

All problems take their steps in the same tensor operations, each with its own curvature pairs and its own step length. This is faster
than one problem after the other if each is small, as in the folds and penalties of a cross-validation. The updates are those of Nocedal
and Wright (2006), *Numerical Optimization*, algorithm 7.4, with backtracking until the Armijo condition holds.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Objective = Callable[[Tensor, Tensor], Tensor]


def minimize_batch(
    function: Objective,
    start: Tensor,
    max_iterations: int = 300,
    history: int = 10,
    tolerance: float = 1e-7,
) -> Tensor:
    """Minimizes independent functions, one for each row of a matrix of variables.

    Args:
        function: Function ``function(x, rows)`` from variables ``[R, D]`` and the numbers ``[R]`` of their problems to values ``[R]``.
            Each value depends on the variables of its own problem only.
        start: Initial variables ``[P, D]``, in float64.
        max_iterations: Maximum number of steps.
        history: Number of curvature pairs.
        tolerance: Largest absolute derivative at which a problem has converged. It is then left out of all computations.

    Returns:
        The variables ``[P, D]`` at the minima.

    >>> centers = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.float64)
    >>> minima = minimize_batch(lambda x, rows: (x - centers[rows]).square().sum(1), torch.zeros_like(centers))
    >>> torch.allclose(minima, centers)
    True
    """
    x = start.detach().clone()
    rows = torch.arange(len(x), device=x.device)
    values, gradient = _differentiate(function, x, rows)
    steps, changes = list[Tensor](), list[Tensor]()
    stalled = torch.zeros_like(rows, dtype=torch.bool)
    for _ in range(max_iterations):
        rows = ((gradient.abs().amax(1) > tolerance) & ~stalled).nonzero()[:, 0]
        if not len(rows):
            break
        slope = gradient[rows]
        pairs = [(step[rows], change[rows]) for step, change in zip(steps, changes, strict=True)]
        direction = -_multiply_inverse_hessian(slope, pairs)
        uphill = (direction * slope).sum(1, keepdim=True) >= 0  # by rounding
        direction = torch.where(uphill, -slope, direction)
        length = torch.ones_like(values[rows]) if steps else 1.0 / slope.abs().sum(1).clamp(min=1.0)
        previous_x, previous_gradient = x.clone(), gradient.clone()
        stalled[rows] = _line_search(function, x, values, gradient, rows, direction, length)
        steps = [*steps, x - previous_x][-history:]
        changes = [*changes, gradient - previous_gradient][-history:]
    return x


def _differentiate(function: Objective, x: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the values ``[R]`` and the gradients ``[R, D]`` of some problems."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        values = function(leaf, rows)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    return values.detach(), gradient


def _multiply_inverse_hessian(gradient: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the approximate inverse Hessian of each problem times its gradient, by the two-loop recursion.

    Pairs of a step and a change of the gradient without positive curvature are skipped, problem by problem.
    """
    result, inverses, weights = gradient, list[Tensor](), list[Tensor]()
    scale = torch.ones_like(gradient[:, :1])
    for step, change in pairs:
        product, square = (step * change).sum(1, keepdim=True), change.square().sum(1, keepdim=True)
        valid = product > 1e-12 * square
        scale = torch.where(valid, product / square.clamp(min=1e-300), scale)
        inverses.append(torch.where(valid, 1.0 / product, 0.0))
    for (step, change), inverse in zip(pairs[::-1], inverses[::-1], strict=True):
        weights.append(inverse * (step * result).sum(1, keepdim=True))
        result = result - weights[-1] * change
    result = scale * result
    for (step, change), inverse, weight in zip(pairs, inverses, weights[::-1], strict=True):
        result = result + (weight - inverse * (change * result).sum(1, keepdim=True)) * step
    return result


def _line_search(
    function: Objective,
    x: Tensor,
    values: Tensor,
    gradient: Tensor,
    rows: Tensor,
    direction: Tensor,
    length: Tensor,
    max_halvings: int = 30,
) -> Tensor:
    """Halves the step of each problem until its value decreases, and updates variables, values and gradients in place.

    Returns:
        True for each problem whose value does not decrease.
    """
    failed = torch.ones_like(rows, dtype=torch.bool)
    for _ in range(max_halvings):
        open_rows = failed.nonzero()[:, 0]
        numbers, steps = rows[open_rows], direction[open_rows]
        candidate = x[numbers] + length[open_rows, None] * steps
        next_values, next_gradient = _differentiate(function, candidate, numbers)
        slope = (steps * gradient[numbers]).sum(1)
        # the condition of Armijo: a fraction of the decrease that the gradient predicts
        accepted = next_values <= values[numbers] + 1e-4 * length[open_rows] * slope
        numbers = numbers[accepted]
        x[numbers], values[numbers] = candidate[accepted], next_values[accepted]
        gradient[numbers] = next_gradient[accepted]
        failed[open_rows[accepted]] = False
        if bool(accepted.all()):
            break
        length = 0.5 * length
    return failed
