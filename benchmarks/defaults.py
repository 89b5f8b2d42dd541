"""Effect of ``fb.fit`` with default arguments on trained networks: test NLL and ECE, compared with the deterministic network.

    python benchmarks/defaults.py [--sets digits wine ...] [--seeds 5] [--recipe NormalAffine] [--device cpu] [--jobs 1] [--out FILE]

There are fourteen tables of at most 600 training rows: sets of scikit-learn, generated ones and four UCI regressions. Three have
flipped labels, and five have at most 150 training rows. ``--sets fashion-2000 fashion-60000`` selects images. UCI tables and
Fashion-MNIST are read from the folder in ``FLOWBNN_DATA``; a set whose file is missing is left out.

Each seed has its own split, network and training. A network is trained by maximum likelihood on all training rows (given). It is then
trained further, for as many epochs and with the same learning rate as the fit trains its weights (longer), or its noise is fitted
(noise). Differences are paired by seed, with a 95 % interval of Student's t distribution. The last columns count fits that returned the
given network, and the seconds of a fit. NLL is the negative log-likelihood, ECE the expected calibration error. For regression the ECE
column has the error of the coverage of 90 % intervals.

With ``--out`` every finished run is written at once, and runs that are in the file are not repeated.
"""

import json
import multiprocessing
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from common import make_parser
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.models import MLP, LeNet
from flowbnn_studies.data import load_images
from flowbnn_studies.data.load import data_folder
from flowbnn_studies.runner.findings import paired_difference

Data = tuple[Tensor, Tensor, Tensor, Tensor]
ARMS = ("given", "longer", "noise")


