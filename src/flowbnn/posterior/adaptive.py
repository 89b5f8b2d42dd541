r"""Adaptive sampling: easy inputs cost a few samples, hard ones many.

Samples are taken in rounds, ``start`` at first and ``growth`` times as many in all after each further one. After a round, the inputs
whose answer has settled are left alone and the others go on together, in full batches. Sample ``s`` is the same network for every
input, so that an answer with ``n`` samples is made of the first ``n`` samples of the full answer.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowbnn.batches import has_row_axis, pick
from flowbnn.errors import FlowBNNError
from flowbnn.options import Bounds, Ge, NonNegative, Positive, Probability, options
from flowbnn.predictive import CategoricalPredictive, Predictive

Draw = Callable[[Any, range], Tensor]


ENOUGH = 16  # samples from which on a standard error is believed


@options
class Adaptive:
    r"""When an input has had enough samples.

    With ``n`` of at most ``S`` samples taken and ``until="probabilities"``, its *probabilities* have settled when those of all ``S``
    samples are within ``tolerance`` with a probability of at least ``certainty``, and it has had at least 16 samples:

    .. math:: \max_c \hat\sigma(p_c) \sqrt{1/n - 1/S} \; t_{n-1}\Big(1 - \frac{1 - \text{certainty}}{2 L}\Big) \;\le\; \text{tolerance}

    for ``L`` looks. For regression, whatever ``until`` says, it is the predictive mean, in predictive standard deviations. A mode that
    none of the first ``n`` samples is in cannot be seen.

    Its *decision* is certain when the most probable class is so far ahead of every other that the samples to come would not turn
    it. The mean over all ``S`` differs from the mean over the first ``n`` by a standard deviation of
    :math:`\hat\sigma \sqrt{1/n - 1/S}`, so for the paired differences :math:`d_{sc} = p_{s \hat y} - p_{sc}` it asks

    .. math::
        \min_{c \ne \hat y} \frac{\bar d_c}{\hat\sigma(d_c) \sqrt{1/n - 1/S}}
        \;\ge\; t_{n-1}\Big(1 - \frac{1 - \text{certainty}}{2 L}\Big),

    a two-sided t-test. Looking ``L`` times gives chance as many occasions to mislead, so each look gets an equal part of
    ``1 - certainty`` (Bonferroni). Whatever the truth, a class that leads then and would be behind this rival after all ``S`` samples
    is a mistake of probability at most ``1 - certainty``, as far as the differences are normal.

    With ``until="either"`` the probabilities have settled when their largest standard error is at most ``tolerance``. Two classes
    can be so close that either leads even then: such an input goes on until the leader is ahead by ``lead`` standard deviations of
    that difference: it will then lead at the end with a probability of 0.95 or more for ``lead=2``, and few inputs are that close.
    What a decided input was spared shows in its probabilities: with ``until="either"`` and ``"decision"`` they are those of a few
    samples, further from the full ones than ``tolerance``. They also lean one way (optional stopping): an input stops sooner where
    its first samples happen to agree, so on average its confidence is too high, by a quarter of its ``confidence_error`` or less
    where one class leads and by up to twice of it where classes are tied, and its epistemic part is too low, 0.75 to 0.95 of the
    full one. Where these matter, use ``until="probabilities"``.

    Args:
        tolerance: how far off probabilities may be; with ``until="either"``, their standard error.
        certainty: of the decision, or that probabilities are within the tolerance.
        until: ``"probabilities"``, ``"decision"``, or ``"either"``, whichever is settled first.
        lead: how far ahead the leader must be for settled probabilities to end the sampling; 0 lets them end it at a tie.
        start: samples before the first look.
        growth: of the number of samples from look to look.

    >>> Adaptive(start=8).looks(128)
    [8, 12, 18, 27, 40, 60, 91, 128]
    """

    tolerance: Positive = 0.01
    certainty: Probability = 0.95
    until: Literal["probabilities", "decision", "either"] = "either"
    start: Annotated[int, Ge(2)] = 8
    growth: Annotated[float, Bounds(gt=1)] = 1.5
    lead: NonNegative = 2.0

    def looks(self, samples: int) -> list[int]:
        """The numbers of samples after which there is a look, and at last all of them."""
        rounds, count = [], float(self.start)
        while count < samples:
            rounds.append(int(count))
            count = max(count * self.growth, int(count) + 1)
        return [*rounds, samples]

    def settled(self, predictive: Predictive, samples: int) -> Tensor:
        """Which inputs need no more samples, ``[B]``; all of them have had the same number so far."""
        from scipy.special import stdtrit  # here, because importing scipy adds a warning filter

        count, error = predictive.num_samples, predictive.sampling_error
        level = 1.0 - (1.0 - self.certainty) / (2 * max(1, len(self.looks(samples)) - 1))
        to_come = math.sqrt(1.0 - count / samples)
        # standard errors that the samples to come may still move a mean by
        reach = float(stdtrit(count - 1, level)) * to_come
        same = error == 0  # no sample differs
        if not isinstance(predictive, CategoricalPredictive) or self.until == "probabilities":
            if self.until == "decision":
                raise FlowBNNError(
                    "regression has no decision to be certain of; use until='probabilities'",
                    kind="unsupported",
                )
            return same | ((error * reach <= self.tolerance) & (count >= ENOUGH))
        ahead = predictive.decision_strength
        if self.until == "decision":
            return ahead >= reach
        return (ahead >= reach) | ((error <= self.tolerance) & ((ahead >= self.lead * to_come) | same))


def adaptive_outputs(
    draw: Draw, inputs: Any, samples: int, rule: Adaptive, predictive: Callable[[Tensor], Predictive]
) -> tuple[Tensor, Tensor]:
    """Outputs ``[samples, B, ...]``, NaN where an input had no sample, and the samples spent on each, ``[B]``.

    Args:
        draw: gives outputs ``[len(samples), b, ...]`` of a range of samples for some of the inputs.
        samples: the most that an input gets.
        predictive: makes a predictive of outputs.
    """
    low, some, cut = 0, inputs, has_row_axis(inputs)
    outputs = sample_counts = going_on = torch.empty(0)
    for high in rule.looks(samples):
        drawn = draw(some, range(low, high))
        if low == 0:
            number = drawn.shape[1]
            outputs = drawn.new_full((samples, number, *drawn.shape[2:]), math.nan)
            sample_counts = torch.full((number,), samples, device=drawn.device)
            going_on = torch.arange(number, device=drawn.device)
        outputs[low:high, going_on] = drawn if cut else drawn[:, going_on]
        if high == samples:
            break
        settled = rule.settled(predictive(outputs[:high, going_on]), samples)
        sample_counts[going_on[settled]] = high
        going_on, low = going_on[~settled], high
        if not len(going_on):
            break
        some = pick(inputs, going_on) if cut else inputs
    return outputs, sample_counts
