"""Flows of images at a budget of minutes: bits per dimension, and samples."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.compare.results import Metric, Parts, read_json, write_json
from flowbnn.data import TensorLoader
from flowbnn.density import fit_density
from flowbnn.flows import IDF, FlowModel, Glow, ResidualFlow
from flowbnn.options import Count, NonNegative, Positive, options
from flowbnn_studies.images.data import read_bytes
from flowbnn_studies.images.settings import BelowOne, ImageSource
from flowbnn_studies.runner.findings import grid_figures, image_grid
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

FLOWS = {"glow": "Glow", "residual": "Residual flow", "idf": "Integer discrete flow"}
SETS = {"mnist": "MNIST", "cifar10": "CIFAR-10"}
METRICS = (
    Metric("bits", "Bits per dimension", "lower", ".3f", "Mean of -log2 p(x) over the test images, for each byte."),
    Metric("pixels", "Independent pixels", "none", ".3f", "The same for a histogram of each byte, with one added to all counts."),
    Metric("epochs", "Epochs", "none", ".1f", "Passes over the training images that the budget allowed."),
    Metric("minutes", "Minutes", "none", ".1f", "Of training, by the clock."),
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
    """What the study depends on.

    Args:
        sets, flows: which.
        minutes: budget of each training; its steps follow from the time of some. 0 takes ``epochs``.
        epochs: without a budget.
        length, width: steps at each level and channels of the networks on CIFAR-10; half as many on MNIST. Residual and integer
            discrete flows have half of the steps.
        batch: images in a step.
        lr: rate of Adam, which falls to zero along a cosine.
        clip: largest norm of the gradients of Glow and residual flows; 0 clips none.
        validation: share of the training images by which the best epoch is kept.
        tested: test images.
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
    tested: Count = 10_000


class ImageFlows(Study):
    name = "images"
    title = "Flows of images at a budget"
    description = "Glow, residual flows and integer discrete flows on MNIST and CIFAR-10 at ten GPU minutes each: bits per dimension"
    question = (
        "Published flows of images take days on several GPUs. How many bits for each byte do Glow, a residual flow and an integer "
        "discrete flow reach in ten minutes on one, and what do their samples look like?"
    )
    source = "Kingma and Dhariwal 2018; Chen et al. 2019; Hoogeboom et al. 2019"
    settings = Settings
    seeds = 1
    accelerator = "auto"
    headline = ("bits", "epochs", "minutes")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "generated": 64, "minutes": 0.0, "sets": ("mnist",), "length": 2, "width": 4, "batch": 32,
        "validation": 0.25, "tested": 8,
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
        images, test = read_bytes(job, name, "train")[0], read_bytes(job, name, "test")[0][: s.tested]
        torch.manual_seed(job.seed)
        flow = make_flow(kind, tuple(images.shape[1:]), s).to(job.device)
        common = job.short_options(precision="32-true", batch_size=s.batch, lr=s.lr, validation=0.0)
        common["clip_gradient"] = None if kind == "idf" else s.clip or None
        whole = max(1, len(images) // s.batch)  # steps of an epoch
        steps = whole * s.epochs
        if s.minutes:
            steps = load_or_plan_steps(job, partial(estimate_steps, flow, images, s.batch, s.minutes, common))
        some = images[: steps * s.batch]  # a budget may end before all images were seen
        epochs = max(1, steps // whole)
        kept = {
            "checkpoint": job.checkpoint_folder,
            "checkpoint_every": max(1, steps // 5),
            "resume": job.resume,
        }
        # the best epoch is kept, and none is left out
        best = {"validation": s.validation, "patience": epochs}
        density = fit_density(flow, some, epochs=epochs, **common | best, **kept)
        bits = density.bits_per_dimension(TensorLoader(test, batch_size=s.batch))
        passes = epochs * len(some) / len(images)
        values = {"bits": bits, "pixels": independent_bits(images, test), "epochs": passes}
        values["minutes"] = density.history.seconds / 60
        content: dict[str, Any] = {"values": values}
        if job.seed == 0:
            content["samples"] = image_grid(density.sample(32, seed=0).float() / 255, 8)
        return content

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        labels = self.row_labels(settings)
        rows = self.rows(settings, parts, METRICS, PUBLISHED)
        first = self.first_seed_parts(settings, parts, "samples")
        figures = grid_figures("Samples", "Drawn from each flow, seed 0.", first, "samples")
        notes = [
            f"{settings.minutes:g} minutes of training each; the number of steps follows from the time that some take, so that "
            f"the rate has fallen to zero when the budget is spent; the epoch is kept that is best for {settings.validation:.0%} of "
            "the training images, put aside. Images are not augmented, and the test images are used once.",
            f"On CIFAR-10 three levels of {settings.length} steps (but for Glow half as many) with networks of "
            f"{settings.width} channels, on MNIST two levels and half of both. Glow and residual flows dequantize bytes by uniform "
            "noise: theirs are bounds from above; the integer discrete flow has exact probabilities. The published numbers are for "
            "models that are larger and were trained for days; neural spline flows, which are not run here, have 3.38 on CIFAR-10.",
        ]
        return Findings(answer(parts, labels), METRICS, rows, figures, notes)


def make_flow(kind: str, shape: tuple[int, ...], s: Settings) -> FlowModel:
    """A flow for images of a shape.

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
    """How many steps there are to be; a run that is resumed keeps to what was planned when it began."""
    path = job.checkpoint_folder / "plan.json"
    plan = read_json(path) or {"steps": estimate()}
    write_json(path, plan)
    return int(plan["steps"])


def estimate_steps(
    flow: FlowModel, images: Tensor, batch: int, minutes: float, common: dict[str, Any]
) -> int:
    """How many steps a budget allows, from the time of two short trainings of different length, after one that wakes the device."""
    some = images[: 20 * batch]
    took = []
    for epochs in (1, 1, 5):
        start = time.perf_counter()
        fit_density(flow, some, epochs=epochs, **common)
        took.append(time.perf_counter() - start)
    _, short, long = took
    steps = max(1, len(some) // batch)
    step = (long - short) / (4 * steps) if long > short else long / (5 * steps)
    return max(1, int(60 * minutes / step))


def independent_bits(images: Tensor, test: Tensor, values: int = 256) -> float:
    """Bits for each number of test images under a histogram of its own, from training images, with one added to all counts.

    >>> independent_bits(torch.tensor([[0], [0], [1]]), torch.tensor([[0]]), values=2)  # -log2(3 / 5)
    0.7369655941662062
    """
    known, new = (one.flatten(1).long().cpu() for one in (images, test))
    ones = torch.ones(1, dtype=torch.float64)
    counts = ones.new_ones(known.shape[1], values).scatter_add_(1, known.mT, ones.expand(known.mT.shape))
    shares = counts.gather(1, new.mT) / (len(known) + values)
    return -float(shares.log2().mean())


def answer(parts: Parts, labels: dict[str, str]) -> str:
    """The answer, put together from the numbers."""
    known = [key for key in labels if parts.values(key, "bits")]
    told = ", ".join(f"{labels[key]} {parts.mean(key, 'bits'):.2f}" for key in known)
    return f"Bits per dimension of the test images: {told}." if told else "No flow has numbers yet."
