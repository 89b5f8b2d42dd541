r"""Adaptive sampling: few samples for easy inputs, many for hard ones.

Samples are drawn in rounds. The first round has ``start`` samples, and each further round multiplies their number by ``growth``. After
each round, inputs whose prediction has converged are dropped, and the others continue together in full batches. Sample ``s`` is the
same network for every input, so a prediction with ``n`` samples consists of the first ``n`` samples of the full prediction.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowbnn.batches import has_row_axis, pick
from flowbnn.errors import requirement_error
from flowbnn.options import Bounds, Ge, NonNegative, Positive, Probability, options
from flowbnn.predictive import CategoricalPredictive, Predictive

Draw = Callable[[Any, range], Tensor]


@options
class Adaptive:
    r"""Rule that decides when an input has enough samples.

    ``n`` denotes the number of samples so far, ``S`` the maximum number, and ``L`` the number of tests. With
    ``criterion="probabilities"`` an input has converged after at least 16 samples, when its *probabilities* are within ``tolerance`` of
    those with all ``S`` samples, with a probability of at least ``certainty``:

    .. math:: \max_c \hat\sigma(p_c) \sqrt{1/n - 1/S} \; t_{n-1}\Big(1 - \frac{1 - \text{certainty}}{2 L}\Big) \;\le\; \text{tolerance}

    For regression this test is about the predictive mean, in predictive standard deviations. A mode that none of the first ``n``
    samples visits cannot be detected.

    With ``criterion="decision"`` an input has converged when the remaining samples would not change its most probable class. The mean
    over all ``S`` samples differs from the mean over the first ``n`` by a standard deviation of :math:`\hat\sigma \sqrt{1/n - 1/S}`.
    For the paired differences :math:`d_{sc} = p_{s \hat y} - p_{sc}` the rule therefore requires

    .. math::
        \min_{c \ne \hat y} \frac{\bar d_c}{\hat\sigma(d_c) \sqrt{1/n - 1/S}}
        \;\ge\; t_{n-1}\Big(1 - \frac{1 - \text{certainty}}{2 L}\Big),

    a two-sided t-test with a Bonferroni correction for ``L`` tests. If the differences are normal, another class leads after all ``S``
    samples with a probability of at most ``1 - certainty``.

    With ``criterion="either"`` an input has also converged when the largest standard error of its probabilities is at most
    ``tolerance``. If two classes are nearly tied, it continues until the difference is at least ``lead`` standard deviations. For
    ``lead=2`` the most probable class then stays the same with a probability of at least 0.95.

    ``"either"`` and ``"decision"`` preserve decisions, not probabilities. The probabilities of an input that stops early may differ
    from the full ones by more than ``tolerance``. They are also biased by optional stopping, because an input stops earlier if its
    first samples agree by chance. On average its confidence is too high. The bias is at most a quarter of ``confidence_error`` if one
    class leads, and at most twice ``confidence_error`` if classes are tied. The epistemic uncertainty is 0.75 to 0.95 of its full
    value. Use ``"probabilities"`` if this matters.

    Args:
        tolerance: Maximum error of the probabilities. With ``criterion="either"``, their maximum standard error.
        certainty: Probability that more samples would not change the decision, or the probabilities by more than the tolerance.
        criterion: Criterion of convergence: ``"probabilities"``, ``"decision"``, or ``"either"`` of the two.
        start: Number of samples before the first test.
        growth: Factor by which the number of samples grows from test to test.
        lead: Minimum lead of the most probable class, in standard deviations, with ``criterion="either"``. 0 ignores ties.

    >>> Adaptive(start=8).test_sizes(128)
    [8, 12, 18, 27, 40, 60, 91, 128]
    """

    tolerance: Positive = 0.01
    certainty: Probability = 0.95
    criterion: Literal["probabilities", "decision", "either"] = "either"
    start: Annotated[int, Ge(2)] = 8
    growth: Annotated[float, Bounds(gt=1)] = 1.5
    lead: NonNegative = 2.0

    def test_sizes(self, samples: int) -> list[int]:
        """Returns the numbers of samples at which convergence is tested. The last entry is ``samples``."""
        numbers, count = [], float(self.start)
        while count < samples:
            numbers.append(int(count))
            count = max(count * self.growth, int(count) + 1)
        return [*numbers, samples]

    def has_converged(self, predictive: Predictive, samples: int) -> Tensor:
        """Returns a mask ``[B]`` of the inputs that have converged. All inputs must have the same number of samples so far.

        Args:
            predictive: Predictive distribution of the samples so far.
            samples: Maximum number of samples.
        """
        from scipy.special import stdtrit  # here, because importing scipy adds a warning filter

        count, error = predictive.num_samples, predictive.sampling_error
        level = 1.0 - (1.0 - self.certainty) / (2 * max(1, len(self.test_sizes(samples)) - 1))
        remaining_scale = math.sqrt(1.0 - count / samples)
        # standard errors by which the remaining samples may move a mean
        max_shift = float(stdtrit(count - 1, level)) * remaining_scale
        identical = error == 0  # all samples are equal
        reliable = count >= 16  # the estimate of a standard error from fewer samples is unreliable
        if not isinstance(predictive, CategoricalPredictive) or self.criterion == "probabilities":
            if self.criterion == "decision":
                value, hint = f"a {type(predictive).__name__}", "use criterion='probabilities'"
                raise requirement_error("criterion='decision'", "classes", value, hint, argument="criterion")
            return identical | ((error * max_shift <= self.tolerance) & reliable)
        margin = predictive.decision_strength
        margin = margin.flatten(1).amin(1) if margin.ndim > 1 else margin  # all positions must be decided
        if self.criterion == "decision":
            return margin >= max_shift
        is_decided = (margin >= self.lead * remaining_scale) | identical
        return (margin >= max_shift) | ((error <= self.tolerance) & is_decided)


def adaptive_outputs(
    draw: Draw, inputs: Any, samples: int, rule: Adaptive | float, predictive: Callable[[Tensor], Predictive]
) -> tuple[Tensor, Tensor]:
    """Samples outputs in rounds until the prediction of each input has converged.

    Args:
        draw: Function that returns the outputs ``[len(samples), b, ...]`` of a range of samples for some of the inputs.
        inputs: Inputs.
        samples: Maximum number of samples.
        rule: Rule that decides when an input has enough samples, or its tolerance.
        predictive: Function from outputs to a predictive distribution.

    Returns:
        Outputs ``[samples, B, ...]``, NaN for samples that were not drawn, and the number of samples of each input, ``[B]``.
    """
    rule = rule if isinstance(rule, Adaptive) else Adaptive(tolerance=rule)
    low, batch, has_rows = 0, inputs, has_row_axis(inputs)
    outputs = sample_counts = active = torch.empty(0)
    for high in rule.test_sizes(samples):
        new_outputs = draw(batch, range(low, high))
        if low == 0:
            number, device = new_outputs.shape[1], new_outputs.device
            outputs = new_outputs.new_full((samples, number, *new_outputs.shape[2:]), math.nan)
            sample_counts = torch.full((number,), samples, device=device)
            active = torch.arange(number, device=device)
        outputs[low:high, active] = new_outputs if has_rows else new_outputs[:, active]
        if high == samples:
            break
        converged = rule.has_converged(predictive(outputs[:high, active]), samples)
        sample_counts[active[converged]] = high
        active, low = active[~converged], high
        if not len(active):
            break
        batch = pick(inputs, active) if has_rows else inputs
    return outputs, sample_counts
