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
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from datetime import UTC, datetime
from functools import reduce
from importlib import import_module
from importlib.metadata import version
from operator import add
from pathlib import Path

from tests.stress import Budget, StressResult, first_line

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


def run_here(options: argparse.Namespace) -> Iterator[StressResult]:
    """Runs the suites in this process and yields their results."""
    warnings.simplefilter("ignore")
    total = sum(SUITES[name] for name in options.suite)
    for name in options.suite:
        try:
            stress = import_module(f"tests.stress.{name}").stress
        except ModuleNotFoundError as error:
            yield StressResult(name, options.seed, counts={f"trials, since {error.name} is not installed": 0})
            continue
        start = time.monotonic()
        result = stress(options.seed, Budget(60.0 * options.minutes * SUITES[name] / total, options.trials))
        seconds = time.monotonic() - start
        summary = f"{name}: {result.trials} trials in {seconds:.0f} s, seed {options.seed}"
        print("\n  ".join([summary, *result.failures[:20]]), flush=True)
        yield result


def run_in_child(options: argparse.Namespace, seed: int) -> list[StressResult]:
    """Runs the suites in a child process, in which torch has one thread."""
    suites = [word for name in options.suite for word in ("--suite", name)]
    limits = ["--minutes", str(options.minutes), "--trials", str(options.trials / options.jobs)]
    command = [sys.executable, "-m", "tests.stress", "--child", "--seed", str(seed), *limits, *suites]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    results = []
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(RESULT_PREFIX):
                results.append(StressResult(**json.loads(line.removeprefix(RESULT_PREFIX))))
            else:
                print(line, end="", flush=True)
    for name in options.suite[len(results) :]:
        lost = StressResult(name, seed)
        lost.add("failed", f"{name}, seed {seed}: the process ended with status {process.returncode}")
        results.append(lost)
    return results


def write_results(path: Path, results: list[StressResult]) -> None:
    """Writes the results as JSON, with the command and the versions."""
    content = {
        "command": " ".join(["python -m tests.stress", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": {name: version(name) for name in ("flowbnn", "torch")}
        | {"python": platform.python_version()},
        "trials": sum(result.trials for result in results),
        "failed": sum(len(result.failures) for result in results),
        "suites": [asdict(result) for result in results],
    }
    path.write_text(json.dumps(content, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.stress",
        description=first_line(__doc__),
        epilog=LONG_RUNS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, help="total time; 15 unless --trials is set")
    parser.add_argument(
        "--trials", type=float, default=float("inf"), help="trials of each suite, over all jobs"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the first job; the others count up")
    parser.add_argument(
        "--suite", choices=SUITES, action="append", help="suite to run, repeatable; default all"
    )
    parser.add_argument("--jobs", type=int, default=1, help="parallel processes, each with its own seed")
    parser.add_argument("--out", type=Path, help="JSON file for the results, written after each suite")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.suite = options.suite or list(SUITES)
    if options.minutes is None:
        options.minutes = 15.0 if options.trials == float("inf") else float("inf")
    return options


def main() -> int:
    """Runs the suites and returns the exit status."""
    options = parse_options()
    results = []
    if options.jobs == 1:
        for result in run_here(options):
            results.append(result)
            if options.out is not None:
                write_results(options.out, results)
            if options.child:
                print(RESULT_PREFIX + json.dumps(asdict(result)), flush=True)
    else:
        seeds = range(options.seed, options.seed + options.jobs)
        with ThreadPoolExecutor(options.jobs) as pool:
            of_jobs = list(pool.map(lambda seed: run_in_child(options, seed), seeds))
        for name in options.suite:
            results.append(reduce(add, [result for job in of_jobs for result in job if result.suite == name]))
    if options.out is not None:
        write_results(options.out, results)
    if not options.child:
        print(table(results))
    return int(not results or any(result.failures or not result.trials for result in results))


if __name__ == "__main__":
    sys.exit(main())
