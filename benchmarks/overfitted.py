"""Effect of ``fb.fit`` on networks that have memorized flipped labels, and of ``fb.calibrate`` on fresh rows.

    python benchmarks/overfitted.py [--seeds 5] [--first 0] [--jobs 1] [--out FILE]

- ``flipped``: 500 rows, 20 inputs, a linear boundary, 10 % flipped labels.
- ``xor``: 600 rows, sign of the product of two inputs, 15 % flipped labels.

An MLP is trained until it has memorized most labels (``given``). Its test NLL is then compared with that of three posteriors:

- ``fit``: ``fb.fit`` with default arguments on the same rows.
- ``frozen``: the same with frozen weights, so that only the noise is fitted.
- ``calibrate``: ``fb.calibrate`` on 300 rows that the network was not trained on.

Differences to ``given`` are paired by seed, with a 95 % interval of Student's t distribution. NLL is the negative log-likelihood, ECE
the expected calibration error. ``returned`` counts fits that gave back the given network. A finished run is written at once.
"""

import json
import multiprocessing
import warnings
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from common import make_parser
from defaults import exclusive_or, flipped

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.models import MLP
from flowbnn.noise import freeze
from flowbnn_studies.runner.findings import paired_difference

ARMS = ("given", "fit", "frozen", "calibrate")
FRESH = 300  # rows for fb.calibrate, which are not tested
# data, network and epochs of the training
SETS: dict[str, Any] = {
    "flipped": (flipped, lambda: MLP(20, (50,), 2), 100),
    "xor": (exclusive_or, lambda: MLP(2, (50, 50), 2), 600),
}


def measure(job: tuple[str, int]) -> dict[str, Any]:
    """Trains one network, fits all arms, and returns their test NLL and ECE."""
    name, seed = job
    torch.set_num_threads(1)
    data, make_network, epochs = SETS[name]
    inputs, targets, others, labels = data(seed)
    fresh, test = (others[:FRESH], labels[:FRESH]), (others[FRESH:], labels[FRESH:])
    loader = TensorLoader(inputs, targets, batch_size=32, shuffle=True)
    quiet: dict[str, Any] = {"seed": seed, "progress": False}
    torch.manual_seed(seed)
    given = fb.MLE(epochs=epochs, lr=5e-3).fit(make_network(), loader, **quiet)

    def fit(frozen: bool) -> fb.Posterior:
        noisy = fb.to_stochastic(given.model, {"*": fb.noise.NormalAffine()})
        if frozen:
            freeze(noisy, "weights")
        return fb.fit(noisy, loader, **quiet)

    result: dict[str, Any] = {"set": name, "seed": seed}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posteriors = dict(zip(ARMS, (given, fit(False), fit(True)), strict=False))
        posteriors["calibrate"] = fb.calibrate(given.model, fresh, **quiet)
    for arm, posterior in posteriors.items():
        numbers = fb.evaluate(posterior, test, progress=False)
        result[arm] = {key: numbers[key] for key in ("nll", "ece")}
        if arm in ("fit", "frozen"):
            result[arm]["returned"] = not posterior.report.accepted
    return result


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the means of each set, and the paired differences to the given network."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        runs = sorted((row for row in rows if row["set"] == name), key=lambda row: row["seed"])
        line: dict[str, Any] = {"set": name, "seeds": [run["seed"] for run in runs]}
        for arm in ARMS:
            line |= {f"{key} {arm}": mean(run[arm][key] for run in runs) for key in ("nll", "ece")}
            if arm != "given" and len(runs) > 1:
                gap = paired_difference(
                    [run[arm]["nll"] for run in runs], [run["given"]["nll"] for run in runs]
                )
                line[f"nll {arm} - given"], line[f"half {arm}"] = gap.mean, gap.high - gap.mean
            if arm in ("fit", "frozen"):
                line[f"returned {arm}"] = sum(run[arm]["returned"] for run in runs)
        lines.append(line)
    return lines


def main() -> None:
    parser = make_parser(__doc__, seeds=5, jobs=1)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--out", type=Path, help="JSON file of the results, which is continued")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    done = {(row["set"], row["seed"]) for row in rows}
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    jobs = [(name, seed) for seed in seeds for name in SETS if (name, seed) not in done]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for row in pool.imap_unordered(measure, jobs):
            rows.append(row)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                text = json.dumps({"summary": summary(rows), "rows": rows}, indent=1)
                arguments.out.write_text(text + "\n")
    for line in summary(rows):
        cells = [f"{line['set']:8} ({len(line['seeds'])} seeds)"]
        for arm in ARMS:
            cell = f"{arm} NLL {line[f'nll {arm}']:.3f} ECE {line[f'ece {arm}']:.3f}"
            if f"half {arm}" in line:
                cell += f" ({line[f'nll {arm} - given']:+.3f} +- {line[f'half {arm}']:.3f})"
            if f"returned {arm}" in line:
                cell += f", given network returned {line[f'returned {arm}']} times"
            cells.append(cell)
        print("\n    ".join(cells))


if __name__ == "__main__":
    main()
