"""The images of a study on the device where it computes, and what studies of all methods on images have in common."""

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

STRENGTHS = tuple(range(1, 6))
SPLIT_SEED = 0  # the same images are put aside for every seed and every method
BINARY_SEED = 2008  # of the one draw by which grey images become binary

TensorPair = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class ImageData:
    """What one job computes on.

    Args:
        learned: the images to learn from, in bytes on the device.
        tested: those to evaluate on: the test set, or the validation images where settings are chosen.
        strangers: sets of images the network has never seen; one called ``"noise"`` is made when asked for.
    """

    learned: ImageSet
    tested: ImageSet
    strangers: dict[str, ImageSet | None]

    @property
    def device(self) -> torch.device:
        return self.learned.images.device

    @property
    def num_data(self) -> int:
        return len(self.learned)

    @property
    def channels(self) -> int:
        return self.learned.images.shape[1]

    @property
    def test(self) -> TensorPair:
        """The images to test on as the network takes them, and their labels."""
        return self.learned.normalizer()(self.tested.images), self.tested.labels

    def loader(self, training: Training, seed: int) -> TensorLoader:
        """Shuffled batches of equal size; the few images that fill no batch differ from epoch to epoch."""
        moved = training.padding or training.flip or training.cutout
        return device_loader(
            self.learned,
            min(training.batch, self.num_data),
            shuffle=True,
            augment=CropAndFlip(training.padding, training.flip, training.cutout) if moved else None,
            generator=torch.Generator(self.device).manual_seed(seed),
            drop_last=True,
        )

    def novel(self, number: int) -> dict[str, Tensor]:
        """At most ``number`` images of every kind the network has never seen, as it takes them."""
        novel = {}
        for key, images in self.strangers.items():
            if images is None:
                generator = torch.Generator().manual_seed(0)
                shape = self.tested.images.shape[1:]
                strange = novel_noise(min(number, len(self.tested)), shape, generator).to(self.device)
            else:
                strange = images.images[:number]
            novel[key] = self.learned.normalizer()(strange)
        return novel

    def corrupted(self, kind: str, strength: int, number: int) -> TensorPair:
        """The first ``number`` test images corrupted, as the network takes them, and their labels; the same for all methods."""
        some = self.tested.subset(slice(0, number))
        generator = torch.Generator().manual_seed(strength)
        return self.learned.normalizer()(corrupt(some.to_unit(), kind, strength, generator)), some.labels


