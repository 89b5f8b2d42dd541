"""The comparison on images of Xiong's report, for LeNet and VGG16 on Fashion-MNIST and CIFAR-10, and ResNet18 with other posteriors."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from flowbnn.compare.results import Parts
from flowbnn.methods import SWAG, Posterior
from flowbnn.methods.ensemble import EnsemblePosterior
from flowbnn.posterior import PointPosterior
from flowbnn.training import History
from flowbnn_studies.data import CORRUPTIONS
from flowbnn_studies.images.data import ImageData, load_image_data
from flowbnn_studies.images.evaluation import add_matched_nll, evaluate, image_metrics
from flowbnn_studies.images.findings import PLAIN, answer, comparisons, figures, notes, table_rows
from flowbnn_studies.images.settings import (
    FASHION,
    GROUPS,
    LENET_CIFAR10,
    NAMES,
    QUICK,
    RESNET18_CIFAR10,
    VGG16_CIFAR10,
    ImageSettings,
    Published,
    Training,
    image_variants,
    make_network,
    split_key,
)
from flowbnn_studies.images.training import fit_variant, measure_cost
from flowbnn_studies.runner.study import Findings, Job, Study, Variant

SEEDS = (3, 5)  # of Xiong's recipe and of the best one


@dataclass(frozen=True, eq=False)
class ImageStudy(Study):
    """Is flow noise better than Gaussian noise, dropout, or none, in a network on images?

    Args:
        network, dataset: their names, in words.
        data: name of the data set.
        source: what it repeats.
        novel: kinds of images the network has never seen, by name, with labels.
        strange: what these are, for the question.
        published: numbers that stand beside ours.
        defaults: the settings that differ from those of :class:`ImageSettings`.
        remarks: how the settings came about where validation images did not choose them.
    """

    network: str
    dataset: str
    data: str
    source: str  # type: ignore[misc]
    novel: dict[str, str]
    strange: str
    published: Published
    defaults: dict[str, Any]
    remarks: tuple[str, ...]

    seeds: ClassVar[int] = 5
    accelerator: ClassVar[str] = "auto"
    quick: ClassVar[dict[str, Any]] = QUICK

    @property
    def architecture(self) -> str:
        return self.network.lower()

    @property
    def name(self) -> str:  # type: ignore[override]
        return f"{self.architecture}-{self.data.removesuffix('-mnist')}"

    @property
    def title(self) -> str:  # type: ignore[override]
        return f"{self.network} on {self.dataset}"

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{self.title}: plain, dropout, Gaussian, flow and mixture noise ({self.source})"

    @property
    def question(self) -> str:  # type: ignore[override]
        return (
            f"{self.network} learns {self.dataset}. Which kind of noise on the inputs of its layers gives the best probabilities, on "
            f"the test set, on corrupted images and on {self.strange} it has never seen; and is noise from a flow better than Gaussian "
            "noise?"
        )

    def settings(self, **changes: Any) -> ImageSettings:  # type: ignore[override]
        return ImageSettings(**{**self.defaults, **changes})

    def variants(self, settings: ImageSettings) -> tuple[Variant, ...]:
        every = image_variants(self.network, SEEDS)
        return every if settings.rounds else every[:-1]

    def pictures(self, settings: ImageSettings, device: str) -> ImageData:
        """The data on a device."""
        return load_image_data(settings, self.data, list(self.novel), device)

    def check(self, settings: ImageSettings, jobs: Sequence[Job]) -> None:
        if jobs:
            self.pictures(settings, "cpu")

    def train(self, job: Job) -> dict[str, Any]:
        settings: ImageSettings = job.settings
        pictures = self.pictures(settings, job.device)
        if job.variant == "cost":
            return measure_cost(self.architecture, settings, pictures, job.short_options(), job.precision)
        training = settings.training(job.variant)
        network = make_network(self.architecture, pictures.channels, settings.width)
        if job.start_from is not None:
            network = job.load_start_network(network)
        steps = max(1, pictures.num_data // training.batch)
        options = job.options(training.epochs, steps)
        # few checkpoints: each is three networks large
        options["checkpoint_every"] = max(1, training.epochs // 3) * steps
        curve_samples = settings.curve_samples if job.variant.startswith("xiong-") else 0
        posterior = fit_variant(
            job.variant, self.architecture, training, network, pictures, options, job.seed, curve_samples
        )
        posterior.save(job.network_path)
        return evaluate(posterior, pictures, settings.evaluating(job.variant), training, job.precision)

    def findings(self, settings: ImageSettings, parts: Parts) -> Findings:
        variants = self.variants(settings)
        parts = add_matched_nll(parts, variants, PLAIN)
        metrics = image_metrics(self.novel)
        table = table_rows(parts, variants, metrics, self.published)
        shown = [metric for metric in metrics if any(metric.key in row["values"] for row in table)]
        return Findings(
            answer(parts, variants, shown, self.published),
            shown,
            table,
            figures(parts, variants, self.published, self.novel, self.source),
            notes(parts, variants, settings, self.published, self.remarks),
            comparisons(parts, shown),
        )


def _trainings(
    start: Training,
    xiong: Training,
    best: Training,
    channel: Training,
    position: Training,
    **changes: Training,
) -> dict[str, Training]:
    """A training for every group: the best one's for the plain network and dropout, then that of the noise at each site."""
    groups = {group: channel if "channel" in group else position for group in GROUPS}
    return {**groups, "plain": best, "dropout": best, "start": start, "xiong": xiong, **changes}


