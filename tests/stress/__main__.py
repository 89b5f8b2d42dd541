"""Runs the parts one after the other and prints one table; exits with 1 where anything failed.

python -m tests.stress [--minutes 15] [--tries 5000] [--seed 0] [--part kills] [--jobs 1]
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

from tests.stress import Budget, Tally, short

PARTS = {
    "fuzz": 0.15,
    "files": 0.2,
    "kills": 0.3,
    "processes": 0.1,
    "threads": 0.1,
    "soak": 0.15,
}  # of the time
SHOWN = 20  # failures of a part
MARK = "tally "  # what a process says to the one that started it


def table(tallies: list[Tally]) -> str:
    """Tries, survived and failed of every part."""
    lines = [f"{'part':<10} {'seed':>5} {'tries':>7} {'survived':>9} {'failed':>7}   how they ended"]
    for one in tallies:
        failed = len(one.failures)
        ended = [f"{count} {word}" for word, count in one.counts.items()]
        ended += [f"at most {value:g} {word}" for word, value in one.most.items()]
        lines.append(
            f"{one.part:<10} {one.seed:>5} {one.tries:>7} {one.tries - failed:>9} {failed:>7}   {', '.join(ended)}"
        )
    return "\n".join(lines)


def here(given: argparse.Namespace) -> Iterator[Tally]:
    """The parts in this process."""
    warnings.simplefilter("ignore")
    whole = sum(PARTS[name] for name in given.part)
    for name in given.part:
        try:
            stress = import_module(f"tests.stress.{name}").stress
        except ModuleNotFoundError as error:
            yield Tally(name, given.seed, counts={f"tried, since {error.name} is not installed": 0})
            continue
        began = time.monotonic()
        tally = stress(given.seed, Budget(60.0 * given.minutes * PARTS[name] / whole, given.tries))
        seconds = time.monotonic() - began
        lines = [
            f"{name}: {tally.tries} tries in {seconds:.0f} s, seed {given.seed}",
            *tally.failures[:SHOWN],
        ]
        print("\n  ".join(lines), flush=True)
        yield tally


def elsewhere(given: argparse.Namespace, seed: int) -> list[Tally]:
    """The parts in a process of their own, with one thread for torch."""
    parts = [word for name in given.part for word in ("--part", name)]
    limits = ["--minutes", str(given.minutes), "--tries", str(given.tries / given.jobs)]
    command = [sys.executable, "-m", "tests.stress", "--told", "--seed", str(seed), *limits, *parts]
    tallies = []
    with subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                tallies.append(Tally(**json.loads(line.removeprefix(MARK))))
            else:
                print(line, end="", flush=True)
    for name in given.part[len(tallies) :]:
        lost = Tally(name, seed)
        lost.add("failed", f"{name}, seed {seed}: the process ended with status {process.returncode}")
        tallies.append(lost)
    return tallies


def main() -> int:
    """The parts asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=short(__doc__))
    parser.add_argument("--minutes", type=float, help="time in all; 15 unless a number of tries is given")
    parser.add_argument("--tries", type=float, default=float("inf"), help="of every part, over all jobs")
    parser.add_argument("--seed", type=int, default=0, help="what repeats a run; jobs count up from it")
    parser.add_argument("--part", choices=PARTS, action="append", help="may be repeated; all unless given")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, each with its own seed")
    parser.add_argument("--told", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.part = given.part or list(PARTS)
    if given.minutes is None:
        given.minutes = 15.0 if given.tries == float("inf") else float("inf")
    if given.jobs == 1:
        tallies = []
        for tally in here(given):
            tallies.append(tally)
            if given.told:
                print(MARK + json.dumps(asdict(tally)), flush=True)
    else:
        seeds = range(given.seed, given.seed + given.jobs)
        with ThreadPoolExecutor(given.jobs) as pool:
            found = [one for many in pool.map(lambda seed: elsewhere(given, seed), seeds) for one in many]
        of_part = [[one for one in found if one.part == name] for name in PARTS]
        tallies = [reduce(add, many) for many in of_part if many]
    if not given.told:
        print(table(tallies))
    return int(not tallies or any(one.failures or not one.tries for one in tallies))


if __name__ == "__main__":
    sys.exit(main())
