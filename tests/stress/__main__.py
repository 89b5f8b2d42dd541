"""Runs the parts one after the other and prints one table; exits with 1 where anything failed.

python -m tests.stress [--minutes 15] [--trials 5000] [--seed 0] [--part interruptions] [--jobs 1]
"""

import argparse
import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import reduce
from importlib import import_module
from operator import add

from tests.stress import Budget, StressResult, short

SUITES = {
    "fuzz": 0.15,
    "files": 0.2,
    "interruptions": 0.3,
    "processes": 0.1,
    "threads": 0.1,
    "soak": 0.15,
}  # of the time
SHOWN = 20  # failures of a part
MARK = "result "  # what a process says to the one that started it


def table(results: list[StressResult]) -> str:
    """Tries, survived and failed of every part."""
    lines = [f"{'part':<10} {'seed':>5} {'trials':>7} {'survived':>9} {'failed':>7}   how they ended"]
    for one in results:
        failed = len(one.failures)
        ended = [f"{count} {word}" for word, count in one.counts.items()]
        ended += [f"at most {value:g} {word}" for word, value in one.most.items()]
        lines.append(
            f"{one.suite:<10} {one.seed:>5} {one.trials:>7} {one.trials - failed:>9} {failed:>7}   {', '.join(ended)}"
        )
    return "\n".join(lines)


def here(given: argparse.Namespace) -> Iterator[StressResult]:
    """The parts in this process."""
    warnings.simplefilter("ignore")
    whole = sum(SUITES[name] for name in given.suite)
    for name in given.suite:
        try:
            stress = import_module(f"tests.stress.{name}").stress
        except ModuleNotFoundError as error:
            yield StressResult(name, given.seed, counts={f"try_call, since {error.name} is not installed": 0})
            continue
        began = time.monotonic()
        result = stress(given.seed, Budget(60.0 * given.minutes * SUITES[name] / whole, given.trials))
        seconds = time.monotonic() - began
        lines = [
            f"{name}: {result.trials} trials in {seconds:.0f} s, seed {given.seed}",
            *result.failures[:SHOWN],
        ]
        print("\n  ".join(lines), flush=True)
        yield result


def elsewhere(given: argparse.Namespace, seed: int) -> list[StressResult]:
    """The parts in a process of their own, with one thread for torch."""
    parts = [word for name in given.suite for word in ("--suite", name)]
    limits = ["--minutes", str(given.minutes), "--trials", str(given.trials / given.jobs)]
    command = [sys.executable, "-m", "tests.stress", "--told", "--seed", str(seed), *limits, *parts]
    results = []
    with subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                results.append(StressResult(**json.loads(line.removeprefix(MARK))))
            else:
                print(line, end="", flush=True)
    for name in given.suite[len(results) :]:
        lost = StressResult(name, seed)
        lost.add("failed", f"{name}, seed {seed}: the process ended with status {process.returncode}")
        results.append(lost)
    return results


def main() -> int:
    """The parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=short(__doc__))
    parser.add_argument("--minutes", type=float, help="time in all; 15 unless a number of trials is given")
    parser.add_argument("--trials", type=float, default=float("inf"), help="of every part, over all jobs")
    parser.add_argument("--seed", type=int, default=0, help="what repeats a run; jobs count up from it")
    parser.add_argument("--suite", choices=SUITES, action="append", help="may be repeated; all unless given")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each with its own seed")
    parser.add_argument("--told", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.suite = given.suite or list(SUITES)
    if given.minutes is None:
        given.minutes = 15.0 if given.trials == float("inf") else float("inf")
    if given.jobs == 1:
        results = []
        for result in here(given):
            results.append(result)
            if given.told:
                print(MARK + json.dumps(asdict(result)), flush=True)
    else:
        seeds = range(given.seed, given.seed + given.jobs)
        with ThreadPoolExecutor(given.jobs) as pool:
            found = [one for many in pool.map(lambda seed: elsewhere(given, seed), seeds) for one in many]
        of_part = [[one for one in found if one.suite == name] for name in SUITES]
        results = [reduce(add, many) for many in of_part if many]
    if not given.told:
        print(table(results))
    return int(not results or any(one.failures or not one.trials for one in results))


if __name__ == "__main__":
    sys.exit(main())
