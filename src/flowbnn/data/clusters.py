r"""Four Gaussian blobs in the plane, one of them the second class: the problem of document 000's figure 3.

.. math:: x \sim \tfrac14 \sum_{k=1}^4 N(\mu_k, s^2 I), \qquad y = 1 \text{ for the blob at } (-3, -3), \text{ else } 0

The blobs overlap, so no classifier is always right; what the best one reaches is known exactly.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["CENTRES", "CLASSES", "Optimum", "best_possible", "clusters", "ring", "true_probability"]

CENTRES = ((-5.0, 3.0), (3.0, 3.0), (5.0, -3.0), (-3.0, -3.0))
CLASSES = (0, 0, 0, 1)


def clusters(number: int, spread: float, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Points ``[number, 2]`` and their classes ``[number]``; each blob is equally likely.

    Args:
        number: how many points.
        spread: standard deviation of each blob, in both directions.
        generator: source of the draws; the same seed gives the same points.

    >>> points, targets = clusters(4, 1.0, torch.Generator().manual_seed(0))
    >>> points.shape, targets.shape
    (torch.Size([4, 2]), torch.Size([4]))
    """
    if number < 1:
        raise FlowBNNError(f"the number of points is at least 1, not {number}")
    _check(spread)
    blob = torch.randint(len(CENTRES), (number,), generator=generator)
    points = torch.tensor(CENTRES)[blob] + spread * torch.randn(number, 2, generator=generator)
    return points, torch.tensor(CLASSES)[blob]


def true_probability(points: Tensor, spread: float) -> Tensor:
    r"""The exact probability of the second class, :math:`p(y = 1 \mid x)`, for points ``[..., 2]``.

    >>> true_probability(torch.tensor([-4.0, 0.0]), spread=1.0)  # halfway between two blobs
    tensor(0.5000)
    """
    _check(spread)
    logs = _log_densities(points, spread)
    return torch.softmax(logs, -1)[..., [index for index, label in enumerate(CLASSES) if label == 1]].sum(-1)


def ring(
    number: int, radius: float, generator: torch.Generator | None = None, thickness: float = 0.05
) -> Tensor:
    """Points ``[number, 2]`` on a circle around the origin, far from all blobs where ``radius`` is large.

    Args:
        number: how many points.
        radius: of the circle.
        generator: source of the draws.
        thickness: how far radii stray from it, as a share of it.

    >>> points = ring(100, 20.0, torch.Generator().manual_seed(0))
    >>> bool(((points.norm(dim=-1) - 20).abs() <= 1).all())
    True
    """
    if number < 1:
        raise FlowBNNError(f"the number of points is at least 1, not {number}")
    if not (radius > 0 and math.isfinite(radius) and 0 <= thickness < 1):
        raise FlowBNNError(
            f"a ring has a radius above 0 and a thickness from 0 to below 1, not {radius} and {thickness}"
        )
    angle = 2 * math.pi * torch.rand(number, generator=generator)
    reach = radius * (1 + thickness * (2 * torch.rand(number, generator=generator) - 1))
    return torch.stack([reach * angle.cos(), reach * angle.sin()], -1)


class Optimum(NamedTuple):
    """What nobody can do better: accuracy, and negative log-likelihood in nats."""

    accuracy: float
    nll: float


def best_possible(spread: float, nodes: int = 801) -> Optimum:
    r"""Accuracy and NLL of the exact posterior, :math:`\int \max_c p(x, c)\,dx` and :math:`H[y \mid x]`, by quadrature.

    The trapezoid rule on a square that holds all but :math:`10^{-13}` of the mass; for so smooth a density its error is
    below :math:`10^{-4}` in the accuracy (whose integrand has a kink) and far below in the entropy.

    >>> best = best_possible(1.95)
    >>> round(best.accuracy, 3), round(best.nll, 3)
    (0.961, 0.099)
    """
    _check(spread)
    reach = max(abs(value) for centre in CENTRES for value in centre) + 7.5 * spread
    axis = torch.linspace(-reach, reach, nodes, dtype=torch.float64)
    points = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1)
    logs = _log_densities(points, spread)
    density = logs.exp().sum(-1) * float(axis[1] - axis[0]) ** 2
    one = true_probability(points, spread)
    entropy = -(torch.special.xlogy(one, one) + torch.special.xlogy(1 - one, 1 - one))
    return Optimum(float((density * torch.maximum(one, 1 - one)).sum()), float((density * entropy).sum()))


def _log_densities(points: Tensor, spread: float) -> Tensor:
    """Logs of the four joint densities ``[..., 4]``."""
    centres = torch.tensor(CENTRES, dtype=points.dtype, device=points.device)
    square = (points.unsqueeze(-2) - centres).square().sum(-1)
    return -square / (2 * spread**2) - math.log(2 * math.pi * spread**2 * len(CENTRES))


def _check(spread: float) -> None:
    if not spread > 0 or not math.isfinite(spread):
        raise FlowBNNError(f"spread is a positive standard deviation, not {spread}")
