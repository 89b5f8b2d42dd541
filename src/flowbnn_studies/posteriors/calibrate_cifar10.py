"""Noise of networks that were trained on 45,000 images of CIFAR-10, fitted on the 5,000 that their weights have not seen."""

from dataclasses import asdict, replace
from typing import Any, ClassVar

import torch

from flowbnn.compare.results import Parts
from flowbnn.data import TensorLoader
from flowbnn.likelihoods import Categorical
from flowbnn.methods.temperature import TemperedPosterior, temper
from flowbnn.options import Count, Positive, options
from flowbnn.posterior import PointPosterior
from flowbnn_studies.images.data import ImageData, load_image_data
from flowbnn_studies.images.settings import Training, make_network
from flowbnn_studies.images.study import SHORT_RESNET18
from flowbnn_studies.images.training import fit_variant
from flowbnn_studies.posteriors.calibrate import (
    CALIBRATE_DEFAULT,
    CORRUPTED,
    FIRST,
    NUMBERS,
    EvaluationSettings,
    evaluate_images,
    fit_posteriors,
)
from flowbnn_studies.runner.findings import paired_difference, pluralize
from flowbnn_studies.runner.study import Findings, Job, Study, Variant, make_metrics, parts_by_row

NETWORKS = {"lenet": "LeNet", "vgg16": "VGG16", "resnet18": "ResNet18"}
FITS: dict[str, tuple[str, dict[str, Any]]] = {  # label, and what calibrate is given
    "factorized": ("Noise, factorized", {"structure": "factorized", "prior": "fitted"}),
    "layers": ("Noise, full within layers", {"structure": "layers", "prior": "fitted"}),
    "chain": ("Noise, chain of layers", {"structure": "chain", "prior": "fitted"}),
    "joint": ("Noise, joint", {"structure": "full", "prior": "fitted"}),
    "joint-fixed": ("Noise, joint, fixed prior", {"structure": "full", "prior": "fixed"}),
    "own": (CALIBRATE_DEFAULT, {"folds": 5}),
}
ROWS = {
    **FIRST,
    **{key: (label, "node-noise-gaussian") for key, (label, _) in FITS.items()},
    "chosen": ("Noise, chosen by the ELBO", "node-noise-gaussian"),
    "all": ("Plain on all images, tempered", "temperature"),
}
NOVEL = {"fashion-mnist": "Fashion-MNIST", "mnist": "MNIST"}
# fmt: off
MORE = {
    "elbo": ("ELBO", "higher", ".4f", "Of the fit, in nats for a held-out image."),
    **{f"auroc_{key}": (f"AUROC {name}", "higher", ".3f",
       f"Chance that an image of {name} has a higher predictive entropy than a test image.")
       for key, name in NOVEL.items()},
    **CORRUPTED,
}
# fmt: on
TARGET = 0.008  # of the ECE


@options(kw_only=True)
class Settings(EvaluationSettings):
    """What the study depends on, besides :class:`~flowbnn_studies.posteriors.calibrate.Evaluated`.

    Args:
        width: multiplies the channels of VGG16 and ResNet18.
        held_out: images that the weights do not see, other ones with every seed.
        fits: keys of the posteriors that are fitted, out of :data:`FITS`.
        lenet, vgg16, resnet18: how the weights are trained.
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
        """The settings that a variant's result depends on."""
        own = variant.partition("-")[0]
        return {name: value for name, value in asdict(self).items() if name == own or name not in NETWORKS}


