"""Scores of predicted class probabilities."""

import torch
from torch import Tensor

from flowbnn.metrics.checks import average, check_scored
from flowbnn.options import checked

__all__ = ["accuracy", "brier_score", "negative_log_likelihood"]


@checked
def accuracy(probabilities: Tensor, targets: Tensor) -> float:
    r"""Share of inputs whose most probable class is the target: :math:`\frac1B \sum_i 1[\arg\max_c p_{ic} = y_i]`.

    Every input counts the same ("micro"), whatever the size of its class.

    >>> accuracy(torch.tensor([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]]), torch.tensor([0, 1, 1, 1]))
    0.75
    """
    probabilities, targets = check_scored(probabilities, targets)
    return average(probabilities.argmax(-1) == targets)


@checked
def negative_log_likelihood(probabilities: Tensor, targets: Tensor) -> float:
    r"""Mean of :math:`-\log p_{i y_i}`, in nats; a proper score (Good, 1952), infinite when a target had probability zero.

    From samples, :meth:`flowbnn.predictive.CategoricalPredictive.nll` is more exact: it never leaves the log domain.

    >>> round(negative_log_likelihood(torch.tensor([[0.5, 0.5], [0.2, 0.8]]), torch.tensor([0, 0])), 4)  # log(10) / 2
    1.1513
    """
    probabilities, targets = check_scored(probabilities, targets)
    return average(-torch.log(probabilities.gather(-1, targets.unsqueeze(-1))))


@checked
def brier_score(probabilities: Tensor, targets: Tensor) -> float:
    r"""Mean squared distance of the probabilities to the one-hot target, *summed* over classes (Brier, 1950):

    .. math:: \frac1B \sum_i \sum_c (p_{ic} - 1[y_i = c])^2 \in [0, 2].

    With two classes that is twice the score that looks at one class's probability only; some papers divide by the number
    of classes.

    >>> round(brier_score(torch.tensor([[0.7, 0.2, 0.1]]), torch.tensor([0])), 4)  # 0.09 + 0.04 + 0.01
    0.14
    """
    probabilities, targets = check_scored(probabilities, targets)
    aim = torch.zeros_like(probabilities).scatter_(-1, targets.unsqueeze(-1), 1.0)
    return average((probabilities - aim).square().sum(-1))
