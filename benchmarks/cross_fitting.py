"""Cross-fitting compared with deep ensembles of as many networks: test NLL and ECE.

    python benchmarks/cross_fitting.py [--sets digits fashion-2000 ...] [--seeds 5] [--jobs 1] [--out FILE]

The sets, networks and trainings are those of ``benchmarks/defaults.py``. All arms use the same training rows:

- ``one``: one network trained on four fifths, and ``fb.calibrate`` on the other fifth.
- ``ensemble``: a deep ensemble of five networks, each trained on all rows.
- ``ensemble+temperature``: five networks trained on four fifths, and their temperature fitted to the other fifth.
- ``cross``: ``fb.cross_calibrate`` with five folds. Its cost is that of five networks and their calibrations.
- ``cross+temperature``: ``fb.cross_calibrate`` on nine tenths, and the temperature of the mixture fitted to the other tenth.

Differences to ``cross`` are paired by seed, with a 95 % interval of Student's t distribution. NLL is the negative log-likelihood,
ECE the expected calibration error. For regression the ECE column has the error of the coverage of 90 % intervals.

With ``--out`` every finished run is written at once, and arms that are in the file are not repeated.
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
from defaults import IMAGES, SETS

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn_studies.runner.findings import paired_difference

ARMS = ("one", "ensemble", "ensemble+temperature", "cross", "cross+temperature")
DEFAULT_SETS = ("digits", "breast_cancer", "flipped-500", "concrete", "fashion-2000")


def measure(job: tuple[str, int, dict[str, Any]]) -> dict[str, Any] | None:
    """Fits the arms that an earlier result of the same run lacks, and returns all test metrics. None if the data are missing."""
    name, seed, result = job
    torch.set_num_threads(1)
    data, network, batch, epochs, lr = (SETS | IMAGES)[name]
    try:
        inputs, targets, *test = data(seed)
    except FileNotFoundError:
        return None
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    fifth = len(order) // 5
    held_out, training = order[:fifth], order[fifth:]

    def loader(rows: Any) -> TensorLoader:
        return TensorLoader(inputs[rows], targets[rows], batch_size=batch, shuffle=True)

    quiet: dict[str, Any] = {"seed": seed, "progress": False}
    ensemble = fb.DeepEnsemble(5, epochs=epochs, lr=lr)
    point = fb.MLE(epochs=epochs, lr=lr)
    pair = (inputs[held_out], targets[held_out])

    def fit(arm: str) -> fb.Posterior:
        if arm == "one":
            trained = point.fit(network(), loader(training), **quiet)
            return fb.calibrate(trained.model, pair, likelihood=trained.likelihood, **quiet)
        if arm == "ensemble":
            return ensemble.fit(network(), loader(order), **quiet)
        if arm == "ensemble+temperature":
            return fb.Temperature().calibrate(ensemble.fit(network(), loader(training), **quiet), pair)
        if arm == "cross":
            return fb.cross_calibrate(network, loader(order), method=point, **quiet)
        tenth = len(order) // 10
        mixture = fb.cross_calibrate(network, loader(order[tenth:]), method=point, **quiet)
        return fb.Temperature().calibrate(mixture, (inputs[order[:tenth]], targets[order[:tenth]]))

    result = {"set": name, "seed": seed, **result}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for arm in (arm for arm in ARMS if arm not in result):
            torch.manual_seed(seed)
            started = time.perf_counter()
            posterior = fit(arm)
            seconds = time.perf_counter() - started
            numbers = fb.evaluate(posterior, tuple(test), progress=False)
            if "coverage_90" in numbers:
                numbers["ece"] = abs(numbers["coverage_90"] - 0.9)
            result[arm] = {"nll": numbers["nll"], "ece": numbers["ece"], "seconds": seconds}
    return result


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the means of every data set, and the paired differences of cross-fitting to the other arms."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        runs = sorted((row for row in rows if row["set"] == name), key=lambda row: row["seed"])
        line: dict[str, Any] = {"set": name, "seeds": len(runs)}
        for arm in (arm for arm in ARMS if all(arm in run for run in runs)):
            line |= {f"{key} {arm}": mean(run[arm][key] for run in runs) for key in ("nll", "ece", "seconds")}
            if arm != "cross" and len(runs) > 1:
                gap = paired_difference(
                    [run["cross"]["nll"] for run in runs], [run[arm]["nll"] for run in runs]
                )
                line[f"nll cross - {arm}"], line[f"half {arm}"] = gap.mean, gap.high - gap.mean
        lines.append(line)
    return lines


def main() -> None:
    parser = make_parser(__doc__, seeds=5, jobs=1)
    parser.add_argument("--sets", nargs="+", choices=list(SETS | IMAGES), default=list(DEFAULT_SETS))
    parser.add_argument("--out", type=Path, help="JSON file of the results, which is continued")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    done = {(row["set"], row["seed"]): row for row in rows}
    jobs = [
        (name, seed, done.get((name, seed), {}))
        for name in arguments.sets[::-1]
        for seed in range(arguments.seeds)
    ]
    jobs = [job for job in jobs if not all(arm in job[2] for arm in ARMS)]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for row in pool.imap_unordered(measure, jobs):
            if row is None:
                continue
            rows = [other for other in rows if (other["set"], other["seed"]) != (row["set"], row["seed"])]
            rows.append(row)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(
                    json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n"
                )
    for line in summary(rows):
        cells = [f"{line['set']:14} ({line['seeds']} seeds)"]
        for arm in (arm for arm in ARMS if f"nll {arm}" in line):
            values = (
                f"NLL {line[f'nll {arm}']:.4f} ECE {line[f'ece {arm}']:.4f} {line[f'seconds {arm}']:.0f} s"
            )
            gap = ""
            if f"half {arm}" in line:
                gap = f", cross - {arm} {line[f'nll cross - {arm}']:+.4f} +- {line[f'half {arm}']:.4f}"
            cells.append(f"{arm}: {values}{gap}")
        print("\n    ".join(cells))


if __name__ == "__main__":
    main()
