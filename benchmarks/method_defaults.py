"""Compares every method at its defaults with maximum likelihood trained for as many epochs: test NLL and calibration error.

    python benchmarks/method_defaults.py [--sets digits wine ...] [--methods ivon laplace ...] [--plateau] [--seeds 3]
                                         [--jobs 2] [--out FILE]

The sets and networks are those of ``benchmarks/defaults.py``. Every method has its default settings and the number of epochs of the
set, or trains until its own plateau with ``--plateau``. A method whose NLL is above that of maximum likelihood by more than 0.1 nats
on average is marked. NLL is the negative log-likelihood, ECE the expected calibration error; for regression the ECE column has the
error of the coverage of 90 % intervals.

With ``--out`` every finished fit is written at once, and fits that are in the file are not repeated.
"""

import json
import multiprocessing
import time
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import make_parser
from defaults import SETS

import flowbnn as fb
from flowbnn.compare.candidates import CANDIDATES, find_candidates
from flowbnn.data import TensorLoader

WORSE = 0.1  # nats above maximum likelihood at which a method is marked


def measure(job: tuple[str, str, int, bool]) -> dict[str, Any] | None:
    """Fits one method to one set, and returns its test metrics. None if the data are missing."""
    name, key, seed, plateau = job
    torch.set_num_threads(1)
    data, network, batch, epochs, _ = SETS[name]
    try:
        inputs, targets, *test = data(seed)
    except FileNotFoundError:
        return None
    (candidate,) = find_candidates([key])
    sizes = {} if plateau else {"epochs": epochs}
    torch.manual_seed(seed)
    started, result = time.perf_counter(), {"set": name, "method": key, "seed": seed, "plateau": plateau}
    loader = TensorLoader(inputs, targets, batch_size=batch, shuffle=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            method = candidate.make(batches=len(loader), **sizes)
            options: dict[str, Any] = {"seed": seed, "progress": False, "accelerator": "cpu"}
            posterior = method.fit(network(), loader, **options)
            numbers = fb.evaluate(posterior, tuple(test), progress=False)
        except Exception as error:
            return result | {"error": f"{type(error).__name__}: {error}"[:200]}
    if "coverage_90" in numbers:
        numbers["ece"] = abs(numbers["coverage_90"] - 0.9)
    texts = sorted({str(entry.message)[:160] for entry in caught})
    return result | {
        "nll": numbers["nll"],
        "ece": numbers["ece"],
        "seconds": time.perf_counter() - started,
        "warnings": texts,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """Prints the mean NLL of each method relative to maximum likelihood, and marks those that are worse."""
    sets = [name for name in SETS if any(row["set"] == name for row in rows)]
    print(f"{'NLL relative to maximum likelihood':36}" + "".join(f"{name:>15}" for name in sets))

    def mean_nll(key: str, name: str) -> float | None:
        values = [row["nll"] for row in rows if row["method"] == key and row["set"] == name and "nll" in row]
        return mean(values) if values else None

    for candidate in CANDIDATES:
        cells = ""
        for name in sets:
            value, base = mean_nll(candidate.key, name), mean_nll("mle", name)
            if value is None or base is None:
                cells += f"{'-':>15}"
            elif candidate.key == "mle":
                cells += f"{value:>15.4f}"
            else:
                mark = " !" if value - base > WORSE else "  "
                cells += f"{value - base:>+13.4f}{mark}"
        if any(row["method"] == candidate.key for row in rows):
            print(f"{candidate.label:36}{cells}")
    for row in rows:
        if "error" in row:
            print(f"  {row['method']} on {row['set']}, seed {row['seed']}: {row['error']}")


def main() -> None:
    parser = make_parser(__doc__, seeds=3, jobs=1)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument(
        "--methods",
        nargs="+",
        default=["*"],
        help="names or patterns of methods; maximum likelihood is always fitted",
    )
    parser.add_argument("--plateau", action="store_true", help="train until the plateau of each method")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if options.out is not None and options.out.exists():
        rows = json.loads(options.out.read_text())
    keys = [candidate.key for candidate in find_candidates(["mle", *options.methods])]
    jobs = [
        (name, key, seed, options.plateau)
        for seed in range(options.seeds)
        for name in options.sets
        for key in keys
    ]
    finished = {(row["set"], row["method"], row["seed"], row["plateau"]) for row in rows}
    jobs = [job for job in jobs if job not in finished]
    with multiprocessing.get_context("spawn").Pool(options.jobs, maxtasksperchild=20) as pool:
        for row in pool.imap_unordered(measure, jobs):
            if row is None:
                continue
            rows.append(row)
            print(f"{row['set']:15} {row['method']:28} {row.get('nll', float('nan')):9.4f}", flush=True)
            if options.out is not None:
                options.out.write_text(json.dumps(rows, indent=1))
    print_table([row for row in rows if row["plateau"] == options.plateau])


if __name__ == "__main__":
    main()
