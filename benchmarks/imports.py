"""Measures the time of ``import flowbnn``, as a ratio to ``import torch``, in new processes that take turns.

Both packages have compiled byte code, as after ``pip install``. A checkout without it takes twice as long, because
Python compiles the sources of ``flowbnn`` but not those of ``torch``.

python benchmarks/imports.py [--rounds 15] [--out results]
"""

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from common import make_parser, parse_with, print_ratios, write_results


def import_seconds(package: str, byte_code: str) -> float:
    """Returns the CPU time of a new process that imports a package.

    Args:
        package: Name of the package.
        byte_code: Folder of the compiled byte code. The first import writes it.
    """
    environment = os.environ | {"PYTHONPYCACHEPREFIX": byte_code, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", f"import {package}"], check=True, env=environment)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    parser = make_parser(__doc__, rounds=15, threads=1)
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    parser.set_defaults(device="cpu")
    options = parse_with(parser)
    packages = ("torch", "flowbnn")
    times: dict[str, list[float]] = {package: [] for package in packages}
    with tempfile.TemporaryDirectory() as byte_code:
        for package in packages:
            import_seconds(package, byte_code)
        for _ in range(options.rounds):
            for package, seconds in times.items():
                seconds.append(import_seconds(package, byte_code))
    write_results(options, "imports", print_ratios("import, CPU time of a new process", times, base="torch"))


if __name__ == "__main__":
    main()
