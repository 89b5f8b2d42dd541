"""Estimators for scikit-learn on the two tables of the paper on bde, compared with its published numbers.

    FLOWBNN_DATA=folder python benchmarks/sklearn_tables.py [--tables airfoil bike] [--heads heteroscedastic mixture] [--runs 5]

The folder ``FLOWBNN_DATA/bde`` holds ``airfoil.csv`` and ``hour.csv``, as in ``bde/data`` of https://github.com/scikit-learn-contrib/bde
(bike sharing is in a folder of its own there). Nothing is downloaded.

The protocol is that of ``paper/scripts/benchmark.py`` there. A fifth of the rows is for testing (seed 0), inputs and targets are
standardized by the training rows, and the runs differ in the seed of the fit. The negative log-likelihood (NLL) of bde is that of a
Gaussian with the predictive mean and standard deviation (``gaussian``). The NLL of the whole predictive distribution is ``nll``.
Seconds are those of fit and prediction on one core. bde was timed on ten cores.

Settings were chosen with ``--validation``, which splits off a tenth of the training rows and does not use the test rows.
"""

import json
import math
import os
import time
import warnings
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pandas as pd
import torch
from common import make_parser
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import PowerTransformer, StandardScaler

import flowbnn as fb
from flowbnn.sklearn import BayesianRegressor, log_likelihood_score
from flowbnn.training import cosine

PUBLISHED = {  # NLL and seconds
    "airfoil": {"bde": (-0.913, 240), "TabPFN v2": (-0.934, 9), "deep ensemble of bde": (0.176, 19)},
    "bike": {"bde": (-0.732, 2550), "TabPFN v2": (-0.686, 1245), "deep ensemble of bde": (-0.455, 39)},
}
HEADS = ("gaussian", "heteroscedastic", "mixture", "flow")


def load(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets of a table."""
    folder = Path(os.environ.get("FLOWBNN_DATA", "data")) / "bde"
    if name == "airfoil":
        table = pd.read_csv(folder / "airfoil.csv")
        return table.iloc[:, :-1].to_numpy(float), table.iloc[:, -1].to_numpy(float)
    path = folder / "hour.csv"
    table = pd.read_csv(path if path.exists() else folder / "bike_sharing_dataset" / "hour.csv")
    unused = ["cnt", "casual", "registered", "instant", "dteday"]  # the count is casual + registered
    return table.drop(columns=unused).to_numpy(float), table["cnt"].to_numpy(float)


def split(name: str, validation: bool) -> tuple[np.ndarray, ...]:
    """Returns inputs for training and testing and their targets, standardized by the training rows.

    Args:
        name: Name of the table.
        validation: If True, tests on a tenth of the training rows instead of the test rows.
    """
    X, X_test, y, y_test = train_test_split(*load(name), test_size=0.2, random_state=0)
    if validation:
        X, X_test, y, y_test = train_test_split(X, y, test_size=0.1, random_state=1)
    scaler = StandardScaler().fit(y[:, None])
    return X, X_test, scaler.transform(y[:, None])[:, 0], scaler.transform(y_test[:, None])[:, 0]


def make_model(name: str, head: str, seed: int) -> Any:
    """Returns the estimator of a table: an ensemble of perceptrons with periodic embeddings.

    Args:
        name: Name of the table.
        head: Likelihood of the targets.
        seed: Seed of the fit.
    """
    settings = {"likelihood": head, "embedding": "periodic", "activation": "silu", "random_state": seed}
    if name == "airfoil":
        # held-out rows end the training of a member, because longer runs shrink the noise of memorized rows
        model = BayesianRegressor(fb.DeepEnsemble(5), hidden_sizes=(64, 64, 64), lr=0.005, **settings)
        return make_pipeline(PowerTransformer(), model)
    ensemble = fb.DeepEnsemble(5, schedule=partial(cosine, rise=0.1))
    return BayesianRegressor(ensemble, hidden_sizes=(128, 128, 128), epochs=40, lr=0.005, **settings)


def measure(name: str, head: str, seed: int, validation: bool) -> dict[str, Any]:
    """Fits one estimator, and returns its scores and the seconds of fit and prediction."""
    X, X_test, y, y_test = split(name, validation)
    model = make_model(name, head, seed)
    started, cpu = time.perf_counter(), time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(X, y)
        location, scale = model.predict(X_test, return_std=True)
    seconds, cpu_seconds = time.perf_counter() - started, time.process_time() - cpu
    residuals = (y_test - location) / scale
    gaussian = np.mean(0.5 * residuals**2 + np.log(scale) + 0.5 * math.log(2.0 * math.pi))
    return {
        "table": name,
        "head": head,
        "seed": seed,
        "gaussian": float(gaussian),
        "nll": -log_likelihood_score(model, X_test, y_test),
        "rmse": float(np.sqrt(np.mean((y_test - location) ** 2))),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
    }


def main() -> None:
    """Runs all estimators and prints their scores beside the published ones."""
    parser = make_parser(__doc__)
    parser.add_argument("--tables", nargs="+", choices=list(PUBLISHED), default=list(PUBLISHED))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=["heteroscedastic", "mixture"])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--validation", action="store_true", help="test on a part of the training rows")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    runs: list[dict[str, Any]] = []
    for name in arguments.tables:
        for label, (nll, seconds) in PUBLISHED[name].items():
            print(f"{name:8} {label:22} gaussian {nll:7.3f}                 {seconds:6.0f} s (published)")
        for head in arguments.heads:
            rows = [measure(name, head, seed, arguments.validation) for seed in range(arguments.runs)]
            runs += rows
            texts = []
            for key in ("gaussian", "nll", "rmse"):
                values = [row[key] for row in rows]
                texts.append(f"{key} {mean(values):7.3f} +- {stdev(values) if len(values) > 1 else 0.0:.3f}")
            times = [mean(row[key] for row in rows) for key in ("seconds", "cpu_seconds")]
            print(
                f"{name:8} {head:22} {'  '.join(texts)}  {times[0]:.0f} s, {times[1]:.0f} s of CPU",
                flush=True,
            )
            if arguments.out:
                arguments.out.write_text(json.dumps(runs, indent=1) + "\n")


if __name__ == "__main__":
    main()
