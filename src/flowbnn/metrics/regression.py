"""Scores of predicted values and of their intervals."""

import math

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.metrics.checks import average, check_values
from flowbnn.options import checked


@checked
def root_mean_squared_error(predictions: Tensor, targets: Tensor) -> float:
    r""":math:`\sqrt{\frac{1}{BD} \sum_{id} (\hat y_{id} - y_{id})^2}`, in the target's own unit.

    Predictions are ``[B, D]``; targets have the same shape, or ``[B]`` when D is 1.

    >>> root_mean_squared_error(torch.tensor([[1.0], [2.0]]), torch.tensor([4.0, 6.0]))  # sqrt((9 + 16) / 2)
    3.5355...
    """
    predictions = check_values(predictions, "predictions")
    targets = check_values(targets, "targets", predictions.shape).to(predictions.device)
    return math.sqrt(average((predictions - targets).square()))


@checked
def interval_coverage(low: torch.Tensor, high: Tensor, targets: Tensor) -> float:
    r"""Share of targets inside their interval: :math:`\frac{1}{BD} \sum_{id} 1[l_{id} \le y_{id} \le h_{id}]`.

    A calibrated interval of mass 0.9 covers 0.9 of unseen targets; below is overconfident, above underconfident.

    >>> interval_coverage(torch.zeros(4, 1), torch.ones(4, 1), torch.tensor([0.5, 1.0, 1.5, -1.0]))
    0.5
    """
    low, high = check_values(low, "low"), check_values(high, "high")
    if low.shape != high.shape or (low > high).any():
        raise FlowBNNError("low and high must have one shape, and low must not lie above high")
    targets = check_values(targets, "targets", low.shape).to(low.device)
    return average((low <= targets) & (targets <= high))