def load_image_data(
    settings: ImageSettings, data: str, novel: Sequence[str], device: torch.device | str
) -> ImageData:
    """The images of a study.

    Args:
        settings: ``source``, ``validation`` and ``choose`` are read; where settings are chosen, the test set is not opened at all.
        data: ``"fashion-mnist"`` or ``"cifar10"``.
        novel: kinds of images the network has never seen: names of sets, or ``"noise"``.
        device: where they are to lie.
    """

    learned = read_images(data, "train", settings)
    if settings.choose:
        learned, tested = learned.split(min(settings.validation, len(learned) // 4), SPLIT_SEED)
    else:
        tested = read_images(data, "test", settings)

    def stranger(name: str) -> ImageSet:
        images = read_images(name, "test", settings)
        colour = learned.images.shape[1] == 3
        return (images.in_colour(learned.images.shape[-1]) if colour else images).to(device)

    strangers = {name: None if name == "noise" else stranger(name) for name in novel}
    return ImageData(learned.to(device), tested.to(device), strangers)


def read_images(name: str, split: str, given: ImageSource) -> ImageSet:
    """A published set, or for trials pictures of its shape, as the settings say."""
    if given.source == "files":
        return _read(name, split)
    return generated_images(given.generated // (1 if split == "train" else 4), name, split)


def read_bytes(job: Job, name: str, split: str) -> tuple[Tensor, Tensor]:
    """Images in bytes and their labels, on the device of the job."""
    found = read_images(name, split, job.settings)
    return found.images.to(job.device), found.labels.to(job.device)


def read_binary(job: Job, split: str) -> Tensor:
    """MNIST, binarised once, on the device of the job."""
    images = read_images("mnist", split, job.settings).images
    generator = torch.Generator().manual_seed(BINARY_SEED + (split == "test"))
    return binarise(images, generator).to(job.device)


def binarise(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Grey bytes become binary ones: a pixel is 1 with its grey value as the probability.

    >>> binarise(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0, 1], dtype=torch.uint8)
    """
    return (torch.rand(images.shape, generator=generator, device=images.device) * 255 < images).to(
        torch.uint8
    )


def split_classes(
    name: str, novel: Sequence[int], validation: int, device: str, given: ImageSource
) -> Digits:
    """A set without some of its classes, on a device and as a network takes it; ``novel`` are test images of those classes.

    >>> parts = split_classes("cifar10", [1, 8], 10, "cpu", ImageSource(source="generated", generated=100))
    >>> [len(labels) for _, labels in (parts.train, parts.validation, parts.test, parts.novel)], parts.known
    ([70, 10, 20, 5], (0, 2, 3, 4, 5, 6, 7, 9))
    """
    whole, tested = (read_images(name, split, given) for split in ("train", "test"))
    known = tuple(label for label in range(len(whole.classes)) if label not in novel)
    places = torch.full((len(whole.classes),), -1).scatter_(0, torch.tensor(known), torch.arange(len(known)))
    seen = [places[one.labels] >= 0 for one in (whole, tested)]
    learned, aside = whole.subset(seen[0]).split(validation, SPLIT_SEED)
    strange = tested.subset(~seen[1])

    def pair(some: ImageSet) -> TensorPair:
        return whole.normalizer()(some.images.to(device)), places[some.labels].to(device)

    labelled = (pair(strange)[0], strange.labels.to(device))
    return Digits(pair(learned), pair(aside), pair(tested.subset(seen[1])), labelled, known)


@lru_cache(maxsize=6)
def _read(name: str, split: str) -> ImageSet:
    """A published set, read and verified once in a process."""
    return load_images(name, split)


def generated_images(number: int, name: str, split: str) -> ImageSet:
    """Pictures of the shape of a published set: waves whose direction and length encode the class, under noise.

    >>> generated_images(20, "cifar10", "test")
    ImageSet(cifar10, test: 20 images of 3x32x32 in 10 classes)
    """
    channels, size = (3, 32) if name == "cifar10" else (1, 28)
    generator = torch.Generator().manual_seed(len(name) + (1000 if split == "test" else 0))
    labels = torch.arange(number) % 10
    angle = (labels % 5) * torch.pi / 5
    length = 4.0 + 4.0 * (labels // 5) + (2.0 if name == "mnist" else 0.0)
    place = torch.arange(size, dtype=torch.float32)
    across = angle.cos()[:, None, None] * place + angle.sin()[:, None, None] * place[:, None]
    phase = 2 * torch.pi * torch.rand(number, 1, 1, generator=generator)
    waves = torch.sin(2 * torch.pi * across / length[:, None, None] + phase).unsqueeze(1)
    noise = torch.randn(number, channels, size, size, generator=generator)
    pixels = (128 + 70 * waves + 40 * noise).clamp(0, 255).to(torch.uint8)
    classes = tuple(str(label) for label in range(10))
    return ImageSet(pixels, labels, classes, name, split, (0.5,) * channels, (0.25,) * channels)


SLOW = ("mode-ensemble", "hmc", "nuts")  # which take all data in every step
FAST = tuple(one.key for one in CANDIDATES if one.key not in SLOW)


@options(kw_only=True)
class ImageMethodSettings(ImageSource, MethodSettings):
    """The settings of a study of methods on images, besides :class:`PictureData` and :class:`MethodSettings`.

    Args:
        validation: images that are put aside, the same for all seeds.
    """

    validation: Count = 5_000
    methods: tuple[str, ...] = FAST


class ImageMethodStudy(MethodStudy):
    """A study of methods on a published set of images, on a GPU where there is one; subclasses say which set, and what is put aside."""

    data: ClassVar[str]
    accelerator = "auto"

    def novel(self, settings: Any) -> tuple[int, ...]:
        """The classes that training never sees."""
        return ()

    def check(self, settings: Any, jobs: Sequence[Job]) -> None:
        for split in ("train", "test"):
            read_images(self.data, split, settings)

    def load_data(self, job: Job) -> Digits:
        """The images, on the device of the job."""
        s: ImageMethodSettings = job.settings
        return split_classes(self.data, self.novel(s), s.validation, job.device, s)

    def fit_candidate(
        self, job: Job, candidate: Candidate, network: nn.Module, data: Digits, augment: Augment | None = None
    ) -> Posterior:
        """The method's posterior; a training of seconds keeps no checkpoints."""
        images, batch = data.train[0], job.settings.batch
        device = str(images.device.type)
        loader = shuffled_loader(data.train, batch, job.seed, device, drop_last=True, augment=augment)
        method, _ = self.make_method(job, candidate, len(loader))
        held_out = TensorLoader(*data.validation, batch_size=batch) if candidate.held_out else None
        return method.fit(
            network.to(device), loader, validation=held_out, num_data=len(images), **job.short_options()
        )
