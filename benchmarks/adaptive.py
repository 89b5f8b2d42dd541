"""What adaptive sampling spends, and how far its answers are from those with all samples.

    python benchmarks/adaptive.py [--data digits|fashion-mnist|cifar10] [--root folder] [--epochs 10] [--images 2000] [--samples 128]
                                  [--tolerance 0.01] [--threads 2] [--device cpu] [--out results]

Trains a small network (LeNet on the image sets) and its flow noise, then predicts test images with all samples and adaptively, by each
of four rules. ``spent`` is the mean number of samples of an input, ``time`` is relative to all samples, ``same`` is the share of
inputs with the same decision, ``differ`` the largest difference of a probability (its median and its maximum over inputs), ``early``
the share of inputs that had fewer than all samples, and of these those that differ by more than the tolerance, and twice it.
``confidence`` is by how much theirs is higher than with all samples, on average, beside its mean Monte Carlo error, and ``epistemic``
the ratio of their epistemic parts: what optional stopping does. ``--epochs`` are those of the plain network, and again of the noise;
``--train`` and ``--images`` are at most so many training and test images.
"""

import sys
import warnings
from dataclasses import replace
from pathlib import Path

import torch
from common import options, parsed, write
from torch import Tensor, nn

import flowbnn as fb
from flowbnn.data import TensorLoader, load_digits
from flowbnn.models import LeNet, SmallConv
from flowbnn_studies.data import load_images
from flowbnn_studies.runner.study import time_call

FAR = {"further": 1.0, "twice": 2.0}  # tolerances


def load(name: str, root: Path | None, device: str) -> tuple[nn.Module, list[Tensor]]:
    """A network, and the training and test images with their labels."""
    if name == "digits":
        digits = load_digits()
        return SmallConv(1, 9).to(device), [part.to(device) for part in (*digits.train, *digits.test)]
    train, test = (load_images(name, split, root).to(device) for split in ("train", "test"))
    parts = [train.normalized(), train.labels, test.normalized(), test.labels]
    return LeNet(train.images.shape[1], len(train.classes)).to(device), parts


def main() -> None:
    parser = options(__doc__, epochs=10, train=60_000, images=10_000, samples=128, threads=2)
    parser.add_argument("--data", choices=["digits", "fashion-mnist", "cifar10"], default="digits")
    parser.add_argument("--root", type=Path, help="folder of the image sets")
    parser.add_argument(
        "--validation",
        action="store_true",
        help="predict the last training images instead, and leave them out",
    )
    parser.add_argument("--tolerance", type=float, default=0.01)
    parser.add_argument("--certainty", type=float, default=0.95)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path)
    arguments = parsed(parser)
    try:
        usual = fb.posterior.Adaptive(arguments.tolerance, arguments.certainty)
    except fb.FlowBNNError as error:
        parser.error(str(error))
    torch.manual_seed(0)
    warnings.simplefilter("ignore", fb.errors.FlowBNNWarning)
    network, (x, y, images, labels) = load(arguments.data, arguments.root, arguments.device)
    if arguments.validation:
        images, labels = x[-arguments.images :], y[-arguments.images :]
        x, y = x[: -arguments.images], y[: -arguments.images]
    judged = "validation" if arguments.validation else "test"
    loader = TensorLoader(x[: arguments.train], y[: arguments.train], batch_size=64, shuffle=True)
    run = {"progress": True, "accelerator": arguments.device}
    network = fb.MLE(epochs=arguments.epochs).fit(network, loader, **run).model
    rules = {
        "conv2": fb.noise.NormalInvConv(),
        "fc1": fb.noise.NormalPlanar(length=2),
        "*": fb.noise.NormalAffine(),
    }
    posterior = fb.fit(fb.to_stochastic(network, rules), loader, epochs=arguments.epochs, **run)
    images, labels = images[: arguments.images], labels[: arguments.images]
    posterior.predict(images[:256], 16)  # finds the plan
    count = arguments.samples
    full, sample_counts = time_call(posterior.predict, images, count, seed=1)
    other = posterior.predict(images, count, seed=2)
    print(
        f"{arguments.data}, {len(images)} {judged} images: accuracy {full.evaluate(labels)['accuracy']:.4f}; {count} other samples "
        f"give the same decision on {(full.labels == other.labels).double().mean():.4f} of them; all samples take {sample_counts:.2f} s"
    )
    rows = []
    for name, rule in {
        "either": usual,
        "either, at ties too": replace(usual, lead=0.0),
        "decision": replace(usual, until="decision"),
        "probabilities": replace(usual, until="probabilities"),
    }.items():
        found, taken = time_call(posterior.predict, images, count, seed=1, adaptive=rule)
        gap = (found.probabilities - full.probabilities).abs().amax(-1)
        row = {
            "until": name,
            "spent": float(found.sample_counts.double().mean()),
            "time": taken / sample_counts,
            "same": float((found.labels == full.labels).double().mean()),
            "accuracy": found.evaluate(labels)["accuracy"],
            "differ_median": float(gap.median()),
            "differ_most": float(gap.max()),
        }
        stopped = found.sample_counts < count
        early = gap[stopped]
        row |= {
            "confidence": float((found.confidence - full.confidence)[stopped].mean()),
            "confidence_error": float(found.confidence_error[stopped].mean()),
            "epistemic": float(found.epistemic[stopped].mean() / full.epistemic[stopped].mean()),
        }
        row["early"] = len(early) / len(gap)
        row |= {
            name: float((early > times * rule.tolerance).double().mean()) if len(early) else 0.0
            for name, times in FAR.items()
        }
        rows.append(row)
        print(
            f"  until {name:20} spent {row['spent']:6.1f} of {count}   time {row['time']:.2f}   same {row['same']:.4f}   "
            f"accuracy {row['accuracy']:.4f}   differ {row['differ_median']:.4f}, {row['differ_most']:.3f} at most   "
            f"early {row['early']:.3f}, of them further than the tolerance {row['further']:.3f}, than twice {row['twice']:.3f}   "
            f"confidence {row['confidence']:+.4f} (error {row['confidence_error']:.4f}), epistemic {row['epistemic']:.3f}"
        )
    write(arguments, f"adaptive-{arguments.data}", rows)


if __name__ == "__main__":
    try:
        main()
    except fb.FlowBNNError as error:
        sys.exit(f"adaptive.py: {error}")
