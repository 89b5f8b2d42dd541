"""Labelled images in memory, in bytes, and what turns them into the input of a network."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.options import Count, checked


class Normalize:
    r"""Images in bytes, or in real numbers from 0 to 1, to :math:`(x - \text{mean}) / \text{deviation}` of each channel.

    Bytes are divided by 255 first. The arithmetic is in 32 bits (64 for images of 64); the memory format of the images stays, and
    after the first call on a device nothing waits for it.

    Args:
        mean, deviation: one number for each channel, in units of [0, 1].

    >>> Normalize([0.5], [0.25])(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)).flatten()
    tensor([-2., 2.])
    """

    row_wise = True  # an example comes out the same whatever else is in its batch

    def __init__(self, mean: Sequence[float], deviation: Sequence[float]) -> None:
        if len(mean) != len(deviation) or not all(value > 0 for value in deviation):
            raise FlowBNNError("mean and deviation have one number for each channel, deviations above 0")
        self.mean, self.deviation = tuple(mean), tuple(deviation)
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        known = images.dtype == torch.uint8 or images.is_floating_point()
        if not known or images.ndim < 3 or images.shape[-3] != len(self.mean):
            raise FlowBNNError(
                f"images [..., {len(self.mean)}, H, W] are bytes or real numbers in [0, 1], not {images.dtype} of shape "
                f"{tuple(images.shape)}"
            )
        scale, shift = self._on(images.device, images.dtype)
        return torch.addcmul(shift, images.to(scale.dtype), scale)

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if (device, dtype) not in self._constants:
            mean, deviation = (
                torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (self.mean, self.deviation)
            )
            kind = torch.float64 if dtype == torch.float64 else torch.float32
            scale = 1 / (deviation * (255 if dtype == torch.uint8 else 1))
            self._constants[device, dtype] = scale.to(device, kind), (-mean / deviation).to(device, kind)
        return self._constants[device, dtype]


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Labelled images in bytes, with the constants that prepare them for a network.

    Args:
        images: ``[N, C, H, W]`` of uint8.
        labels: ``[N]`` of int64, each a place in ``classes``.
        classes: their names.
        name: of the set.
        part: ``"train"``, ``"test"``, or what :meth:`split` made of them.
        mean, deviation: of each channel over the whole training set, in units of [0, 1]; parts and subsets keep them, so
            what is trained on one part can be tested on another.

    >>> images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    >>> data = ImageSet(images, torch.tensor([0, 1, 0, 1, 0, 1]), ("even", "odd"), "numbers", "train", (0.5,), (0.25,))
    >>> data
    ImageSet(numbers, train: 6 images of 1x1x1 in 2 classes)
    >>> rest, validation = data.split(validation=2)
    >>> len(rest), sorted(validation.labels.tolist())
    (4, [0, 1])
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str
    part: str
    mean: tuple[float, ...]
    deviation: tuple[float, ...]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        pixels = images.ndim == 4 and images.dtype == torch.uint8
        paired = labels.shape == images.shape[:1] and labels.dtype == torch.int64
        if not (pixels and paired and len(self.mean) == len(self.deviation) == images.shape[1]):
            raise FlowBNNError(
                "an ImageSet holds bytes [N, C, H, W], N int64 labels and C means and deviations, not "
                f"{images.dtype} {tuple(images.shape)}, {labels.dtype} {tuple(labels.shape)} and {len(self.mean)}"
            )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        size = "x".join(str(length) for length in self.images.shape[1:])
        return (
            f"ImageSet({self.name}, {self.part}: {len(self)} images of {size} in {len(self.classes)} classes)"
        )

    def to(self, device: torch.device | str) -> "ImageSet":
        """The same set on another device, still in bytes: CIFAR-10 takes 184 MB there."""
        try:
            return replace(self, images=self.images.to(device), labels=self.labels.to(device))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise FlowBNNError(f"device '{device}' cannot be used here: {reason}") from None

    def normalizer(self) -> Normalize:
        """What turns images (bytes, or real numbers in [0, 1]) into what a network trained on this set takes.

        Corrupted images, noise and images of other sets go through the normalizer of the set the network knows.
        """
        return Normalize(self.mean, self.deviation)

    def normalized(self) -> Tensor:
        """All images as ``(x / 255 - mean) / deviation``."""
        return self.normalizer()(self.images)

    def to_unit(self) -> Tensor:
        """All images as real numbers from 0 to 1."""
        return self.images.float() / 255

    def subset(self, indices: Tensor | Sequence[int] | slice) -> "ImageSet":
        """Some of the images: their places, a mask with one truth for each, or a slice."""
        if isinstance(indices, Sequence):
            indices = torch.tensor(indices, dtype=None if indices else torch.int64)
        try:
            return replace(self, images=self.images[indices], labels=self.labels[indices])
        except (IndexError, TypeError) as error:
            raise FlowBNNError(f"a subset is places below {len(self)}, a mask or a slice: {error}") from None

    @checked
    def split(self, validation: Count = 5000, seed: int = 0) -> tuple["ImageSet", "ImageSet"]:
        """``(rest, validation)``: every class gives its share, drawn from ``seed``; both keep the order of the whole.

        Args:
            validation: how many images to put aside.
            seed: of the draw; the same seed gives the same split.
        """
        if validation >= len(self):
            raise FlowBNNError(f"validation must be an integer from 1 to {len(self) - 1}, got {validation}")
        labels = self.labels.cpu()
        counts = torch.bincount(labels).tolist()
        quota = _shares(counts, validation)
        generator = torch.Generator().manual_seed(seed)
        aside = torch.zeros(len(self), dtype=torch.bool)
        for label, number in enumerate(quota):
            places = (labels == label).nonzero().squeeze(1)
            aside[places[torch.randperm(len(places), generator=generator)[:number]]] = True
        return self.subset(~aside), replace(self.subset(aside), part="validation")

    def in_colour(self, size: int = 32) -> "ImageSet":
        """Grey images as a colour network takes them: zeros around them up to ``size``, the one channel three times.

        The mean and deviation follow, exactly: zeros dilute both moments.
        """
        number, channels, height, width = self.images.shape
        if channels != 1 or size < max(height, width):
            raise FlowBNNError(f"in_colour pads grey images to size {size}, not {channels}x{height}x{width}")
        top, left = (size - height) // 2, (size - width) // 2
        padded = self.images.new_zeros(number, 1, size, size)
        padded[:, :, top : top + height, left : left + width] = self.images
        share = height * width / size**2
        mean = share * self.mean[0]
        deviation = (share * (self.deviation[0] ** 2 + self.mean[0] ** 2) - mean**2) ** 0.5
        return replace(self, images=padded.repeat(1, 3, 1, 1), mean=(mean,) * 3, deviation=(deviation,) * 3)


def _shares(counts: list[int], total: int) -> list[int]:
    """``total`` divided in proportion to ``counts``, in integers: the largest remainders are rounded up.

    >>> _shares([50, 30, 20], 5)
    [3, 1, 1]
    """
    whole = sum(counts)
    shares = [count * total // whole for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda place: -(counts[place] * total % whole))
    for place in by_remainder[: total - sum(shares)]:
        shares[place] += 1
    return shares


def device_loader(
    data: ImageSet,
    batch_size: int,
    device: torch.device | str | None = None,
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> TensorLoader:
    """A whole image set on a device, in bytes, and batches of it that are augmented and normalized there.

    Args:
        data: the set; CIFAR-10's training images take 154 MB on the device.
        batch_size: images in a batch.
        device: None leaves the set where it is.
        prepare: bytes to what the network takes; None is the set's own :meth:`~ImageSet.normalizer`. Images of a
            set that the network was not trained on go through the normalizer of the one it was.
        options: ``shuffle``, ``augment``, ``generator`` and ``drop_last`` of :class:`TensorLoader`.

    >>> images = torch.full((4, 1, 8, 8), 255, dtype=torch.uint8)
    >>> data = ImageSet(images, torch.arange(4), tuple("abcd"), "white", "train", (0.5,), (0.25,))
    >>> [(len(labels), round(batch.mean().item(), 4)) for batch, labels in device_loader(data, 3, "cpu")]
    [(3, 2.0), (1, 2.0)]
    """
    there = data if device is None else data.to(device)
    prepare = data.normalizer() if prepare is None else prepare
    return TensorLoader(there.images, there.labels, batch_size=batch_size, prepare=prepare, **options)
