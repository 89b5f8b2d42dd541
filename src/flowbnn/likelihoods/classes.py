r"""Observation models of class labels, of whole inputs or of their positions (pixels, tokens, several labels).

The log-likelihood of an example is the *sum* over its positions, because the ELBO adds up independent targets:
:math:`\log p(y \mid x) = \sum_t \log p(y_t \mid x)`. The loss of a fit is the mean of this sum over the examples of a batch. It is
larger than torch's mean over pixels by the number of pixels of an example. Metrics, the negative log-likelihood (NLL) included, are
means over positions.

Class weights and label smoothing change the loss of a fit. They do not change the predictive distribution or the metrics.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from flowbnn.errors import check_entries, check_shape, value_error
from flowbnn.likelihoods.base import Likelihood, misfit_error, stack_outputs
from flowbnn.metrics.checks import IGNORED, check_any_target, check_classes, expected_value
from flowbnn.numerics import at_least_single, is_concrete
from flowbnn.options import Bounds, Positive, checked
from flowbnn.predictive import CategoricalPredictive

Smoothing = Annotated[float, Bounds(ge=0, lt=1)]


class ClassLikelihood(Likelihood):
    """Base class for likelihoods of class labels."""

    ignore_index: int

    def extra_repr(self) -> str:
        """Returns the settings that differ from their defaults."""
        defaults = type(self)()._settings()
        changed = {name: value for name, value in self._settings().items() if value != defaults[name]}
        return ", ".join(f"{name}={value!r}" for name, value in changed.items())

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Returns the arguments of ``__init__`` as plain values."""

    def to_dict(self) -> dict[str, Any]:
        """Returns the name and the settings as plain values."""
        return {"likelihood": type(self).__name__, **self._settings()}

    def hide_ignored(self, targets: Tensor) -> Tensor:
        """Returns targets in which the ignored label is -100."""
        if self.ignore_index == IGNORED:
            return targets
        labels = targets if targets.is_floating_point() else targets.long()  # bytes cannot hold -100
        return labels.masked_fill(labels == self.ignore_index, IGNORED)


