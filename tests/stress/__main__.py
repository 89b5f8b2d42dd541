"""Runs the stress suites one after the other and prints one table. Exits with status 1 if anything failed.

python -m tests.stress [--minutes 15] [--trials 5000] [--seed 0] [--suite interruptions] [--jobs 1] [--out FILE.json]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from importlib import import_module
from operator import add
from pathlib import Path
from threading import Lock

import torch
from tests.stress import Budget, StressResult, first_line

import flowbnn

# suites, with their shares of the time
SUITES = {
    "fuzz": 0.1,
    "files": 0.12,
    "checkpoints": 0.1,
    "interruptions": 0.2,
    "processes": 0.05,
    "threads": 0.1,
    "networks": 0.13,
    "targets": 0.05,
    "loaders": 0.05,
    "memory": 0.05,
    "soak": 0.05,
}
LONG_RUNS = """\
each job runs all suites of the call, with the seeds --seed, --seed + 1, ... and an equal share of the trials.

long runs on a machine with 16 cores:
  python -m tests.stress --suite interruptions --trials 1600 --jobs 16 --out kills.json      # more than 2,000 kills
  python -m tests.stress --suite files --suite checkpoints --trials 10000 --jobs 16 --out files.json
  python -m tests.stress --suite fuzz --trials 50000 --jobs 16 --out fuzz.json
  python -m tests.stress --suite networks --trials 1320 --jobs 5 --out networks.json   # 22 subjects x 5 variants x 12 methods
  python -m tests.stress --suite threads --suite targets --suite loaders --trials 4000 --jobs 8 --out others.json
  python -m tests.stress --suite memory --trials 8 --jobs 4 --out memory.json
  python -m tests.stress --suite soak --minutes 60 --jobs 16 --out soak.json
"""
RESULT_PREFIX = "result "  # begins the lines by which a child process reports its results


def table(results: list[StressResult]) -> str:
    """Returns a table of the trials, passes and failures of each suite."""
    lines = [f"{'suite':<14} {'seed':>5} {'trials':>7} {'passed':>9} {'failed':>7}   outcomes"]
    for result in results:
        failed = len(result.failures)
        outcomes = [f"{count} {word}" for word, count in result.counts.items()]
        outcomes += [f"at most {value:g} {word}" for word, value in result.maxima.items()]
        numbers = f"{result.seed:>5} {result.trials:>7} {result.trials - failed:>9} {failed:>7}"
        lines.append(f"{result.suite:<14} {numbers}   {', '.join(outcomes)}")
    return "\n".join(lines)


def run_here(options: argparse.Namespace, record: Callable[[StressResult], object]) -> None:
    """Runs the suites in this process.

    Args:
        options: Options of the command line.
        record: Function that gets the results of a suite while it runs and at its end.
    """
    warnings.simplefilter("ignore")
    total = sum(SUITES[name] for name in options.suite)
    for name in options.suite:
        budget = Budget(60.0 * options.minutes * SUITES[name] / total, options.trials, record)
        try:
            result = import_module(f"tests.stress.{name}").stress(options.seed, budget)
        except ModuleNotFoundError as error:
            result = StressResult(
                name, options.seed, counts={f"trials, since {error.name} is not installed": 0}
            )
        result.seconds, result.complete = round(time.monotonic() - budget.start, 1), True
        summary = f"{name}: {result.trials} trials in {result.seconds:.0f} s, seed {options.seed}"
        print("\n  ".join([summary, *result.failures[:20]]), flush=True)
        record(result)


def run_in_child(options: argparse.Namespace, seed: int, record: Callable[[StressResult], object]) -> None:
    """Runs the suites in a child process, in which torch has one thread.

    Args:
        options: Options of the command line.
        seed: Seed of the process.
        record: Function that gets the results of a suite while it runs and at its end.
    """
    suites = [word for name in options.suite for word in ("--suite", name)]
    limits = ["--minutes", str(options.minutes), "--trials", str(options.trials / options.jobs)]
    command = [sys.executable, "-m", "tests.stress", "--child", "--seed", str(seed), *limits, *suites]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    results: dict[str, StressResult] = {}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT_PREFIX):
                result = StressResult(**json.loads(line.removeprefix(RESULT_PREFIX)))
                results[result.suite] = result
                record(result)
            else:
                print(line, end="", flush=True)
    for name in options.suite:
        lost = results.get(name, StressResult(name, seed))
        if not lost.complete:
            lost.add("failed", f"{name}, seed {seed}: the process ended with status {process.returncode}")
            record(lost)


def merge(results: Iterable[StressResult], names: Sequence[str]) -> list[StressResult]:
    """Returns one result for each suite, over all seeds."""
    ordered = sorted(results, key=lambda result: result.seed)
    of_suites = [[result for result in ordered if result.suite == name] for name in names]
    return [reduce(add, parts) for parts in of_suites if parts]


def write_results(path: Path, results: list[StressResult]) -> None:
    """Writes the results as JSON, with the command and the versions."""
    content = {
        "command": " ".join(["python -m tests.stress", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {
            "flowbnn": flowbnn.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "trials": sum(result.trials for result in results),
        "failed": sum(len(result.failures) for result in results),
        "suites": [asdict(result) for result in results],
    }
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(json.dumps(content, indent=2) + "\n")
    unfinished.replace(path)


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description=first_line(__doc__),
        epilog=LONG_RUNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, help="total time, also a limit on --trials; 15 unless --trials is set"
    )
    parser.add_argument(
        "--trials", type=float, default=float("inf"), help="trials of each suite, over all jobs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job; the others count up")
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="suite to run, repeatable; default all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes, each with its own seed")
    parser.add_argument("--out", type=Path, help="JSON file for the results, written every few seconds")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.suite = options.suite or list(SUITES)
    options.out = options.out and options.out.resolve()  # a suite may change the folder
    if options.minutes is None:
        options.minutes = 15.0 if options.trials == float("inf") else float("inf")
    return options


def main() -> int:
    """Runs the suites and returns the exit status."""
    options = parse_options()
    results: dict[tuple[str, int], StressResult] = {}
    lock = Lock()

    def record(result: StressResult) -> None:
        """Writes the results so far to the file, or reports one to the parent process."""
        if options.child:
            print(RESULT_PREFIX + json.dumps(asdict(result)), flush=True)
            return
        with lock:
            results[result.suite, result.seed] = result
            if options.out is not None:
                write_results(options.out, merge(results.values(), options.suite))

    if options.jobs == 1:
        run_here(options, record)
    else:
        with ThreadPoolExecutor(options.jobs) as pool:
            futures = [
                pool.submit(run_in_child, options, options.seed + number, record)
                for number in range(options.jobs)
            ]
        for future in futures:
            future.result()
    merged = merge(results.values(), options.suite)
    if not options.child:
        print(table(merged))
    return int(any(result.failures or not result.trials for result in merged))


if __name__ == "__main__":
    sys.exit(main())
