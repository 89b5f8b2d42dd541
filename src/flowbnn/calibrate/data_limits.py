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
from flowbnn.methods.calibrators.label_problems import (
    distinct_classes,
    find_contradiction,
    find_equal_targets,
    find_few_examples,
    find_missing_class,
    find_one_class,
    hard_labels,
)


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
    has_classes = isinstance(data.likelihood, Categorical | Bernoulli)
    problem = find_one_class(data.targets) if has_classes else find_equal_targets(data.targets)
    if problem is None and needs_folds:
        problem = find_few_examples(len(data))
    if problem is not None:
        return DataLimits(*problem)
    if not has_classes:
        return None
    predictive = data.point_posterior(torch.arange(len(data)))._predictive(data.outputs.double()[None])
    contradiction = find_contradiction(predictive, data.targets)
    if contradiction is not None:
        return DataLimits(*contradiction)
    missing = find_missing_class(predictive, data.targets)
    if missing is not None:
        return DataLimits(*missing, ("plain", "temperature"))
    targets, classes = hard_labels(data.targets), predictive.log_probabilities.shape[-1]
    if len(data) < classes:
        text = f"{pluralize(len(data), 'held-out example')} for {classes} classes; provide all classes"
        return DataLimits("examples", text, ("plain", "temperature"))
    for fold, group in enumerate(groups):
        mask = torch.ones(len(targets), dtype=torch.bool)
        mask[group] = False
        remaining_classes = distinct_classes(targets[mask])
        if len(remaining_classes) == 1:
            text = f"without fold {fold + 1}, all examples are of class {int(remaining_classes)}; provide more of the others"
            return DataLimits("folds", text, ("plain", "temperature"))
    return None


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