def split(inputs: Tensor, targets: Tensor, seed: int, share: float, limit: int = 600) -> Data:
    """Returns training and test data. Vectors and real-valued targets are standardized by the training data."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    number = min(limit, int(share * len(order)))
    train, test = order[:number], order[number:]
    if inputs.ndim == 2:
        spread = inputs[train].std(0)
        inputs = (inputs - inputs[train].mean(0)) / torch.where(spread > 0, spread, 1.0)
    if targets.is_floating_point():
        targets = (targets - targets[train].mean(0)) / targets[train].std(0)
    return inputs[train], targets[train], inputs[test], targets[test]


def bundled(name: str, seed: int, limit: int = 600) -> Data:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    targets = torch.tensor(data.target)
    targets = targets.float()[:, None] if targets.is_floating_point() else targets
    return split(torch.tensor(data.data, dtype=torch.float32), targets, seed, 0.7, limit)


def uci(name: str, seed: int) -> Data:
    table = torch.tensor(np.loadtxt(data_folder() / "uci" / name / "data.txt"), dtype=torch.float32)
    return split(table[:, :-1], table[:, -1:], seed, 0.9)


def flipped(seed: int, rows: int = 500) -> Data:
    """Twenty inputs, a linear boundary, and 10 % flipped labels."""
    source = torch.Generator().manual_seed(seed)
    direction, inputs = torch.randn(20, generator=source), torch.randn(rows + 2000, 20, generator=source)
    labels = (inputs @ direction > 0) ^ (torch.rand(rows + 2000, generator=source) < 0.1)
    return inputs[:rows], labels[:rows].long(), inputs[rows:], labels[rows:].long()


def exclusive_or(seed: int, rows: int = 600) -> Data:
    """Sign of the product of two inputs, and 15 % flipped labels."""
    source = torch.Generator().manual_seed(seed)
    inputs = 4 * torch.rand(rows + 2000, 2, generator=source) - 2
    labels = (inputs.prod(-1) > 0) ^ (torch.rand(rows + 2000, generator=source) < 0.15)
    return inputs[:rows], labels[:rows].long(), inputs[rows:], labels[rows:].long()


def generated(name: str, seed: int, rows: int, **options: Any) -> Data:
    from sklearn import datasets

    inputs, labels = getattr(datasets, f"make_{name}")(n_samples=rows + 2000, random_state=seed, **options)
    return split(torch.tensor(inputs, dtype=torch.float32), torch.tensor(labels), seed, 1.0, rows)


def images(name: str, number: int, seed: int) -> Data:
    train, test = load_images(name), load_images(name, "test")
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:number]
    return train.normalized()[chosen], train.labels[chosen], test.normalized(), test.labels


# data, network, batch size, epochs and learning rate of the deterministic training
Setup = tuple[Callable[[int], Data], Callable[[], nn.Module], int, int, float]
SETS: dict[str, Setup] = {
    "flipped-500": (flipped, lambda: MLP(20, (50,), 2), 32, 40, 5e-3),
    "xor-600": (exclusive_or, lambda: MLP(2, (50, 50), 2), 32, 150, 5e-3),
    "digits-100": (lambda seed: bundled("digits", seed, 100), lambda: MLP(64, (50,), 10), 32, 60, 5e-3),
    "moons-100": (lambda s: generated("moons", s, 100, noise=0.3), lambda: MLP(2, (50,), 2), 32, 100, 1e-2),
    "classes-150": (
        lambda s: generated("classification", s, 150, n_features=10, n_informative=4, flip_y=0.05),
        lambda: MLP(10, (50,), 2),
        32,
        60,
        5e-3,
    ),
    "wine": (lambda seed: bundled("wine", seed), lambda: MLP(13, (50,), 3), 32, 60, 5e-3),
    "iris": (lambda seed: bundled("iris", seed), lambda: MLP(4, (50,), 3), 32, 100, 1e-2),
    "breast_cancer": (lambda seed: bundled("breast_cancer", seed), lambda: MLP(30, (50,), 2), 32, 40, 5e-3),
    "digits": (lambda seed: bundled("digits", seed), lambda: MLP(64, (50,), 10), 32, 40, 5e-3),
    "diabetes": (lambda seed: bundled("diabetes", seed), lambda: MLP(10, (50,), 1), 32, 40, 1e-2),
    "boston": (lambda seed: uci("bostonHousing", seed), lambda: MLP(13, (50,), 1), 32, 40, 1e-2),
    "concrete": (lambda seed: uci("concrete", seed), lambda: MLP(8, (50,), 1), 32, 40, 1e-2),
    "energy": (lambda seed: uci("energy", seed), lambda: MLP(8, (50,), 1), 32, 40, 1e-2),
    "yacht": (lambda seed: uci("yacht", seed), lambda: MLP(6, (50,), 1), 32, 60, 1e-2),
}
IMAGES: dict[str, Setup] = {
    "fashion-2000": (lambda seed: images("fashion-mnist", 2_000, seed), lambda: LeNet(1), 64, 30, 1e-3),
    "fashion-60000": (lambda seed: images("fashion-mnist", 60_000, seed), lambda: LeNet(1), 128, 10, 1e-3),
    "cifar10-5000": (lambda seed: images("cifar10", 5_000, seed), lambda: LeNet(3), 64, 30, 1e-3),
}


def measure(job: tuple[str, int, str, str]) -> dict[str, Any] | None:
    """Trains one network, fits its noise, and returns the test metrics of all arms. None if the data are missing."""
    name, seed, recipe, device = job
    torch.set_num_threads(1)
    data, network, batch, epochs, lr = (SETS | IMAGES)[name]
    try:
        inputs, targets, *test = (part.to(device) for part in data(seed))
    except FileNotFoundError:
        return None
    loader = TensorLoader(inputs, targets, batch_size=batch, shuffle=True)
    quiet: dict[str, Any] = {"seed": seed, "progress": False, "accelerator": device}
    torch.manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = fb.MLE(epochs=epochs, lr=lr).fit(network(), loader, **quiet)
        started = time.perf_counter()
        noise = fb.fit(fb.to_stochastic(given.model, {"*": getattr(fb.noise, recipe)()}), loader, **quiet)
        seconds = time.perf_counter() - started
        longer = fb.MLE(epochs=noise.history.epochs, lr=2e-4).fit(given.model, loader, **quiet)
    result: dict[str, Any] = {"set": name, "seed": seed, "recipe": recipe, "seconds": seconds}
    result["accepted"] = noise.report.accepted
    for label, posterior in zip(ARMS, (given, longer, noise), strict=True):
        numbers = fb.evaluate(posterior, tuple(test), progress=False)
        if "coverage_90" in numbers:
            numbers["ece"] = abs(numbers["coverage_90"] - 0.9)
        result[label] = {key: numbers[key] for key in ("nll", "ece")}
    return result


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the means of every data set, and the paired differences with their intervals."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        runs = sorted((row for row in rows if row["set"] == name), key=lambda row: row["seed"])
        line: dict[str, Any] = {"set": name, "seeds": len(runs)}
        line["returned the given network"] = sum(not row["accepted"] for row in runs)
        line["seconds"] = mean(row["seconds"] for row in runs)
        for key in ("nll", "ece"):
            values = {arm: [row[arm][key] for row in runs] for arm in ARMS}
            line |= {f"{key} {arm}": mean(each) for arm, each in values.items()}
            for arm in ARMS[:2]:
                gap = paired_difference(values["noise"], values[arm])
                line[f"{key} - {arm}"], line[f"{key} - {arm} half"] = gap.mean, gap.high - gap.mean
        lines.append(line)
    return lines


def print_summary(lines: list[dict[str, Any]]) -> None:
    """Prints one line per data set, and the number of sets that are better or worse beyond their intervals."""
    for line in lines:
        cells = [f"{line['set']:14}"]
        for key in ("nll", "ece"):
            cells.append(f"{key.upper()} " + " ".join(f"{line[f'{key} {arm}']:7.4f}" for arm in ARMS))
            cells += [
                f"- {arm} {line[f'{key} - {arm}']:+.4f} +- {line[f'{key} - {arm} half']:.4f}"
                for arm in ARMS[:2]
            ]
        cells.append(f"{line['returned the given network']} of {line['seeds']} as given")
        print("   ".join([*cells, f"{line['seconds']:.1f} s"]))
    for arm in ARMS[:2]:
        gaps = [(line[f"nll - {arm}"], line[f"nll - {arm} half"]) for line in lines]
        better, worse = (sum(sign * gap < -half for gap, half in gaps) for sign in (1, -1))
        print(f"NLL compared with {arm}: better on {better} of {len(lines)} sets, worse on {worse}")


def main() -> None:
    parser = make_parser(__doc__, seeds=5, jobs=1)
    parser.add_argument("--sets", nargs="+", choices=list(SETS | IMAGES), default=list(SETS))
    parser.add_argument("--recipe", default="NormalAffine")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file of the results, which is continued")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    if arguments.out is not None and arguments.out.exists():
        rows = json.loads(arguments.out.read_text())["rows"]
    done = {(row["set"], row["seed"], row["recipe"]) for row in rows}
    jobs = [
        (name, seed, arguments.recipe, arguments.device)
        for seed in range(arguments.seeds)
        for name in arguments.sets
        if (name, seed, arguments.recipe) not in done
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        for row in pool.imap_unordered(measure, jobs):
            if row is None:
                continue
            rows.append(row)
            if arguments.out is not None:
                arguments.out.parent.mkdir(parents=True, exist_ok=True)
                content = {"recipe": arguments.recipe, "summary": summary(rows), "rows": rows}
                arguments.out.write_text(json.dumps(content, indent=1) + "\n")
    print("NLL and ECE of the given network, trained longer, with noise; differences with 95 % intervals")
    print_summary(summary([row for row in rows if row["recipe"] == arguments.recipe]))


if __name__ == "__main__":
    main()