class CalibrateCifar10(Study):
    name = "calibrate-cifar10"
    title = "Calibrating networks of CIFAR-10"
    description = "LeNet, VGG16 and ResNet18: noise on fresh images of CIFAR-10, factorized to joint, beside temperature scaling"
    question = (
        "LeNet, VGG16 and ResNet18 are trained on 45,000 images of CIFAR-10. Their weights stay, and their noise is fitted to the "
        "other 5,000. Does it predict better than temperature scaling, and which structure of the posterior is worth its time?"
    )
    source = "flowbnn's own"
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
        """A variant for each network with all its fits, then the networks on all images."""
        cost = {"lenet": 0.5, "vgg16": 1.0, "resnet18": 2.0}
        return tuple(Variant(key, label, "mle", cost=cost[key]) for key, label in NETWORKS.items()) + tuple(
            Variant(f"{key}-all", f"{label} on all images", "mle", start_from=key, cost=cost[key])
            for key, label in NETWORKS.items()
        )

    def train(self, job: Job) -> dict[str, Any]:
        s: Settings = job.settings
        network, _, whole = job.variant.partition("-")
        names = NUMBERS | MORE
        pictures = load_image_data(s.images(), "cifar10", list(NOVEL), job.device)
        rest, fresh = pictures.train.split(min(s.held_out, len(pictures.train) // 3), job.seed)
        held_out = TensorLoader(rest.normalizer()(fresh.images), fresh.labels, batch_size=1000)
        if whole:
            start = make_network(network, pictures.channels, s.width)
            point = PointPosterior(job.load_start_network(start).to(pictures.device), Categorical())
            temperature = temper(point, held_out, progress=False).temperature
            posterior = TemperedPosterior(_plain(job, network, pictures), temperature)
            return {
                "values": {},
                "table": {"all": evaluate_images(posterior, pictures, s, names, job.precision)},
            }
        plain = _plain(job, network, replace(pictures, train=rest))
        plain.save(job.network_path)
        table = {}
        fits = {key: how for key, (_, how) in FITS.items() if key in s.fits}
        for key, one, seconds in fit_posteriors(plain, held_out, job, fits):
            table[key] = evaluate_images(one, pictures, s, names, job.precision) | {"seconds": seconds}
            if key in fits:
                last = one.history["elbo"][-8:]
                table[key] |= {"elbo": sum(last) / len(last), "passes": one.history.epochs}
        return {"values": {}, "table": table, "minutes": plain.history.seconds / 60}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        by_row = network_parts_by_row(parts)
        known = by_row.of("plain")[0]["values"] if by_row.of("plain") else {}
        trained = {key: label for key, label in NETWORKS.items() if f"nll_{key}" in known}
        metrics = make_metrics(NUMBERS | MORE, trained)
        rows = [by_row.row(key, label, metrics, None, method) for key, (label, method) in ROWS.items()]
        minutes = {
            label: sum(part["minutes"] for part in parts.of(key)) / len(parts.of(key))
            for key, label in NETWORKS.items()
            if parts.of(key)
        }
        told = ", ".join(
            f"{NETWORKS[key]} {getattr(settings, key).epochs} epochs ({minutes[NETWORKS[key]]:.1f} minutes)"
            for key in NETWORKS
            if NETWORKS[key] in minutes
        )
        notes = [
            f"The weights: {told}; SGD with Nesterov momentum (LeNet: AdamW), one cycle of the rate, moved and mirrored images. A "
            "short training: more epochs would give a better network, whose noise has less to mend.",
            "The prior of the noise is N(m, s²) with a mean and a width for every layer by the ELBO, or fixed at N(1, 0.5²). “Chosen”: "
            "the structure whose ELBO is the highest for that seed, with a fitted prior; its seconds are those of all these fits.",
            "Last-layer Laplace: Kronecker-factored, its prior by the marginal likelihood, all on the held-out images. There is no row "
            "of flows: a step of their fit takes 32 draws through all held-out images, and 300 steps 48 million passes.",
            "Plain on all images: the same training on all 50,000, with the temperature that suits the network on 45,000 on the other "
            "5,000.",
            f"Predictions on the test set average {settings.samples} networks, those on novel and corrupted images "
            f"{settings.shift_samples}, on the first {settings.shift_images}. Nothing was chosen on test images.",
        ]
        return Findings(answer(by_row), metrics, [row for row in rows if row["values"]], [], notes)


def _plain(job: Job, network: str, pictures: ImageData) -> PointPosterior:
    """A network trained on these pictures, laid out as convolutions on a GPU are fastest."""
    s: Settings = job.settings
    training: Training = getattr(s, network)
    made = make_network(network, pictures.channels, s.width)
    posterior = fit_variant("best-plain", network, training, made, pictures, job.short_options(), job.seed)
    assert isinstance(posterior, PointPosterior)
    if pictures.device.type == "cuda":
        posterior.model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return posterior


def network_parts_by_row(parts: Parts) -> Parts:
    """From parts by network to parts by row, with values ``nll_vgg16``; and the row that the ELBO chooses."""
    tables = []
    for (variant, seed), part in parts.content.items():
        table = dict(part["table"])
        # among priors the ELBO is no judge: one that is fitted to it always wins
        fits = [key for key, (_, given) in FITS.items() if key in table and given.get("prior") == "fitted"]
        if fits:
            best = max(fits, key=lambda key: table[key]["elbo"])
            table["chosen"] = {**table[best], "seconds": sum(table[key]["seconds"] for key in fits)}
        tables.append((seed, variant.partition("-")[0], table))
    return parts_by_row(parts.seeds, tables)


def answer(parts: Parts) -> str:
    """The answer, put together from the numbers."""
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
        more = ""
        if (pair := parts.common("joint", "factorized", nll))[0]:
            more += f" Joint versus factorized noise: {paired_difference(*pair).describe()}."
        if (pair := parts.common("chosen", "all", nll))[0]:
            gain = paired_difference(*pair).describe()
            more += f" The tempered network on all images has {parts.mean('all', nll):.4f}; difference of the noise: {gain}."
        lines.append(
            f"{label}, {pluralize(number)}: the NLL is {parts.mean('plain', nll):.4f} without calibration, "
            f"{parts.mean('temperature', nll):.4f} with temperature scaling and {parts.mean('chosen', nll):.4f} with the noise "
            f"that the ELBO chooses ({verdict}: {difference.describe()}). "
            f"Its ECE {parts.mean('chosen', ece):.4f} {reached} {TARGET:g}.{more}"
        )
    return "\n".join(lines) or "Too little has been trained for an answer."
