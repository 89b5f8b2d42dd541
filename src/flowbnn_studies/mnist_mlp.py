"""The table of Blundell et al. 2015 (https://arxiv.org/abs/1505.05424): MLPs on MNIST, with Gaussian weights and without."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import Parts, figure
from flowbnn.methods import MLE, BayesByBackprop, MCDropout, Method
from flowbnn.models import MLP
from flowbnn.options import Count, NonNegative, Positive, Probability, options
from flowbnn.training import cosine
from flowbnn_studies.images.data import SPLIT_SEED, read_images
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import line, panel, pluralize
from flowbnn_studies.runner.methods import predict, shuffled_loader
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, regroup_parts

SCALE = 126.0  # pixels are divided by it, as in the paper: the empty ground stays at zero
CHOICE_SEED = 100
METHODS = {  # label and kind
    "plain": ("Plain", "mle"),
    "dropout": ("MC dropout", "mc-dropout"),
    "gaussian": ("Bayes by Backprop, Gaussian prior", "bayes-by-backprop"),
    "mixture": ("Bayes by Backprop, scale mixture", "bayes-by-backprop-mixture"),
    "mixture-all": ("Scale mixture, all 60,000 images", "bayes-by-backprop-mixture"),
}
PUBLISHED = {
    "plain": {"error_400": 0.0183, "error_800": 0.0184, "error_1200": 0.0188},
    "dropout": {"error_400": 0.0151, "error_800": 0.0133, "error_1200": 0.0136},
    "gaussian": {"error_400": 0.0182, "error_800": 0.0199, "error_1200": 0.0204},
    "mixture": {"error_400": 0.0136, "error_800": 0.0134, "error_1200": 0.0132},
}
NUMBERS = {
    "error": ("Error", "lower", ".2%", "Share of images whose most probable class is wrong."),
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood of the right class, in nats."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
}
# What is tried on validation images, each in place of one default: settings of the priors, by the paper's ranges, and of the KL.
CHOICES: dict[str, dict[str, Any]] = {
    **{
        f"mixture-s{first}-s{second}": {"sigma1": math.exp(-first), "sigma2": math.exp(-second)}
        for first, second in ((0, 6), (1, 6), (1, 7), (2, 6), (2, 7), (3, 7))
    },
    "mixture-pi25": {"pi": 0.25},
    "mixture-pi75": {"pi": 0.75},
    **{f"mixture-kl{weight:g}": {"beta": weight} for weight in (1.0, 0.1, 0.01)},
    **{f"gaussian-s{scale}": {"prior_scale": math.exp(-scale)} for scale in (0, 1, 2)},
}


@options(kw_only=True)
class Settings(ImageSource):
    """What the study depends on, besides :class:`~flowbnn_studies.images.settings.PictureData`.

    Args:
        units: of each of the two hidden layers.
        validation: images that are put aside, as in the paper, and that settings are chosen on.
        choose: train what is in :data:`CHOICES`, and evaluate it on the validation images; the test images stay closed.
        batch, epochs, lr: of all trainings; the rate falls to zero along half a cosine.
        noise_lr, base_scale: rate and start of the standard deviations.
        prior: standard deviation of the Gaussian prior.
        pi, sigma1, sigma2: of the scale mixture.
        beta, warmup: weight of the KL, and the share of the run over which it grows.
        inputs, hidden: rates of dropout of pixels and of units.
        samples: networks averaged in a prediction.
    """

    units: tuple[int, ...] = (400, 800, 1200)
    validation: Count = 10_000
    choose: bool = False
    batch: Count = 500
    epochs: Count = 100
    lr: Positive = 1e-3
    noise_lr: Positive = 5e-3
    base_scale: Positive = 0.1
    prior: Positive = math.exp(-2)
    pi: Probability = 0.5
    sigma1: Positive = math.exp(-2)
    sigma2: Positive = math.exp(-7)
    beta: NonNegative = 0.03
    warmup: NonNegative = 0.5
    inputs: Probability = 0.2
    hidden: Probability = 0.5
    samples: Count = 64


class MnistMlp(Study):
    name = "mnist-mlp"
    title = "Bayes by Backprop on MNIST: MLPs of 400, 800 and 1200 units"
    description = "test errors of MLPs on MNIST: plain, dropout, Bayes by Backprop with a Gaussian and a scale mixture prior"
    question = (
        "An MLP with two hidden layers learns MNIST without any knowledge of images. Does a distribution over its weights err as "
        "little as dropout, does the prior matter, and do more units hurt?"
    )
    source = "Blundell et al. 2015, table 1, as in Ahn and Lee's lecture"
    settings = Settings
    seeds = 3
    accelerator = "auto"
    headline = ("error_400", "error_800", "error_1200", "nll_1200", "ece_1200")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "units": (8, 12), "epochs": 1, "batch": 50, "validation": 100, "samples": 4,
    }  # fmt: skip

    def folder(self, settings: Settings) -> str:
        return f"{self.name}-choice" if settings.choose else self.name

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        largest = settings.units[-1]
        if settings.choose:
            return tuple(
                Variant(f"{key}-{largest}", key, "bayes-by-backprop", cost=largest, seeds=1)
                for key in CHOICES
            )
        return tuple(
            Variant(f"{key}-{units}", f"{label}, {units} units", kind, cost=units)
            for key, (label, kind) in METHODS.items()
            for units in (settings.units if key != "mixture-all" else (largest,))
        )

    def check(self, settings: Settings, jobs: Sequence[Job]) -> None:
        read_images("mnist", "train", settings)

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        learned = read_images("mnist", "train", s)
        rest, aside = learned.split(s.validation, SPLIT_SEED)
        tested = aside if s.choose else read_images("mnist", "test", s)
        key, _, units = job.variant.rpartition("-")
        learned = learned if key == "mixture-all" else rest

        def tensors(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return images.to(job.device).flatten(1) / SCALE, labels.to(job.device)

        seed = job.seed + (CHOICE_SEED if s.choose else 0)
        loader = shuffled_loader(
            tensors(learned.images, learned.labels), s.batch, seed, job.device, drop_last=True
        )
        torch.manual_seed(seed)
        network = make_network(int(units), s if key == "dropout" else None)
        options = job.short_options(seed=1 + seed, num_data=len(learned))
        posterior = make_method(key, s).fit(network.to(job.device), loader, **options)
        images, labels = tensors(tested.images, tested.labels)
        found = predict(posterior, images, s.samples).evaluate(labels.cpu())
        values = {"error": 1.0 - found["accuracy"], "nll": found["nll"], "ece": found["ece"]}
        return {"values": {f"{name}_{units}": value for name, value in values.items()}}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        by_row = regroup_parts(parts, lambda variant, name: (variant.rpartition("-")[0], name))
        widths = settings.units[-1:] if settings.choose else settings.units
        metrics = make_metrics(NUMBERS, {units: f"{units} units" for units in widths})
        labels = {key: (key, "bayes-by-backprop") for key in CHOICES} if settings.choose else METHODS
        present = {key: value for key, value in labels.items() if by_row.of(key)}
        rows = [
            by_row.row(key, label, metrics, None if settings.choose else PUBLISHED.get(key), kind)
            for key, (label, kind) in present.items()
        ]
        mixture = f"π = {settings.pi:g}, σ₁ = {settings.sigma1:.3g}, σ₂ = {settings.sigma2:.2g}"
        notes = [
            f"Two hidden layers; pixels divided by {SCALE:g} and not moved; {settings.validation:,} of the training images are put "
            "aside, as in the paper, and settings are chosen on them (--set choose=true, another seed); only the last row learns "
            "from all.",
            f"{settings.epochs} epochs of {settings.batch} images in a step by Adam, from a rate of {settings.lr:g} to zero along a "
            "cosine; the paper has 600 epochs of 128 by SGD. Noise is drawn for every example (local reparameterization), in the "
            f"paper once for each batch. Predictions average {settings.samples} networks.",
            f"Scale mixture: {mixture}; Gaussian prior: {settings.prior:.3g}; the KL has the weight {settings.beta:g}, to "
            f"which it grows over the first {settings.warmup:.0%} of the run.",
            f"Dropout: {settings.hidden:g} of the units and {settings.inputs:g} of the pixels.",
        ]
        drawn = [] if settings.choose else [curves(settings, by_row, present)]
        return Findings(answer(settings, by_row, present), metrics, rows, drawn, notes)


def make_network(units: int, dropped: Settings | None, inputs: int = 784) -> nn.Module:
    """Two hidden layers of as many units, with dropout of its own where there are rates.

    >>> len(make_network(4, None).state_dict()), sum(isinstance(part, nn.Dropout) for part in make_network(4, Settings()).modules())
    (6, 3)
    """
    if dropped is None:
        return MLP(inputs, (units, units), 10)
    hidden = dropped.hidden
    layers = [nn.Dropout(dropped.inputs), nn.Linear(inputs, units), nn.ReLU(), nn.Dropout(hidden)]
    return nn.Sequential(
        *layers, nn.Linear(units, units), nn.ReLU(), nn.Dropout(hidden), nn.Linear(units, 10)
    )


def make_method(key: str, s: Settings) -> Method:
    """The method of a row, or of a choice."""
    common: dict[str, Any] = {"epochs": s.epochs, "lr": s.lr, "schedule": cosine}
    if key == "plain":
        return MLE(**common)
    if key == "dropout":
        return MCDropout(prior_scale=1.0, **common)
    given: dict[str, Any] = {
        "noise_lr": s.noise_lr,
        "base_scale": s.base_scale,
        "beta": s.beta,
        "warmup": s.warmup,
    }
    given |= {"pi": s.pi, "sigma1": s.sigma1, "sigma2": s.sigma2, "prior_scale": s.prior, **common}
    given |= {"prior": "gaussian" if key.startswith("gaussian") else "scale-mixture"}
    return BayesByBackprop(**{**given, **CHOICES.get(key, {})})


def curves(s: Settings, parts: Parts, present: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Test errors against the number of units, and the paper's beside ours."""
    ours, cited = [], []
    for key, (label, _) in present.items():
        known = [units for units in s.units if parts.values(key, f"error_{units}")]
        columns = ([100 * value for value in parts.values(key, f"error_{units}")] for units in known)
        ours.append(line(label, known, columns))
        given = {units: PUBLISHED.get(key, {}).get(f"error_{units}") for units in s.units}
        values = {units: 100 * value for units, value in given.items() if value is not None}
        cited.append(line(label, values, ([value] for value in values.values())))
    panels = [panel("Here", "test error, %", ours)]
    if any(one["x"] for one in cited):
        panels.append(panel("Blundell et al. 2015", "test error, %", [one for one in cited if one["x"]]))
    return figure(
        "curves",
        "Test error against the number of units",
        "Share of the 10,000 test images that is classified wrongly: means over seeds here, and the paper's table 1.",
        {"x_label": "units in each hidden layer", "panels": panels},
    )


def answer(s: Settings, parts: Parts, present: dict[str, tuple[str, str]]) -> str:
    """The answer, put together from the numbers."""
    error = f"error_{s.units[-1]}"
    known = sorted((parts.mean(key, error), key) for key in present if parts.values(key, error))
    if not known:
        return "No method has numbers yet."
    labels = {key: label for key, (label, _) in present.items()}
    if s.choose:
        (best, key), (worst, last) = known[0], known[-1]
        return f"On the validation images {labels[key]} errs least ({best:.2%}), {labels[last]} most ({worst:.2%})."
    told = ", ".join(f"{labels[key]} {value:.2%}" for value, key in known)
    text = f"With {s.units[-1]} units and {pluralize(len(parts.seeds))} the test errors are: {told}."
    value = parts.mean("mixture", error)
    if not math.isnan(value) and error in PUBLISHED["mixture"]:
        least = parts.mean("mixture-all", error)
        text += (
            f"\nThe scale mixture errs on {value:.2%} where the paper has {PUBLISHED['mixture'][error]:.2%}"
            + (f", and on {least:.2%} if it learns from all 60,000 images." if not math.isnan(least) else ".")
        )
    return text
