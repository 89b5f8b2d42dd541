"""Sets of values whose predictive density is above a level."""

import math

import torch
from torch import Tensor

from flowbnn.predictive.continuous import ContinuousPredictive, Interval


def marginal_log_density(predictive: ContinuousPredictive, values: Tensor) -> Tensor:
    """Returns the log-density of the mixture at values of single targets, ``[B, D, G]``.

    Args:
        predictive: Predictive distribution of B inputs.
        values: G values for each input and target, ``[B, D, G]``.
    """
    return predictive._log_mean_exp(predictive._log_densities(values.to(predictive.samples)))


def level_set(predictive: ContinuousPredictive, log_level: Tensor) -> Interval:
    """Returns the values whose log-density is at least a level, as a union of R intervals.

    Intervals are found on a grid of about 500 points. Their ends are then refined by bisection. If no value has such a density, the
    set is the value of highest density on the grid.

    Args:
        predictive: Predictive distribution of B inputs.
        log_level: Log-density for each target, ``[D]``.

    Returns:
        Ends ``[R, B, D]`` in ascending order. They are NaN if the set of an input has fewer than R intervals.

    >>> from flowbnn.predictive import GaussianPredictive
    >>> prediction = GaussianPredictive(torch.tensor([[[-3.0]], [[3.0]]]), 0.25)  # two peaks
    >>> level_set(prediction, torch.tensor([-3.0])).low.flatten()
    tensor([-4.0201,  1.9799])
    """
    ends = predictive._by_chunks(lambda chunk: _level_ends(chunk, log_level), 512)
    low, high = ends.unbind(-1)
    count = int((~low.isnan()).sum(-1).max()) if low.numel() else 1
    return Interval(*(predictive._to_target_shape(end[..., :count].movedim(-1, 0)) for end in (low, high)))


def _level_ends(predictive: ContinuousPredictive, log_level: Tensor) -> Tensor:
    """Returns the ends of the intervals, ``[B, D, R, 2]`` with R half the size of the grid."""
    points = predictive._fine_grid()
    level = log_level.to(points).view(-1, 1)
    points = _extended(predictive, points, level)
    density = marginal_log_density(predictive, points)
    above = density >= level
    rising, falling = ~above[..., :-1] & above[..., 1:], above[..., :-1] & ~above[..., 1:]
    count = max(1, int(rising.sum(-1).max())) if points.numel() else 1
    peak = points.gather(-1, density.argmax(-1, keepdim=True))
    ends = []
    for crossing, inner in ((rising, points[..., 1:]), (falling, points[..., :-1])):
        outer = points[..., :-1] if crossing is rising else points[..., 1:]
        bracket = _first(inner, crossing, count), _first(outer, crossing, count)
        ends.append(_bisect(predictive, *bracket, level, peak))
    empty = ~rising.any(-1, keepdim=True) & (torch.arange(count, device=points.device) == 0)
    both = torch.stack([torch.where(empty, peak, end) for end in ends], -1)
    padding = both.new_full((*both.shape[:2], points.shape[-1] // 2 - count, 2), math.nan)
    return torch.cat([both, padding], -2)


def _extended(predictive: ContinuousPredictive, points: Tensor, level: Tensor) -> Tensor:
    """Returns the grid with one more point on each side, at which the density is below the level."""
    first, last = points[..., :1], points[..., -1:]
    width = (last - first).clamp_min(torch.finfo(points.dtype).tiny)
    for end, sign in ((first, -1.0), (last, 1.0)):
        outer, step = end + sign * width, width
        for _ in range(60):  # the density decreases at least as fast as that of a Cauchy distribution
            inside = marginal_log_density(predictive, outer) >= level
            if not bool(inside.any()):
                break
            step = 2.0 * step
            outer = torch.where(inside, end + sign * step, outer)
        points = torch.cat([outer, points] if sign < 0 else [points, outer], -1)
    return points


def _first(points: Tensor, chosen: Tensor, count: int) -> Tensor:
    """Returns the first chosen points of each grid, ``[B, D, count]``, NaN if there are fewer."""
    ordered = points.masked_fill(~chosen, math.inf).sort(-1).values[..., :count]
    return ordered.masked_fill(ordered.isinf(), math.nan)


def _bisect(
    predictive: ContinuousPredictive, inner: Tensor, outer: Tensor, level: Tensor, peak: Tensor
) -> Tensor:
    """Returns the values between inner and outer points at which the density has the level, and NaN for NaN."""
    missing = inner.isnan()
    inner, outer = torch.where(missing, peak, inner), torch.where(missing, peak, outer)
    for _ in range(40):
        middle = 0.5 * (inner + outer)
        inside = marginal_log_density(predictive, middle) >= level
        inner, outer = torch.where(inside, middle, inner), torch.where(inside, outer, middle)
    return inner.masked_fill(missing, math.nan)
