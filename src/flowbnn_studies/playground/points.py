"""Points of the page: training and held-out points of two or three classes, or of a curve."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, describe_value

Task = Literal["classes", "curve"]

RANGE = 4.0  # coordinates of points are between -RANGE and RANGE
MAX_CLASSES = 3
MIN_POINTS = 4
MAX_POINTS = 600  # of training points, and as many held-out points


@dataclass(frozen=True)
class Points:
    """Training points and held-out points, as the page sends them.

    Args:
        task: ``"classes"`` for points ``(x, y, class)``, ``"curve"`` for points ``(x, y)`` of a function of ``x``.
        train: Training points, one row each.
        held_out: Points that no fit sees, one row each.

    >>> points = Points("curve", ((0.0, 1.0), (1.0, 2.0)), ())
    >>> points.inputs(points.train).shape, points.targets(points.train).shape
    (torch.Size([2, 1]), torch.Size([2, 1]))
    """

    task: Task
    train: tuple[tuple[float, ...], ...]
    held_out: tuple[tuple[float, ...], ...]

    @classmethod
    def parse(cls, document: Any) -> "Points":
        """Returns the points of a JSON document.

        Raises:
            FlowBNNError: If the document has another form, or too few or too many points.
        """
        if not isinstance(document, dict) or document.get("task") not in ("classes", "curve"):
            text = "points must be an object with task 'classes' or 'curve', and lists train and held_out"
            raise FlowBNNError(text, argument="points")
        task: Task = document["task"]
        train, held_out = (_rows(document.get(name), task, name) for name in ("train", "held_out"))
        if len(train) < MIN_POINTS:
            text = f"a fit needs at least {MIN_POINTS} training points, got {len(train)}; draw more"
            raise FlowBNNError(text, kind="too few", argument="train")
        if task == "classes" and len({row[2] for row in train}) < 2:
            text = "all training points have the same class; draw points of a second class"
            raise FlowBNNError(text, kind="one class", argument="train")
        return cls(task, train, held_out)

    @property
    def num_inputs(self) -> int:
        """Number of inputs of the network."""
        return 2 if self.task == "classes" else 1

    @property
    def num_outputs(self) -> int:
        """Number of outputs of the network: the number of classes, or 1 for a curve."""
        if self.task == "curve":
            return 1
        return max(2, *(int(row[2]) + 1 for row in self.train + self.held_out))

    def inputs(self, rows: Sequence[Sequence[float]]) -> Tensor:
        """Returns the inputs of some rows, ``[N, 2]`` for classes and ``[N, 1]`` for a curve."""
        return torch.tensor([row[: self.num_inputs] for row in rows]).reshape(-1, self.num_inputs)

    def targets(self, rows: Sequence[Sequence[float]]) -> Tensor:
        """Returns the targets of some rows: classes ``[N]``, or values ``[N, 1]``."""
        if self.task == "classes":
            return torch.tensor([int(row[2]) for row in rows], dtype=torch.long)
        return torch.tensor([row[1:2] for row in rows]).reshape(-1, 1)


def _rows(values: Any, task: Task, name: str) -> tuple[tuple[float, ...], ...]:
    """Returns the checked rows of one list of points."""
    if not isinstance(values, list):
        text = f"{name} must be a list of points, got {describe_value(values)}"
        raise FlowBNNError(text, argument=name)
    if len(values) > MAX_POINTS:
        text = f"{name} may have at most {MAX_POINTS} points, got {len(values)}; remove some"
        raise FlowBNNError(text, kind="too many", argument=name)
    return tuple(_row(value, task, name) for value in values)


def _row(value: Any, task: Task, name: str) -> tuple[float, ...]:
    """Returns one checked point."""
    length = 3 if task == "classes" else 2
    valid = (
        isinstance(value, list)
        and len(value) == length
        and all(isinstance(number, int | float) and not isinstance(number, bool) for number in value)
        and all(math.isfinite(number) and abs(number) <= RANGE for number in value[:2])
        and (task == "curve" or value[2] in range(MAX_CLASSES))
    )
    if not valid:
        form = f"[x, y, class] with a class below {MAX_CLASSES}" if task == "classes" else "[x, y]"
        text = f"a point of {name} must be {form} and coordinates from {-RANGE:g} to {RANGE:g}, got {value!r:.60}"
        raise FlowBNNError(text, argument=name)
    x, y = (round(float(number), 3) for number in value[:2])
    return (x, y, int(value[2])) if task == "classes" else (x, y)
