"""Fits and predicts with loaders that shrink, grow, raise, never end, or have batches of other sizes.

A trial passes if the call returns, raises an error of one line, or raises the exception of the loader itself. A hang is a failure.
"""

import random
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import cached_fit, network, small_method
from tests.stress.children import run_in_fork

import flowbnn as fb

__all__ = ["LOADERS", "stress"]


class LoaderError(Exception):
    """Exception that a loader of a user raises."""


class ChangingLoader:
    """Loader whose number of batches depends on the pass.

    Args:
        num_batches: Function from the number of the pass to that of its batches.
        raises: Number of the pass in which the loader raises an exception, or None.
        length: Length that the loader claims, or None for no length.
        num_rows: Function from the number of a batch to that of its rows.
    """

    def __init__(
        self,
        num_batches: Callable[[int], int],
        raises: int | None = None,
        length: int | None = None,
        num_rows: Callable[[int], int] = lambda batch: 4,
    ) -> None:
        self.num_batches, self.raises, self.num_rows, self.passes = num_batches, raises, num_rows, 0
        if length is not None:
            self.length = length

    def __iter__(self) -> Iterator[Any]:
        number, self.passes = self.passes, self.passes + 1
        for batch in range(self.num_batches(number)):
            if number == self.raises and batch == 1:
                raise LoaderError("the disk is gone")
            rows = self.num_rows(batch)
            yield torch.randn(rows, 3), torch.arange(rows) % 2


class SizedLoader(ChangingLoader):
    """Loader with a length, which may be wrong."""

    def __len__(self) -> int:
        return self.length


LOADERS: dict[str, Callable[[], Any]] = {
    "shrinks": lambda: ChangingLoader(lambda number: max(1, 4 - number)),
    "shrinks to nothing": lambda: ChangingLoader(lambda number: max(0, 3 - number)),
    "grows": lambda: ChangingLoader(lambda number: 1 + number),
    "raises at once": lambda: ChangingLoader(lambda number: 3, raises=0),
    "raises later": lambda: ChangingLoader(lambda number: 3, raises=2),
    "has one row": lambda: ChangingLoader(lambda number: 3, num_rows=lambda batch: 1),
    "has other sizes": lambda: ChangingLoader(lambda number: 4, num_rows=lambda batch: 1 + 3 * batch),
    "has empty batches": lambda: ChangingLoader(lambda number: 3, num_rows=lambda batch: 2 * (batch % 2)),
    "claims too much": lambda: SizedLoader(lambda number: 2, length=9),
    "claims too little": lambda: SizedLoader(lambda number: 5, length=1),
    "claims nothing": lambda: SizedLoader(lambda number: 2, length=0),
    "is an iterator": lambda: iter(ChangingLoader(lambda number: 3)),
    "is infinite": lambda: ChangingLoader(lambda number: 10**12),
}


def try_loader(loader: str, action: str, num_data: int | None) -> str:
    """Returns the outcome of a fit or a prediction with a loader.

    Args:
        loader: Name of the loader.
        action: Name of a method to fit, or ``"predict"`` or ``"evaluate"``.
        num_data: Number of examples that the loader represents, or None.
    """
    warnings.simplefilter("ignore")
    data = LOADERS[loader]()
    try:
        if action == "predict":
            cached_fit("map").predict(data, 2, progress=False)
        elif action == "evaluate":
            fb.evaluate(cached_fit("map"), data, samples=2, progress=False)
        else:
            small_method(action).fit(network(), data, num_data=num_data, seed=0, progress=False)
    except fb.FlowBNNError as error:
        return "several lines" if "\n" in str(error) else "refused"
    except LoaderError:
        return "raised by the loader"
    return "returned"


def stress(
    seed: int,
    budget: Budget,
    actions: tuple[str, ...] = (
        "predict",
        "evaluate",
        "map",
        "node-noise",
        "swag",
        "laplace",
        "deep-ensemble",
    ),
    names: tuple[str, ...] = tuple(LOADERS),
) -> StressResult:
    """Tries every loader with every action, in random order, with and without ``num_data``."""
    result, rng = StressResult("loaders", seed), random.Random(seed)
    cached_fit("map")
    while True:
        cases = [(loader, action) for loader in names for action in actions]
        rng.shuffle(cases)
        for loader, action in cases:
            if not budget.allows(result):
                return result
            num_data = rng.choice([None, 12])
            outcome, failure = run_in_fork(partial(try_loader, loader, action, num_data), 20.0)
            failure = failure or ("several lines" if outcome == "several lines" else "")
            # a loader without end is read until it is stopped; only a prediction of unbounded memory would be a fault
            if loader == "is infinite" and failure == "a hang":
                failure, outcome = "", "still reading"
            where = f"{action}, loader that {loader}, num_data={num_data}"
            result.add("failed" if failure else str(outcome), failure and f"{where}: {failure}")
