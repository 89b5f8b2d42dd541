"""Detection of held-out data that a network cannot be calibrated on, and warnings about doubtful data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.calibrate.problem import HeldOutData
from flowbnn.errors import nonfinite_error, pluralize, warn
from flowbnn.likelihoods import Bernoulli, Categorical, RealLikelihood
from flowbnn.methods.calibrators.lbfgs import minimize_batch
from flowbnn.metrics.checks import IGNORED
from flowbnn.posterior.report import Difference


@dataclass(frozen=True)
class DataLimits:
    """Problem of the held-out data, and the candidates that remain possible.

    Args:
        kind: Kind of the warning.
        message: Message of the warning.
        candidates: Candidates that can be fitted to these data.
    """

    kind: str
    message: str
    candidates: tuple[str, ...] = ("plain",)


def find_limits(data: HeldOutData, groups: Sequence[Tensor], needs_folds: bool) -> DataLimits | None:
    """Returns the first problem of the data that excludes candidates, or None if there is no problem.

    Args:
        data: Network and held-out data.
        groups: Indices of the examples of each fold.
        needs_folds: True if candidates are compared by cross-validation.

    Raises:
        FlowBNNError: If the network returns NaN or infinite values.
    """
    finite = data.outputs.flatten(1).isfinite().all(1) if data.outputs.ndim > 1 else data.outputs.isfinite()
    if not bool(finite.all()):
        fields: dict[str, Any] = {"kind": "not finite", "argument": "network"}
        raise nonfinite_error("the outputs", finite, "check inputs and weights", **fields)
    too_few = None
    if needs_folds and not groups:
        text = f"a comparison needs 4 held-out examples, got {len(data)}"
        too_few = DataLimits("examples", text)
    if not isinstance(data.likelihood, Categorical | Bernoulli):
        if needs_folds and len(data) > 1 and bool((data.targets == data.targets[:1]).all()):
            text = f"all {len(data)} held-out targets are equal; provide targets that differ"
            return DataLimits("targets", text)
        return too_few
    targets = hard_labels(data.targets)
    classes = 2
    if isinstance(data.likelihood, Categorical):
        classes = data.outputs.shape[data.likelihood.class_axis or 1]
    present = _classes_of(targets)
    if len(present) == 1:
        number = pluralize(len(data), "held-out example")
        text = f"{number} of class {int(present)} and of no other class; provide all classes"
        return DataLimits("classes", text)
    if too_few is not None:
        return too_few
    if labels_contradict(data, targets, classes):
        text = "class frequencies predict the labels better than the network; check the order of the classes"
        return DataLimits("labels", text)
    if len(data) < classes:
        text = f"{pluralize(len(data), 'held-out example')} for {classes} classes; provide all classes"
        return DataLimits("examples", text, ("plain", "temperature"))
    for fold, group in enumerate(groups):
        mask = torch.ones(len(targets), dtype=torch.bool)
        mask[group] = False
        remaining_classes = _classes_of(targets[mask])
        if len(remaining_classes) == 1:
            text = f"without fold {fold + 1}, all examples are of class {int(remaining_classes)}; provide more of the others"
            return DataLimits("folds", text, ("plain", "temperature"))
    return None


def hard_labels(targets: Tensor) -> Tensor:
    """Returns class labels ``[N]`` or ``[N, *positions]`` on the CPU, of soft labels the most probable class."""
    labels = targets.argmax(-1) if targets.is_floating_point() else targets
    return (labels.flatten() if labels.numel() == len(labels) else labels).long().cpu()


def _classes_of(labels: Tensor) -> Tensor:
    """Returns the classes that occur among labels. Ignored positions do not count."""
    return labels[labels != IGNORED].unique() if labels.ndim > 1 else labels.unique()


def labels_contradict(data: HeldOutData, targets: Tensor, classes: int) -> bool:
    r"""Returns True if class frequencies predict significantly better than the network, and its logits do not improve them.

    The logits help if :math:`a` is significantly positive in :math:`\mathrm{softmax}(a \log p + b)` with an offset :math:`b` for each
    class. A network whose only fault is wrong class frequencies therefore passes.

    Args:
        data: Network and held-out data.
        targets: Class labels ``[N]`` or ``[N, *positions]``, on the CPU.
        classes: Number of classes.
    """
    valid = targets != IGNORED
    counts = torch.bincount(targets[valid], minlength=classes).double()
    left_out = (counts[targets.clamp(min=0)] - 1.0 + 1.0 / classes) / int(valid.sum())
    frequencies = torch.where(valid, -left_out.log(), 0.0).reshape(len(targets), -1).sum(1)
    predictive = data.point_posterior(torch.arange(len(data)))._predictive(data.outputs.double()[None])
    gap = Difference.of(predictive.nll(_flat(data.targets)).double().cpu(), frequencies)
    if gap.mean <= 2.0 * gap.error:
        return False
    step = 1 + int(valid.sum()) // 2**17  # a subset of many positions suffices
    log_p = predictive.log_probabilities.cpu()[valid][::step].clamp(min=-1e3)
    targets = targets[valid][::step]

    def objective(x: Tensor, rows: Tensor) -> Tensor:
        # the first problem has a slope, the second has none; a weak penalty keeps offsets of absent classes finite
        logits = (x[:, :1] * (rows == 0)[:, None])[..., None] * log_p + x[:, None, 1:]
        nll = -logits.log_softmax(-1)[:, torch.arange(len(targets)), targets].sum(1)
        return (nll + 0.01 * x.square().sum(1)) / len(targets)

    x = minimize_batch(objective, log_p.new_zeros(2, 1 + classes))
    values = len(targets) * objective(x, torch.arange(2))
    return float(x[0, 0]) <= 0.0 or float(values[1] - values[0]) < 2.0  # two nats are two standard errors


def _flat(targets: Tensor) -> Tensor:
    """Returns class labels without axes of size one, and soft labels and labels of positions unchanged."""
    return targets.flatten() if targets.numel() == len(targets) else targets


def warn_unreliable(
    data: HeldOutData, limits: DataLimits | None, choice: str, temperature: float, bound: str
) -> None:
    """Warns about problems of the data, too few examples, and data that the weights seem to have memorized.

    A temperature below 0.8 means that the network is underconfident on the data, which is typical of training data. So is a
    likelihood that grows as the temperature falls, which occurs if all examples are classified correctly. In a regression the
    temperature depends on the noise scale and is not checked.

    Args:
        data: Network and held-out data.
        limits: Problem of the data, if any.
        choice: Candidate that is returned.
        temperature: Temperature on all examples.
        bound: Bound of the temperature at which the likelihood is largest, if any.
    """
    if limits is not None:
        suffix = "; plain network returned" if choice == "plain" else ""
        warn(f"{limits.message}{suffix}", kind=limits.kind)
    elif len(data) < 20:  # the standard error of an accuracy of 0.8 is then 0.09
        number = pluralize(len(data), "held-out example")
        warn(f"calibration is unreliable with {number}; provide at least 20", kind="examples")
    if limits is not None or isinstance(data.likelihood, RealLikelihood) or not math.isfinite(temperature):
        return
    if temperature < 0.8 or bound == "low":
        text = f"the optimal temperature {temperature:.2f} is typical of training data; pass data that the weights have not seen"
        warn(text, kind="memorized", temperature=temperature)
