"""Five classes of CIFAR-10 and five that nobody has shown it, as in Louizos and Welling 2017 (https://arxiv.org/abs/1703.01961)."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from torch import nn

from flowbnn.compare.candidates import Candidate
from flowbnn.compare.results import CLASSIFICATION, Metric, Parts, best_first, figure, format_means
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
from flowbnn_studies.runner.study import Findings, Job

MOVED, LONG = "-moved", "-long"
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
SHIFTED = tuple(
    replace(one, key=f"{one.key}{end}", label=f"{one.label}, moved images{more}")
    for end, more in ((MOVED, ""), (LONG, ", long"))
    for one in ROWS
    if one.key in ("map", "mc-dropout", "mnf")
)
WEIGHTS = (1.0, 0.1, 0.01, 0.001)
TRIED = tuple(
    replace(
        one,
        key=f"{one.key}-kl{beta:g}",
        label=f"{one.label}, KL × {beta:g}",
        settings={**one.settings, "beta": beta},
    )
    for one in (*ROWS, *SHIFTED)
    if one.key in ("mnf", f"mnf{LONG}")
    for beta in WEIGHTS
)
PUBLISHED = {"map": 0.24, "mc-dropout": 0.16, "deep-ensemble": 0.21, "ffg": 0.22, "fflu": 0.23, "mnf": 0.16}
KNOWN, NOVEL = "The five classes it knows", "The five it does not"
# fmt: off
METRICS = (
    Metric("error", "Error", "lower", ".1%", "Share of test images of the five known classes that is classified wrongly.", KNOWN),
    *(replace(m, group=KNOWN) for m in CLASSIFICATION[1:3]),
    Metric("novel_entropy", "Entropy, unseen", "higher", ".3f",
           "Mean entropy of the predictive distribution on images of the other five classes, in nats; log 5 is 1.609.", NOVEL),
    Metric("known_entropy", "Entropy, known", "none", ".3f", "The same on test images of the known classes.", NOVEL),
    Metric("auroc", "Novelty AUROC", "higher", ".3f",
           "Of an unseen and a known image, drawn at random, how often the unseen one has the higher entropy.", NOVEL),
)
# fmt: on


@options(kw_only=True)
class Settings(ImageMethodSettings):
    """What the study depends on, besides :class:`~flowbnn_studies.images.data.PictureSettings`.

    Args:
        width, hidden: filters of both convolutions, and units of the layer after them.
        rate: of dropout.
        beta, warmup: weight of the KL, and the share of the run over which it grows.
        long_epochs, long_beta: of the long runs on moved images: epochs, and weight of the KL.
        noise_lr: rate of the standard deviations and flows.
        choose: train multiplicative flows with several weights of the KL, and evaluate them on the images that were put aside; the
            test images of the known classes stay closed.
        methods: keys of the rows; none for all.
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
    title = "Five classes of CIFAR-10, and five never seen"
    description = (
        "LeNet on five classes of CIFAR-10: test error, and the entropy on the other five, by six methods"
    )
    question = (
        "A LeNet learns five of the ten classes of CIFAR-10. Which methods err least on them, and how uncertain is each about images "
        "of the other five?"
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
        known = {one.key: one for one in (TRIED if settings.choose else (*ROWS, *SHIFTED))}
        wrong = next((key for key in settings.methods if key not in known), None)
        if wrong is not None:
            raise FlowBNNError(f"there is no row '{wrong}'{nearest(wrong, known)}", argument="methods")
        return [one for key, one in known.items() if not settings.methods or key in settings.methods]

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
        augment = CropAndFlip(4, True) if MOVED in candidate.key or LONG in candidate.key else None
        posterior = self.fit_candidate(job, candidate, network, data, augment)
        images, labels = data.validation if s.choose else data.test
        known, novel = (predict(posterior, some, s.samples) for some in (images, data.novel[0]))
        found = known.evaluate(labels.cpu())
        values = {"error": 1.0 - found["accuracy"], "nll": found["nll"], "ece": found["ece"]}
        values |= {"known_entropy": float(known.entropy.mean()), "novel_entropy": float(novel.entropy.mean())}
        values["auroc"] = novelty_auroc(known.entropy, novel.entropy)
        grid = [1.61 * place / 40 for place in range(41)]
        below = [float((novel.entropy <= limit).double().mean()) for limit in grid]
        both = {"known": known, "novel": novel}
        return {
            "values": values,
            "below": {"x": grid, "share": below},
            "entropy": {name: histogram(one.entropy, 0.0, 1.61, 20) for name, one in both.items()},
        }

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        chosen = self.evaluated_candidates(settings, parts)
        published = {key: {"error": value} for key, value in PUBLISHED.items()}
        notes = [
            f"Airplane, automobile, bird, cat and deer; {settings.validation:,} of their 25,000 training images are put aside, and the "
            f"weight of the KL is chosen on them (--set choose=true). LeNet with two convolutions of {settings.width} filters and a "
            f"layer of {settings.hidden:,} units. {settings.epochs} epochs of {settings.batch} images in a step by Adam, from a rate "
            f"of {settings.lr:g} to zero along a cosine.",
            f"The KL has the weight {settings.beta:g}, with a prior N(0, {settings.prior:g}²) where it is Gaussian: with a weight of 1 "
            "the prior of five million weights counts for more than all the images.",
            "“Moved images”: shifted by up to 4 pixels and mirrored at random, which the published ones are not; “long”: "
            f"for {settings.long_epochs} epochs, with a KL of weight {settings.long_beta:g}. Dropout: "
            f"{settings.rate:g} before every layer but the first.",
        ]
        rows = self.rows(settings, parts, METRICS, None if settings.choose else published)
        return Findings(answer(parts, chosen), METRICS, rows, figures(parts, chosen), notes)


def lenet(width: int, hidden: int, rate: float = 0.0) -> nn.Module:
    """Two convolutions of 5x5 with pooling and two linear layers, for images of 32x32; dropout of ``rate`` before all but the first.

    >>> import torch
    >>> lenet(4, 8, 0.5)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 5])
    """

    def drop() -> list[nn.Module]:
        return [nn.Dropout(rate)] if rate else []

    first = [nn.Conv2d(3, width, 5), nn.ReLU(), nn.MaxPool2d(2), *drop()]
    second = [nn.Conv2d(width, width, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), *drop()]
    return nn.Sequential(
        *first, *second, nn.Linear(25 * width, hidden), nn.ReLU(), *drop(), nn.Linear(hidden, 5)
    )


def figures(parts: Parts, chosen: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Entropies of unseen images: how many lie below a limit, as in the paper, and beside those of known ones."""
    lines = []
    for one in chosen:
        runs: list[Mapping[str, Any]] = [part["below"] for part in parts.of(one.key) if "below" in part]
        columns = zip(*(run["share"] for run in runs), strict=True)
        lines.append(line(one.label, runs[0]["x"], columns, std=None))
    contents = {one.label: [part["entropy"] for part in parts.of(one.key)] for one in chosen}
    groups = {"known": "test images of the five known classes", "novel": "images of the five others"}
    return [
        figure(
            "curves",
            "Entropy of images of unseen classes",
            "Share of the 5,000 test images of the five unseen classes whose entropy is at most this, mean over seeds. The further to "
            "the right and the lower a line is, the less sure the method is of what it has never seen.",
            {
                "x_label": "entropy (nats)",
                "panels": [panel("Distribution of the entropy", "share of the images", lines)],
            },
        ),
        figure(
            "histogram",
            "Entropy of known and of unseen classes",
            "All seeds together. A method that knows what it does not know has the two apart.",
            {"x_label": "entropy (nats)", "panels": histogram_panels(contents, groups)},
        ),
    ]


def answer(parts: Parts, chosen: Sequence[Candidate]) -> str:
    """The answer, put together from the numbers."""
    order = best_first(parts, chosen, "error")
    if not order:
        return "No method has numbers yet."
    novel, auroc = (best_first(parts, chosen, name, higher=True) for name in ("novel_entropy", "auroc"))
    fewer = "up to " if any(len(parts.of(one.key)) < len(parts.seeds) for one in order) else ""
    text = (
        f"Test errors over {fewer}{len(parts.seeds)} seeds: {format_means(parts, order, 'error', '.1%')}.\n"
        f"Unseen classes get the highest entropy from {format_means(parts, novel[:2], 'novel_entropy')} nats, the lowest from "
        f"{format_means(parts, novel[-1:], 'novel_entropy')}; by entropy they are told from known ones best by "
        f"{format_means(parts, auroc[:2], 'auroc')} (AUROC)."
    )
    mnf, long = (parts.mean(key, "error") for key in ("mnf", f"mnf{LONG}"))
    more = f", and on {long:.1%} after a long run on moved images" if long == long else ""
    return text + (f"\nMultiplicative flows err on {mnf:.1%}{more}; published: 16 %." if mnf == mnf else "")
