"""Every public function, class and method with wrong arguments.

A trial calls an entry point with valid arguments, except for one or two of the wrong type, shape or size. The call is *accepted* (a
result without NaN, and no argument that its annotation forbids) or *rejected* (a ``FlowBNNError`` of one line, or a ``TypeError`` of
Python at the call). Any other exception, a hang, or a meaningless result is a failure.
"""

import contextlib
import io
import math
import os
import random
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from tests.stress import Budget, StressResult, first_line
from tests.stress.cases import FITS, named_tensors, random_fit, vectors
from tests.stress.entry_points import VARIADIC, EntryPoint, entry_points, entry_points_of_fit
from torch import nn

import flowbnn as fb
from flowbnn.errors import MissingPackageError
from flowbnn.options import _allows as allows
from flowbnn.options import numbers_as_tensor

__all__ = ["describe_error", "silenced", "stress", "try_call"]

TIMEOUT = (
    60  # seconds of the processor for one call; ten times as many seconds may pass on a machine that is busy
)
NAN = float("nan")

# fmt: off
INVALID_VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None, "True": lambda: True, "0": lambda: 0, "-1": lambda: -1, "2.5": lambda: 2.5, "nan": lambda: NAN,
    "inf": lambda: math.inf, "1e30": lambda: 1e30, "2**70": lambda: 2**70, "'x'": lambda: "x", "'0.9'": lambda: "0.9",
    "''": lambda: "", "b'x'": lambda: b"x", "[]": list, "[1, 2]": lambda: [1, 2], "[[1.0], [2.0]]": lambda: [[1.0], [2.0]],
    "['a']": lambda: ["a"], "(0.5, 0.1)": lambda: (0.5, 0.1), "{}": dict, "{1: 2}": lambda: {1: 2}, "object()": object,
    "int": lambda: int, "print": lambda: print, "range(3)": lambda: range(3), "iter([])": lambda: iter([]), "1j": lambda: 1j,
    "nan tensor": lambda: torch.full((5, 3), NAN), "inf tensor": lambda: torch.full((5, 3), math.inf),
    "huge tensor": lambda: torch.full((5, 3), 3e38), "no rows": lambda: torch.zeros(0, 3),
    "no columns": lambda: torch.zeros(5, 0), "one row": lambda: vectors(1, 3), "7 columns": lambda: vectors(5, 7),
    "a scalar": lambda: torch.tensor(0.5), "4 axes": lambda: vectors(2, 5, 3, 1),
    "integers": lambda: torch.arange(15).reshape(5, 3), "negative labels": lambda: torch.tensor([-1, 0, 1, 0, 1]),
    "large labels": lambda: torch.tensor([0, 1, 7, 0, 1]), "real labels": lambda: torch.tensor([0.5, 1.0, 0.0, 1.0, 0.0]),
    "complex tensor": lambda: torch.ones(5, 3, dtype=torch.complex64),
    "boolean tensor": lambda: torch.ones(5, 3, dtype=torch.bool), "half tensor": lambda: vectors(5, 3).half(),
    "sparse tensor": lambda: torch.eye(5).to_sparse(), "meta tensor": lambda: torch.empty(5, 3, device="meta"),
    "numpy array": lambda: vectors(5, 3).numpy(), "numpy labels": lambda: np.array([0, 1, 2, 0, 1]),
    "numpy strings": lambda: np.array(["a", "b"]), "numpy objects": lambda: np.array([None, {}], dtype=object),
    "a list of lists": lambda: vectors(5, 3).tolist(), "a Linear": lambda: nn.Linear(7, 5), "no weights": nn.ReLU,
    "numpy loader": lambda: [(vectors(4, 3).numpy(), np.array([0, 1, 0, 1]))],
    "numpy targets": lambda: [(vectors(4, 3), np.array([0, 1, 0, 1]))], "list targets": lambda: [(vectors(4, 3), [0, 1, 0, 1])],
    "tuple of lists": lambda: ([[1.0, 2.0, 3.0]], [0]),
    "nan loader": lambda: [(torch.full((4, 3), NAN), torch.tensor([0, 1, 0, 1]))], "loader of text": lambda: [("a", "b")],
    "loader without targets": lambda: [vectors(4, 3)],
    "empty batches": lambda: [(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long))],
    "a pair": lambda: (vectors(4, 3), torch.tensor([0, 1, 0, 1])),
    "labels too large": lambda: [(vectors(4, 3), torch.tensor([0, 1, 5, 1]))], "a folder": lambda: ".",
    "no such folder": lambda: "nowhere/file.safetensors", "a nul in a path": lambda: "a\0b", "a long path": lambda: "a" * 5000,
}
# fmt: on