# Xiong's report does not say its batch. With 32 images its plain network on Fashion-MNIST comes out as it reports (0.884 against 0.887
# on validation images; 0.873 with 64, 0.860 with 128). What starts from it fits the training images as the report's curves do with 512
# (Gaussian noise by position, one seed, validation images: log-likelihood -0.110, accuracy 0.895, ECE 0.046; the report's -0.117,
# 0.893, 0.045), and faster with 256 (-0.060, ECE 0.066) and fewer.
# The best recipe was chosen on 5,000 validation images with seed 100 (--set choose=true): rates of 0.002 and 0.004, 60, 90 and
# 120 epochs, noise of 0.1 to 0.4 at the start with a prior as wide or of 0.5, dropout of 0.05 to 0.2.
_BEST_LENET = Training(
    epochs=90, optimizer="adamw", weight_lr=4e-3, weight_decay=1e-2, schedule="cosine", rise=0.05, padding=2, flip=True,
)  # fmt: skip
_NOISE_LENET = replace(_BEST_LENET, noise_lr=5e-3, warmup=0.3, base_scale=0.2)
_WIDER_LENET = replace(_NOISE_LENET, base_scale=0.3)
_FASHION = _trainings(
    Training(epochs=10, batch=32, optimizer="sgd", weight_lr=2e-3),
    Training(batch=512),
    _BEST_LENET,
    _NOISE_LENET,
    _WIDER_LENET,
    dropout=replace(_BEST_LENET, rate=0.05),
    mixture_channel=replace(_NOISE_LENET, components=4),
    mixture_position=replace(_WIDER_LENET, components=4),
)

# On CIFAR-10 Xiong's report says neither its batch nor whether its images are moved and mirrored. The batches are those of the other
# study; with images as they are the training log-likelihood runs far past the report's, with moved and mirrored ones it does not
# (Gaussian noise by position, 128 images in a step, one seed, validation images: -0.91, accuracy 0.700, ECE 0.016; the report's -0.95,
# 0.687, 0.015).
# Chosen on 5,000 validation images with seed 100: rates of 0.002 and 0.004 for the plain network; at 0.002, 100 and 200 epochs, batches
# of 64, 128 and 256, a running average of the weights, noise of 0.05 to 0.2 at the start with a prior as wide or of 0.5, dropout of
# 0.05 and 0.1.
_BEST_CIFAR10 = replace(_BEST_LENET, epochs=150, padding=4)
_NOISE_CIFAR10 = replace(_BEST_CIFAR10, noise_lr=5e-3, warmup=0.3, base_scale=0.05)
_MIXTURE_CIFAR10 = replace(_NOISE_CIFAR10, components=4)
_CIFAR10 = _trainings(
    Training(epochs=20, batch=32, optimizer="sgd", weight_lr=2e-3, padding=4, flip=True),
    Training(batch=512, padding=4, flip=True),
    _BEST_CIFAR10,
    _NOISE_CIFAR10,
    _NOISE_CIFAR10,
    dropout=replace(_BEST_CIFAR10, rate=0.05),
    mixture_channel=_MIXTURE_CIFAR10,
    mixture_position=_MIXTURE_CIFAR10,
)

