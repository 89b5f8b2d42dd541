"""Runs the parts one after the other and prints one table; exits with 1 where anything failed.

python -m attack [--minutes 15] [--seed 0] [--part kills]
"""

import argparse
import sys
import time
import warnings

from attack import Budget, Part, Tally, files, fuzz, kills, processes, soak, threads

PARTS: dict[str, tuple[Part, float]] = {  # and their shares of the time
    "fuzz": (fuzz.attack, 0.15),
    "files": (files.attack, 0.2),
    "kills": (kills.attack, 0.3),
    "processes": (processes.attack, 0.1),
    "threads": (threads.attack, 0.1),
    "soak": (soak.attack, 0.15),
}


def table(tallies: list[Tally]) -> str:
    """Tries, survived and failed of every part."""
    lines = [f"{'part':<10} {'seed':>5} {'tries':>7} {'survived':>9} {'failed':>7}   how they ended"]
    for one in tallies:
        failed = len(one.failures)
        ended = ", ".join(f"{count} {word}" for word, count in (one.counts | one.notes).items())
        lines.append(
            f"{one.part:<10} {one.seed:>5} {one.tries:>7} {one.tries - failed:>9} {failed:>7}   {ended}"
        )
    return "\n".join(lines)


def main() -> int:
    """The parts asked for."""
    parser = argparse.ArgumentParser(prog="attack", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--part", choices=PARTS, action="append")
    given = parser.parse_args()
    chosen = given.part or list(PARTS)
    whole = sum(PARTS[name][1] for name in chosen)
    warnings.simplefilter("ignore")
    tallies = []
    for name in chosen:
        part, share = PARTS[name]
        began = time.monotonic()
        tallies.append(part(given.seed, Budget(60.0 * given.minutes * share / whole)))
        seconds = time.monotonic() - began
        print(f"{name}: {tallies[-1].tries} tries in {seconds:.0f} s, seed {given.seed}", flush=True)
        for failure in tallies[-1].failures[:20]:
            print(f"  {failure}", flush=True)
    print(table(tallies))
    return int(any(one.failures for one in tallies))


if __name__ == "__main__":
    sys.exit(main())
