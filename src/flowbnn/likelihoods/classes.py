"""Observation models of class labels."""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, pluralize
from flowbnn.likelihoods.base import Likelihood, single_precision, stacked
from flowbnn.numerics import is_concrete
from flowbnn.options import checked
from flowbnn.predictive import CategoricalPredictive

SEVERAL_LABELS = "several labels of one example are no classes that exclude each other; fit a network with one output for each of them"


def _integers(targets: Tensor, advice: str) -> Tensor:
    """Class labels as integers; floating-point numbers without fractions are taken."""
    if targets.is_floating_point() and is_concrete(targets) and not bool((targets == targets.round()).all()):
        line = f"class labels must be integers, but these have fractions; {advice}"
        raise FlowBNNError(line, kind="targets", argument="targets")
    return targets.long()


class Categorical(Likelihood):
    r"""Classes: :math:`\log p(y \mid x) = \log \mathrm{softmax}(f(x))_y`, minus the cross entropy.

    >>> import torch
    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).item(), 4)  # -log(4)
    -1.3863
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        outputs = single_precision(outputs)
        if targets.is_floating_point():
            targets = self.canonical(targets)
        # torch ignores the label -100 by default; no label is special here
        return -F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=-(2**62))

    def canonical(self, targets: Tensor) -> Tensor:
        return _integers(targets, "of probabilities give argmax(1)")

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        return stacked(outputs).log_softmax(-1).logsumexp(0) - math.log(len(outputs))

    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        return CategoricalPredictive(outputs, sample_counts)

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.ndim != 2:
            advice = ""
            if outputs.ndim > 2:
                advice = "; for labels of pixels or tokens give fb.fit a subclass of fb.likelihoods.Likelihood that sums over them"
            return (
                "a categorical likelihood takes outputs of shape (batch, classes), but the network gives "
                f"{tuple(outputs.shape)}{advice}"
            )
        if targets.is_floating_point() or targets.shape != outputs.shape[:1]:
            advice = "every example has one"
            if targets.is_floating_point():
                advice = "for real-valued targets use likelihood='gaussian'"
            elif targets.shape == (len(outputs), 1):
                advice = "give labels.squeeze(1)"
            elif targets.shape == outputs.shape:
                advice = "of one-hot labels give labels.argmax(1)" if is_one_hot(targets) else SEVERAL_LABELS
            return (
                f"class labels are one integer for each of {pluralize(len(outputs), 'row')} of outputs, "
                f"not {targets.dtype} of shape {tuple(targets.shape)}; {advice}"
            )
        classes = outputs.shape[1]
        if targets.numel() and (int(targets.min()) < 0 or int(targets.max()) >= classes):
            return (
                f"labels run from {int(targets.min())} to {int(targets.max())}, but the network has {pluralize(classes, 'output')}, "
                f"so labels must lie in 0 to {classes - 1}"
            )
        return ""


class Bernoulli(Likelihood):
    r"""Two classes from one logit: :math:`\log p(y \mid x) = y \log\sigma(f) + (1 - y) \log\sigma(-f)`.

    >>> import torch
    >>> round(Bernoulli().log_prob(torch.zeros(1, 1), torch.tensor([1])).item(), 4)  # -log(2)
    -0.6931
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        logits = single_precision(outputs).flatten()
        labels = targets.flatten().to(logits.dtype)
        return -F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def canonical(self, targets: Tensor) -> Tensor:
        return _integers(targets.flatten(), "of probabilities give (targets > 0.5).long()")

    def average(self, outputs: Sequence[Tensor]) -> Tensor:
        logits = stacked(outputs)
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        rows = outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(-1)
        return CategoricalPredictive.from_bernoulli(rows, sample_counts)

    def problem(self, outputs: Tensor, targets: Tensor) -> str:
        if outputs.numel() != outputs.shape[0]:
            return f"a Bernoulli likelihood takes one logit per example, but the network gives {tuple(outputs.shape)}"
        if targets.numel() != outputs.shape[0] or not bool(((targets == 0) | (targets == 1)).all()):
            return (
                "the targets of a Bernoulli likelihood are 0 or 1, one for each example; for real-valued targets say "
                "likelihood='gaussian', for more classes give the network an output for each"
            )
        return ""


def is_one_hot(targets: Tensor) -> bool:
    """Whether each row has a single one among zeros."""
    return bool(((targets == 0) | (targets == 1)).all()) and bool((targets.sum(1) == 1).all())
