r"""The toy regression of Blundell et al. (2015, section 5.2), which document 001 shows.

.. math:: y = x + 0.3 \sin(2\pi(x + \varepsilon)) + 0.3 \sin(4\pi(x + \varepsilon)) + \varepsilon, \qquad
          \varepsilon \sim N(0, 0.02^2), \quad x \in [0, 0.5]

The one :math:`\varepsilon` of a point enters in three places, so the noise of :math:`y` is wide where the curve is steep.
"""

import math

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

__all__ = ["NOISE", "SPAN", "curve_points", "true_curve"]

NOISE = 0.02
SPAN = (0.0, 0.5)


def true_curve(inputs: Tensor, noise: Tensor | float = 0.0) -> Tensor:
    r"""The curve at ``inputs``, each with its own :math:`\varepsilon`, nought unless given.

    >>> true_curve(torch.tensor([0.0, 0.25, 0.5]))  # 0, 0.25 + 0.3, 0.5
    tensor([0.0000, 0.5500, 0.5000])
    """
    moved = inputs + noise
    return moved + 0.3 * torch.sin(2 * math.pi * moved) + 0.3 * torch.sin(4 * math.pi * moved)


def curve_points(
    number: int,
    generator: torch.Generator | None = None,
    *,
    span: tuple[float, float] = SPAN,
    noise: float = NOISE,
) -> tuple[Tensor, Tensor]:
    r"""Points of the curve, ``[number, 1]`` each, with inputs spread evenly at random over ``span``.

    Args:
        number: how many.
        generator: source of the draws; the same seed gives the same points.
        span: where the inputs lie.
        noise: standard deviation of :math:`\varepsilon`.

    >>> inputs, targets = curve_points(5, torch.Generator().manual_seed(0))
    >>> inputs.shape, targets.shape, bool(((inputs >= 0) & (inputs <= 0.5)).all())
    (torch.Size([5, 1]), torch.Size([5, 1]), True)
    """
    if number < 1:
        raise FlowBNNError(f"the number of points is at least 1, not {number}")
    if not span[0] < span[1]:
        raise FlowBNNError(f"the span of the inputs goes from a smaller to a larger number, not {span}")
    if not 0 <= noise < math.inf:
        raise FlowBNNError(f"noise is a standard deviation, not {noise}")
    inputs = span[0] + (span[1] - span[0]) * torch.rand(number, 1, generator=generator)
    return inputs, true_curve(inputs, noise * torch.randn(number, 1, generator=generator))
