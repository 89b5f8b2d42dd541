"""Measures the running time of ``fb.calibrate``, and its gain with few examples.

    python benchmarks/calibrate.py [--threads 2] [--seeds 10] [--examples 1000] [--device cpu]

Time: a LeNet with random weights and images, with and without cross-validation, and the k-hat of the result. On a GPU also a ResNet18
with 5,000 images. A short calibration before excludes the one-time work of torch.

Few examples: an MLP with 64-64-10 units, or a small convolutional network, is trained on scikit-learn's digits. Its noise is fitted to
20 to 1,000 other digits, and tested on the last 697. Differences to factorized noise are paired by seed, with Student's 95 % interval.
"""

import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean

import torch
from common import make_parser
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import MissingPackageError
from flowbnn.methods.calibrators.temperature import Temperature
from flowbnn.models import MLP, LeNet, ResNet18, SmallConv
from flowbnn_studies.runner.findings import paired_difference

Pair = tuple[Tensor, Tensor]


def print_seconds(network: nn.Module, shape: tuple[int, ...], examples: int, device: str) -> None:
    """Prints the running time of a calibration with and without folds, and of k-hat.

    Args:
        network: Network with random weights.
        shape: Shape of an input.
        examples: Number of examples.
        device: Device to compute on.
    """
    torch.manual_seed(0)
    name, inputs = type(network).__name__, torch.randn(examples, *shape)
    with torch.no_grad():
        # drawn from the predictions: calibrators are not fitted to labels of one class
        logits = torch.cat([network.eval()(batch) for batch in inputs.split(250)])
    targets = torch.distributions.Categorical(logits=logits).sample()
    loader = TensorLoader(inputs.to(device), targets.to(device), batch_size=250)
    options = {"progress": False, "accelerator": device}
    fb.calibrate(network, (inputs[:100], targets[:100]), **options)
    for folds in (4, 0):
        start, cpu_start = time.perf_counter(), time.process_time()
        posterior = fb.calibrate(network, loader, folds=folds, **options)
        seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
        print(
            f"{name}, {examples:,} examples, {folds} folds: {seconds:.1f} s, {cpu_seconds:.1f} s of CPU time"
        )
    start = time.perf_counter()
    with suppress(MissingPackageError):
        fb.diagnostics.pareto_k(posterior, loader)
        print(f"{name}, {examples:,} examples, k-hat: {time.perf_counter() - start:.1f} s")


@dataclass(frozen=True)
class DigitsCase:
    """Setting of the experiment with few examples.

    Args:
        images: Number of digits that the weights are trained on.
        epochs: Number of epochs of the weights.
        examples: Number of digits that the noise is fitted to.
        lr: Learning rate of the weights.
        prior_scale: Standard deviation of the prior of the noise.
        conv: If True, the network is convolutional.
    """

    images: int
    epochs: int
    examples: int = 50
    lr: float = 0.01
    prior_scale: float = 0.5
    conv: bool = False


CASES = (
    *(DigitsCase(100, 100, examples) for examples in (20, 50, 100, 1_000)),
    *(DigitsCase(100, 100, examples, conv=True) for examples in (20, 50, 100)),
    DigitsCase(100, 400),
    DigitsCase(1_000, 30),
    DigitsCase(1_000, 30, prior_scale=1.0),
    DigitsCase(50, 200, lr=0.05),  # the weights memorize the digits and are overconfident
)


def split_digits(case: DigitsCase, seed: int) -> tuple[Pair, Pair, Pair]:
    """Returns inputs and targets for the weights, for the noise, and for the test."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs, targets = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    if case.conv:
        inputs = inputs.reshape(-1, 1, 8, 8)
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed))
    indices = order[: case.images], order[case.images : case.images + case.examples], order[1100:]
    training, held_out, test = ((inputs[index], targets[index]) for index in indices)
    return training, held_out, test


def print_gains(case: DigitsCase, seeds: int) -> None:
    """Prints the test NLL of calibrated networks and of their rivals, and the difference to factorized noise."""
    losses: dict[str, list[float]] = {}
    elbos: dict[str, list[float]] = {}
    quiet = {"progress": False, "accelerator": "cpu"}
    print(f"{case}, {seeds} seeds")
    for seed in range(seeds):
        training, held_out, test = split_digits(case, seed)
        torch.manual_seed(seed)
        loader = TensorLoader(*training, batch_size=50, shuffle=True)
        network = SmallConv(classes=10, width=12) if case.conv else MLP(64, (64,), 10)
        point = fb.MLE(epochs=case.epochs, lr=case.lr).fit(network, loader, seed=seed, **quiet)
        posteriors = {"plain": point, "temperature": Temperature().fit(point, [held_out], progress=False)}
        for structure in ("factorized", "layers", "full"):
            for prior in ("fixed", "fitted"):
                name = f"{structure}, {prior} prior"
                options = {
                    "structure": structure,
                    "prior": prior,
                    "prior_scale": case.prior_scale,
                    "folds": 0,
                }
                posteriors[name] = fb.calibrate(point.model, [held_out], **options, **quiet)
                elbo = case.examples * mean(posteriors[name].history["elbo"][-8:])
                elbos.setdefault(name, []).append(elbo)
        for name, posterior in posteriors.items():
            loss = fb.evaluate(posterior, test, samples=128, progress=False)["nll"]
            losses.setdefault(name, []).append(loss)
    baseline = losses["factorized, fixed prior"]
    for name, values in losses.items():
        gap = paired_difference(values, baseline)
        interval = f"{gap.mean:+.4f} +- {gap.high - gap.mean:.4f}"
        elbo_text = f"   ELBO {mean(elbos[name]):.1f} nats" if name in elbos else ""
        print(f"{name:<26} NLL {mean(values):.4f}   to factorized {interval}{elbo_text}")


def main() -> None:
    """Runs the benchmark."""
    parser = make_parser(__doc__, threads=2, seeds=10)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    if arguments.examples:
        print_seconds(LeNet(1), (1, 28, 28), arguments.examples, arguments.device)
        if arguments.device != "cpu":
            print_seconds(ResNet18(3), (3, 32, 32), 5 * arguments.examples, arguments.device)
    for case in CASES:
        print_gains(case, arguments.seeds)


if __name__ == "__main__":
    main()
