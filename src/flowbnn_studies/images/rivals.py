"""ResNet18 on CIFAR-10: kinds of noise beside SWAG and a deep ensemble in a short training, and joint noise in a longer one."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from flowbnn.methods import SWAG, Posterior
from flowbnn.methods.ensemble import EnsemblePosterior
from flowbnn.posterior import PointPosterior
from flowbnn.training import History
from flowbnn_studies.data import CORRUPTIONS
from flowbnn_studies.images.data import Pictures
from flowbnn_studies.images.evaluation import evaluate
from flowbnn_studies.images.settings import (
    NAMES,
    RESNET18_CIFAR10,
    ImageSettings,
    Training,
    make_network,
    split_key,
)
from flowbnn_studies.images.study import BEST_VGG16, CIFAR10_NOVEL, ImageStudy
from flowbnn_studies.images.training import fit_variant
from flowbnn_studies.runner.study import Job, Variant

MEMBERS = 5
COLLECTED = 4  # sets of weights that SWAG collects in an epoch
NORMALIZED = 16  # draws of SWAG that have BatchNorm statistics of their own

# not tuned: the recipe of VGG16 in batches of 512, with the rates that go with them
PLAIN = replace(BEST_VGG16, epochs=40, batch=512, weight_lr=0.2, rise=0.25)
_NOISE = replace(PLAIN, noise_lr=0.1, warmup=0.5, base_scale=0.2, components=4)
_TRAININGS = {
    "plain": PLAIN,
    "gaussian_channel": _NOISE,
    "mixture_channel": _NOISE,
    "output_channel": _NOISE,
    # a matrix learns from many noisy gradients, whose steps add up
    "joint_channel": replace(_NOISE, noise_lr=0.02),
    "swag": replace(PLAIN, epochs=5, weight_lr=0.02, schedule="constant", rise=0.0),
    # blank squares as in DeVries and Taylor (2017, https://arxiv.org/abs/1708.04552), the usual rate of 0.1 for 128 images
    "long": replace(_NOISE, epochs=200, weight_lr=0.4, cutout=16, noise_lr=0.02),
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
            f"{self.network} learns {self.dataset} in a short training of {PLAIN.epochs} epochs, and with joint noise in one of "
            f"{_TRAININGS['long'].epochs}. Which posterior gives the best probabilities, on the test set, on corrupted images and on "
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
        starts = ("best-swag", "best-ensemble")
        return tuple(
            Variant(
                key,
                label,
                NAMES[split_key(key)[1]],
                after="best-plain" if key in starts else None,
                cost=MEMBERS if key == "best-ensemble" else 3.0 if key.startswith("long-") else 1.0,
            )
            for key, label in labels.items()
        )

    def train(self, job: Job) -> dict[str, Any]:
        if job.after is None:
            return super().train(job)
        settings: ImageSettings = job.settings
        pictures = self.pictures(settings, job.device)
        training = settings.training(job.variant)
        made = self._walk if job.variant == "best-swag" else self._members
        return evaluate(made(job, pictures, training), pictures, settings, training, job.precision)

    def _start(self, job: Job, pictures: Pictures) -> nn.Module:
        """The plain network of the same seed, laid out as convolutions on a GPU are fastest."""
        network = job.load_start(self._fresh(job, pictures)).to(pictures.device)
        return network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def _fresh(self, job: Job, pictures: Pictures) -> nn.Module:
        return make_network(self.architecture, pictures.channels, job.settings.width)

    def _walk(self, job: Job, pictures: Pictures, training: Training) -> Posterior:
        """SWAG from the plain network."""
        method = SWAG(
            epochs=training.epochs,
            begin=0.0,
            swag_lr=training.weight_lr,
            per_epoch=COLLECTED,
            prior_scale=(training.weight_decay * pictures.num_data) ** -0.5 if training.weight_decay else 1.0,
            batch_norm_samples=NORMALIZED,
        )
        loader = pictures.loader(training, job.seed)
        return method.fit(self._start(job, pictures), loader, **job.brief())

    def _members(self, job: Job, pictures: Pictures, training: Training) -> Posterior:
        """The plain network and others like it, with seeds of their own."""
        points = []
        for seed in range(job.seed + 1000, job.seed + 1000 * MEMBERS, 1000):
            given = job.brief(seed=1 + seed)
            network = self._fresh(job, pictures)
            point = fit_variant("best-plain", self.architecture, training, network, pictures, given, seed)
            assert isinstance(point, PointPosterior)
            points.append(point)
        records = points[0].history.records
        whole = History(records, seconds=sum(point.history.seconds for point in points))
        first = PointPosterior(self._start(job, pictures), points[0].likelihood)
        return EnsemblePosterior.from_points([first, *points], whole)


_REMARKS = (
    "Nothing was tuned: the recipe is that of VGG16 with larger batches, far shorter than the trainings of the published rows, which "
    "stand here as what is known to be possible. The longer recipe has "
    f"{_TRAININGS['long'].epochs} epochs, twice the rate and squares of {_TRAININGS['long'].cutout} blank pixels, all set beforehand.",
    f"Joint noise is full within layers and of rank 16 across them. SWAG walks {_TRAININGS['swag'].epochs} epochs from the plain "
    f"network at a constant rate and is {NORMALIZED} draws, each with BatchNorm statistics of its own. The ensemble is the plain "
    f"network and {MEMBERS - 1} more.",
)
_FEW = {"samples": 64, "shift_samples": 16, "shift_images": 1000}
# fmt: off
RESNET18 = RivalStudy(
    "ResNet18", "CIFAR-10", "cifar10", "node-BNN (Trinh et al. 2022) and FoRDE (Trinh et al. 2024)", CIFAR10_NOVEL, "images",
    RESNET18_CIFAR10, {**_TRAININGS, **_FEW, "rounds": 0, "corruptions": tuple(CORRUPTIONS)}, _REMARKS,
)
# fmt: on
