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
from tests.stress import Budget, StressResult, short
from tests.stress.cases import FITS, named_tensors, random_fit, vectors
from tests.stress.entry_points import VARIADIC, EntryPoint, entry_points, results_of
from torch import nn

import flowbnn as fb
from flowbnn.options import _allows as allows

__all__ = ["describe_error", "silenced", "stress", "try_call"]

SECONDS = 20  # for one call
NAN = float("nan")
VARIED = 0.1  # of the trials are at what a fit with other settings gives

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


def _nan(result: Any) -> bool:
    """Whether NaN is among the named_tensors of a result."""
    if is_dataclass(result):
        return False  # where NaN says that something could not be measured
    if isinstance(result, tuple):
        return any(map(_nan, result))
    if isinstance(result, fb.predictive.Predictive):
        result = result.standard_error
    if isinstance(result, fb.Posterior):
        result = result.tensors()
    return any(
        one.is_floating_point() and one.device.type != "meta" and bool(one.isnan().any())
        for one in named_tensors(result).values()
    )


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """No output, no warnings, an alarm against hangs."""

    def late(*_: Any) -> None:
        raise TimeoutError(f"no answer after {SECONDS} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS)
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
        signal.signal(signal.SIGALRM, before)


def try_call(entry_point: EntryPoint, wrong: Mapping[str, str]) -> tuple[str, str]:
    """Calls an entry point with some invalid arguments.

    Args:
        entry_point: Entry point to call.
        wrong: Labels of :data:`INVALID_VALUES` by the name of the argument they replace.

    Returns:
        The outcome (``"accepted"``, ``"rejected"`` or ``"failed"``), and a description of the failure or an empty string.
    """
    with silenced():
        arguments = entry_point.arguments()
        changes = {name: INVALID_VALUES[label]() for name, label in wrong.items()}
        forbidden = [
            name for name, value in changes.items() if not allows(entry_point.parameters[name][0], value)
        ]
        arguments |= {name: [value] if name == VARIADIC else value for name, value in changes.items()}
        flow = entry_point.name.endswith((".forward", ".inverse"))  # which is exact up to inputs of scale 100
        sick = any(label[:3] in ("nan", "inf", "hug" if flow else "nan") for label in wrong.values())
        try:
            result = entry_point.call(arguments)
        except fb.FlowBNNError as error:
            text = str(error)
            return (
                ("rejected", "") if text and "\n" not in text else ("failed", f"not one line: {text!r:.200}")
            )
        except TypeError as error:
            if len(traceback.extract_tb(error.__traceback__)) <= 3 and "argument" in str(error):
                return "rejected", ""
            return "failed", describe_error(error)
        except Exception as error:
            return "failed", describe_error(error)
    if _nan(result) and not sick:
        return "failed", "accepted, with NaN in the result"
    if forbidden and forbidden[0] not in (
        VARIADIC,
        "context",
        "abstain_above",
    ):  # which may be unused, or infinity
        return "failed", f"accepted, though the annotation of {forbidden[0]} does not allow it"
    return "accepted", ""


def describe_error(error: BaseException) -> str:
    """What a bare describe_error ends with, and the last place of ours in it."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "flowbnn" in frame.filename]
    where = f" in {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{where}: {short(error)}"


def cases(seed: int, every: bool = False) -> Iterator[tuple[EntryPoint, dict[str, str]]]:
    """Wrong arguments without end: one of a entry_point's, sometimes two. Or every argument with every value, once."""
    dice = random.Random(seed)
    callable_points = [entry_point for entry_point in entry_points() if entry_point.parameters]
    while not every:
        entry_point = dice.choice(callable_points)
        if dice.random() < VARIED:
            with silenced(), contextlib.suppress(Exception):  # which the soak counts
                entry_point = dice.choice(
                    [one for one in results_of(random_fit(dice.choice(FITS), dice)) if one.parameters]
                )
        names = dice.sample(
            list(entry_point.parameters), min(len(entry_point.parameters), dice.choice([1, 1, 1, 2]))
        )
        labels = {name: dice.choice(list(INVALID_VALUES)) for name in names}
        if all(possible(entry_point, name, label) for name, label in labels.items()):
            yield entry_point, labels
    for entry_point in callable_points:
        for name in entry_point.parameters:
            yield from (
                (entry_point, {name: label}) for label in INVALID_VALUES if possible(entry_point, name, label)
            )


def possible(entry_point: EntryPoint, name: str, label: str) -> bool:
    """Not so an integer that is allowed and asks for a thousand years, and a tensor without named_tensors where none are looked at."""
    annotation = entry_point.parameters[name][0]
    if label == "meta tensor" and entry_point.name.endswith((".forward", ".inverse")):
        return False  # which torch serves
    return label != "2**70" or not allows(annotation, 2**70) or annotation is Any


def stress(seed: int, budget: Budget, opened: bool = True) -> StressResult:
    """Every entry_point with good arguments, if they are to be ``opened``, then wrong ones until the budget is over."""
    result = StressResult("fuzz", seed)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for entry_point in entry_points() if opened else ():
                with silenced():
                    served = _served(entry_point)
                if served:
                    result.add("failed", f"{entry_point.name}() with good arguments: {served}")
            for entry_point, wrong in cases(seed):
                if not budget.allows(result):
                    break
                outcome, failure = try_call(entry_point, wrong)
                result.add(outcome, failure and f"{entry_point.name}({wrong}): {failure}")
        finally:
            os.chdir(before)
    return result


def _served(entry_point: EntryPoint) -> str:
    try:
        return "NaN" if _nan(entry_point.call(deepcopy(entry_point.arguments()))) else ""
    except Exception as error:
        if isinstance(error, fb.FlowBNNError) and error.kind == "unsupported":
            return ""
        return describe_error(error)
