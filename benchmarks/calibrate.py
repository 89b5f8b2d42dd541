"""What ``fb.calibrate`` costs, and what it gains from few examples.

    python benchmarks/calibrate.py [--threads 2] [--seeds 10] [--examples 1000]

Time: a LeNet with random weights and images, with and without cross-validation. Few examples: an MLP of 64-64-10 units trained on
scikit-learn's digits (100, the same for longer, and 1,000), its noise on 50 others, the test on the last 697; differences to factorized
noise are paired by seed, with Student's 95 % interval.
"""

import argparse
import time
import warnings
from statistics import mean, stdev

import torch
from scipy.special import stdtrit

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.methods.temperature import temper
from flowbnn.models import MLP, LeNet


def seconds(examples: int) -> None:
    torch.manual_seed(0)
    network, inputs = LeNet(1), torch.randn(examples, 1, 28, 28)
    loader = TensorLoader(inputs, network(inputs).argmax(-1), batch_size=250)
    for folds in (4, 0):
        began = time.perf_counter()
        fb.calibrate(network, loader, folds=folds, progress=False, accelerator="cpu")
        print(f"LeNet, {examples:,} examples, {folds} folds: {time.perf_counter() - began:.1f} s")


def few_digits(seeds: int, images: int, epochs: int) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    losses: dict[str, list[float]] = {}
    bounds: dict[str, list[float]] = {}
    quiet = {"progress": False, "accelerator": "cpu"}
    print(f"weights on {images:,} digits, {epochs} epochs, noise on 50 others, {seeds} seeds")
    for seed in range(seeds):
        order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
        parts = order[:images], order[images : images + 50], order[1100:]
        first, fresh, rest = ((inputs[index], targets[index]) for index in parts)
        torch.manual_seed(seed)
        loader = TensorLoader(*first, batch_size=50, shuffle=True)
        plain = fb.MLE(epochs=epochs, lr=0.01).fit(MLP(64, (64,), 10), loader, seed=seed, **quiet)
        rivals = {"plain": plain, "temperature": temper(plain, [fresh], progress=False)}
        for structure in ("factorized", "layers", "full"):
            for prior in ("fixed", "fitted"):
                name = f"{structure}, {prior} prior"
                rivals[name] = fb.calibrate(
                    plain.model, [fresh], structure=structure, prior=prior, folds=0, **quiet
                )
                bounds.setdefault(name, []).append(50 * mean(rivals[name].history["elbo"][-8:]))
        for name, posterior in rivals.items():
            loss = fb.evaluate(posterior, rest, samples=128, progress=False)["nll"]
            losses.setdefault(name, []).append(loss)
    base = losses["factorized, fixed prior"]
    for name, values in losses.items():
        gaps = [one - other for one, other in zip(values, base, strict=True)]
        half = float(stdtrit(seeds - 1, 0.975)) * stdev(gaps) / seeds**0.5 if seeds > 1 else float("inf")
        bound = f"   ELBO {mean(bounds[name]):.1f} nats" if name in bounds else ""
        print(f"{name:<26} NLL {mean(values):.4f}   to factorized {mean(gaps):+.4f} +- {half:.4f}{bound}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--examples", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.simplefilter("ignore")
    seconds(given.examples)
    for images, epochs in ((100, 100), (100, 400), (1_000, 30)):
        few_digits(given.seeds, images, epochs)


if __name__ == "__main__":
    main()
