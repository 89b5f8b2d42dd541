"""Five classes of CIFAR-10 in training and five unseen ones, as in Louizos and Welling 2017 (https://arxiv.org/abs/1703.01961)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, SeedResults, best_first, figure, format_means
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods import MAP, MNF, BayesByBackprop, DeepEnsemble, MCDropout, Method
from flowbnn.methods.variational.base import Variational
from flowbnn.metrics import novelty_auroc
from flowbnn.options import Count, NonNegative, Positive, Probability, options
from flowbnn.training import cosine
from flowbnn_studies.data import CropAndFlip
from flowbnn_studies.images.data import ImageMethodSettings, ImageMethodStudy
from flowbnn_studies.runner.findings import histogram, histogram_panels, line, panel
from flowbnn_studies.runner.methods import predict
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job

AUGMENTED, LONG = "-moved", "-long"  # suffixes of keys
ROWS = (
    Candidate("map", "L2", MAP),
    Candidate("mc-dropout", "MC dropout", MCDropout, cost=2),
    Candidate("deep-ensemble", "Deep ensemble of 5", DeepEnsemble, {"members": 5}, cost=5),
    Candidate("ffg", "Factorized Gaussian, Gaussian prior", BayesByBackprop, {"estimator": "local"}, cost=2),
    Candidate(
        "fflu",
        "Factorized Gaussian, log-uniform prior",
        BayesByBackprop,
        {"estimator": "local", "prior": "log-uniform"},
        cost=2,
    ),
    Candidate("mnf", "Multiplicative flows", MNF, cost=3),
)
AUGMENTED_ROWS = tuple(
    replace(row, key=f"{row.key}{suffix}", label=f"{row.label}, augmented images{words}")
    for suffix, words in ((AUGMENTED, ""), (LONG, ", long"))
    for row in ROWS
    if row.key in ("map", "mc-dropout", "mnf")
)
WEIGHTS = (1.0, 0.1, 0.01, 0.001)  # of the KL, tried on validation images
CHOICES = tuple(
    replace(
        row,
        key=f"{row.key}-kl{beta:g}",
        label=f"{row.label}, KL × {beta:g}",
        settings={**row.settings, "beta": beta},
    )
    for row in (*ROWS, *AUGMENTED_ROWS)
    if row.key in ("mnf", f"mnf{LONG}")
    for beta in WEIGHTS
)
PUBLISHED = {"map": 0.24, "mc-dropout": 0.16, "deep-ensemble": 0.21, "ffg": 0.22, "fflu": 0.23, "mnf": 0.16}
KNOWN, NOVEL = "Known classes", "Unseen classes"
# fmt: off
METRICS = (
    Metric("error", "Error", "lower", ".1%", "Fraction of misclassified test images of the five known classes.", KNOWN),
    *(replace(m, group=KNOWN) for m in CLASSIFICATION[1:3]),
    Metric("novel_entropy", "Entropy, unseen", "higher", ".3f",
           "Mean predictive entropy on images of the five unseen classes, in nats; at most log 5 = 1.609.", NOVEL),
    Metric("known_entropy", "Entropy, known", "none", ".3f", "Mean predictive entropy on test images of the known classes, in "
        "nats.", NOVEL),
    Metric("auroc", "Novelty AUROC", "higher", ".3f",
           "Probability that an image of an unseen class has a higher entropy than one of a known class; 0.5 is chance.", NOVEL),
    Metric("auroc_mi", "AUROC by MI", "higher", ".3f",
           "Novelty AUROC by the mutual information of label and network; a single network has none.", NOVEL),
    Metric("auroc_energy", "AUROC by energy", "higher", ".3f",
           "Novelty AUROC by the energy, minus the logarithm of the sum of the exponentials of the logits.", NOVEL),
)
# fmt: on


@options(kw_only=True)
class Settings(ImageMethodSettings):
    """Settings of the study, in addition to :class:`~flowbnn_studies.images.data.ImageMethodSettings`.

    Args:
        width, hidden: Number of filters of both convolutions, and of units of the next layer.
        rate: Dropout rate.
        beta, warmup: Weight of the KL, and the fraction of the run over which it grows.
        long_epochs, long_beta: Epochs and weight of the KL of the long runs on augmented images.
        noise_lr: Learning rate of the standard deviations and flows.
        choose: Train multiplicative flows with several weights of the KL and evaluate them on the validation images, without the
            test images of the known classes.
        methods: Keys of the rows; empty for all.
    """

    width: Count = 192
    hidden: Count = 1_000
    rate: Probability = 0.5
    beta: NonNegative = 0.01
    warmup: NonNegative = 0.3
    long_epochs: Count = 150
    long_beta: NonNegative = 0.001
    noise_lr: Positive = 1e-3
    choose: bool = False
    validation: Count = 2_500
    batch: Count = 250
    epochs: Count = 30
    lr: Positive = 1e-3
    prior: Positive = 0.1
    samples: Count = 32
    methods: tuple[str, ...] = ()


class Cifar5(ImageMethodStudy):
    name = "cifar-5"
    title = "Five known and five unseen classes of CIFAR-10"
    description = (
        "LeNet on five classes of CIFAR-10: test error, and entropy on the other five, by six methods"
    )
    question = (
        "A LeNet is trained on five of the ten classes of CIFAR-10. Which methods have the lowest error on them, and how uncertain "
        "are they about images of the other five?"
    )
    source = "Ahn and Lee's lecture, after Louizos and Welling 2017"
    settings = Settings
    data = "cifar10"
    headline = ("error", "nll", "ece", "novel_entropy", "auroc")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "validation": 40, "epochs": 1, "long_epochs": 1, "batch": 40, "samples": 4, "width": 4,
        "hidden": 8,
    }  # fmt: skip

    def novel(self, settings: Settings) -> tuple[int, ...]:
        return tuple(range(5, 10))

    def folder(self, settings: Settings) -> str:
        return f"{self.name}-choice" if settings.choose else self.name

    def candidates(self, settings: Settings) -> list[Candidate]:
        rows = {row.key: row for row in (CHOICES if settings.choose else (*ROWS, *AUGMENTED_ROWS))}
        unknown = next((key for key in settings.methods if key not in rows), None)
        if unknown is not None:
            raise FlowBNNError(f"there is no row '{unknown}'{nearest(unknown, rows)}", argument="methods")
        return [row for key, row in rows.items() if not settings.methods or key in settings.methods]

    def make_method(self, job: Job, candidate: Candidate, steps: int) -> tuple[Method, dict[str, Any]]:
        s: Settings = job.settings
        method, options = super().make_method(job, candidate, steps)
        method = replace(method, schedule=cosine)
        long = LONG in candidate.key
        if long:
            method = replace(method, epochs=s.long_epochs)
        if isinstance(method, Variational):
            beta = candidate.settings.get("beta", s.long_beta if long else s.beta)
            method = replace(method, beta=beta, warmup=s.warmup, noise_lr=s.noise_lr)
        return method, options

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        data = self.load_data(job)
        network = lenet(s.width, s.hidden, s.rate if candidate.method is MCDropout else 0.0)
        augment = CropAndFlip(4, True) if AUGMENTED in candidate.key or LONG in candidate.key else None
        posterior = self.fit_candidate(job, candidate, network, data, augment)
        images, labels = data.validation if s.choose else data.test
        known, novel = (predict(posterior, inputs, s.samples) for inputs in (images, data.novel[0]))
        scores = known.evaluate(labels.cpu())
        values = {"error": 1.0 - scores["accuracy"], "nll": scores["nll"], "ece": scores["ece"]}
        values |= {"known_entropy": float(known.entropy.mean()), "novel_entropy": float(novel.entropy.mean())}
        values["auroc"] = novelty_auroc(known.entropy, novel.entropy)
        values["auroc_energy"] = novelty_auroc(known.energy, novel.energy)
        if known.num_samples > 1:
            values["auroc_mi"] = novelty_auroc(known.mutual_information, novel.mutual_information)
        grid = [1.61 * index / 40 for index in range(41)]
        below = [float((novel.entropy <= limit).double().mean()) for limit in grid]
        predictives = {"known": known, "novel": novel}
        return {
            "values": values,
            "below": {"x": grid, "share": below},
            "entropy": {
                name: histogram(predictive.entropy, 0.0, 1.61, 20) for name, predictive in predictives.items()
            },
        }

    def story(self, numbers: Numbers) -> Story:
        flows, plain = (f"{100 * numbers.mean(key, 'error'):.1f} %" for key in ("mnf-long", "map-long"))
        aurocs = [numbers.mean(key, "auroc") for key in numbers.ranked("auroc")]
        verdict = numbers.verdict("mnf-long", "map-long", "error")
        return Story(
            "Do multiplicative flows err least on known classes, and notice unknown ones?",
            f"With long training on moved images they err on {flows}, which is {verdict} than a deterministic network trained "
            "the same way "
            f"({plain}), and no method separates unknown classes well (AUROC {min(aurocs):.2f} to {max(aurocs):.2f}).",
            f"{flows} vs {plain}",
            "test errors of multiplicative flows and of a deterministic network, same training",
            ("error", "nll", "ece", "auroc"),
            rows=("map", "deep-ensemble", "mc-dropout", "mnf", "map-long", "mc-dropout-long", "mnf-long"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        candidates = self.evaluated_candidates(settings, parts)
        published = {key: {"error": value} for key, value in PUBLISHED.items()}
        notes = [
            f"Known classes: airplane, automobile, bird, cat and deer. {settings.validation:,} of their 25,000 training images are "
            "held out, on which the weight of the KL is chosen (--set choose=true). LeNet with two convolutions of "
            f"{settings.width} filters and a layer of {settings.hidden:,} units. {settings.epochs} epochs of Adam with batches of "
            f"{settings.batch}, and a learning rate that decays from {settings.lr:g} to zero along a cosine.",
            f"The weight of the KL is {settings.beta:g}, and Gaussian priors are N(0, {settings.prior:g}²). With a weight of 1 the "
            "prior of five million weights dominates the images.",
            "“Augmented images” are translated by up to 4 pixels and mirrored at random, unlike the published ones. “Long” runs "
            f"have {settings.long_epochs} epochs and a KL weight of {settings.long_beta:g}. Dropout: {settings.rate:g} before every "
            "layer except the first.",
        ]
        rows = self.rows(settings, parts, METRICS, None if settings.choose else published)
        return Findings(answer(parts, candidates), METRICS, rows, figures(parts, candidates), notes)


def lenet(width: int, hidden: int, rate: float = 0.0) -> nn.Module:
    """Returns a network with two 5x5 convolutions, pooling and two linear layers for 32x32 images. Dropout precedes all but the
    first layer.

    >>> import torch
    >>> lenet(4, 8, 0.5)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """

    def dropout() -> list[nn.Module]:
        return [nn.Dropout(rate)] if rate else []

    first = [nn.Conv2d(3, width, 5), nn.ReLU(), nn.MaxPool2d(2), *dropout()]
    second = [nn.Conv2d(width, width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *dropout()]
    return nn.Sequential(
        *first, *second, nn.Linear(25 * width, hidden), nn.ReLU(), *dropout(), nn.Linear(hidden, 5)
    )


def figures(parts: SeedResults, candidates: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Returns the figures of the entropies: cumulative distribution of unseen images, as in the paper, and histograms."""
    lines = []
    for candidate in candidates:
        curves: list[Mapping[str, Any]] = [
            part["below"] for part in parts.of(candidate.key) if "below" in part
        ]
        columns = zip(*(run["share"] for run in curves), strict=True)
        lines.append(line(candidate.label, curves[0]["x"], columns, std=None))
    contents = {
        candidate.label: [part["entropy"] for part in parts.of(candidate.key)] for candidate in candidates
    }
    groups = {"known": "test images of the five known classes", "novel": "images of the five unseen classes"}
    return [
        figure(
            "curves",
            "Entropy of images of unseen classes",
            "Fraction of the 5,000 test images of the five unseen classes with at most this entropy, mean over seeds. Lower lines "
            "further to the right belong to methods that are less certain about unseen classes.",
            {
                "x_label": "entropy (nats)",
                "panels": [panel("Distribution of the entropy", "fraction of the images", lines)],
            },
        ),
        figure(
            "histogram",
            "Entropy of known and unseen classes",
            "All seeds together. A method that detects unseen classes separates the two.",
            {"x_label": "entropy (nats)", "panels": histogram_panels(contents, groups)},
        ),
    ]


def answer(parts: SeedResults, candidates: Sequence[Candidate]) -> str:
    """Returns the answer, computed from the numbers."""
    order = best_first(parts, candidates, "error")
    if not order:
        return "No method has results yet."
    novel, auroc = (best_first(parts, candidates, name, higher=True) for name in ("novel_entropy", "auroc"))
    fewer = "up to " if any(len(parts.of(row.key)) < len(parts.seeds) for row in order) else ""
    text = (
        f"Test errors over {fewer}{len(parts.seeds)} seeds: {format_means(parts, order, 'error', '.1%')}.\n"
        f"Entropy of unseen classes: highest {format_means(parts, novel[:2], 'novel_entropy')} nats, lowest "
        f"{format_means(parts, novel[-1:], 'novel_entropy')}. Detection of unseen classes by entropy (AUROC): best "
        f"{format_means(parts, auroc[:2], 'auroc')}."
    )
    mnf, long = (parts.mean(key, "error") for key in ("mnf", f"mnf{LONG}"))
    if math.isnan(mnf):
        return text
    long_text = "" if math.isnan(long) else f", and {long:.1%} after a long run on augmented images"
    return f"{text}\nMultiplicative flows have an error of {mnf:.1%}{long_text}; published: 16 %."