class Categorical(ClassLikelihood):
    r"""Likelihood of class labels, :math:`\log p(y \mid x) = \log \mathrm{softmax}(f(x))_y`, the negative cross entropy.

    Outputs ``[B, C]`` have targets ``[B]``. Outputs for pixels or tokens are ``[B, C, *positions]``, as in torch's
    ``cross_entropy``, or ``[B, *positions, C]``, as in Hugging Face. Their targets are ``[B, *positions]``, and the log-likelihood of
    an example is the sum over its positions.

    Soft labels :math:`t`, such as those of mixup, are probabilities of the shape of the outputs. Their log-likelihood is the
    expectation over labels, :math:`\sum_c t_c \log \mathrm{softmax}(f(x))_c`.

    Args:
        class_axis: Axis of the classes in outputs with positions, 1 or -1. By default, it is found from the shapes of outputs and
            targets. Predictions have the classes on the last axis.
        ignore_index: Label of positions without a target, such as padding. An example without positions needs a label.
        class_weights: Weight of the loss of each class, as ``weight`` in torch's ``cross_entropy`` without its normalization.
        label_smoothing: Probability :math:`\varepsilon` that is spread over all classes, as in torch's ``cross_entropy``.

    >>> import torch
    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).item(), 4)  # -log(4)
    -1.3863
    >>> round(Categorical().log_prob(torch.zeros(1, 4), torch.tensor([[0.9, 0.1, 0.0, 0.0]])).item(), 4)
    -1.3863
    >>> masks = torch.full((1, 2, 2), 3).index_fill(2, torch.tensor([1]), -100)  # the second column is ignored
    >>> round(Categorical().log_prob(torch.zeros(1, 4, 2, 2), masks).item(), 4)  # two pixels
    -2.7726
    """

    _class_weights: Tensor | None

    @checked
    def __init__(
        self,
        class_axis: Literal[1, -1] | None = None,
        ignore_index: int = IGNORED,
        class_weights: Sequence[Positive] | None = None,
        label_smoothing: Smoothing = 0.0,
    ) -> None:
        super().__init__()
        self.class_axis, self.ignore_index, self.label_smoothing = class_axis, ignore_index, label_smoothing
        self.class_weights = None if class_weights is None else [float(weight) for weight in class_weights]
        self.register_buffer("_class_weights", _as_tensor(self.class_weights), persistent=False)

    def _settings(self) -> dict[str, Any]:
        names = ("class_axis", "ignore_index", "class_weights", "label_smoothing")
        return {name: getattr(self, name) for name in names}

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probability of the labels of each example, ``[B]``, summed over positions.

        Args:
            outputs: Logits ``[B, C]``, ``[B, C, *positions]`` or ``[B, *positions, C]``.
            targets: Class indices ``[B]`` or ``[B, *positions]``, or probabilities of the shape of the outputs.
        """
        logits, targets = self.classes_last(at_least_single(outputs), targets)
        if targets.is_floating_point():
            values = expected_value(logits.log_softmax(-1), self.target_weights(targets, logits))
        else:
            # without positions every label counts, also torch's default of an ignored label
            ignored = IGNORED if targets.ndim > 1 else -(2**62)
            weights = None if self._class_weights is None else self._class_weights.to(logits)
            values = -F.cross_entropy(
                logits if logits.ndim == 2 else logits.movedim(-1, 1),
                targets.long(),
                weights,
                reduction="none",
                ignore_index=ignored,
                label_smoothing=self.label_smoothing,
            )
        return values.flatten(1).sum(1) if values.ndim > 1 else values

    def target_weights(self, targets: Tensor, logits: Tensor) -> Tensor:
        r"""Returns the weight of each class in the loss, ``[..., C]``, for a loss of :math:`-\sum_c a_c \log p_c`.

        Args:
            targets: Class indices ``[...]``, of which -100 has no weight, or soft labels ``[..., C]``.
            logits: Logits ``[..., C]``.
        """
        weights, classes = targets, logits.shape[-1]
        if not targets.is_floating_point():
            weights = F.one_hot(targets.long().clamp(min=0), classes)
        weights = weights.to(logits)
        if self.label_smoothing:
            weights = (1.0 - self.label_smoothing) * weights + self.label_smoothing / classes
        if self._class_weights is not None:
            weights = weights * self._class_weights.to(weights)
        return weights if targets.is_floating_point() else weights * (targets >= 0).unsqueeze(-1)

    def classes_last(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Returns logits ``[B, *positions, C]``, and class indices ``[B, *positions]`` or soft labels ``[B, *positions, C]``.

        Args:
            outputs: Logits.
            targets: Class indices or soft labels, also those that :meth:`canonical_targets` returned.

        Raises:
            FlowBNNError: If the axis of the classes is ambiguous.
        """
        axis = self._find_axis(outputs, targets)
        logits = outputs if axis == -1 else outputs.movedim(axis, -1)
        if not targets.is_floating_point():
            return logits, self.hide_ignored(targets)
        if outputs.ndim > 1 and targets.shape == outputs.shape:
            return logits, targets.movedim(axis, -1)
        return logits, targets if targets.shape == logits.shape else self.canonical_targets(targets)

    def _find_axis(self, outputs: Tensor, targets: Tensor | None) -> int:
        """Returns the axis of the classes, 1 or -1.

        Raises:
            FlowBNNError: If both or none fit the targets.
        """
        if outputs.ndim <= 2:
            return -1
        if self.class_axis is not None:
            return self.class_axis
        axes = [axis for axis in (1, -1) if targets is None or _is_class_axis(axis, outputs, targets)]
        if len(axes) == 1:
            return axes[0]
        if axes or targets is None:
            value = f"None for outputs of shape {tuple(outputs.shape)}"
            raise value_error("class_axis", "1 or -1", value, "set Categorical(class_axis=1)", kind="outputs")
        first, last = outputs.movedim(1, -1).shape[:-1], outputs.shape[:-1]
        raise misfit_error(
            outputs, targets, f"use targets of shape {tuple(first)} or {tuple(last)}", "outputs"
        )

    def initialize(self, outputs: Tensor, targets: Tensor) -> None:
        """Stores the axis of the classes of outputs with positions."""
        if outputs.ndim > 2:
            self.class_axis = 1 if self._find_axis(outputs, targets) == 1 else -1

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns integer labels, -100 where they are ignored. Soft labels get the classes on the last axis.

        Raises:
            FlowBNNError: If labels have fractions.
        """
        if targets.is_floating_point() and targets.ndim > 1 and targets.shape[1] > 1:
            return (
                targets
                if targets.ndim == 2 or self.class_axis is None
                else targets.movedim(self.class_axis, -1)
            )
        labels = _to_integers(targets)
        return self.hide_ignored(labels) if labels.ndim > 1 else labels

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the logarithm of the mean probabilities.

        Args:
            outputs: Samples of logits ``[S, B, ...]`` of equal shape, or logits ``[B, C]``.
        """
        axis = -1
        if outputs[0].ndim > 3 and self._find_axis(outputs[0][0], None) == 1:
            axis = 3  # after the stacked views, the samples and the batch
        return stack_outputs(outputs).log_softmax(axis).logsumexp(0) - math.log(len(outputs))

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        """Returns the predictive distribution of samples of logits ``[S, B, ...]``, whose classes are on the last axis."""
        if outputs.ndim > 3:
            axis = self._find_axis(outputs[0], None)
            outputs = outputs.movedim(axis if axis < 0 else axis + 1, -1)
        return CategoricalPredictive(outputs, sample_counts)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if outputs and targets do not fit, or if targets are neither class indices nor probabilities.

        Args:
            outputs: Logits ``[B, C]``, ``[B, C, *positions]`` or ``[B, *positions, C]``.
            targets: Class indices ``[B]`` or ``[B, *positions]``, or probabilities of the shape of the outputs.
        """
        if outputs.ndim < 2:
            check_shape("outputs", outputs, ("batch", "classes"), kind="outputs", owner="Categorical")
        axis = self._find_axis(outputs, targets)
        *shape, classes = outputs.shape if axis == -1 else outputs.movedim(axis, -1).shape
        if self._class_weights is not None:
            check_shape("class_weights", self._class_weights, (classes,), kind="outputs")
        if targets.is_floating_point() and targets.shape == outputs.shape:
            check_classes(targets.movedim(axis, -1), shape, classes, kind="targets")
            return
        labels = targets
        if not targets.is_floating_point() and len(shape) > 1:
            labels = self.hide_ignored(targets)
        check_classes(labels, shape, classes, kind="targets")
        if len(shape) > 1:
            check_any_target(labels != IGNORED)

    def outputs_like(self, row: Tensor, targets: Tensor) -> Tensor:
        """Returns outputs of one row with the number of rows and the positions of some targets."""
        if row.ndim <= 2 or self.class_axis is None or targets.ndim != row.ndim - 1:
            return super().outputs_like(row, targets)
        positions = row.movedim(self.class_axis, -1)[(0,) * (row.ndim - 1)]
        return positions.expand(*targets.shape, len(positions)).movedim(-1, self.class_axis)


class Bernoulli(ClassLikelihood):
    r"""Likelihood of labels 0 and 1 with one logit each.

    .. math:: \log p(y \mid x) = \sum_t y_t \log\sigma(f_t) + (1 - y_t) \log\sigma(-f_t)

    Outputs ``[B]`` or ``[B, 1]`` are one label of each example. Outputs ``[B, L]`` are L labels, of which any number may be 1, and
    ``[B, H, W]`` or ``[B, 1, H, W]`` are masks. Targets have the same shape; an axis 1 of size one may be left out. The
    log-likelihood of an example is the sum over its labels or pixels. Targets may be integers, booleans or floating point numbers.

    Args:
        ignore_index: Value of targets of several labels or pixels that are unknown. NaN is refused, because it is often a mistake; use
            ``targets.nan_to_num(-100)``.
        pos_weight: Weight of the loss of label 1, or of each of several labels, as in torch's ``binary_cross_entropy_with_logits``.
        label_smoothing: Probability :math:`\varepsilon` that is spread over both labels.

    >>> import torch
    >>> round(Bernoulli().log_prob(torch.zeros(1, 1), torch.tensor([1])).item(), 4)  # -log(2)
    -0.6931
    >>> round(Bernoulli().log_prob(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, -100.0]])).item(), 4)  # two known labels
    -1.3863
    """

    _pos_weight: Tensor | None

    @checked
    def __init__(
        self,
        ignore_index: int = IGNORED,
        pos_weight: Positive | Sequence[Positive] | None = None,
        label_smoothing: Smoothing = 0.0,
    ) -> None:
        super().__init__()
        self.ignore_index, self.label_smoothing = ignore_index, label_smoothing
        self.pos_weight = list(pos_weight) if isinstance(pos_weight, Sequence) else pos_weight
        self.register_buffer("_pos_weight", _as_tensor(self.pos_weight), persistent=False)

    def _settings(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("ignore_index", "pos_weight", "label_smoothing")}

    def log_prob(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the log-probability of the labels of each example, ``[B]``, summed over labels or pixels.

        Args:
            outputs: Logits ``[B]``, ``[B, 1]``, ``[B, L]`` or ``[B, *positions]``.
            targets: Labels 0 or 1 of the same shape.
        """
        logits = squeeze_channel(at_least_single(outputs))
        labels = self.hide_ignored(squeeze_channel(targets).reshape(logits.shape)).to(logits.dtype)
        zero, one = self.target_weights(labels)
        values = one * F.logsigmoid(logits) + zero * F.logsigmoid(-logits)
        return values.flatten(1).sum(1) if values.ndim > 1 else values

    def target_weights(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        r"""Returns the weights of the labels 0 and 1 in the loss, for a loss of :math:`-a_0 \log(1 - p) - a_1 \log p`.

        Args:
            labels: Labels 0 and 1 as floating point numbers. Labels of -100 have no weight.
        """
        one = labels
        if self.label_smoothing:
            one = (1.0 - self.label_smoothing) * labels + 0.5 * self.label_smoothing
        zero, known = 1.0 - one, labels != IGNORED
        if self._pos_weight is not None:
            one = one * self._pos_weight.to(one)
        return torch.where(known, zero, 0.0), torch.where(known, one, 0.0)

    def canonical_targets(self, targets: Tensor) -> Tensor:
        """Returns integer labels ``[B]`` or ``[B, *positions]``, -100 where they are ignored.

        Raises:
            FlowBNNError: If labels have fractions.
        """
        return self.hide_ignored(_to_integers(squeeze_channel(targets)))

    def average_outputs(self, outputs: Sequence[Tensor]) -> Tensor:
        """Returns the logit of the mean probability."""
        logits = stack_outputs(outputs)
        return F.logsigmoid(logits).logsumexp(0) - F.logsigmoid(-logits).logsumexp(0)

    @checked
    def predictive(self, outputs: Tensor, sample_counts: Tensor | None = None) -> CategoricalPredictive:
        """Returns the predictive distribution of samples of logits ``[S, B, ...]``: two classes for each label or pixel."""
        rows = outputs.unsqueeze(-1) if outputs.ndim == 1 else outputs
        return CategoricalPredictive.from_bernoulli(rows, sample_counts)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raises FlowBNNError if there is not one logit for each label, or if a label is not 0 or 1.

        Args:
            outputs: Logits ``[B]``, ``[B, 1]``, ``[B, L]`` or ``[B, *positions]``.
            targets: Labels 0 or 1 of the same shape.
        """
        shape, labels = squeeze_channel(outputs).shape, squeeze_channel(targets)
        if labels.shape != shape:
            argument = "outputs" if targets.numel() == len(outputs) else "targets"
            raise misfit_error(outputs, targets, "Bernoulli needs one output per label", argument)
        if self._pos_weight is not None and self._pos_weight.ndim:
            check_shape("pos_weight", self._pos_weight, shape[-1:], kind="outputs")
        valid, ignored = (labels == 0) | (labels == 1), labels == self.ignore_index
        allowed = valid | ignored if len(shape) > 1 else valid
        hint = "use likelihood='gaussian' or 'categorical'"
        check_entries("targets", labels, allowed, "0 or 1", hint, kind="targets")
        if len(shape) > 1:
            check_any_target(valid)

    def outputs_like(self, row: Tensor, targets: Tensor) -> Tensor:
        """Returns outputs of one row with the number of rows and the positions of some targets."""
        if row.numel() <= 1 or squeeze_channel(targets).ndim != squeeze_channel(row).ndim or row.ndim < 3:
            return super().outputs_like(row, targets)
        return row.flatten()[0].expand(squeeze_channel(targets).shape)


def squeeze_channel(values: Tensor) -> Tensor:
    """Returns values ``[B, 1, ...]`` without their axis of size one, and others unchanged."""
    return values.squeeze(1) if values.ndim > 1 and values.shape[1] == 1 else values


def _as_tensor(weights: float | list[float] | None) -> Tensor | None:
    """Returns weights as a tensor in double precision, or None."""
    return None if weights is None else torch.tensor(weights, dtype=torch.float64)


def _is_class_axis(axis: int, outputs: Tensor, targets: Tensor) -> bool:
    """Returns True if targets fit outputs with the classes on an axis."""
    if targets.is_floating_point() and targets.shape == outputs.shape:
        return bool(((targets.double().sum(axis) - 1.0).abs() <= 1e-3).all())
    return targets.shape == outputs.movedim(axis, -1).shape[:-1]


def _to_integers(targets: Tensor) -> Tensor:
    """Returns labels as integers. Floating point numbers without fractions are accepted."""
    if targets.is_floating_point() and is_concrete(targets):
        hint = "use (targets > 0.5).long() or likelihood='gaussian'"
        check_entries("targets", targets, targets == targets.round(), "an integer", hint, kind="targets")
    return targets.long()
