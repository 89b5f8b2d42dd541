"""Every public function, class and method with wrong arguments.

A try calls a door with arguments that it serves, but for one or two, which are of the wrong type, shape or size. It is *served* (a
result without NaN, and no argument that its annotation forbids), *refused* (a ``FlowBNNError`` of one line, or Python's own
``TypeError`` at the call), or it has failed: any other exception, a hang, or nonsense.
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
from tests.stress import Budget, Tally, short
from tests.stress.doors import SEVERAL, Door, doors, results_of
from tests.stress.subjects import FITS, drawn, numbers, vectors
from torch import nn

import flowbnn as fb
from flowbnn.options import _allows as allows

__all__ = ["quiet", "stress", "trace", "tried"]

SECONDS = 20  # for one call
NAN = float("nan")
VARIED = 0.1  # of the tries are at what a fit with other settings gives

# fmt: off
WRONG: dict[str, Callable[[], Any]] = {
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
    """Whether NaN is among the numbers of a result."""
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
        for one in numbers(result).values()
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
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


def tried(door: Door, wrong: Mapping[str, str]) -> tuple[str, str]:
    """One try, with the arguments of ``wrong`` replaced by values of :data:`WRONG`: how it ended, and what failed, if anything."""
    with quiet():
        arguments = door.arguments()
        changes = {name: WRONG[label]() for name, label in wrong.items()}
        forbidden = [name for name, value in changes.items() if not allows(door.parameters[name][0], value)]
        arguments |= {name: [value] if name == SEVERAL else value for name, value in changes.items()}
        flow = door.name.endswith((".forward", ".inverse"))  # which is exact up to inputs of scale 100
        sick = any(label[:3] in ("nan", "inf", "hug" if flow else "nan") for label in wrong.values())
        try:
            result = door.call(arguments)
        except fb.FlowBNNError as error:
            text = str(error)
            return (
                ("refused", "") if text and "\n" not in text else ("failed", f"not one line: {text!r:.200}")
            )
        except TypeError as error:
            if len(traceback.extract_tb(error.__traceback__)) <= 3 and "argument" in str(error):
                return "refused", ""
            return "failed", trace(error)
        except Exception as error:
            return "failed", trace(error)
    if _nan(result) and not sick:
        return "failed", "served with NaN"
    if forbidden and forbidden[0] not in (
        SEVERAL,
        "context",
        "abstain_above",
    ):  # which may be unused, or infinity
        return "failed", f"served, though the annotation of {forbidden[0]} does not allow it"
    return "served", ""


def trace(error: BaseException) -> str:
    """What a bare trace ends with, and the last place of ours in it."""
    ours = [frame for frame in traceback.extract_tb(error.__traceback__) if "flowbnn" in frame.filename]
    where = f" in {os.path.basename(ours[-1].filename)}:{ours[-1].lineno}" if ours else ""
    return f"{type(error).__name__}{where}: {short(error)}"


def cases(seed: int, every: bool = False) -> Iterator[tuple[Door, dict[str, str]]]:
    """Wrong arguments without end: one of a door's, sometimes two. Or every argument with every value, once."""
    dice = random.Random(seed)
    open_doors = [door for door in doors() if door.parameters]
    while not every:
        door = dice.choice(open_doors)
        if dice.random() < VARIED:
            with quiet(), contextlib.suppress(Exception):  # which the soak counts
                door = dice.choice(
                    [one for one in results_of(drawn(dice.choice(FITS), dice)) if one.parameters]
                )
        names = dice.sample(list(door.parameters), min(len(door.parameters), dice.choice([1, 1, 1, 2])))
        labels = {name: dice.choice(list(WRONG)) for name in names}
        if all(possible(door, name, label) for name, label in labels.items()):
            yield door, labels
    for door in open_doors:
        for name in door.parameters:
            yield from ((door, {name: label}) for label in WRONG if possible(door, name, label))


def possible(door: Door, name: str, label: str) -> bool:
    """Not so an integer that is allowed and asks for a thousand years, and a tensor without numbers where none are looked at."""
    annotation = door.parameters[name][0]
    if label == "meta tensor" and door.name.endswith((".forward", ".inverse")):
        return False  # which torch serves
    return label != "2**70" or not allows(annotation, 2**70) or annotation is Any


def stress(seed: int, budget: Budget, opened: bool = True) -> Tally:
    """Every door with good arguments, if they are to be ``opened``, then wrong ones until the budget is over."""
    tally = Tally("fuzz", seed)
    before = os.getcwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for door in doors() if opened else ():
                with quiet():
                    served = _served(door)
                if served:
                    tally.add("failed", f"{door.name}() with good arguments: {served}")
            for door, wrong in cases(seed):
                if not budget.allows(tally):
                    break
                outcome, failure = tried(door, wrong)
                tally.add(outcome, failure and f"{door.name}({wrong}): {failure}")
        finally:
            os.chdir(before)
    return tally


def _served(door: Door) -> str:
    try:
        return "NaN" if _nan(door.call(deepcopy(door.arguments()))) else ""
    except Exception as error:
        if isinstance(error, fb.FlowBNNError) and error.kind == "unsupported":
            return ""
        return trace(error)
