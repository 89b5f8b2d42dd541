r"""Adaptive sampling: few samples for easy inputs, many for hard ones.

Samples are drawn in rounds. The first has ``start`` samples, and each further round multiplies their number by ``growth``. After each
round, inputs whose answer has settled are dropped, and the others continue together in full batches. Sample ``s`` is the same network
for every input, so that an answer with ``n`` samples consists of the first ``n`` samples of the full answer.
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


@options
class Adaptive:
    r"""Rule that decides when an input has enough samples.

    With ``n`` of at most ``S`` samples taken and ``until="probabilities"``, its *probabilities* have settled when those of all ``S``
    samples are within ``tolerance`` with a probability of at least ``certainty``, and it has had at least 16 samples:

    .. math:: \max_c \hat\sigma(p_c) \sqrt{1/n - 1/S} \; t_{n-1}\Big(1 - \frac{1 - \text{certainty}}{2 L}\Big) \;\le\; \text{tolerance}

    for ``L`` looks. For regression, with any ``until``, this is about the predictive mean, in predictive standard deviations. A mode
    that none of the first ``n`` samples is in cannot be detected.

    Its *decision* is certain when the most probable class is so far ahead of every other that the remaining samples would not change
    it. The mean over all ``S`` differs from the mean over the first ``n`` by a standard deviation of
    :math:`\hat\sigma \sqrt{1/n - 1/S}`, so for the paired differences :math:`d_{sc} = p_{s \hat y} - p_{sc}` the rule requires

    .. math::
        \min_{c \ne \hat y} \frac{\bar d_c}{\hat\sigma(d_c) \sqrt{1/n - 1/S}}
        \;\ge\; t_{n-1}\Big(1 - \frac{1 - \text{certainty}}{2 L}\Big),

    a two-sided t-test. There are ``L`` looks, so each gets an equal part of ``1 - certainty`` (Bonferroni). The probability that the
    leading class would be behind this rival after all ``S`` samples is then at most ``1 - certainty``, if the differences are normal.

    With ``until="either"`` the probabilities have settled when their largest standard error is at most ``tolerance``. Two classes
    can be so close that either may lead even then. Such an input continues until the leader is ahead by ``lead`` standard deviations
    of that difference. For ``lead=2`` it then leads at the end with a probability of at least 0.95, and few inputs are that close.

    With ``until="either"`` and ``"decision"`` the probabilities of decided inputs are those of a few samples, and differ from the full
    ones by more than ``tolerance``. They are also biased by optional stopping: an input stops sooner if its first samples happen to
    agree. On average its confidence is too high, by at most a quarter of its ``confidence_error`` if one class leads and by up to twice
    of it if classes are tied. Its epistemic part is 0.75 to 0.95 of the full one. If these matter, use ``until="probabilities"``.

    Args:
        tolerance: Maximum error of the probabilities; with ``until="either"``, their standard error.
        certainty: Probability that the decision is right, or that probabilities are within the tolerance.
        until: ``"probabilities"``, ``"decision"``, or ``"either"`` for whichever settles first.
        start: Number of samples before the first look.
        growth: Factor of the number of samples from look to look.
        lead: Standard deviations by which the leader must be ahead for settled probabilities to end the sampling. With 0 they end it
            at a tie.

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
        """Returns the numbers of samples at which the rule is evaluated, and finally all of them."""
        numbers, count = [], float(self.start)
        while count < samples:
            numbers.append(int(count))
            count = max(count * self.growth, int(count) + 1)
        return [*numbers, samples]

    def settled(self, predictive: Predictive, samples: int) -> Tensor:
        """Returns a mask ``[B]`` of the inputs that need no more samples. All must have the same number so far.

        Args:
            predictive: Predictive distribution of the samples so far.
            samples: Maximum number of samples.
        """
        from scipy.special import stdtrit  # here, because importing scipy adds a warning filter

        count, error = predictive.num_samples, predictive.sampling_error
        level = 1.0 - (1.0 - self.certainty) / (2 * max(1, len(self.looks(samples)) - 1))
        remaining = math.sqrt(1.0 - count / samples)
        # standard errors by which the remaining samples may move a mean
        reach = float(stdtrit(count - 1, level)) * remaining
        identical = error == 0  # all samples are equal
        reliable = count >= 16  # the estimate of a standard error from fewer samples is unreliable
        if not isinstance(predictive, CategoricalPredictive) or self.until == "probabilities":
            if self.until == "decision":
                raise FlowBNNError(
                    "until='decision' is for classification; use until='probabilities'",
                    kind="unsupported",
                    argument="until",
                )
            return identical | ((error * reach <= self.tolerance) & reliable)
        margin = predictive.decision_strength
        if self.until == "decision":
            return margin >= reach
        decided = (margin >= self.lead * remaining) | identical
        return (margin >= reach) | ((error <= self.tolerance) & decided)


def adaptive_outputs(
    draw: Draw, inputs: Any, samples: int, rule: Adaptive, predictive: Callable[[Tensor], Predictive]
) -> tuple[Tensor, Tensor]:
    """Samples outputs in rounds, until the answer of each input has settled.

    Args:
        draw: Function that returns the outputs ``[len(samples), b, ...]`` of a range of samples for some of the inputs.
        inputs: Inputs.
        samples: Maximum number of samples.
        rule: Rule that decides when an input has enough samples.
        predictive: Function from outputs to a predictive distribution.

    Returns:
        Outputs ``[samples, B, ...]``, NaN for samples that were not drawn, and the number of samples of each input, ``[B]``.
    """
    low, batch, cut = 0, inputs, has_row_axis(inputs)
    outputs = sample_counts = active = torch.empty(0)
    for high in rule.looks(samples):
        new_outputs = draw(batch, range(low, high))
        if low == 0:
            number, device = new_outputs.shape[1], new_outputs.device
            outputs = new_outputs.new_full((samples, number, *new_outputs.shape[2:]), math.nan)
            sample_counts = torch.full((number,), samples, device=device)
            active = torch.arange(number, device=device)
        outputs[low:high, active] = new_outputs if cut else new_outputs[:, active]
        if high == samples:
            break
        settled = rule.settled(predictive(outputs[:high, active]), samples)
        sample_counts[active[settled]] = high
        active, low = active[~settled], high
        if not len(active):
            break
        batch = pick(inputs, active) if cut else inputs
    return outputs, sample_counts