# Chosen on 5,000 validation images with seed 100, on Gaussian noise: of 0.1 to 0.4 at the start with a prior as wide or of 0.5, a KL of
# 1 and 20 times its weight, weight decays of 0.0005 and 0.001. The others follow it. The noise at the start was chosen once more with
# 70 epochs, on flow noise (0.2, 0.3, 0.4): of those whose NLL of six views is within 0.004 of the best, the one with the fewest errors
# (0.1632 and 5.10 %, 0.1599 and 5.04 %, 0.1586 and 5.24 %; --only best-flow-channel --set choose=true
# --set moved=true --acceleration compile --set flow_channel.base_scale=0.2, and so on).
BEST_VGG16 = Training(
    epochs=70, batch=256, optimizer="sgd", nesterov=True, weight_lr=0.1, weight_decay=5e-4, schedule="linear", rise=0.2, padding=4,
    flip=True, cutout=8,
)  # fmt: skip
_NOISE_VGG16 = replace(BEST_VGG16, noise_lr=0.05, warmup=0.5, base_scale=0.3)
_VGG16 = _trainings(
    Training(epochs=20, optimizer="sgd", weight_lr=2e-3, padding=4, flip=True),
    Training(padding=4, flip=True),
    BEST_VGG16,
    _NOISE_VGG16,
    _NOISE_VGG16,
)

_LENET_REMARKS = (
    "The batch of Xiong's recipe was chosen by how well its curves say that the training images are fitted, with the test set "
    "in sight: what starts from the plain network was run with 32 and with 128 images in a step and evaluated on the test images "
    "before 512 was tried on validation images.",
    "The best recipe's plain network, its Gaussian noise and its flow noise by channel (and on CIFAR-10 its dropout) were trained "
    "twice with the same seeds, the second time to evaluate mirror images as well; the second run is the one shown. A GPU does not "
    "repeat a training to the last bit: the means of the ECE moved by up to 0.003 (Gaussian noise on CIFAR-10: 0.7475 and 0.0132 "
    "first, then as shown), as much as the methods differ.",
)
_VGG16_REMARK = (
    "The best recipe was run before with 60 epochs and noise of 0.4 at the start, and its test results were seen: with noise, "
    "errors of 5.7 % with two views and 6.2 % with one, and an ECE of 0.008 to 0.010 with one. The present settings were chosen on "
    "validation images for six views, where less noise errs less; with one view it is the more overconfident of the two. "
    "Before either, 80 epochs were begun and given up after one seed of the plain network, whose test result, seen then, was "
    "no better."
)
FIGURE_5, FIGURE_6 = (f"Xiong's report, figure {number}" for number in (5, 6))
CIFAR10_NOVEL = {"fashion-mnist": "Fashion-MNIST", "noise": "noise"}
_FEW = {"curve_samples": 4, "shift_images": 1000, "moved": True}

MEMBERS = 5
COLLECTED = 4  # sets of weights that SWAG collects in an epoch
NORMALIZED = 16  # draws of SWAG that have BatchNorm statistics of their own

# not tuned: the recipe of VGG16 in batches of 512, with the rates that go with them
SHORT_RESNET18 = replace(BEST_VGG16, epochs=40, batch=512, weight_lr=0.2, rise=0.25)
_NOISE_RESNET18 = replace(SHORT_RESNET18, noise_lr=0.1, warmup=0.5, base_scale=0.2, components=4)
_RESNET18: dict[str, Any] = {
    **{"samples": 64, "shift_samples": 16, "shift_images": 1000},
    "plain": SHORT_RESNET18,
    "gaussian_channel": _NOISE_RESNET18,
    "mixture_channel": _NOISE_RESNET18,
    "output_channel": _NOISE_RESNET18,
    # a matrix learns from many noisy gradients, whose steps add up
    "joint_channel": replace(_NOISE_RESNET18, noise_lr=0.02),
    "swag": replace(SHORT_RESNET18, epochs=5, weight_lr=0.02, schedule="constant", rise=0.0),
    # blank squares as in DeVries and Taylor (2017, https://arxiv.org/abs/1708.04552), the usual rate of 0.1 for 128 images
    "long": replace(_NOISE_RESNET18, epochs=200, weight_lr=0.4, cutout=16, noise_lr=0.02),
}


