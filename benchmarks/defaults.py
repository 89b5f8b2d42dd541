"""Effect of ``fb.fit`` with default arguments on trained networks: test NLL and ECE, compared with the deterministic network.

    python benchmarks/defaults.py [--sets digits wine ...] [--seeds 5] [--recipe NormalAffine] [--device auto] [--jobs 1] [--out FOLDER]

There are seven data sets: digits, breast cancer and wine of scikit-learn, two UCI regressions, and 2,000 and 60,000 images of
Fashion-MNIST. UCI and Fashion-MNIST are read from the folder in ``FLOWBNN_DATA``. Each seed has its own split, network and training.
Differences are paired by seed, with a 95 % interval of Student's t distribution. The last column is the time of the fit, relative to
the training of the deterministic network. NLL is the negative log-likelihood, ECE the expected calibration error; for regression the
ECE column has the error of the coverage of 90 % intervals.
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
from flowbnn.models import MLP, LeNet, SmallConv
from flowbnn_studies.data import load_images
from flowbnn_studies.data.load import data_folder
from flowbnn_studies.runner.findings import paired_difference

Data = tuple[Tensor, Tensor, Tensor, Tensor]


def split(inputs: Tensor, targets: Tensor, seed: int, share: float) -> Data:
    """Returns training and test data. Vectors and real-valued targets are standardized by the training data."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    train, test = order[: int(share * len(order))], order[int(share * len(order)) :]
    if inputs.ndim == 2:
        inputs = (inputs - inputs[train].mean(0)) / inputs[train].std(0).clamp_min(1e-6)
    if targets.is_floating_point():
        targets = (targets - targets[train].mean(0)) / targets[train].std(0)
    return inputs[train], targets[train], inputs[test], targets[test]


def tabular(name: str, seed: int) -> Data:
    from sklearn import datasets

    data = getattr(datasets, f"load_{name}")()
    inputs = torch.tensor(data.data, dtype=torch.float32)
    if name == "digits":
        inputs = (inputs / 16).view(-1, 1, 8, 8)
    return split(inputs, torch.tensor(data.target), seed, 0.7)


def uci(name: str, seed: int) -> Data:
    table = torch.tensor(np.loadtxt(data_folder() / "uci" / name / "data.txt"), dtype=torch.float32)
    return split(table[:, :-1], table[:, -1:], seed, 0.9)


def fashion(number: int, seed: int) -> Data:
    train, test = load_images("fashion-mnist"), load_images("fashion-mnist", "test")
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:number]
    return train.normalized()[chosen], train.labels[chosen], test.normalized(), test.labels


# data, network, batch size, epochs and learning rate of the deterministic training
SETS: dict[str, tuple[Callable[[int], Data], Callable[[], nn.Module], int, int, float]] = {
    "digits": (lambda seed: tabular("digits", seed), lambda: SmallConv(1, 10), 64, 20, 5e-3),
    "breast_cancer": (lambda seed: tabular("breast_cancer", seed), lambda: MLP(30, (50,), 2), 32, 40, 5e-3),
    "wine": (lambda seed: tabular("wine", seed), lambda: MLP(13, (50,), 3), 32, 60, 5e-3),
    "boston": (lambda seed: uci("bostonHousing", seed), lambda: MLP(13, (50,), 1), 32, 40, 1e-2),
    "concrete": (lambda seed: uci("concrete", seed), lambda: MLP(8, (50,), 1), 32, 40, 1e-2),
    "fashion-2000": (lambda seed: fashion(2_000, seed), lambda: LeNet(1), 64, 30, 1e-3),
    "fashion-60000": (lambda seed: fashion(60_000, seed), lambda: LeNet(1), 128, 10, 1e-3),
}


def measure(job: tuple[str, int, str, str]) -> dict[str, Any]:
    """Trains one network, fits its noise, and returns the test metrics of both and the relative time."""
    name, seed, recipe, device = job
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    data, network, batch, epochs, lr = SETS[name]
    inputs, targets, *test = (part.to(device) for part in data(seed))
    loader = TensorLoader(inputs, targets, batch_size=batch, shuffle=True)
    quiet: dict[str, Any] = {"seed": seed, "progress": False, "accelerator": device}
    torch.manual_seed(seed)
    result: dict[str, Any] = {"set": name, "seed": seed, "recipe": recipe}
    started = time.perf_counter()
    plain = fb.MLE(epochs=epochs, lr=lr).fit(network(), loader, **quiet)
    between = time.perf_counter()
    model = fb.to_stochastic(plain.model, {"*": getattr(fb.noise, recipe)()})
    posterior = fb.fit(model, loader, **quiet)
    result["time"] = (time.perf_counter() - between) / (between - started)
    for label, fitted in (("plain", plain), ("noise", posterior)):
        numbers = fb.evaluate(fitted, tuple(test), progress=False)
        if "coverage_90" in numbers:
            numbers["ece"] = abs(numbers["coverage_90"] - 0.9)
        result[label] = numbers
    return result


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the means of every data set, and the paired differences with their intervals."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        runs = [row for row in rows if row["set"] == name]
        line: dict[str, Any] = {"set": name, "seeds": len(runs), "time": mean(row["time"] for row in runs)}
        for key in ("nll", "ece"):
            values = {kind: [row[kind][key] for row in runs] for kind in ("plain", "noise")}
            line |= {f"{key} {kind}": mean(each) for kind, each in values.items()}
            gap = paired_difference(values["noise"], values["plain"])
            line[f"{key} difference"], line[f"{key} half"] = gap.mean, gap.high - gap.mean
        lines.append(line)
    return lines


def main() -> None:
    parser = make_parser(__doc__, seeds=5, jobs=1)
    parser.add_argument("--sets", nargs="+", choices=list(SETS), default=list(SETS))
    parser.add_argument("--recipe", default="NormalAffine")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="folder for defaults.json")
    arguments = parser.parse_args()
    jobs = [
        (name, seed, arguments.recipe, arguments.device)
        for name in arguments.sets
        for seed in range(arguments.seeds)
    ]
    with multiprocessing.get_context("spawn").Pool(arguments.jobs) as pool:
        rows = pool.map(measure, jobs, chunksize=1)
    lines = summary(rows)
    print(
        f"{arguments.recipe}, {arguments.seeds} seeds: deterministic, with noise, difference with 95 % interval; relative time"
    )
    for line in lines:
        cells = [f"{line['set']:14}"]
        for key in ("nll", "ece"):
            plain, noise, gap, half = (
                line[f"{key} {part}"] for part in ("plain", "noise", "difference", "half")
            )
            cells.append(f"{key.upper()} {plain:7.4f} {noise:7.4f} {gap:+.4f} +- {half:.4f}")
        print("   ".join([*cells, f"time {line['time']:.2f}"]))
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        content = {"recipe": arguments.recipe, "device": arguments.device, "summary": lines, "rows": rows}
        (arguments.out / f"defaults-{arguments.recipe}-{arguments.device}.json").write_text(
            json.dumps(content, indent=1)
        )


if __name__ == "__main__":
    main()
