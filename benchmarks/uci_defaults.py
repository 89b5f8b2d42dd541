"""Methods with their default arguments on the UCI regressions, compared with published log-likelihoods.

    python benchmarks/uci_defaults.py [--sets boston yacht ...] [--methods map ...] [--seeds 20] [--jobs 1] [--out FILE]

The sets and splits are those of Hernández-Lobato and Adams 2015, read from the folder in ``FLOWBNN_DATA``. A seed is one of the 20
splits (of protein, 5). The network has one hidden layer of 50 units (100 for protein). Batches have 32 rows, and 256 on sets of more
than 5,000 training rows. Inputs are standardized by the training rows. Everything else is the default of the method.

A method reaches a published mean if its own mean is not lower by more than one standard error of the published mean. MAP and node noise
are compared with published dropout. Deep ensembles predict the noise level from the inputs, as the published ones do.

The likelihood at the test error replaces the noise scale of every split by the error on its test rows. If it is no higher than the
likelihood, a single noise scale cannot explain a gap, and the predicted means are the reason.

With ``--out`` every finished run is written at once, and runs that are in the file are not repeated.
"""

import json
import math
import multiprocessing
import time
import warnings
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from common import make_parser

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.models import MLP
from flowbnn_studies.data.tables import UCI_FOLDERS, load_uci, standardize
from flowbnn_studies.uci import PUBLISHED, SPLITS

# method, published row to compare with, and True if the network predicts the noise level
METHODS: dict[str, tuple[Any, str, bool]] = {
    "map": (fb.MAP, "mc-dropout", False),
    "mc-dropout": (fb.MCDropout, "mc-dropout", False),
    "deep-ensemble": (fb.DeepEnsemble, "deep-ensemble", True),
    "node-noise": (fb.NodeNoise, "mc-dropout", False),
}


def measure(job: tuple[str, str, int]) -> dict[str, Any]:
    """Fits one method to one split, and returns its log-likelihood and error on the test rows."""
    name, key, seed = job
    torch.set_num_threads(1)
    method, _, predicted = METHODS[key]
    inputs, targets, test_inputs, test_targets = load_uci(name, seed)
    inputs, test_inputs = standardize(inputs, test_inputs)
    loader = TensorLoader(inputs, targets, batch_size=256 if len(inputs) > 5000 else 32, shuffle=True)
    torch.manual_seed(seed)
    network = MLP(inputs.shape[1], (100 if name == "protein" else 50,), 2 if predicted else 1)
    likelihood = fb.likelihoods.Gaussian("predicted") if predicted else "auto"
    started = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = method().fit(network, loader, likelihood=likelihood, seed=seed, progress=False)
        numbers = fb.evaluate(posterior, (test_inputs, test_targets), progress=False)
    result = {"set": name, "method": key, "seed": seed, "seconds": time.perf_counter() - started}
    result |= {"epochs": posterior.history.epochs, "log_likelihood": -numbers["nll"], "rmse": numbers["rmse"]}
    return result


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the mean of every set and method with its standard error, beside the published mean."""
    lines = []
    for name, key in sorted({(row["set"], row["method"]) for row in rows}):
        values = [row["log_likelihood"] for row in rows if (row["set"], row["method"]) == (name, key)]
        reference = METHODS[key][1]
        errors = [row["rmse"] for row in rows if (row["set"], row["method"]) == (name, key)]
        published, deviation, published_rmse = PUBLISHED[reference][name][:3]
        error = deviation / math.sqrt(SPLITS[name])
        line: dict[str, Any] = {"set": name, "method": key, "splits": len(values), "mean": mean(values)}
        line["standard error"] = stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        line |= {"rmse": mean(errors), "published rmse": published_rmse}
        line["likelihood at test error"] = -mean(math.log(error) for error in errors) - 0.5 * math.log(
            2.0 * math.pi * math.e
        )
        line |= {"published": published, "published error": error, "published method": reference}
        line["reached"] = mean(values) >= published - error
        lines.append(line)
    return lines


def main() -> None:
    parser = make_parser(__doc__, seeds=20, jobs=1)
    parser.add_argument("--sets", nargs="+", choices=list(UCI_FOLDERS), default=list(UCI_FOLDERS))
    parser.add_argument("--methods", nargs="+", choices=list(METHODS), default=list(METHODS))
    parser.add_argument("--out", type=Path, help="JSON file of the results, which is continued")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    done = {(row["set"], row["method"], row["seed"]) for row in rows}
    jobs = [
        (name, key, seed)
        for seed in range(arguments.seeds)
        for name in arguments.sets
        for key in arguments.methods
        if (name, key, seed) not in done and seed < SPLITS[name]
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for row in pool.imap_unordered(measure, jobs):
            rows.append(row)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                arguments.out.write_text(
                    json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n"
                )
    if arguments.out is not None and rows:
        arguments.out.write_text(json.dumps({"summary": summary(rows), "rows": rows}, indent=1) + "\n")
    for line in summary(rows):
        error = "" if line["standard error"] is None else f" +- {line['standard error']:.3f}"
        print(
            f"{line['set']:9} {line['method']:14} {line['mean']:7.3f}{error} ({line['splits']} splits)   published "
            f"{line['published method']} {line['published']:.2f} +- {line['published error']:.2f}"
            f"{'' if line['reached'] else '   not reached'}"
        )


if __name__ == "__main__":
    main()
