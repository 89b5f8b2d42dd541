"""Noise of networks trained on 45,000 images of CIFAR-10, fitted on the 5,000 images that their weights have not seen."""

from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch

from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader
from flowbnn.likelihoods import Categorical
from flowbnn.methods.calibrators.temperature import Temperature, TemperedPosterior
from flowbnn.options import Count, Positive, options
from flowbnn.posterior import PointPosterior
from flowbnn_studies.images.data import ImageData, load_image_data
from flowbnn_studies.images.settings import Training, make_network
from flowbnn_studies.images.study import SHORT_RESNET18
from flowbnn_studies.images.training import fit_variant
from flowbnn_studies.posteriors.calibrate import (
    CALIBRATE_DEFAULT,
    CORRUPTED,
    NUMBERS,
    ROWS_WITHOUT_NOISE,
    EvaluationSettings,
    evaluate_images,
    fit_posteriors,
)
from flowbnn_studies.runner.findings import paired_difference, pluralize
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, parts_by_row

NETWORKS = {"lenet": "LeNet", "vgg16": "VGG16", "resnet18": "ResNet18"}
FITS: dict[str, tuple[str, dict[str, Any]]] = {  # label, and arguments of calibrate
    "factorized": ("Noise, factorized", {"structure": "factorized", "prior": "fitted"}),
    "layers": ("Noise, full within layers", {"structure": "layers", "prior": "fitted"}),
    "chain": ("Noise, chain of layers", {"structure": "chain", "prior": "fitted"}),
    "joint": ("Noise, joint", {"structure": "full", "prior": "fitted"}),
    "joint-fixed": ("Noise, joint, fixed prior", {"structure": "full", "prior": "fixed"}),
    "own": (CALIBRATE_DEFAULT, {"folds": 5}),
}
ROWS = {
    **ROWS_WITHOUT_NOISE,
    **{key: (label, "node-noise-gaussian") for key, (label, _) in FITS.items()},
    "chosen": ("Noise, chosen by the ELBO", "node-noise-gaussian"),
    "all": ("Deterministic on all images, tempered", "temperature"),
}
NOVEL = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
# fmt: off
MORE = {
    "elbo": ("ELBO", "higher", ".4f", "ELBO of the fit, in nats per held-out image."),
    **{f"auroc_{key}": (f"AUROC {name}", "higher", ".3f",
       f"Probability that an image of {name} has a higher predictive entropy than a test image.")
       for key, name in NOVEL.items()},
    **{f"mi_{key}": (f"AUROC {name}, by MI", "higher", ".3f",
       f"AUROC on {name} by the mutual information of label and network; a single network has none.") for key, name in NOVEL.items()},
    **{f"energy_{key}": (f"AUROC {name}, by energy", "higher", ".3f",
       f"AUROC on {name} by the energy, minus the logarithm of the sum of the exponentials of the logits.")
       for key, name in NOVEL.items()},
    **CORRUPTED,
}
# fmt: on
TARGET = 0.008  # target of the ECE, as in vgg16-cifar10


@options(kw_only=True)
class Settings(EvaluationSettings):
    """Settings of the study, in addition to :class:`~flowbnn_studies.posteriors.calibrate.EvaluationSettings`.

    Args:
        width: Factor of the channels of VGG16 and ResNet18.
        held_out: Number of held-out images, which differ between seeds.
        fits: Keys of the posteriors to fit, out of :data:`FITS`.
        lenet, vgg16, resnet18: Trainings of the weights.
    """

    width: Positive = 1.0
    held_out: Count = 5_000
    fits: tuple[str, ...] = tuple(FITS)
    samples: Count = 32
    vgg16: Training = replace(SHORT_RESNET18, epochs=24, cutout=0)
    resnet18: Training = replace(vgg16, epochs=16)
    lenet: Training = replace(
        vgg16, epochs=60, batch=256, optimizer="adamw", weight_lr=4e-3, weight_decay=1e-2
    )

    def relevant(self, variant: str) -> dict[str, Any]:
        """Returns the settings that the result of a variant depends on."""
        network = variant.partition("-")[0]
        return {
            name: value for name, value in asdict(self).items() if name == network or name not in NETWORKS
        }


