r"""Thresholds of conformal prediction and of conformal risk control.

Both choose the smallest threshold :math:`\lambda` whose mean loss on n held-out examples, corrected for one more example, is at most a
level :math:`\alpha` ([Angelopoulos 2022](https://arxiv.org/abs/2208.02814)):

.. math:: \hat\lambda = \inf \Big\{ \lambda : \frac{1}{n + 1} \Big( \sum_{i=1}^n L_i(\lambda) + 1 \Big) \le \alpha \Big\}
          \quad \Rightarrow \quad E[L_{n+1}(\hat\lambda)] \le \alpha .

The losses are in [0, 1] and do not increase with :math:`\lambda`. With the loss :math:`1[s_i > \lambda]` of one score per example this
is split conformal prediction: the threshold is the score of rank :math:`\lceil (n + 1)(1 - \alpha) \rceil`.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, check_entries, check_shape
from flowbnn.options import Probability, checked


def exact(number: float) -> Fraction:
    """Returns the decimal number that a user wrote, so that 10 x 0.9 is 9 and not a little more.

    >>> exact(0.9)
    Fraction(9, 10)
    """
    return Fraction(str(float(number)))


def least_examples(level: Fraction) -> int:
    r"""Returns the smallest number of examples for which a threshold exists, :math:`\lceil 1 / \alpha \rceil - 1`.

    >>> least_examples(exact(0.1)), least_examples(exact(0.05))
    (9, 19)
    """
    return math.ceil(1 / level) - 1


def loss_threshold(scores: Tensor, weights: Tensor, number: int, level: Fraction) -> float:
    r"""Returns the smallest threshold for losses :math:`L_i(\lambda) = \sum_j w_{ij} 1[s_{ij} > \lambda]`.

    Args:
        scores: Scores ``[M]`` of all parts of all examples.
        weights: Weight of each score in the loss of its example, ``[M]``. The weights of an example sum to at most one.
        number: Number of examples n.
        level: Level of the mean loss.

    Returns:
        One of the scores, minus infinity if no score has to be covered, or infinity if there are too few examples.
    """
    budget = (number + 1) * level - 1
    if budget < 0:
        return math.inf
    values, places = scores.double().unique(return_inverse=True)
    mass = torch.zeros_like(values).index_add(0, places, weights.double())
    above = mass.flip(0).cumsum(0).flip(0) - mass  # weight of the scores above each value
    tolerance = 1e-9 * max(1, number)  # rounding errors of the sums
    if not len(values) or float(mass.sum()) <= budget:
        return -math.inf
    return float(values[int((above <= float(budget) + tolerance).nonzero()[0])])


def too_few_examples(
    argument: str, value: float, number: int, level: Fraction, note: str = ""
) -> FlowBNNError:
    """Returns the error about too few held-out examples for a level."""
    least = least_examples(level)
    text = f"{argument}={value:g} needs at least {least:,} held-out examples, got {number:,}{note}"
    return FlowBNNError(text, kind="examples", argument="held_out", least=least)


def no_threshold(level: float, hint: str, argument: str) -> FlowBNNError:
    """Returns the error about thresholds that all have a risk above a level."""
    return FlowBNNError(
        f"no threshold has a risk of at most {level:g}; {hint}", kind="risk", argument=argument
    )


@checked
def conformal_quantile(scores: Tensor, coverage: Probability = 0.9) -> float:
    r"""Returns the threshold of split conformal prediction, the score of rank :math:`\lceil (n + 1) c \rceil` of n held-out scores.

    A new score is at most the threshold with a probability of at least c, if all scores are exchangeable
    ([Vovk 2005](https://doi.org/10.1007/b106715)). If they have no ties, the coverage of a threshold has the distribution
    Beta(k, n + 1 - k) over held-out data, with the rank k.

    Args:
        scores: Scores ``[n]`` of held-out examples. Larger scores mean worse predictions.
        coverage: Coverage c.

    Raises:
        FlowBNNError: If there are fewer than :math:`1 / (1 - c) - 1` scores.

    >>> conformal_quantile(torch.arange(1.0, 20.0), 0.9)  # the 18th of 19
    18.0
    """
    check_shape("scores", scores, ("examples >= 1",))
    level = 1 - exact(coverage)
    threshold = loss_threshold(scores, torch.ones_like(scores), len(scores), level)
    if threshold == math.inf and len(scores) < least_examples(level):
        raise too_few_examples("coverage", coverage, len(scores), level)
    return threshold


@checked
def risk_threshold(losses: Tensor, thresholds: Tensor, level: Probability = 0.1) -> float:
    r"""Returns the smallest threshold of conformal risk control, for losses of any kind.

    .. math:: \hat\lambda = \min \Big\{ \lambda : \frac{1}{n + 1} \Big( \sum_i L_i(\lambda) + 1 \Big) \le \alpha \Big\}

    The expected loss of a new example is then at most :math:`\alpha` ([Angelopoulos 2022](https://arxiv.org/abs/2208.02814)).

    Args:
        losses: Losses ``[n, T]`` of held-out examples in [0, 1], which do not increase from one threshold to the next.
        thresholds: Thresholds ``[T]`` in ascending order.
        level: Level :math:`\alpha` of the expected loss.

    Raises:
        FlowBNNError: If losses increase or are outside of [0, 1], or if no threshold has a small enough loss.

    >>> losses = torch.tensor([[1.0, 0.5, 0.0]]).expand(9, 3)
    >>> risk_threshold(losses, torch.tensor([0.1, 0.2, 0.3]), level=0.6)
    0.2...
    """
    check_shape("thresholds", thresholds, ("T",))
    check_shape("losses", losses, ("examples >= 1", len(thresholds)))
    valid = (losses >= 0) & (losses <= 1)
    valid[:, 1:] &= losses.diff(dim=1) <= 0
    check_entries("losses", losses, valid, "from 0 to 1, and not increasing")
    alpha, number = exact(level), len(losses)
    if number < least_examples(alpha):
        raise too_few_examples("level", level, number, alpha)
    risks = (losses.double().sum(0) + 1.0) / (number + 1)
    places = (risks <= float(alpha) + 1e-12).nonzero()
    if not len(places):
        raise no_threshold(
            level, f"the smallest is {float(risks.min()):.3g}; add larger thresholds", argument="thresholds"
        )
    return float(thresholds[int(places[0])])
