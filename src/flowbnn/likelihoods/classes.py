"""Observation models of class labels."""

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import FlowBNNError, check_entries, check_shape
from flowbnn.likelihoods.base import Likelihood, stack_outputs, to_single_precision
from flowbnn.metrics.checks import check_classes, expected_value, is_soft
from flowbnn.numerics import is_concrete
from flowbnn.options import checked
from flowbnn.predictive import CategoricalPredictive


class Categorical(Likelihood):
    r"""Likelihood of class labels, :math:`\log p(y \mid x) = \log \mathrm{softmax}(f(x))_y`, the negative cross entropy.

    Soft labels :math:`t`, such as those of label smoothing or mixup, are rows of probabilities. Their log-likelihood is the expectation
    over labels, :math:`\sum_c t_c \log \mathrm{softmax}(f(x))_c`.

    >>> import torch
    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).item(), 4)  # -log(4)
    -1.3863
    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([[0.9, 0.1, 0.0, 0.0]])).item(), 4)
    -1.3863
    """

    predictive = CategoricalPredictive  # type: ignore[assignment]  # of samples of logits ``[S, B, C]``

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probability of the label of each example, ``[B]``.

        Args:
            outputs: Logits ``[B, C]``.
            targets: Class indices ``[B]``, or probabilities ``[B, C]``.
        """
        outputs = outputs.float() if outputs.dtype.itemsize < 4 else outputs
        if targets.is_floating_point():
            if is_soft(targets):
                return expected_value(outputs.log_softmax(-1), targets)
            targets = self.canonical_targets(targets)
        # torch ignores the label -100 by default
        return -F.cross_entropy(outputs, targets.long(), reduction="none", ignore_index=-(2**62))

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns integer labels. Probabilities ``[B, C]`` are returned unchanged.

        Raises:
            FlowBNNError: If labels have fractions.
        """
        return targets if is_soft(targets) else _to_integers(targets)

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean probabilities."""
        return stack_outputs(outputs).log_softmax(-1).logsumexp(0) - math.log(len(outputs))

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if outputs are not ``[B, C]``, or if targets are neither class indices nor rows of probabilities.

        Args:
            outputs: Logits ``[B, C]``.
            targets: Class indices ``[B]``, or probabilities ``[B, C]``.
        """
        if outputs.ndim != 2:
            hint = "for pixels, subclass Likelihood" if outputs.ndim > 2 else ""
            check_shape("outputs", outputs, ("batch", "classes"), hint, kind="outputs", owner="Categorical")
        inputs, classes = outputs.shape
        labels = targets.shape == (inputs,) and not targets.is_floating_point()
        if not labels or bool(((targets < 0) | (targets >= classes)).any()):
            check_classes(targets, inputs, classes, kind="targets")  # the error says which of these failed


class Bernoulli(Likelihood):
    r"""Likelihood of two classes with one logit, :math:`\log p(y \mid x) = y \log\sigma(f) + (1 - y) \log\sigma(-f)`.

    >>> import torch
    >>> round(Bernoulli().log_prob(torch.zeros(1, 1), torch.tensor([1])).item(), 4)  # -log(2)
    -0.6931
    """

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probability of the label of each example, ``[B]``.

        Args:
            outputs: Logits ``[B]`` or ``[B, 1]``.
            targets: Labels 0 or 1, ``[B]`` or ``[B, 1]``.
        """
        logits = to_single_precision(outputs).flatten()
        labels = targets.flatten().to(logits.dtype)
        return -F.binary_cross_entropy_with_logits(logits, labels, reduction="none")

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns integer labels ``[B]``.

        Raises:
            FlowBNNError: If labels have fractions.
        """
        return _to_integers(targets.flatten())

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the logit of the mean probability."""
        logits = stack_outputs(outputs)
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        """Returns the predictive distribution of samples of logits ``[S, B]`` or ``[S, B, 1]``."""
        rows = outputs.flatten(1) if outputs.ndim > 1 else outputs.unsqueeze(-1)
        return CategoricalPredictive.from_bernoulli(rows, sample_counts)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if there is not one logit and one label, 0 or 1, for each example.

        Args:
            outputs: Logits ``[B]`` or ``[B, 1]``.
            targets: Labels ``[B]`` or ``[B, 1]``.
        """
        if outputs.numel() != outputs.shape[0]:
            text = f"Bernoulli needs one logit per example, got outputs of shape {tuple(outputs.shape)}"
            raise FlowBNNError(text, kind="outputs", argument="outputs")
        if targets.numel() != outputs.shape[0] or not bool(((targets == 0) | (targets == 1)).all()):
            text = "Bernoulli needs one label, 0 or 1, per example; set likelihood='gaussian' for real numbers, or add outputs"
            raise FlowBNNError(text, kind="targets", argument="targets")


def _to_integers(targets: Tensor) -> Tensor:
    """Returns labels as integers. Floating point numbers without fractions are accepted."""
    if targets.is_floating_point() and is_concrete(targets):
        hint = "use (targets > 0.5).long(), or likelihood='gaussian' for real numbers"
        check_entries("targets", targets, targets == targets.round(), "an integer", hint, kind="targets")
    return targets.long()