class RivalStudy(ImageStudy):
    """Which posterior is worth its cost: kinds of noise with one network's weights, SWAG, or an ensemble?"""

    seeds = 1

    @property
    def description(self) -> str:  # type: ignore[override]
        return f"{self.title}, a short training: Gaussian, mixture, joint and output noise, SWAG, deep ensemble ({self.source})"

    @property
    def question(self) -> str:  # type: ignore[override]
        return (
            f"{self.network} learns {self.dataset} in a short training of {SHORT_RESNET18.epochs} epochs, and with joint noise in one "
            f"of {_RESNET18['long'].epochs}. Which posterior gives the best probabilities, on the test set, on corrupted images and on "
            f"{self.strange} it has never seen: noise on the inputs or outputs of its layers, SWAG or a deep ensemble?"
        )

    def variants(self, settings: ImageSettings) -> tuple[Variant, ...]:
        labels = {
            "best-plain": f"{self.network}, plain",
            "best-gaussian-channel": "Gaussian noise",
            "best-mixture-channel": "Mixture noise",
            "best-joint-channel": "Joint Gaussian noise",
            "best-output-channel": "Gaussian noise on outputs",
            "best-swag": "SWAG",
            "best-ensemble": f"Deep ensemble of {MEMBERS}",
            "long-plain": "Longer: plain",
            "long-joint-channel": "Longer: joint Gaussian noise",
        }
        after = dict.fromkeys(("best-swag", "best-ensemble"), "best-plain")
        cost = {"best-ensemble": MEMBERS, "long-plain": 3.0, "long-joint-channel": 3.0}
        return tuple(
            Variant(key, label, NAMES[split_key(key)[1]], after.get(key), cost=cost.get(key, 1.0))
            for key, label in labels.items()
        )

    def train(self, job: Job) -> dict[str, Any]:
        if job.start_from is None:
            return super().train(job)
        settings: ImageSettings = job.settings
        pictures = self.pictures(settings, job.device)
        training = settings.training(job.variant)
        made = self._walk if job.variant == "best-swag" else self._members
        return evaluate(made(job, pictures, training), pictures, settings, training, job.precision)

    def _start(self, job: Job, pictures: ImageData) -> nn.Module:
        """The plain network of the same seed, laid out as convolutions on a GPU are fastest."""
        network = job.load_start_network(self._fresh(job, pictures)).to(pictures.device)
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _fresh(self, job: Job, pictures: ImageData) -> nn.Module:
        return make_network(self.architecture, pictures.channels, job.settings.width)

    def _walk(self, job: Job, pictures: ImageData, training: Training) -> Posterior:
        """SWAG from the plain network."""
        scale = (training.weight_decay * pictures.num_data) ** -0.5 if training.weight_decay else 1.0
        walk: dict[str, Any] = {"epochs": training.epochs, "begin": 0.0, "swag_lr": training.weight_lr}
        method = SWAG(**walk, snapshots_per_epoch=COLLECTED, prior_scale=scale, batch_norm_samples=NORMALIZED)
        loader = pictures.loader(training, job.seed)
        return method.fit(self._start(job, pictures), loader, **job.short_options())

    def _members(self, job: Job, pictures: ImageData, training: Training) -> Posterior:
        """The plain network and others like it, with seeds of their own."""
        points = []
        for seed in range(job.seed + 1000, job.seed + 1000 * MEMBERS, 1000):
            given = job.short_options(seed=1 + seed)
            network = self._fresh(job, pictures)
            point = fit_variant("best-plain", self.architecture, training, network, pictures, given, seed)
            assert isinstance(point, PointPosterior)
            points.append(point)
        records = points[0].history.records
        whole = History(records, seconds=sum(point.history.seconds for point in points))
        first = PointPosterior(self._start(job, pictures), points[0].likelihood)
        return EnsemblePosterior.from_points([first, *points], whole)


_RESNET18_REMARKS = (
    "Nothing was tuned: the recipe is that of VGG16 with larger batches, far shorter than the trainings of the published rows, which "
    "stand here as what is known to be possible. The longer recipe has "
    f"{_RESNET18['long'].epochs} epochs, twice the rate and squares of {_RESNET18['long'].cutout} blank pixels, all set beforehand.",
    f"Joint noise is full within layers and of rank 16 across them. SWAG walks {_RESNET18['swag'].epochs} epochs from the plain "
    f"network at a constant rate and is {NORMALIZED} draws, each with BatchNorm statistics of its own. The ensemble is the plain "
    f"network and {MEMBERS - 1} more.",
)
# fmt: off
IMAGE_STUDIES = (
    ImageStudy("LeNet", "Fashion-MNIST", "fashion-mnist", FIGURE_5, {"mnist": "MNIST"}, "digits", FASHION, _FASHION, _LENET_REMARKS),
    ImageStudy("LeNet", "CIFAR-10", "cifar10", FIGURE_5, CIFAR10_NOVEL, "images", LENET_CIFAR10, _CIFAR10, _LENET_REMARKS),
    ImageStudy("VGG16", "CIFAR-10", "cifar10", FIGURE_6, CIFAR10_NOVEL, "images", VGG16_CIFAR10, {**_VGG16, **_FEW}, (_VGG16_REMARK,)),
    RivalStudy("ResNet18", "CIFAR-10", "cifar10", "node-BNN (Trinh et al. 2022) and FoRDE (Trinh et al. 2024)", CIFAR10_NOVEL, "images",
               RESNET18_CIFAR10, {**_RESNET18, "rounds": 0, "corruptions": tuple(CORRUPTIONS)}, _RESNET18_REMARKS),
)
# fmt: on
