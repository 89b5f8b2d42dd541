"""Conformal sets and intervals on the same networks as MAPIE and TorchCP: coverage and size.

    python benchmarks/conformal.py [--networks 10] [--splits 10] [--seed 100] [--coverage 0.9] [--out folder]

The rivals are not needed by flowbnn: ``pip install mapie torchcp``. TorchCP needs torchsort for a training loss only. If torchsort is
not installed, an empty module takes its place.

Each network is trained once, with the seeds 100, 101, ... Settings of flowbnn were chosen on the seeds 0 and 1. The other rows are
split at random into 400 held-out rows and test rows, with seeds that depend on the network and the split only. All libraries get the
same predictions and the same rows.

* ``digits``: 8 x 8 digits of scikit-learn, 10 classes, 200 training rows.
* ``classes``: generated table, 30 classes in 10 dimensions, 1,500 training rows.
* ``numbers``: generated table with noise that depends on the inputs, 600 training rows. The network predicts mean and variance.

``size`` is the mean number of classes in a set or the mean width of an interval. ``larger`` is the mean difference to flowbnn in
percent, with its standard error over networks.
"""

import importlib.metadata
import statistics
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import make_parser, write_results
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.datasets import load_digits
from torch import Tensor

import flowbnn as fb
from flowbnn.conformal import APS, RAPS

HELD_OUT = 400
Result = tuple[float, float]  # coverage and size


def import_rivals() -> None:
    """Imports both rivals, and replaces torchsort by an empty module if it is not installed."""
    try:
        import torchsort  # noqa: F401
    except ImportError:
        module: Any = types.ModuleType("torchsort")
        module.soft_rank = module.soft_sort = None
        sys.modules["torchsort"] = module
    import mapie  # noqa: F401
    import torchcp  # noqa: F401


# -------------------- data


