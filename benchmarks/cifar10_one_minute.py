"""Trains a ResNet-9 with flow noise on CIFAR-10 from scratch, and reports the test accuracy with the seconds of its training.

    python benchmarks/cifar10_one_minute.py --device cuda --precision bf16-mixed --out results
    python benchmarks/cifar10_one_minute.py --device cuda --precision bf16-mixed --validation        # choice of settings
    python benchmarks/cifar10_one_minute.py --images 1000 --width 0.125 --epochs 2 --samples 2       # trial on a CPU

Network and recipe are those of Page (2018, https://myrtle.ai/learn/how-to-train-your-resnet), which reach 94 % without noise in 24
epochs: batches of 512, SGD with Nesterov momentum, learning rates that rise and fall linearly, random crops and mirror images, and
cutout of 8x8 (DeVries and Taylor 2017, https://arxiv.org/abs/1708.04552). Every layer has noise, from the flows of Xiong's report on
four of them and from Gaussians on the others. Weights and noise are trained together by ``fb.fit``.

The seconds of the training are those of all epochs, at the speed of the epochs after the first one. What the first one takes longer,
and the time before it, are reported as ``warmup``: compilation, autotuning and the recording of the step. The evaluation averages
``samples`` networks. ``two views`` averages each image with its mirror image, with half as many networks. With ``--validation`` 5,000
of the training images are held out and evaluated, and the test images are not read.
"""

import statistics
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from common import make_parser, parse_with, write_results
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

import flowbnn as fb
from flowbnn_studies.data import CropAndFlip, ImageSet, device_loader, load_images, mirror

SEEDS = (0, 1, 2)
VALIDATION_IMAGES = 5000
RISE = 0.2  # fraction of the run over which the learning rates grow


def convolution(before: int, after: int, pool: bool = False) -> nn.Sequential:
    """Returns a convolution with BatchNorm and ReLU, followed by a pool if ``pool`` is True."""
    layers = [nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))


class ResNet9(nn.Module):
    """Network of Page (2018): eight convolutions, two shortcuts and a linear layer, whose outputs are divided by 8.

    Args:
        width: Factor of the channels.
    """

    def __init__(self, width: float = 1.0) -> None:
        super().__init__()
        first, second, third, fourth = (max(1, round(width * number)) for number in (64, 128, 256, 512))
        self.prep = convolution(3, first)
        self.layer1 = convolution(first, second, pool=True)
        self.residual1 = nn.Sequential(convolution(second, second), convolution(second, second))
        self.layer2 = convolution(second, third, pool=True)
        self.layer3 = convolution(third, fourth, pool=True)
        self.residual3 = nn.Sequential(convolution(fourth, fourth), convolution(fourth, fourth))
        self.fc = nn.Linear(fourth, 10, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.prep(x))
        x = self.layer2(x + self.residual1(x))
        x = self.layer3(x)
        x = x + self.residual3(x)
        return self.fc(x.amax((2, 3))) / 8


def rules(base_scale: float) -> dict[str, fb.noise.Recipe]:
    """Returns the noise of the layers. The last convolution of each residual, ``layer3`` and ``fc`` have flows."""
    convolution = fb.noise.NormalInvConv(base_scale=base_scale)
    return {
        "*": fb.noise.NormalAffine(base_scale=base_scale),
        "residual*.1.0": convolution,
        "layer3.0": convolution,
        "fc": fb.noise.NormalPlanar(2, base_scale=base_scale),
    }


