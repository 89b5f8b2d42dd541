"""What ``fb.fit`` with no argument but the loader does to a trained network: test NLL and ECE against the plain network's.

    python benchmarks/defaults.py [--sets digits wine ...] [--seeds 5] [--recipe NormalAffine] [--device auto] [--jobs 1] [--out FOLDER]

Seven data sets: digits, breast cancer and wine of scikit-learn, two UCI regressions, 2,000 and 60,000 images of Fashion-MNIST
(those in the folder that ``FLOWBNN_DATA`` names). Each seed has a split, a network and a training of its own. A difference is
paired by seed; its 95 % interval is Student's.
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
    """Training and test data of a seed; vectors are standardised by the training data, and so are real-valued targets."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    first, rest = order[: int(share * len(order))], order[int(share * len(order)) :]
    if inputs.ndim == 2:
        inputs = (inputs - inputs[first].mean(0)) / inputs[first].std(0).clamp_min(1e-6)
    if targets.is_floating_point():
        targets = (targets - targets[first].mean(0)) / targets[first].std(0)
    return inputs[first], targets[first], inputs[rest], targets[rest]


def tabular(name: str, seed: int) -> Data:
    from sklearn import datasets

    found = getattr(datasets, f"load_{name}")()
    inputs = torch.tensor(found.data, dtype=torch.float32)
    if name == "digits":
        inputs = (inputs / 16).view(-1, 1, 8, 8)
    return split(inputs, torch.tensor(found.target), seed, 0.7)


def uci(name: str, seed: int) -> Data:
    table = torch.tensor(np.loadtxt(data_folder() / "uci" / name / "data.txt"), dtype=torch.float32)
    return split(table[:, :-1], table[:, -1:], seed, 0.9)


def fashion(number: int, seed: int) -> Data:
    train, test = load_images("fashion-mnist"), load_images("fashion-mnist", "test")
    chosen = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:number]
    return train.normalized()[chosen], train.labels[chosen], test.normalized(), test.labels


# data, network, batch size, epochs and learning rate of the plain training
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
    """One training and one fit, by their test numbers and seconds."""
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
    for label, one in (("plain", plain), ("noise", posterior)):
        numbers = fb.evaluate(one, tuple(test), progress=False)
        if "coverage_90" in numbers:
            numbers["ece"] = abs(numbers["coverage_90"] - 0.9)
        result[label] = numbers
    return result


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Means of every set, and the paired differences with their intervals."""
    lines = []
    for name in dict.fromkeys(row["set"] for row in rows):
        some = [row for row in rows if row["set"] == name]
        line: dict[str, Any] = {"set": name, "seeds": len(some), "time": mean(row["time"] for row in some)}
        for key in ("nll", "ece"):
            values = {kind: [row[kind][key] for row in some] for kind in ("plain", "noise")}
            line |= {f"{key} {kind}": mean(own) for kind, own in values.items()}
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
    given = parser.parse_args()
    jobs = [(name, seed, given.recipe, given.device) for name in given.sets for seed in range(given.seeds)]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        rows = pool.map(measure, jobs, chunksize=1)
    lines = summary(rows)
    print(
        f"{given.recipe}, {given.seeds} seeds: plain, with noise, difference with its 95 % interval; time of the fit over plain's"
    )
    for line in lines:
        cells = [f"{line['set']:14}"]
        for key in ("nll", "ece"):
            plain, noise, gap, half = (
                line[f"{key} {part}"] for part in ("plain", "noise", "difference", "half")
            )
            cells.append(f"{key.upper()} {plain:7.4f} {noise:7.4f} {gap:+.4f} +- {half:.4f}")
        print("   ".join([*cells, f"time {line['time']:.2f}"]))
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        content = {"recipe": given.recipe, "device": given.device, "summary": lines, "rows": rows}
        (given.out / f"defaults-{given.recipe}-{given.device}.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
