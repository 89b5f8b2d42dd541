"""Learning-rate schedules."""

import math

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from flowbnn.options import Count, UnitInterval, checked


@checked
def cosine(optimizer: Optimizer, steps: Count, rise: UnitInterval = 0.0) -> LRScheduler:
    r"""Returns a schedule that decreases the learning rate to zero along half a cosine, after a linear warm-up.

    The factor at step :math:`t` of :math:`T` is :math:`\min(1, (t + 1) / (r T)) \cdot (1 + \cos(\pi t / T)) / 2`.

    Args:
        optimizer: Optimizer whose learning rates are scheduled.
        steps: Number of steps :math:`T`.
        rise: Fraction :math:`r` of the steps in the warm-up.

    >>> import torch
    >>> optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule, rates = cosine(optimizer, steps=4, rise=0.5), []
    >>> for _ in range(5):
    ...     rates.append(round(schedule.get_last_lr()[0], 2))
    ...     optimizer.step()
    ...     schedule.step()
    >>> rates
    [0.5, 0.85, 0.5, 0.15, 0.0]
    """
    warmup_steps = max(1.0, rise * steps)

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup_steps) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

    return LambdaLR(optimizer, factor)
