"""Measures the time of ``import flowbnn``, as a ratio to ``import torch``, in new processes that take turns.

python benchmarks/imports.py [--rounds 15] [--out results]
"""

import os
import resource
import subprocess
import sys
from pathlib import Path

from common import make_parser, parse_with, print_ratios, write_results


def import_seconds(package: str) -> float:
    """Returns the CPU time of a new process that imports a package."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {package}"], check=True, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = make_parser(__doc__, rounds=15, threads=1)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.set_defaults(device="cpu")
    options = parse_with(parser)
    packages = ("torch", "flowbnn")
    for package in packages:
        import_seconds(package)
    times: dict[str, list[float]] = {package: [] for package in packages}
    for _ in range(options.rounds):
        for package, seconds in times.items():
            seconds.append(import_seconds(package))
    write_results(options, "imports", print_ratios("import, CPU time of a new process", times, base="torch"))


if __name__ == "__main__":
    main()
