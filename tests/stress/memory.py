"""Measures the memory of predictions and evaluations over loaders, which must not grow with samples times rows.

Each trial runs in a forked process, whose largest resident memory is compared for a number of rows and for four times as many. The
module prints a table of such measurements as well:

python -m tests.stress.memory [--fit node-noise] [--rows 250000 1000000] [--samples 16 64]
"""

import argparse
import random
import time
import warnings
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, Literal

import torch
from tests.stress import Budget, StressResult, first_line
from tests.stress.cases import cached_fit
from tests.stress.children import peak_memory, run_in_fork

import flowbnn as fb

__all__ = ["measure", "stress"]

BATCH_SIZE = 1000
FEW_SAMPLES = 16  # whose memory is compared with that of many samples


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


def measure(
    name: str, action: str, num_rows: int, samples: int, keep_samples: bool | Literal["auto"] = "auto"
) -> float:
    """Returns the growth of the largest resident memory by one call, in MiB.

    Args:
        name: Name of the fit.
        action: ``"predict"`` or ``"evaluate"``.
        num_rows: Number of rows of the loader.
        samples: Number of samples.
        keep_samples: Option of the prediction.
    """
    posterior, before = cached_fit(name), peak_memory()
    options: dict[str, Any] = {"samples": samples, "progress": False, "keep_samples": keep_samples}
    if action == "predict":
        result = posterior.predict(Rows(num_rows), **options)
    else:
        result = fb.evaluate(posterior, Rows(num_rows), **options)
    assert result is not None
    return peak_memory() - before


def stress(
    seed: int, budget: Budget, names: tuple[str, ...] = ("node-noise", "swag"), num_rows: int = 400_000
) -> StressResult:
    """Compares the growth of memory from a quarter of the rows to all rows, with few samples and with many. Samples are not kept.

    Results of every row need memory, with any number of samples. Only the additional growth with many samples is limited, to the memory
    of the additional samples. Streaming needs at most half of it, and a prediction that keeps its samples about four times as much.
    """
    result, rng = StressResult("memory", seed), random.Random(seed)
    while budget.allows(result):
        name, action, samples = rng.choice(names), rng.choice(["predict", "evaluate"]), rng.choice([64, 96])
        cached_fit(name)
        growth, failure = 0.0, ""
        for sign, number in ((-1, FEW_SAMPLES), (1, samples)):
            for side, rows in ((-1, num_rows // 4), (1, num_rows)):
                size, problem = run_in_fork(partial(measure, name, action, rows, number, False), 300.0)
                growth += sign * side * (size or 0.0)
                failure = failure or problem
        # MiB of two outputs in single precision
        additional = 0.75 * num_rows * (samples - FEW_SAMPLES) * 2 * 4 / 2**20
        if not failure and growth > additional:
            failure = f"{growth:.0f} MiB more at {samples} than at {FEW_SAMPLES} samples, for {0.75 * num_rows:,.0f} more rows"
        largest = result.maxima.get("MiB for more samples", 0.0)
        result.maxima["MiB for more samples"] = round(max(growth, largest), 1)
        result.add("failed" if failure else "held", failure and f"{name}, {action}: {failure}")
    return result


def main() -> None:
    """Prints the growth of memory by predictions and evaluations with several numbers of rows and samples."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress.memory", description=first_line(__doc__))
    parser.add_argument("--fit", default="node-noise", help="name of the fit; it has two classes")
    parser.add_argument("--rows", type=int, nargs="+", default=[250_000, 1_000_000])
    parser.add_argument("--samples", type=int, nargs="+", default=[16, 64])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    cached_fit(options.fit)
    print(f"{'action':<10} {'rows':>10} {'samples':>8} {'MiB':>8} {'MiB of all samples':>20} {'seconds':>8}")
    for action, rows, samples in product(("predict", "evaluate"), options.rows, options.samples):
        start = time.monotonic()
        size, failure = run_in_fork(partial(measure, options.fit, action, rows, samples), 600.0)
        seconds, outputs = time.monotonic() - start, rows * samples * 2 * 4 / 2**20
        growth = failure or f"{size:.0f}"
        print(
            f"{action:<10} {rows:>10,} {samples:>8} {growth:>8} {outputs:>20.0f} {seconds:>8.0f}", flush=True
        )


if __name__ == "__main__":
    main()