def _has_nan(result: Any) -> bool:
    """Returns whether a result contains NaN."""
    if is_dataclass(result) or isinstance(result, fb.predictive.Interval | fb.predictive.Decision):
        # its NaN means that something could not be measured, that a region has fewer intervals, or that a predictive abstains
        return False
    if isinstance(result, tuple):
        return any(map(_has_nan, result))
    if isinstance(result, fb.predictive.Predictive):
        result = result.standard_error
    if isinstance(result, fb.Posterior):
        result = result.tensors()
    return any(
        tensor.is_floating_point() and tensor.device.type != "meta" and bool(tensor.isnan().any())
        for tensor in named_tensors(result).values()
    )


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """Context manager that suppresses output and warnings and raises TimeoutError if a call hangs."""

    def raise_timeout(*_: Any) -> None:
        raise TimeoutError(f"no answer after {TIMEOUT} s")

    before = {number: signal.signal(number, raise_timeout) for number in (signal.SIGALRM, signal.SIGPROF)}
    signal.alarm(10 * TIMEOUT)
    signal.setitimer(signal.ITIMER_PROF, TIMEOUT)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        signal.alarm(0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _permits(annotation: Any, value: Any) -> bool:
    """Returns whether an annotation allows a value, or the tensor that an array is converted to."""
    array = numbers_as_tensor(value) if isinstance(value, np.ndarray) else None
    return allows(annotation, value) or (array is not None and allows(annotation, array))


def try_call(point: EntryPoint, labels: Mapping[str, str]) -> tuple[str, str]:
    """Calls an entry point with some invalid arguments.

    Args:
        point: Entry point to call.
        labels: Labels of :data:`INVALID_VALUES` by the name of the argument they replace.

    Returns:
        The outcome (``"accepted"``, ``"rejected"`` or ``"failed"``), and a description of the failure or an empty string.
    """
    with silenced():
        arguments = point.arguments()
        changes = {name: INVALID_VALUES[label]() for name, label in labels.items()}
        forbidden = [
            name for name, value in changes.items() if not _permits(point.parameters[name][0], value)
        ]
        arguments |= {name: [value] if name == VARIADIC else value for name, value in changes.items()}
        # transforms are exact up to inputs of scale 100, so a huge tensor may give NaN
        prefixes = ("nan", "inf", "huge") if point.name.endswith((".forward", ".inverse")) else ("nan", "inf")
        may_give_nan = any(label.startswith(prefixes) for label in labels.values())
        try:
            result = point.call(arguments)
        except fb.FlowBNNError as error:
            text = str(error)
            one_line = text and "\n" not in text
            return ("rejected", "") if one_line else ("failed", f"not one line: {text!r:.200}")
        except TypeError as error:
            if len(traceback.extract_tb(error.__traceback__)) <= 3 and "argument" in str(error):
                return "rejected", ""
            return "failed", describe_error(error)
        except Exception as error:
            return "failed", describe_error(error)
    if _has_nan(result) and not may_give_nan:
        return "failed", "accepted, with NaN in the result"
    # a context or the name of an argument may be unused, and a threshold infinite
    if forbidden and forbidden[0] not in (VARIADIC, "context", "argument", "abstain_above"):
        return "failed", f"accepted, though the annotation of {forbidden[0]} does not allow it"
    return "accepted", ""


def describe_error(error: BaseException) -> str:
    """Returns the type and first line of an exception, with the last line of this library in its traceback."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "flowbnn" in frame.filename]
    where = f" in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}: {first_line(error)}"


def trials(seed: int, exhaustive: bool = False) -> Iterator[tuple[EntryPoint, dict[str, str]]]:
    """Yields entry points with labels of invalid arguments.

    Args:
        seed: Seed of the choices.
        exhaustive: If True, yields every argument with every invalid value once, instead of random ones without end.
    """
    rng = random.Random(seed)
    points = [point for point in entry_points() if point.parameters]
    while not exhaustive:
        point = rng.choice(points)
        if rng.random() < 0.1:  # a result of a fit with random settings
            with silenced(), contextlib.suppress(Exception):  # the soak suite counts failures of fits
                methods = entry_points_of_fit(random_fit(rng.choice(FITS), rng))
                point = rng.choice([method for method in methods if method.parameters])
        names = rng.sample(list(point.parameters), min(len(point.parameters), rng.choice([1, 1, 1, 2])))
        labels = {name: rng.choice(list(INVALID_VALUES)) for name in names}
        if all(is_testable(point, name, label) for name, label in labels.items()):
            yield point, labels
    for point in points:
        for name in point.parameters:
            yield from ((point, {name: label}) for label in INVALID_VALUES if is_testable(point, name, label))


def is_testable(point: EntryPoint, name: str, label: str) -> bool:
    """Returns whether an argument can be tested with an invalid value.

    A huge integer that is allowed would take too long. Torch itself accepts a meta tensor in a forward pass.
    """
    annotation = point.parameters[name][0]
    if label == "meta tensor" and point.name.endswith((".forward", ".inverse")):
        return False
    return label != "2**70" or not allows(annotation, 2**70) or annotation is Any


def stress(seed: int, budget: Budget, valid_first: bool = True) -> StressResult:
    """Calls entry points with invalid arguments.

    Args:
        seed: Seed of the trials.
        budget: Limit of the trials.
        valid_first: If True, calls every entry point with valid arguments first.
    """
    result = StressResult("fuzz", seed)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for point in entry_points() if valid_first else ():
                with silenced():
                    failure = _call_with_valid_arguments(point)
                if failure:
                    result.add("failed", f"{point.name}() with valid arguments: {failure}")
            for point, labels in trials(seed):
                if not budget.allows(result):
                    break
                outcome, failure = try_call(point, labels)
                result.add(outcome, failure and f"{point.name}({labels}): {failure}")
        finally:
            os.chdir(before)
    return result


def _call_with_valid_arguments(point: EntryPoint) -> str:
    """Calls an entry point with valid arguments. Returns a description of the failure, or an empty string."""
    try:
        return "NaN in the result" if _has_nan(point.call(deepcopy(point.arguments()))) else ""
    except Exception as error:
        if isinstance(error, MissingPackageError):
            return ""
        if isinstance(error, fb.FlowBNNError) and error.kind == "unsupported":
            return ""
        return describe_error(error)
