"""Measures the memory of predictions and evaluations over loaders, which must not grow with samples times rows.

Each trial runs in a forked process, whose largest resident memory is compared for a number of rows and for four times as many.
"""

import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from tests.stress import Budget, StressResult
from tests.stress.cases import cached_fit
from tests.stress.children import peak_memory, run_in_fork

import flowbnn as fb

__all__ = ["measure", "stress"]

BATCH_SIZE = 1000


class Rows:
    """Loader that makes its rows when they are read.

    Args:
        num_rows: Number of rows.
    """

    def __init__(self, num_rows: int) -> None:
        self.num_rows = num_rows

    def __len__(self) -> int:
        return self.num_rows // BATCH_SIZE

    def __iter__(self) -> Iterator[Any]:
        for _ in range(len(self)):
            yield torch.zeros(BATCH_SIZE, 3), torch.zeros(BATCH_SIZE, dtype=torch.long)


def measure(name: str, action: str, num_rows: int, samples: int) -> float:
    """Returns the growth of the largest resident memory by one call, in MiB.

    Args:
        name: Name of the fit.
        action: ``"predict"`` or ``"evaluate"``.
        num_rows: Number of rows of the loader.
        samples: Number of samples.
    """
    posterior, before = cached_fit(name), peak_memory()
    if action == "predict":
        result = posterior.predict(Rows(num_rows), samples, progress=False)
    else:
        result = fb.evaluate(posterior, Rows(num_rows), samples=samples, progress=False)
    assert result is not None
    return peak_memory() - before


def stress(
    seed: int, budget: Budget, names: tuple[str, ...] = ("map", "node-noise", "swag"), num_rows: int = 400_000
) -> StressResult:
    """Compares the memory of calls with the given number of rows and with a quarter of it."""
    result, rng = StressResult("memory", seed), random.Random(seed)
    while budget.allows(result):
        name, action, samples = rng.choice(names), rng.choice(["predict", "evaluate"]), rng.choice([32, 64])
        cached_fit(name)
        sizes, failure = [], ""
        for rows in (num_rows // 4, num_rows):
            size, problem = run_in_fork(partial(measure, name, action, rows, samples), 300.0)
            sizes.append(size or 0.0)
            failure = failure or problem
        growth = sizes[1] - sizes[0]
        all_samples = 0.75 * num_rows * samples * 2 * 4 / 2**20  # MiB of two outputs in single precision
        if not failure and growth > max(64.0, 0.5 * all_samples):
            failure = f"{growth:.0f} MiB more for {0.75 * num_rows:,.0f} more rows at {samples} samples"
        result.maxima["MiB for four times the rows"] = round(
            max(growth, result.maxima.get("MiB for four times the rows", 0.0)), 1
        )
        result.add("failed" if failure else "held", failure and f"{name}, {action}: {failure}")
    return result
