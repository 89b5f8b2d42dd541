"""What ``fb.calibrate`` costs, and what it gains from few examples.

    python benchmarks/calibrate.py [--threads 2] [--seeds 10] [--examples 1000] [--device cpu]

Time: a LeNet with random weights and images, with and without cross-validation, and k-hat of the result; on a GPU a VGG16 with 5,000
images as well. Few examples: an MLP of 64-64-10 units or a small
convolutional network trained on scikit-learn's digits, its noise on 20 to 1,000 others, the test on the last 697; differences to
factorized noise are paired by seed, with Student's 95 % interval.
"""

import time
import warnings
from dataclasses import dataclass
from statistics import mean

import torch
from common import make_parser
from torch import nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.methods.temperature import temper
from flowbnn.models import MLP, VGG16, LeNet, SmallConv
from flowbnn_studies.runner.findings import paired_difference


def seconds(network: nn.Module, shape: tuple[int, ...], examples: int, structure: str, device: str) -> None:
    torch.manual_seed(0)
    name, inputs = type(network).__name__, torch.randn(examples, *shape)
    with torch.no_grad():
        targets = torch.cat([network.eval()(part).argmax(-1) for part in inputs.split(250)])
    loader = TensorLoader(inputs.to(device), targets.to(device), batch_size=250)
    given = {"structure": structure, "progress": False, "accelerator": device}
    for folds in (4, 0):
        began = time.perf_counter()
        posterior = fb.calibrate(network, loader, folds=folds, **given)
        print(f"{name}, {examples:,} examples, {folds} folds: {time.perf_counter() - began:.1f} s")
    began = time.perf_counter()
    fb.diagnostics.pareto_k(posterior, loader)
    print(f"{name}, {examples:,} examples, k-hat: {time.perf_counter() - began:.1f} s")


@dataclass(frozen=True)
class Few:
    """Weights of ``images`` digits, noise of ``examples`` others under a prior of width ``scale``."""

    images: int
    epochs: int
    examples: int = 50
    lr: float = 0.01
    scale: float = 0.5
    conv: bool = False


CASES = (
    *(Few(100, 100, examples) for examples in (20, 50, 100, 1_000)),
    *(Few(100, 100, examples, conv=True) for examples in (20, 50, 100)),
    Few(100, 400),
    Few(1_000, 30),
    Few(1_000, 30, scale=1.0),
    Few(50, 200, lr=0.05),  # learned by heart, and sure of it
)


def few_digits(seeds: int, case: Few) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    losses: dict[str, list[float]] = {}
    bounds: dict[str, list[float]] = {}
    quiet = {"progress": False, "accelerator": "cpu"}
    print(f"{case}, {seeds} seeds")
    for seed in range(seeds):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
        parts = order[: case.images], order[case.images : case.images + case.examples], order[1100:]
        first, fresh, rest = ((inputs[index], targets[index]) for index in parts)
        if case.conv:
            first, fresh, rest = ((x.reshape(-1, 1, 8, 8), y) for x, y in (first, fresh, rest))
        torch.manual_seed(seed)
        loader = TensorLoader(*first, batch_size=50, shuffle=True)
        network = SmallConv(classes=10, width=12) if case.conv else MLP(64, (64,), 10)
        plain = fb.MLE(epochs=case.epochs, lr=case.lr).fit(network, loader, seed=seed, **quiet)
        rivals = {"plain": plain, "temperature": temper(plain, [fresh], progress=False)}
        for structure in ("factorized", "layers", "full"):
            for prior in ("fixed", "fitted"):
                name = f"{structure}, {prior} prior"
                given = {"structure": structure, "prior": prior, "prior_scale": case.scale, "folds": 0}
                rivals[name] = fb.calibrate(plain.model, [fresh], **given, **quiet)
                bounds.setdefault(name, []).append(case.examples * mean(rivals[name].history["elbo"][-8:]))
        for name, posterior in rivals.items():
            loss = fb.evaluate(posterior, rest, samples=128, progress=False)["nll"]
            losses.setdefault(name, []).append(loss)
    base = losses["factorized, fixed prior"]
    for name, values in losses.items():
        gap = paired_difference(values, base)
        bound = f"   ELBO {mean(bounds[name]):.1f} nats" if name in bounds else ""
        print(
            f"{name:<26} NLL {mean(values):.4f}   to factorized {gap.mean:+.4f} +- {gap.high - gap.mean:.4f}{bound}"
        )


def main() -> None:
    parser = make_parser(__doc__, threads=2, seeds=10)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    if given.examples:
        seconds(LeNet(1), (1, 28, 28), given.examples, "full", given.device)
        if given.device != "cpu":
            seconds(VGG16(3), (3, 32, 32), 5 * given.examples, "layers", given.device)
    for case in CASES:
        few_digits(given.seeds, case)


if __name__ == "__main__":
    main()