def make_schedule(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Returns a schedule whose rates rise linearly over a fraction of the run, and then fall linearly to zero."""
    peak = max(1.0, RISE * steps)
    return LambdaLR(
        optimizer, lambda step: min((step + 1) / peak, max(0.0, steps - step) / max(1.0, steps - peak))
    )


def train(
    images: ImageSet, options: Namespace, seed: int
) -> tuple[fb.posterior.NoisePosterior, float, float]:
    """Trains a network with noise.

    Returns:
        The posterior, the seconds of the training, and those of the warm-up.
    """
    start = time.perf_counter()
    torch.manual_seed(seed)
    network = fb.to_stochastic(ResNet9(options.width), rules(options.base_scale)).to(options.device)
    loader = device_loader(
        images,
        min(options.batch, len(images)),
        shuffle=True,
        augment=CropAndFlip(padding=4, cutout=8),
        generator=torch.Generator(options.device).manual_seed(seed),
        drop_last=True,
    )
    ends: list[float] = []  # seconds at which the epochs end
    posterior = fb.fit(
        network,
        loader,
        inplace=True,
        epochs=options.epochs,
        weight_lr=options.weight_lr,
        noise_lr=options.noise_lr,
        weight_decay=5e-4,
        warmup=0.5,
        optimizer=partial(torch.optim.SGD, lr=0.0, momentum=0.9, nesterov=True, fused=True),
        schedule=make_schedule,
        validation=None,
        report=False,
        precision=options.precision,
        acceleration=options.acceleration,
        seed=seed,
        callbacks=[lambda epoch: ends.append(epoch.seconds)],
        progress=False,
    )
    seconds = options.epochs * (ends[-1] - ends[0]) / (options.epochs - 1)
    return posterior, seconds, time.perf_counter() - start - seconds


def evaluate(
    posterior: fb.posterior.NoisePosterior, images: ImageSet, normalize: Any, options: Namespace, views: int
) -> dict[str, float]:
    """Returns scores of a posterior on a set of images, and the seconds of their computation.

    Args:
        posterior: Trained posterior.
        images: Images to predict.
        normalize: Normalization of the training images.
        options: Options of the benchmark.
        views: 1 for the images, 2 for the images and their mirror images.
    """
    start = time.perf_counter()
    prediction = posterior.predict(
        normalize(images.images),
        max(1, options.samples // views),
        seed=0,
        views=[mirror] if views == 2 else [],
        precision=options.precision,
        progress=False,
    )
    scores = prediction.evaluate(images.labels)
    return {**scores, "seconds": time.perf_counter() - start}


def main() -> None:
    parser = make_parser(__doc__, epochs=36, batch=512, samples=64, threads=2, images=50_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true")
    parser.add_argument("--acceleration", choices=("auto", "off", "graph", "compile"))
    parser.add_argument("--weight_lr", type=float, default=0.4)
    parser.add_argument("--noise_lr", type=float, default=0.1)
    parser.add_argument(
        "--base_scale", type=float, default=0.2, help="standard deviation of the noise at the start"
    )
    parser.add_argument("--width", type=float, default=1.0, help="factor of the channels, for trials")
    parser.add_argument("--validation", action="store_true", help="evaluate held-out training images")
    parser.add_argument("--out", type=Path, help="folder for the JSON file")
    options = parse_with(parser)
    if options.epochs < 2:
        parser.error("--epochs must be at least 2, so that one of them has no warm-up")
    if options.acceleration is None:
        options.acceleration = "compile" if options.device == "cuda" else "auto"
    images = load_images("cifar10", "train")
    if options.validation:
        images, evaluated = images.split(VALIDATION_IMAGES)
    else:
        evaluated = load_images("cifar10", "test")
    images = images.subset(slice(0, options.images)).to(options.device)
    evaluated = evaluated.subset(slice(0, options.images)).to(options.device)
    print(
        f"ResNet-9, flow noise, {len(images):,} images, {options.epochs} epochs, batch {options.batch}, {options.device}, "
        f"{options.precision}, {options.acceleration}; {options.samples} samples on {len(evaluated):,} images of the "
        f"{evaluated.partition} set"
    )
    rows: list[dict[str, Any]] = []
    for seed in options.seeds:
        posterior, seconds, warmup = train(images, options, seed)
        row: dict[str, Any] = {"seed": seed, "seconds": seconds, "warmup": warmup}
        for views in (1, 2):
            scores = evaluate(posterior, evaluated, images.normalizer(), options, views)
            row["one view" if views == 1 else "two views"] = scores
        rows.append(row)
        print(f"seed {seed}: training {seconds:.1f} s, warm-up {warmup:.1f} s")
        for name in ("one view", "two views"):
            print(f"  {name:9} {describe(row[name])}", flush=True)
    for name in ("one view", "two views"):
        means = {key: statistics.fmean(row[name][key] for row in rows) for key in rows[0][name]}
        print(f"mean, {name:9} {describe(means)}")
    print(f"longest training: {max(row['seconds'] for row in rows):.1f} s")
    write_results(options, "cifar10-one-minute", rows)


def describe(scores: dict[str, float]) -> str:
    """Returns scores as text."""
    return (
        f"accuracy {scores['accuracy']:.4f}   NLL {scores['nll']:.4f}   ECE {scores['ece']:.4f}   "
        f"evaluation {scores['seconds']:.1f} s"
    )


if __name__ == "__main__":
    main()
