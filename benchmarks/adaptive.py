"""Measures the number of samples of adaptive sampling, and the differences from answers with all samples.

    python benchmarks/adaptive.py [--data digits|fashion-mnist|cifar10] [--root folder] [--epochs 10] [--images 2000] [--samples 128]
                                  [--tolerance 0.01] [--threads 2] [--device cpu] [--out results]

The script trains a small network (LeNet on the image sets) and its flow noise. Then it predicts test images with all samples, and
adaptively by each of four rules. The table has these columns:

- ``samples``: mean number of samples of an input.
- ``time``: time relative to all samples.
- ``same``: share of inputs with the same decision.
- ``difference``: largest difference of a probability, its median and its maximum over inputs.
- ``early``: share of inputs with fewer than all samples. Of these, the shares that differ by more than the tolerance and by more than
  twice it.
- ``confidence``: mean difference of the confidence of early inputs, with its mean Monte Carlo error. It is biased by optional stopping.
- ``epistemic``: ratio of the epistemic parts of early inputs.

``--epochs`` is the number of epochs of the network, and again of the noise. ``--train`` and ``--images`` limit the numbers of training
and test images.
"""

import argparse
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from common import make_parser, parse_with, write_results
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader, load_digits
from flowbnn.models import LeNet, SmallConv
from flowbnn_studies.data import load_images
from flowbnn_studies.runner.study import time_call


def load(name: str, root: Path | None, device: str) -> tuple[nn.Module, list[Tensor]]:
    """Returns a network, and the training and test images with their labels."""
    if name == "digits":
        digits = load_digits()
        return SmallConv(1, 9).to(device), [tensor.to(device) for tensor in (*digits.train, *digits.test)]
    train, test = (load_images(name, split, root).to(device) for split in ("train", "test"))
    tensors = [train.normalized(), train.labels, test.normalized(), test.labels]
    return LeNet(train.images.shape[1], len(train.classes)).to(device), tensors


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that are no integers."""
    parser.add_argument("--data", choices=["digits", "fashion-mnist", "cifar10"], default="digits")
    parser.add_argument("--root", type=Path, help="folder of the image data")
    parser.add_argument(
        "--validation",
        action="store_true",
        help="predict the last training images instead and do not train on them",
    )
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--certainty", type=float, default=0.95)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)


def fit(options: argparse.Namespace) -> tuple[fb.Posterior, Tensor, Tensor]:
    """Trains the network and its noise. Returns the posterior, and the images to predict with their labels."""
    network, (x, y, images, labels) = load(options.data, options.root, options.device)
    if options.validation:
        images, labels = x[-options.images :], y[-options.images :]
        x, y = x[: -options.images], y[: -options.images]
    loader = TensorLoader(x[: options.train], y[: options.train], batch_size=64, shuffle=True)
    training = {"progress": True, "accelerator": options.device}
    network = fb.MLE(epochs=options.epochs).fit(network, loader, **training).model
    rules = {
        "conv2": fb.noise.NormalInvConv(),
        "fc1": fb.noise.NormalPlanar(length=2),
        "*": fb.noise.NormalAffine(),
    }
    posterior = fb.fit(
        fb.to_stochastic(network, rules), loader, epochs=options.epochs, **training, validation=None
    )
    return posterior, images[: options.images], labels[: options.images]


def compare(adaptive: Any, full: Any, labels: Tensor, tolerance: float) -> dict[str, float]:
    """Returns the columns of the table that compare an adaptive prediction with the full one."""
    gap = (adaptive.probabilities - full.probabilities).abs().amax(-1)
    stopped = adaptive.sample_counts < len(full.samples)
    early = gap[stopped]
    row = {
        "samples": float(adaptive.sample_counts.double().mean()),
        "same": float((adaptive.labels == full.labels).double().mean()),
        "accuracy": adaptive.evaluate(labels)["accuracy"],
        "difference_median": float(gap.median()),
        "difference_max": float(gap.max()),
        "confidence": float((adaptive.confidence - full.confidence)[stopped].mean()),
        "confidence_error": float(adaptive.confidence_error[stopped].mean()),
        "epistemic": float(adaptive.epistemic[stopped].mean() / full.epistemic[stopped].mean()),
        "early": len(early) / len(gap),
    }
    for name, factor in (("above_tolerance", 1.0), ("above_twice", 2.0)):
        row[name] = float((early > factor * tolerance).double().mean()) if len(early) else 0.0
    return row


def main() -> None:
    parser = make_parser(__doc__, epochs=10, train=60_000, images=10_000, samples=128, threads=2)
    add_options(parser)
    options = parse_with(parser)
    try:
        default = fb.posterior.Adaptive(options.tolerance, options.certainty)
    except fb.FlowBNNError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    warnings.simplefilter("ignore", fb.errors.FlowBNNWarning)
    posterior, images, labels = fit(options)
    posterior.predict(images[:256], 16)  # warms up
    count, split = options.samples, "validation" if options.validation else "test"
    full, full_seconds = time_call(posterior.predict, images, count, seed=1)
    other = posterior.predict(images, count, seed=2)
    print(
        f"{options.data}, {len(images)} {split} images: accuracy {full.evaluate(labels)['accuracy']:.4f}; {count} other samples "
        f"give the same decision on {(full.labels == other.labels).double().mean():.4f} of them; all samples take {full_seconds:.2f} s"
    )
    rows = []
    for name, rule in {
        "either": default,
        "either, lead=0": replace(default, lead=0.0),
        "decision": replace(default, criterion="decision"),
        "probabilities": replace(default, criterion="probabilities"),
    }.items():
        adaptive, seconds = time_call(posterior.predict, images, count, seed=1, adaptive=rule)
        row = {
            "criterion": name,
            "time": seconds / full_seconds,
            **compare(adaptive, full, labels, rule.tolerance),
        }
        rows.append(row)
        print(
            f"  criterion {name:20} samples {row['samples']:6.1f} of {count}   time {row['time']:.2f}   same {row['same']:.4f}   "
            f"accuracy {row['accuracy']:.4f}   difference {row['difference_median']:.4f}, {row['difference_max']:.3f} at most   "
            f"early {row['early']:.3f}, of these above the tolerance {row['above_tolerance']:.3f}, "
            f"above twice the tolerance {row['above_twice']:.3f}   "
            f"confidence {row['confidence']:+.4f} (error {row['confidence_error']:.4f}), epistemic {row['epistemic']:.3f}"
        )
    write_results(options, f"adaptive-{options.data}", rows)


if __name__ == "__main__":
    try:
        main()
    except fb.FlowBNNError as error:
        sys.exit(f"adaptive.py: {error}")