class CalibrateCifar10(Study):
    name = "calibrate-cifar10"
    title = "Calibrating networks on CIFAR-10"
    description = "LeNet, VGG16 and ResNet18: noise on held-out images of CIFAR-10, factorized to joint, versus temperature scaling"
    question = (
        "LeNet, VGG16 and ResNet18 are trained on 45,000 images of CIFAR-10. Then their noise is fitted to the other 5,000 with "
        "fixed weights. Does it predict better than temperature scaling, and which structure of the posterior is worth its time?"
    )
    source = "no published counterpart"
    settings = Settings
    seeds = 5
    accelerator = "auto"
    headline = ("nll_vgg16", "ece_vgg16", "nll_resnet18", "ece_resnet18")
    quick: ClassVar[dict[str, Any]] = {
        "source": "generated", "generated": 120, "width": 0.0625, "held_out": 30, "fits": ("factorized", "joint"), "samples": 2,
        "shift_samples": 2, "shift_images": 2,
        **{name: replace(getattr(Settings(), name), epochs=1, batch=35) for name in NETWORKS},
    }  # fmt: skip

    def variants(self, settings: Settings) -> tuple[Variant, ...]:
        """Returns a variant for each network with all its fits, then the networks on all images."""
        cost = {"lenet": 0.5, "vgg16": 1.0, "resnet18": 2.0}
        return tuple(Variant(key, label, "mle", cost=cost[key]) for key, label in NETWORKS.items()) + tuple(
            Variant(f"{key}-all", f"{label} on all images", "mle", start_from=key, cost=cost[key])
            for key, label in NETWORKS.items()
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        network, _, on_all_images = job.variant.partition("-")
        names = NUMBERS | MORE
        images = load_image_data(s.images(), "cifar10", list(NOVEL), job.device)
        train_set, held_out_set = images.train.split(min(s.held_out, len(images.train) // 3), job.seed)
        held_out = TensorLoader(
            train_set.normalizer()(held_out_set.images), held_out_set.labels, batch_size=1000
        )
        if on_all_images:
            start = make_network(network, images.channels, s.width)
            point = PointPosterior(job.load_start_network(start).to(images.device), Categorical())
            start_posterior = Temperature().fit(point, held_out, progress=False)
            assert isinstance(start_posterior, TemperedPosterior)
            temperature = start_posterior.temperature
            tempered = TemperedPosterior(_train_network(job, network, images), temperature)
            scores = evaluate_images(tempered, images, s, names, job.precision)
            return {"values": {}, "table": {"all": scores}}
        point = _train_network(job, network, replace(images, train=train_set))
        point.save(job.network_path)
        table = {}
        fits = {key: arguments for key, (_, arguments) in FITS.items() if key in s.fits}
        for key, posterior, seconds in fit_posteriors(point, held_out, job, fits):
            table[key] = evaluate_images(posterior, images, s, names, job.precision) | {"seconds": seconds}
            if key in fits and "elbo" in posterior.history:
                elbos = posterior.history["elbo"][-8:]
                table[key] |= {"elbo": sum(elbos) / len(elbos), "passes": posterior.history.epochs}
        return {"values": {}, "table": table, "minutes": point.history.seconds / 60}

    def story(self, numbers: Numbers) -> Story:
        names = {"lenet": "LeNet", "vgg16": "VGG16", "resnet18": "ResNet18"}
        won = [
            name for key, name in names.items() if numbers.better("chosen", "temperature", f"nll_{key}") > 0
        ]
        behind = sum(
            numbers.mean("all", f"nll_{key}") < numbers.mean("chosen", f"nll_{key}") for key in names
        )
        lead = (
            f"For {len(won)} of {len(names)} networks ({' and '.join(won)})"
            if won
            else f"For none of {len(names)} networks"
        )
        return Story(
            "Does noise on held-out images beat temperature scaling on CIFAR-10?",
            f"{lead}, for example from {numbers.text('temperature', 'nll_vgg16', '.3f')} to "
            f"{numbers.text('chosen', 'nll_vgg16', '.3f')} in "
            f"NLL with VGG16, but a network that is trained on the held-out images as well has a lower mean NLL in {behind} "
            f"of {len(names)}.",
            f"{len(won)} of {len(names)}",
            "networks whose NLL is significantly lower with noise than with temperature scaling",
            ("nll_lenet", "nll_vgg16", "nll_resnet18", "ece_vgg16"),
            rows=("plain", "temperature", "vector", "laplace", "factorized", "joint", "all"),
            charts=("nll_lenet", "nll_vgg16", "nll_resnet18"),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        by_row = network_parts_by_row(parts)
        values = by_row.of("plain")[0]["values"] if by_row.of("plain") else {}
        trained = {key: label for key, label in NETWORKS.items() if f"nll_{key}" in values}
        metrics = make_metrics(NUMBERS | MORE, trained)
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method) in ROWS.items()]
        trainings = []
        for key, label in NETWORKS.items():
            if runs := parts.of(key):
                minutes = sum(part["minutes"] for part in runs) / len(runs)
                trainings.append(f"{label} {getattr(settings, key).epochs} epochs ({minutes:.1f} minutes)")
        notes = [
            f"Weights: {', '.join(trainings)}; SGD with Nesterov momentum (LeNet: AdamW), one cycle of the learning rate, "
            "translated and mirrored images. The training is short: with more epochs the network is better and the noise has less "
            "to correct.",
            "The prior of the noise is N(m, s²) with a mean and a width for every layer by the ELBO, or fixed at N(1, 0.5²). "
            "“Chosen”: the structure with the highest ELBO for that seed, with a fitted prior. Its seconds include all these fits.",
            "Last-layer Laplace: Kronecker-factored, with the prior chosen by the marginal likelihood, fitted to the held-out "
            "images. Flows are not run: a step of their fit needs 32 draws for all held-out images, and 300 steps 48 million "
            "forward passes.",
            "Deterministic on all images: the same training on all 50,000 images, with the temperature of the network on 45,000 "
            "images, fitted to the other 5,000.",
            f"Predictions on the test set average {settings.samples} networks, those on out-of-distribution and corrupted images "
            f"{settings.shift_samples}, on the first {settings.shift_images} images. Nothing was chosen on test images.",
        ]
        return Findings(answer(by_row), metrics, [row for row in rows if row["values"]], [], notes)


def _train_network(job: Job, network: str, images: ImageData) -> PointPosterior:
    """Trains a network in channels-last format on a GPU, which is fastest for convolutions."""
    s: Settings = job.settings
    training: Training = getattr(s, network)
    untrained = make_network(network, images.channels, s.width)
    posterior = fit_variant("best-plain", network, training, untrained, images, job.short_options(), job.seed)
    assert isinstance(posterior, PointPosterior)
    if images.device.type == "cuda":
        posterior.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return posterior


def network_parts_by_row(parts: SeedResults) -> SeedResults:
    """Returns parts by row instead of by network, with values such as ``nll_vgg16``, and the row that the ELBO chooses."""
    tables = []
    for (variant, seed), part in parts.content.items():
        table = dict(part["table"])
        # only fitted priors compete, because a prior fitted to the ELBO always has a higher ELBO than a fixed one
        fits = [
            key for key, (_, arguments) in FITS.items() if key in table and arguments.get("prior") == "fitted"
        ]
        if fits:
            best = max(fits, key=lambda key: table[key]["elbo"])
            table["chosen"] = {**table[best], "seconds": sum(table[key]["seconds"] for key in fits)}
        tables.append((seed, variant.partition("-")[0], table))
    return parts_by_row(parts.seeds, tables)


def answer(parts: SeedResults) -> str:
    """Returns the answer, computed from the numbers."""
    lines = []
    for network, label in NETWORKS.items():
        nll, ece = f"nll_{network}", f"ece_{network}"
        number = len(parts.common("chosen", "temperature", nll)[0])
        if not number:
            continue
        difference = paired_difference(*parts.common("chosen", "temperature", nll))
        verdict = (
            "better than temperature scaling" if difference.mean < 0 else "worse than temperature scaling"
        )
        verdict = verdict if difference.significant else difference.inconclusive
        reached = "reaches" if parts.mean("chosen", ece) <= TARGET else "misses"
        comparisons = ""
        if (pair := parts.common("joint", "factorized", nll))[0]:
            comparisons += f" Joint versus factorized noise: {paired_difference(*pair).describe()}."
        if (pair := parts.common("chosen", "all", nll))[0]:
            gain = paired_difference(*pair).describe()
            comparisons += f" The tempered network on all images has {parts.mean('all', nll):.4f}; difference of the noise: {gain}."
        lines.append(
            f"{label}, {pluralize(number)}: the NLL is {parts.mean('plain', nll):.4f} without calibration, "
            f"{parts.mean('temperature', nll):.4f} with temperature scaling and {parts.mean('chosen', nll):.4f} with the noise "
            f"that the ELBO chooses ({verdict}: {difference.describe()}). "
            f"Its ECE {parts.mean('chosen', ece):.4f} {reached} {TARGET:g}.{comparisons}"
        )
    return "\n".join(lines) or "There are too few results for an answer."
