"""Images of a study on the device of the computation, and the base class of studies of all methods on images."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from flowbnn.compare.candidates import CANDIDATES, Candidate
from flowbnn.data import Augment, Digits, TensorLoader
from flowbnn.methods import Posterior
from flowbnn.options import Count, options
from flowbnn_studies.data import (
    CropAndFlip,
    ImageSet,
    corrupt,
    device_loader,
    load_images,
    novel_noise,
)
from flowbnn_studies.images.settings import ImageSettings, ImageSource, Training
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, shuffled_loader
from flowbnn_studies.runner.study import Job

STRENGTHS = tuple(range(1, 6))  # of corruptions
SPLIT_SEED = 0  # all seeds and methods have the same validation images
BINARY_SEED = 2008  # all runs have the same binary images

TensorPair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageData:
    """Images of one job.

    Args:
        train: Training images, in bytes on the device.
        test_set: Images for the evaluation: the test set, or the validation images while settings are chosen.
        novel_sets: Sets of out-of-distribution images by name; None for ``"noise"``, which is generated.
    """

    train: ImageSet
    test_set: ImageSet
    novel_sets: dict[str, ImageSet | None]

    @property
    def device(self) -> torch.device:
        return self.train.images.device

    @property
    def num_data(self) -> int:
        return len(self.train)

    @property
    def channels(self) -> int:
        return self.train.images.shape[1]

    @property
    def test(self) -> TensorPair:
        """Normalized test images and their labels."""
        return self.train.normalizer()(self.test_set.images), self.test_set.labels

    def loader(self, training: Training, seed: int) -> TensorLoader:
        """Returns shuffled batches of equal size. The images that fill no batch differ from epoch to epoch."""
        augmented = training.padding or training.flip or training.cutout
        return device_loader(
            self.train,
            min(training.batch, self.num_data),
            shuffle=True,
            augment=CropAndFlip(training.padding, training.flip, training.cutout) if augmented else None,
            generator=torch.Generator(self.device).manual_seed(seed),
            drop_last=True,
        )

    def novel(self, number: int) -> dict[str, Tensor]:
        """Returns at most ``number`` normalized out-of-distribution images of every kind."""
        novel = {}
        for key, image_set in self.novel_sets.items():
            if image_set is None:
                generator = torch.Generator().manual_seed(0)
                shape = self.test_set.images.shape[1:]
                inputs = novel_noise(min(number, len(self.test_set)), shape, generator).to(self.device)
            else:
                inputs = image_set.images[:number]
            novel[key] = self.train.normalizer()(inputs)
        return novel

    def corrupted(self, kind: str, strength: int, number: int) -> TensorPair:
        """Returns the first ``number`` test images, corrupted and normalized, and their labels. They are the same for all methods."""
        subset = self.test_set.subset(slice(0, number))
        generator = torch.Generator().manual_seed(strength)
        return self.train.normalizer()(corrupt(subset.to_unit(), kind, strength, generator)), subset.labels


def load_image_data(
    settings: ImageSettings, data: str, novel: Sequence[str], device: torch.device | str
) -> ImageData:
    """Loads the images of a study.

    Args:
        settings: Settings, of which ``source``, ``validation`` and ``choose`` are read. While settings are chosen, the test set is
            not read.
        data: ``"fashion-mnist"`` or ``"cifar10"``.
        novel: Kinds of out-of-distribution images: names of sets, or ``"noise"``.
        device: Device of the images.
    """
    train = read_images(data, "train", settings)
    if settings.choose:
        train, test = train.split(min(settings.validation, len(train) // 4), SPLIT_SEED)
    else:
        test = read_images(data, "test", settings)

    def load_novel(name: str) -> ImageSet:
        images = read_images(name, "test", settings)
        colour = train.images.shape[1] == 3
        return (images.to_color(train.images.shape[-1]) if colour else images).to(device)

    novel_sets = {name: None if name == "noise" else load_novel(name) for name in novel}
    return ImageData(train.to(device), test.to(device), novel_sets)


def read_images(name: str, split: str, source: ImageSource) -> ImageSet:
    """Returns a published data set, or generated images of its shape for trial runs."""
    if source.source == "files":
        return _load_cached(name, split)
    return generated_images(source.generated // (1 if split == "train" else 4), name, split)


def read_bytes(job: Job, name: str, split: str) -> tuple[Tensor, Tensor]:
    """Returns images in bytes and their labels, on the device of the job."""
    image_set = read_images(name, split, job.settings)
    return image_set.images.to(job.device), image_set.labels.to(job.device)


def read_binary(job: Job, split: str) -> Tensor:
    """Returns MNIST with binary pixels, on the device of the job. The pixels are drawn once."""
    images = read_images("mnist", split, job.settings).images
    generator = torch.Generator().manual_seed(BINARY_SEED + (split == "test"))
    return binarise(images, generator).to(job.device)


def binarise(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draws binary pixels with the grey values as probabilities.

    >>> binarise(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0, 1], dtype=torch.uint8)
    """
    return (torch.rand(images.shape, generator=generator, device=images.device) * 255 < images).to(
        torch.uint8
    )


