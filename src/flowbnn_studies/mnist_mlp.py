"""Table 1 of Blundell et al. 2015 (https://arxiv.org/abs/1505.05424): MLPs on MNIST, with and without Gaussian weights."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.results import SeedResults, figure
from flowbnn.methods import MLE, BayesByBackprop, MCDropout, Method
from flowbnn.models import MLP
from flowbnn.options import Count, NonNegative, Positive, Probability, options
from flowbnn.training import cosine
from flowbnn_studies.images.data import SPLIT_SEED, read_images
from flowbnn_studies.images.settings import ImageSource
from flowbnn_studies.runner.findings import line, panel, pluralize
from flowbnn_studies.runner.methods import predict, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, regroup_parts

SCALE = 126.0  # divisor of the pixels, as in the paper
CHOICE_SEED = 100  # added to the seeds of runs that choose settings
METHODS = {  # label, and method for the colour
    "plain": ("Deterministic", "mle"),
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
    "error": ("Error", "lower", ".2%", "Fraction of images whose most probable class is wrong."),
    "nll": ("NLL", "lower", ".4f", "Mean negative log-likelihood (NLL) of the true class, in nats."),
    "ece": ("ECE", "lower", ".4f", "Expected calibration error in 15 equal bins."),
}
# settings that are tried on validation images, each instead of one default: priors in the ranges of the paper, and weights of the KL
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
    """Settings of the study, in addition to :class:`~flowbnn_studies.images.settings.ImageSource`.

    Args:
        units: Numbers of units of each of the two hidden layers.
        validation: Number of validation images, as in the paper, on which settings are chosen.
        choose: Train all :data:`CHOICES` and evaluate them on the validation images, without the test images.
        batch, epochs, lr: Batch size, epochs and learning rate of all trainings. The rate decays to zero along a cosine.
        noise_lr, base_scale: Learning rate and initial value of the standard deviations.
        prior: Standard deviation of the Gaussian prior.
        pi, sigma1, sigma2: Parameters of the scale mixture prior.
        beta, warmup: Weight of the KL, and the fraction of the run over which it grows.
        inputs, hidden: Dropout rates of pixels and of hidden units.
        samples: Number of networks averaged in a prediction.
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
    description = "test errors of MLPs on MNIST: deterministic, dropout, Bayes by Backprop with a Gaussian and a scale mixture prior"
    question = (
        "An MLP with two hidden layers is trained on MNIST without knowledge of images. Is the test error with a distribution over "
        "weights as low as with dropout, does the prior matter, and do more units increase the error?"
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
        train_set = read_images("mnist", "train", s)
        reduced_set, validation_set = train_set.split(s.validation, SPLIT_SEED)
        test_set = validation_set if s.choose else read_images("mnist", "test", s)
        key, _, units = job.variant.rpartition("-")
        train_set = train_set if key == "mixture-all" else reduced_set

        def tensors(images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            return images.to(job.device).flatten(1) / SCALE, labels.to(job.device)

        seed = job.seed + (CHOICE_SEED if s.choose else 0)
        loader = shuffled_loader(
            tensors(train_set.images, train_set.labels), s.batch, seed, job.device, drop_last=True
        )
        torch.manual_seed(seed)
        network = make_network(int(units), s if key == "dropout" else None)
        options = job.short_options(seed=1 + seed, num_data=len(train_set))
        posterior = make_method(key, s).fit(network.to(job.device), loader, **options)
        images, labels = tensors(test_set.images, test_set.labels)
        scores = predict(posterior, images, s.samples).evaluate(labels.cpu())
        values = {"error": 1.0 - scores["accuracy"], "nll": scores["nll"], "ece": scores["ece"]}
        return {"values": {f"{name}_{units}": value for name, value in values.items()}}

    def story(self, numbers: Numbers) -> Story:
        size = max(int(key.removeprefix("error_")) for key in numbers.metrics if key.startswith("error_"))
        error, ece = f"error_{size}", f"ece_{size}"
        mixture, dropout = (f"{100 * numbers.mean(key, error):.2f} %" for key in ("mixture", "dropout"))
        ending = "lower" if numbers.mean("mixture", ece) < numbers.mean("dropout", ece) else "higher"
        return Story(
            "Does a distribution over weights err as little as dropout on MNIST?",
            f"{'No' if numbers.mean('mixture', error) > numbers.mean('dropout', error) else 'Yes'}: Bayes by Backprop with a "
            "scale mixture "
            f"errs on {mixture} of the test images and dropout on {dropout}, though its calibration error is {ending} "
            f"({numbers.text('mixture', ece)} versus {numbers.text('dropout', ece)}).",
            f"{mixture} vs {dropout}",
            f"test errors of Bayes by Backprop and of dropout, {size} units",
            (error, f"nll_{size}", ece),
            charts=(error, ece),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        by_row = regroup_parts(parts, lambda variant, name: (variant.rpartition("-")[0], name))
        widths = settings.units[-1:] if settings.choose else settings.units
        metrics = make_metrics(NUMBERS, {units: f"{units} units" for units in widths})
        labels = {key: (key, "bayes-by-backprop") for key in CHOICES} if settings.choose else METHODS
        present = {key: value for key, value in labels.items() if by_row.of(key)}
        rows = [
            by_row.row(key, label, metrics, None if settings.choose else PUBLISHED.get(key), method)
            for key, (label, method) in present.items()
        ]
        mixture = f"π = {settings.pi:g}, σ₁ = {settings.sigma1:.3g}, σ₂ = {settings.sigma2:.2g}"
        notes = [
            f"Two hidden layers. Pixels are divided by {SCALE:g} and images are not augmented. {settings.validation:,} training "
            "images are held out for validation, as in the paper, and settings are chosen on them (--set choose=true, with another "
            "seed). Only the last row is trained on all images.",
            f"{settings.epochs} epochs of Adam with batches of {settings.batch}, and a learning rate that decays from "
            f"{settings.lr:g} to zero along a cosine. The paper has 600 epochs of SGD with batches of 128. Noise is drawn for every "
            f"example (local reparameterization), in the paper once for each batch. Predictions average {settings.samples} networks.",
            f"Scale mixture: {mixture}. Gaussian prior: {settings.prior:.3g}. The weight of the KL grows to {settings.beta:g} over "
            f"the first {settings.warmup:.0%} of the run.",
            f"Dropout rates: {settings.hidden:g} of the units and {settings.inputs:g} of the pixels.",
        ]
        all_figures = [] if settings.choose else [curves(settings, by_row, present)]
        return Findings(answer(settings, by_row, present), metrics, rows, all_figures, notes)


def make_network(units: int, dropout: Settings | None, inputs: int = 784) -> nn.Module:
    """Returns an MLP with two hidden layers, with dropout layers if there are rates.

    Args:
        units: Number of units of each hidden layer.
        dropout: Settings with the dropout rates; None for no dropout.
        inputs: Number of inputs.

    >>> len(make_network(4, None).state_dict()), sum(isinstance(layer, nn.Dropout) for layer in make_network(4, Settings()).modules())
    (6, 3)
    """
    if dropout is None:
        return MLP(inputs, (units, units), 10)
    hidden = dropout.hidden
    layers = [nn.Dropout(dropout.inputs), nn.Linear(inputs, units), nn.ReLU(), nn.Dropout(hidden)]
    return nn.Sequential(
        *layers, nn.Linear(units, units), nn.ReLU(), nn.Dropout(hidden), nn.Linear(units, 10)
    )


def make_method(key: str, s: Settings) -> Method:
    """Returns the method of a row or of a choice."""
    common: dict[str, Any] = {"epochs": s.epochs, "lr": s.lr, "schedule": cosine}
    if key == "plain":
        return MLE(**common)
    if key == "dropout":
        return MCDropout(prior_scale=1.0, **common)
    options: dict[str, Any] = {
        "noise_lr": s.noise_lr,
        "base_scale": s.base_scale,
        "beta": s.beta,
        "warmup": s.warmup,
    }
    options |= {"pi": s.pi, "sigma1": s.sigma1, "sigma2": s.sigma2, "prior_scale": s.prior, **common}
    options |= {"prior": "gaussian" if key.startswith("gaussian") else "scale-mixture"}
    return BayesByBackprop(**{**options, **CHOICES.get(key, {})})


def curves(s: Settings, parts: SeedResults, present: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Returns the figure of test errors against the number of units, and those of the paper."""
    ours, cited = [], []
    for key, (label, _) in present.items():
        widths = [units for units in s.units if parts.values(key, f"error_{units}")]
        columns = ([100 * value for value in parts.values(key, f"error_{units}")] for units in widths)
        ours.append(line(label, widths, columns))
        published = {units: PUBLISHED.get(key, {}).get(f"error_{units}") for units in s.units}
        values = {units: 100 * value for units, value in published.items() if value is not None}
        cited.append(line(label, values, ([value] for value in values.values())))
    panels = [panel("This study", "test error, %", ours)]
    if any(entry["x"] for entry in cited):
        panels.append(
            panel("Blundell et al. 2015", "test error, %", [entry for entry in cited if entry["x"]])
        )
    return figure(
        "curves",
        "Test error against the number of units",
        "Fraction of misclassified test images: means over seeds here, and table 1 of the paper.",
        {"x_label": "units in each hidden layer", "panels": panels},
    )


def answer(s: Settings, parts: SeedResults, present: dict[str, tuple[str, str]]) -> str:
    """Returns the answer, computed from the numbers."""
    error = f"error_{s.units[-1]}"
    ranked = sorted((parts.mean(key, error), key) for key in present if parts.values(key, error))
    if not ranked:
        return "No method has results yet."
    labels = {key: label for key, (label, _) in present.items()}
    if s.choose:
        (lowest, best), (highest, worst) = ranked[0], ranked[-1]
        return (
            f"On the validation images, {labels[best]} has the lowest error ({lowest:.2%}) and {labels[worst]} the highest "
            f"({highest:.2%})."
        )
    errors = ", ".join(f"{labels[key]} {value:.2%}" for value, key in ranked)
    text = f"Test errors with {s.units[-1]} units ({pluralize(len(parts.seeds))}): {errors}."
    value = parts.mean("mixture", error)
    if not math.isnan(value) and error in PUBLISHED["mixture"]:
        all_images = parts.mean("mixture-all", error)
        text += f"\nThe scale mixture has an error of {value:.2%}, versus {PUBLISHED['mixture'][error]:.2%} in the paper"
        text += (
            f", and {all_images:.2%} if it is trained on all 60,000 images."
            if not math.isnan(all_images)
            else "."
        )
    return text
