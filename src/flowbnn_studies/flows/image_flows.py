"""Flows of images with a training budget of minutes: bits per dimension, and samples."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.results import Metric, SeedResults, read_json, write_json
from flowbnn.data import TensorLoader
from flowbnn.density import fit_density
from flowbnn.flows import IDF, FlowModel, Glow, ResidualFlow
from flowbnn.options import Count, NonNegative, Positive, options
from flowbnn_studies.images.data import read_bytes
from flowbnn_studies.images.settings import BelowOne, ImageSource
from flowbnn_studies.runner.findings import grid_figures, image_grid
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

FLOWS = {"glow": "Glow", "residual": "Residual flow", "idf": "Integer discrete flow"}
SETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
METRICS = (
    Metric("bits", "Bits per dimension", "lower", ".3f", "Mean of -log2 p(x) over the test images, per byte."),
    Metric("pixels", "Independent pixels", "none", ".3f", "Bits per dimension of independent histograms of each byte, with one "
                                                          "added to all counts."),
    Metric("epochs", "Epochs", "none", ".1f", "Number of passes over the training images within the budget."),
    Metric("minutes", "Minutes", "none", ".1f", "Wall-clock time of the training."),
)  # fmt: skip
# Glow on CIFAR-10: Kingma and Dhariwal 2018, on MNIST: Grathwohl et al. 2019; Chen et al. 2019 (all in table 5 of Kobyzev et al. 2020,
# https://arxiv.org/abs/1908.09257); Hoogeboom et al. 2019
PUBLISHED = {
    "glow-cifar10": {"bits": 3.35},
    "glow-mnist": {"bits": 1.05},
    "residual-cifar10": {"bits": 3.28},
    "residual-mnist": {"bits": 0.970},
    "idf-cifar10": {"bits": 3.34},
}


@options(kw_only=True)
class Settings(ImageSource):
    """Settings of the study.

    Args:
        sets, flows: Names of the image sets and of the flows.
        minutes: Time budget of each training. The number of steps is estimated from a short run. 0 uses ``epochs``.
        epochs: Number of epochs without a budget.
        length, width: Number of steps at each level and of channels of the networks on CIFAR-10, half as many on MNIST. Residual
            and integer discrete flows have half of the steps.
        batch: Number of images in a step.
        lr: Learning rate of Adam, which decays to zero along a cosine.
        clip: Largest norm of the gradients of Glow and residual flows; 0 for no clipping.
        validation: Fraction of the training images that chooses the epoch.
        num_tested: Number of test images.
    """

    generated: Count = 200
    sets: tuple[str, ...] = tuple(SETS)
    flows: tuple[str, ...] = tuple(FLOWS)
    minutes: NonNegative = 10.0
    epochs: Count = 1
    length: Count = 16
    width: Count = 128
    batch: Count = 128
    lr: Positive = 1e-3
    clip: NonNegative = 10.0
    validation: BelowOne = 0.02
    num_tested: Count = 10_000


class ImageFlows(Study):
    name = "images"
    title = "Flows of images with a time budget"
    description = "Glow, residual flows and integer discrete flows on MNIST and CIFAR-10, ten GPU minutes each: bits per dimension"
    question = (
        "Published flows of images were trained for days on several GPUs. How many bits per dimension do Glow, a residual flow and "
        "an integer discrete flow reach in ten minutes on one GPU, and how do their samples look?"
    )
    source = "Kingma and Dhariwal 2018; Chen et al. 2019; Hoogeboom et al. 2019"
    settings = Settings
    seeds = 1
    accelerator = "auto"
    headline = ("bits", "epochs", "minutes")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "generated": 64, "minutes": 0.0, "sets": ("mnist",), "length": 2, "width": 4, "batch": 32,
        "validation": 0.25, "num_tested": 8,
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        return tuple(
            Variant(f"{flow}-{name}", f"{FLOWS[flow]}, {SETS[name]}", exclusive=settings.minutes > 0)
            for name in settings.sets
            for flow in settings.flows
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        kind, _, name = job.variant.partition("-")
        images, test = read_bytes(job, name, "train")[0], read_bytes(job, name, "test")[0][: s.num_tested]
        torch.manual_seed(job.seed)
        flow = make_flow(kind, tuple(images.shape[1:]), s).to(job.device)
        common = job.short_options(precision="32-true", batch_size=s.batch, lr=s.lr, validation=0.0)
        common["clip_gradient"] = None if kind == "idf" else s.clip or None
        steps_per_epoch = max(1, len(images) // s.batch)
        steps = steps_per_epoch * s.epochs
        if s.minutes:
            steps = load_or_plan_steps(job, partial(estimate_steps, flow, images, s.batch, s.minutes, common))
        train_images = images[: steps * s.batch]  # the budget may be less than an epoch
        epochs = max(1, steps // steps_per_epoch)
        checkpoints = {
            "checkpoint": job.checkpoint_folder,
            "checkpoint_every": max(1, steps // 5),
            "resume": job.resume,
        }
        # the best epoch is kept, without early stopping
        selection = {"validation": s.validation, "patience": epochs}
        density = fit_density(flow, train_images, epochs=epochs, **common | selection, **checkpoints)
        bits = density.bits_per_dimension(TensorLoader(test, batch_size=s.batch))
        passes = epochs * len(train_images) / len(images)
        values = {"bits": bits, "pixels": independent_bits(images, test), "epochs": passes}
        values["minutes"] = density.history.seconds / 60
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            content["samples"] = image_grid(density.sample(32, seed=0).float() / 255, 8)
        return content

    def story(self, numbers: Numbers) -> Story:
        best = numbers.ranked("bits", ("glow-cifar10", "residual-cifar10", "idf-cifar10"))[0]
        cell = numbers.rows[best]["values"]["bits"]
        published = (
            f", versus {cell['published']:.2f} after days on several GPUs as published"
            if cell.get("published")
            else ""
        )
        return Story(
            "How far do flows of images come in ten minutes?",
            f"On CIFAR-10 {numbers.label(best).partition(',')[0]} is best with {numbers.text(best, 'bits', '.2f')} bits per dimension"
            f"{published}, but with one seed only.",
            f"{numbers.text(best, 'bits', '.2f')} bits",
            "per dimension of CIFAR-10 after ten minutes on one GPU",
            ("bits", "epochs", "minutes"),
            figure="images",
            panels=tuple(numbers.label(key) for key in ("glow-mnist", best) if key in numbers.rows),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        labels = self.row_labels(settings)
        rows = self.rows(settings, parts, METRICS, PUBLISHED)
        first = self.first_seed_parts(settings, parts, "samples")
        figures = grid_figures("Samples", "Seed 0: samples of each flow.", first, "samples")
        notes = [
            f"{settings.minutes:g} minutes of training each. The number of steps is estimated from a short run, so that the "
            f"learning rate reaches zero at the end of the budget. {settings.validation:.0%} of the training images choose the "
            "epoch. Images are not augmented, and the test images are used once.",
            f"On CIFAR-10: three levels of {settings.length} steps (half as many for residual and integer discrete flows) with "
            f"networks of {settings.width} channels. On MNIST: two levels, and half of both. Glow and residual flows dequantize "
            "bytes by uniform noise, so their values are upper bounds; the integer discrete flow has exact probabilities. The "
            "published models are larger and were trained for days. Neural spline flows, which are not run here, have 3.38 on "
            "CIFAR-10.",
        ]
        return Findings(answer(parts, labels), METRICS, rows, figures, notes)


def make_flow(kind: str, shape: tuple[int, ...], s: Settings) -> FlowModel:
    """Returns a flow for images of a shape.

    >>> type(make_flow("idf", (1, 28, 28), Settings(length=2, width=4))).__name__
    'IDF'
    """
    colour = shape[0] == 3
    length, width = (s.length, s.width) if colour else (max(1, s.length // 2), max(1, s.width // 2))
    common: dict[str, Any] = {"hidden": (width, width), "levels": 3 if colour else 2}
    if kind == "glow":
        return Glow(shape, length=length, data_init=True, **common)
    recipe = ResidualFlow if kind == "residual" else IDF
    return recipe(shape, length=max(1, length // 2), data_init=True, **common)


def load_or_plan_steps(job: Job, estimate: Callable[[], int]) -> int:
    """Returns the number of steps. A resumed run keeps the number that was planned at its start."""
    path = job.checkpoint_folder / "plan.json"
    plan = read_json(path) or {"steps": estimate()}
    write_json(path, plan)
    return int(plan["steps"])


def estimate_steps(
    flow: FlowModel, images: Tensor, batch: int, minutes: float, common: dict[str, Any]
) -> int:
    """Estimates the number of steps within a budget from two short trainings of different length, after a warm-up."""
    subset = images[: 20 * batch]
    times = []
    for epochs in (1, 1, 5):
        start = time.perf_counter()
        fit_density(flow, subset, epochs=epochs, **common)
        times.append(time.perf_counter() - start)
    _, short, long = times
    steps = max(1, len(subset) // batch)
    step = (long - short) / (4 * steps) if long > short else long / (5 * steps)
    return max(1, int(60 * minutes / step))


def independent_bits(images: Tensor, test: Tensor, values: int = 256) -> float:
    """Computes the bits per dimension of test images under independent histograms of training images, with one added to all counts.

    >>> independent_bits(torch.tensor([[0], [0], [1]]), torch.tensor([[0]]), values=2)  # -log2(3 / 5)
    0.7369655941662062
    """
    train_values, test_values = (tensor.flatten(1).long().cpu() for tensor in (images, test))
    ones = torch.ones(1, dtype=torch.float64).expand(train_values.mT.shape)
    counts = torch.ones(train_values.shape[1], values, dtype=torch.float64).scatter_add_(
        1, train_values.mT, ones
    )
    probabilities = counts.gather(1, test_values.mT) / (len(train_values) + values)
    return -float(probabilities.log2().mean())


def answer(parts: SeedResults, labels: dict[str, str]) -> str:
    """Returns the answer, computed from the numbers."""
    entries = ", ".join(
        f"{label} {parts.mean(key, 'bits'):.2f}" for key, label in labels.items() if parts.values(key, "bits")
    )
    return f"Bits per dimension of the test images: {entries}." if entries else "No flow has results yet."