def split_classes(
    name: str, novel: Sequence[int], validation: int, device: str, source: ImageSource
) -> Digits:
    """Splits a data set into known classes and novel ones, on a device and normalized. ``novel`` has test images of the novel
    classes.

    Args:
        name: Name of the data set.
        novel: Labels of the novel classes.
        validation: Number of validation images.
        device: Device of the images.
        source: Origin of the images.

    >>> parts = split_classes("cifar10", [1, 8], 10, "cpu", ImageSource(source="generated", generated=100))
    >>> [len(labels) for _, labels in (parts.train, parts.validation, parts.test, parts.novel)], parts.known
    ([70, 10, 20, 5], (0, 2, 3, 4, 5, 6, 7, 9))
    """
    train_set, test_set = (read_images(name, split, source) for split in ("train", "test"))
    num_classes = len(train_set.classes)
    known = tuple(label for label in range(num_classes) if label not in novel)
    new_labels = torch.full((num_classes,), -1).scatter_(0, torch.tensor(known), torch.arange(len(known)))
    known_train, known_test = (new_labels[images.labels] >= 0 for images in (train_set, test_set))
    train, held_out = train_set.subset(known_train).split(validation, SPLIT_SEED)
    novel_set = test_set.subset(~known_test)

    def prepare(images: ImageSet) -> TensorPair:
        return train_set.normalizer()(images.images.to(device)), new_labels[images.labels].to(device)

    novel_pair = (prepare(novel_set)[0], novel_set.labels.to(device))
    return Digits(prepare(train), prepare(held_out), prepare(test_set.subset(known_test)), novel_pair, known)


@lru_cache(maxsize=6)
def _load_cached(name: str, split: str) -> ImageSet:
    """Loads and verifies a published set once in a process."""
    return load_images(name, split)


def generated_images(number: int, name: str, split: str) -> ImageSet:
    """Generates images of the shape of a published set: noisy waves whose direction and length encode the class.

    >>> generated_images(20, "cifar10", "test")
    ImageSet(cifar10, test: 20 images of 3x32x32 in 10 classes)
    """
    channels, size = (3, 32) if name == "cifar10" else (1, 28)
    generator = torch.Generator().manual_seed(len(name) + (1000 if split == "test" else 0))
    labels = torch.arange(number) % 10
    angle = (labels % 5) * torch.pi / 5
    length = 4.0 + 4.0 * (labels // 5) + (2.0 if name == "mnist" else 0.0)
    position = torch.arange(size, dtype=torch.float32)
    coordinate = angle.cos()[:, None, None] * position + angle.sin()[:, None, None] * position[:, None]
    phase = 2 * torch.pi * torch.rand(number, 1, 1, generator=generator)
    waves = torch.sin(2 * torch.pi * coordinate / length[:, None, None] + phase).unsqueeze(1)
    noise = torch.randn(number, channels, size, size, generator=generator)
    pixels = (128 + 70 * waves + 40 * noise).clamp(0, 255).to(torch.uint8)
    classes = tuple(str(label) for label in range(10))
    return ImageSet(pixels, labels, classes, name, split, (0.5,) * channels, (0.25,) * channels)


SLOW = ("mode-ensemble", "hmc", "nuts")  # these use all data in every step
FAST = tuple(candidate.key for candidate in CANDIDATES if candidate.key not in SLOW)


@options(kw_only=True)
class ImageMethodSettings(ImageSource, MethodSettings):
    """Settings of a study of methods on images, in addition to :class:`ImageSource` and :class:`MethodSettings`.

    Args:
        validation: Number of validation images, the same for all seeds.
    """

    validation: Count = 5_000
    methods: tuple[str, ...] = FAST


class ImageMethodStudy(MethodStudy):
    """Base class of studies of methods on a published set of images, on a GPU if available."""

    data: ClassVar[str]
    accelerator = "auto"

    def novel(self, settings: Any) -> tuple[int, ...]:
        """Returns the classes that are excluded from training."""
        return ()

    def check(self, settings: Any, jobs: Sequence[Job]) -> None:
        for split in ("train", "test"):
            read_images(self.data, split, settings)

    def load_data(self, job: Job) -> Digits:
        """Returns the images on the device of the job."""
        s: ImageMethodSettings = job.settings
        return split_classes(self.data, self.novel(s), s.validation, job.device, s)

    def fit_candidate(
        self, job: Job, candidate: Candidate, network: nn.Module, data: Digits, augment: Augment | None = None
    ) -> Posterior:
        """Fits a method. No checkpoints are kept because the training takes seconds."""
        images, batch = data.train[0], job.settings.batch
        device = str(images.device.type)
        loader = shuffled_loader(data.train, batch, job.seed, device, drop_last=True, augment=augment)
        method, _ = self.make_method(job, candidate, len(loader))
        held_out = TensorLoader(*data.validation, batch_size=batch) if candidate.needs_held_out else None
        return method.fit(
            network.to(device), loader, validation=held_out, num_data=len(images), **job.short_options()
        )