def digits(seed: int) -> tuple[Tensor, Tensor, int]:
    """Returns inputs, labels and the number of training rows, in random order."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    return torch.tensor(pixels / 16.0, dtype=torch.float32)[order], torch.tensor(labels)[order], 200


def classes(seed: int) -> tuple[Tensor, Tensor, int]:
    """Returns inputs, labels and the number of training rows of a mixture of 30 Gaussians."""
    generator = torch.Generator().manual_seed(seed)
    centers = 1.2 * torch.randn(30, 10, generator=generator)
    labels = torch.randint(30, (3500,), generator=generator)
    return centers[labels] + torch.randn(3500, 10, generator=generator), labels, 1500


def numbers(seed: int) -> tuple[Tensor, Tensor, int]:
    """Returns inputs, targets and the number of training rows of a table with heteroscedastic noise."""
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(2600, 5, generator=generator)
    noise = (0.2 + inputs[:, 1].abs()) * torch.randn(2600, generator=generator)
    return inputs, torch.sin(2.0 * inputs[:, 0]) + inputs[:, 2] * inputs[:, 3] + noise, 600


# -------------------- rivals


class Classifier(ClassifierMixin, BaseEstimator):
    """Classifier of scikit-learn with stored probabilities. An input is the index of its row."""

    def __init__(self, probabilities: Any = None) -> None:
        self.probabilities = probabilities
        self.classes_ = np.arange(probabilities.shape[1])

    def fit(self, X: Any, y: Any) -> "Classifier":
        """Does nothing, because the network is trained."""
        return self

    def predict_proba(self, X: Any) -> Any:
        """Returns stored probabilities."""
        return self.probabilities[np.asarray(X)[:, 0]]

    def predict(self, X: Any) -> Any:
        """Returns the most probable classes."""
        return self.predict_proba(X).argmax(1)


class Regressor(RegressorMixin, BaseEstimator):
    """Regressor of scikit-learn with stored values. An input is the index of its row."""

    def __init__(self, values: Any = None) -> None:
        self.values = values
        self.fitted_ = True

    def fit(self, X: Any, y: Any) -> "Regressor":
        """Does nothing, because the network is trained."""
        return self

    def predict(self, X: Any) -> Any:
        """Returns stored values."""
        return self.values[np.asarray(X)[:, 0]]


def set_result(sets: Any, labels: Tensor) -> Result:
    """Returns coverage and mean size of boolean sets ``[B, C]``."""
    sets = torch.as_tensor(sets).bool()
    return float(sets[torch.arange(len(labels)), labels].double().mean()), float(sets.sum(1).double().mean())


def interval_result(low: Any, high: Any, targets: Tensor) -> Result:
    """Returns coverage and mean width of intervals."""
    low, high = (torch.as_tensor(end).double().flatten() for end in (low, high))
    return float(((targets >= low) & (targets <= high)).double().mean()), float((high - low).mean())


def mapie_sets(
    score: str, last: Any, seed: int, probabilities: Tensor, y: Tensor, rows: Any, level: float
) -> Result:
    """Returns the result of MAPIE for class labels."""
    from mapie.classification import SplitConformalClassifier

    held_out, test = rows
    values = probabilities.double().numpy()
    values = values / values.sum(1, keepdims=True)
    model = SplitConformalClassifier(
        Classifier(values), confidence_level=level, conformity_score=score, random_state=seed
    )
    model.conformalize(held_out[:, None].numpy(), y[held_out].numpy())
    sets = model.predict_set(test[:, None].numpy(), conformity_score_params={"include_last_label": last})[1]
    return set_result(sets[..., 0], y[test])


def torchcp_sets(score: Any, seed: int, probabilities: Tensor, y: Tensor, rows: Any, level: float) -> Result:
    """Returns the result of TorchCP for class labels."""
    from torchcp.classification.predictor import SplitPredictor

    held_out, test = rows
    torch.manual_seed(seed)
    logits = probabilities.log()
    predictor = SplitPredictor(score, alpha=1.0 - level)
    predictor.calculate_threshold(logits[held_out], y[held_out])
    return set_result(predictor.predict_with_logits(logits[test]), y[test])


def mapie_intervals(score: str, symmetric: bool, values: Any, y: Tensor, rows: Any, level: float) -> Result:
    """Returns the result of MAPIE for real values."""
    from mapie.regression import ConformalizedQuantileRegressor, SplitConformalRegressor

    held_out, test = (indices[:, None].numpy() for indices in rows)
    mean, low, high, _ = (Regressor(value.double().numpy()) for value in values)
    model: Any
    if score == "cqr":
        model = ConformalizedQuantileRegressor([low, high, mean], confidence_level=level, prefit=True)
        model.conformalize(held_out, y[rows[0]].double().numpy())
        intervals = model.predict_interval(test, symmetric_correction=symmetric)[1]
    else:
        model = SplitConformalRegressor(mean, confidence_level=level, conformity_score=score, prefit=True)
        model.conformalize(held_out, y[rows[0]].double().numpy())
        intervals = model.predict_interval(test)[1]
    return interval_result(intervals[:, 0, 0], intervals[:, 1, 0], y[rows[1]])


def torchcp_intervals(
    score: Any, columns: list[int], values: Any, y: Tensor, rows: Any, level: float
) -> Result:
    """Returns the result of TorchCP for real values, from the columns of predictions that a score needs."""
    from torchcp.regression.predictor import SplitPredictor

    held_out, test = rows
    predictions = torch.stack([values[column] for column in columns], -1)
    predictor = SplitPredictor(score, alpha=1.0 - level)
    scores = predictor.calculate_score(predictions[held_out], y[held_out])
    threshold = predictor._calculate_conformal_value(scores, 1.0 - level)
    intervals = predictor.generate_intervals(predictions[test], threshold)
    return interval_result(intervals[:, 0, 0], intervals[:, 0, 1], y[test])


# -------------------- comparison


def compare_classes(
    posterior: Any, x: Tensor, y: Tensor, rows: Any, level: float, seed: int
) -> dict[tuple[str, str], Result]:
    """Returns coverage and size of all libraries for one split."""
    from torchcp.classification.score import APS as TorchAPS
    from torchcp.classification.score import LAC as TorchLAC
    from torchcp.classification.score import RAPS as TorchRAPS

    held_out, test = rows
    probabilities = posterior.predict(x).probabilities

    def ours(score: Any) -> Result:
        sets = fb.conformalize(posterior, (x[held_out], y[held_out]), level, score, seed=seed)
        return set_result(sets.predict_set(x[test], seed=seed + 10_000), y[test])

    data = (seed, probabilities, y, rows, level)
    return {
        ("nll", "flowbnn"): ours("nll"),
        ("nll", "MAPIE lac"): mapie_sets("lac", True, *data),
        ("nll", "TorchCP LAC"): torchcp_sets(TorchLAC(), *data),
        ("aps", "flowbnn"): ours("aps"),
        ("aps", "MAPIE aps"): mapie_sets("aps", True, *data),
        ("aps", "TorchCP APS(randomized=False)"): torchcp_sets(TorchAPS(randomized=False), *data),
        ("aps, randomized", "flowbnn"): ours(APS(randomized=True)),
        ("aps, randomized", "MAPIE aps, randomized"): mapie_sets("aps", "randomized", *data),
        ("aps, randomized", "TorchCP APS"): torchcp_sets(TorchAPS(), *data),
        ("raps", "flowbnn"): ours("raps"),
        ("raps", "MAPIE raps"): mapie_sets("raps", True, *data),
        ("raps", "TorchCP RAPS(0.1, 1)"): torchcp_sets(
            TorchRAPS(randomized=False, penalty=0.1, kreg=1), *data
        ),
        ("raps, randomized", "flowbnn"): ours(RAPS(randomized=True)),
        ("raps, randomized", "MAPIE raps, randomized"): mapie_sets("raps", "randomized", *data),
        ("raps, randomized", "TorchCP RAPS(0.1, 1)"): torchcp_sets(TorchRAPS(penalty=0.1, kreg=1), *data),
    }


def compare_numbers(
    posterior: Any, x: Tensor, y: Tensor, rows: Any, level: float, seed: int
) -> dict[tuple[str, str], Result]:
    """Returns coverage and width of all libraries for one split."""
    from torchcp.regression.score import ABS, CQR

    held_out, test = rows
    predictive = posterior.predict(x)
    low, high = predictive.quantiles([(1.0 - level) / 2, (1.0 + level) / 2])
    values = [tensor.flatten() for tensor in (predictive.mean, low, high, predictive.std)]

    def ours(score: Any) -> Result:
        result = fb.conformalize(posterior, (x[held_out], y[held_out]), level, score, seed=seed)
        report: Any = result.evaluate((x[test], y[test]))
        return report["coverage"], report["width"]

    data = (values, y, rows, level)
    return {
        ("absolute", "flowbnn"): ours("absolute"),
        ("absolute", "MAPIE absolute"): mapie_intervals("absolute", True, *data),
        ("absolute", "TorchCP ABS"): torchcp_intervals(ABS(), [0], *data),
        ("cqr", "flowbnn"): ours("cqr"),
        ("cqr", "MAPIE"): mapie_intervals("cqr", False, *data),
        ("cqr", "MAPIE, symmetric"): mapie_intervals("cqr", True, *data),
        ("cqr", "TorchCP CQR"): torchcp_intervals(CQR(), [1, 2], *data),
        ("normalized", "flowbnn"): ours("normalized"),
        ("nll", "flowbnn"): ours("nll"),
    }


TABLES: dict[str, tuple[Callable[..., Any], Callable[..., Any], int]] = {
    "digits": (digits, compare_classes, 10),
    "classes": (classes, compare_classes, 30),
    "numbers": (numbers, compare_numbers, 2),
}


def run(table: str, options: Any) -> list[dict[str, Any]]:
    """Returns one row for each score and library of a table."""
    make_data, compare, outputs = TABLES[table]
    results: dict[tuple[str, str], list[list[Result]]] = {}
    for seed in range(options.seed, options.seed + options.networks):
        x, y, train = make_data(seed)
        torch.manual_seed(seed)
        network = torch.nn.Sequential(
            torch.nn.Linear(x.shape[1], 64), torch.nn.ReLU(), torch.nn.Linear(64, outputs)
        )
        likelihood = fb.likelihoods.Gaussian("predicted") if table == "numbers" else "auto"
        posterior = fb.MAP(epochs=60, lr=0.01).fit(
            network, (x[:train], y[:train]), likelihood=likelihood, seed=seed, progress=False
        )
        x, y = x[train:], y[train:]
        splits = []
        for split in range(options.splits):
            number = 1000 * seed + split
            order = torch.randperm(len(y), generator=torch.Generator().manual_seed(number))
            rows = order[:HELD_OUT], order[HELD_OUT:]
            splits.append(compare(posterior, x, y, rows, options.coverage, number))
        for key in splits[0]:
            results.setdefault(key, []).append([split[key] for split in splits])
        print(
            f"{table}: network {seed - options.seed + 1} of {options.networks}", file=sys.stderr, flush=True
        )
    return [summarize(table, *key, values, results[key[0], "flowbnn"]) for key, values in results.items()]


def summarize(
    table: str, score: str, library: str, values: list[list[Result]], ours: list[list[Result]]
) -> dict[str, Any]:
    """Returns mean coverage and size of a library, and its mean difference to flowbnn with its standard error over networks."""
    sizes, own_sizes = (
        [statistics.fmean(size for _, size in splits) for splits in group] for group in (values, ours)
    )
    differences = [100.0 * (size / own - 1.0) for size, own in zip(sizes, own_sizes, strict=True)]
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("nan")
    coverage = statistics.fmean(coverage for splits in values for coverage, _ in splits)
    row = {"table": table, "score": score, "library": library, "coverage": coverage}
    return row | {"size": statistics.fmean(sizes), "larger": statistics.fmean(differences), "error": error}


def main() -> None:
    """Runs all tables and prints one line for each score and library."""
    parser = make_parser(__doc__, networks=10, splits=10, threads=1)
    parser.add_argument("--seed", type=int, default=100, help="seed of the first network")
    parser.add_argument("--coverage", type=float, default=0.9)
    parser.add_argument("--tables", nargs="+", choices=list(TABLES), default=list(TABLES))
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    options = parser.parse_args()
    options.device = "cpu"
    torch.set_num_threads(options.threads)
    # warnings of the rivals about data types, and of flowbnn about few epochs
    warnings.simplefilter("ignore")
    import_rivals()
    versions = {name: importlib.metadata.version(name) for name in ("mapie", "torchcp")}
    print(", ".join(f"{name} {version}" for name, version in versions.items()))
    rows = []
    for table in options.tables:
        rows += run(table, options)
        print(f"\n{table:20} {'library':32} coverage    size   larger than flowbnn")
        for row in rows:
            if row["table"] == table:
                difference = (
                    f"{row['larger']:+6.1f} % ± {row['error']:.1f}" if row["library"] != "flowbnn" else ""
                )
                print(
                    f"{row['score']:20} {row['library']:32} {row['coverage']:8.3f} {row['size']:7.3f}   {difference}"
                )
    write_results(options, "conformal", {"versions": versions, "rows": rows})


if __name__ == "__main__":
    main()
