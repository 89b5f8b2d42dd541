"""Labelled images in memory, in bytes, what turns them into the input of a network, and what the published files of each set hold.

The SHA-256 digests are of the decoded bytes (pixels row by row and channel by channel; labels as one byte each), so one digest serves
every format of a set. They were computed from files whose MD5 are the published ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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


# -------------------- published files

FileFormat = Literal["idx", "cifar"]


@dataclass(frozen=True)
class DataFile:
    """One file of CIFAR, or one pair of IDX files.

    Args:
        files: names without their endings: images and labels, or the one that holds both.
        count: how many images.
        pixels, labels: SHA-256 of the decoded bytes.
        pickle_md5: of the published pickled file, for CIFAR.
    """

    files: tuple[str, ...]
    count: int
    pixels: str
    labels: str
    pickle_md5: str = ""


@dataclass(frozen=True)
class Download:
    """A published file: its name, length and MD5, and the places that have it."""

    file: str
    size: int
    md5: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class PublishedDataset:
    """One data set as it lies on a disk.

    Args:
        name, title: for the program, and for people.
        layout: ``"idx"`` (files in ``folder``) or ``"cifar"`` (in ``folder-bin`` or ``folder-py``).
        folder: below the root.
        shape: channels, height and width.
        classes: their names in the order of the labels.
        mean, deviation: of each channel over the training images, in units of [0, 1].
        splits: the pieces of ``"train"`` and ``"test"``, in order.
        downloads: for IDX the files themselves, for CIFAR one archive.
    """

    name: str
    title: str
    layout: FileFormat
    folder: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    splits: Mapping[str, tuple[DataFile, ...]]
    downloads: tuple[Download, ...] = field(default=())


def _idx(
    name: str, title: str, classes: str, moments: tuple[float, float], table: str, mirrors: tuple[str, ...]
) -> PublishedDataset:
    """A set of IDX files; the table has, for images and labels of both splits, length and MD5 of the .gz, SHA-256 of its content."""
    files = [f"{stem}-{kind}-ubyte" for stem in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    rows = [line.split() for line in table.strip().splitlines()]
    sizes, sums, digests = zip(*rows, strict=True)
    return PublishedDataset(
        name,
        title,
        "idx",
        f"{title.replace('-', '')}/raw",
        (1, 28, 28),
        tuple(classes.split(",")),
        moments[:1],
        moments[1:],
        {
            "train": (DataFile(tuple(files[:2]), 60_000, *digests[:2]),),
            "test": (DataFile(tuple(files[2:]), 10_000, *digests[2:]),),
        },
        tuple(
            Download(f"{file}.gz", int(size), md5, tuple(f"{mirror}{file}.gz" for mirror in mirrors))
            for file, size, md5 in zip(files, sizes, sums, strict=True)
        ),
    )


MNIST = _idx(
    "mnist",
    "MNIST",
    "0,1,2,3,4,5,6,7,8,9",
    (0.1306604762738429, 0.30810780385646264),
    """
9912422 f68b3c2dcbeaaa9fbdd348bbdeb94873 741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757
28881 d53e105ee54ea40749a09fcbcd1e9432 1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13
1648877 9fb629c4189551a2d022fa330f9573f3 6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161
4542 ec29112dd5afa0611ce80d1b7f02629c ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5
""",
    (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
)
FASHION_MNIST = _idx(
    "fashion-mnist",
    "Fashion-MNIST",
    "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,Ankle boot",
    (0.2860405969887955, 0.35302424451492254),
    """
26421880 8d4fb7e6c68d591d4c3dfef9ec88bf0d 2e487a6c89124f78f2d7521542223cafe96f7123c3ca13d447772ac6ecbb3012
29515 25c81989df183df01b3e8a0aad5dffbe 657fbd221bfc9f4198cc14b5619cc33ec57c58dd0e47af4d99d6650759e869a7
4422102 bef4ecab320f06d8554ea6380940ec79 c867c93ff95360594e8ec3287995350b824dd110b11595c0e13d5423f621867a
5148 bb300cfdad3c16e7a12a480ee83cd310 3d0e6c6ea990b53b6f8f500a41cac93881d981b315f84578b7d915342ade01e9
""",
    (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
)

# file, SHA-256 of the pixels and of the labels, MD5 of the pickled file
_CIFAR10 = """
data_batch_1 a50e8b48728e1667d682a807155c375279d5ae321fb12242c02e3104a6bc8b21
    d829dbdf32167c9d7b3687cee66d92d80d46c441308b5aca0d11e8b69e27dac9 c99cafc152244af753f735de768cd75f
data_batch_2 0b825e5592c3b72ea18d6ec2ff5f5b19d33e41a75f5039054a9bb87be3cf69a0
    5d18f7371ed35ea9ade77952fe958b0660a45cd6c8b8a8970030f21612cfd7e3 d4bba439e000b95fd0a9bffe97cbabec
data_batch_3 c6ee1dd4601a69ec085d8ebf53ee6441775491a6839a0a9ae8fa198e88a3a429
    32cf77b0ee2e790b1c4384d2d82e42dc1571b87e67f6da8f444b2725b2973f65 54ebc095f3ab1f0389bbae665268c751
data_batch_4 1f6b6c799cff375a9f8fae2fac909d51ee09f38a6a60eebb9e8fec6f47ddc48f
    d2815e3f8f656272864920fc0edde56b04ec9cf81bf397c0dd3069f4aea51aeb 634d18415352ddfa80567beed471001a
data_batch_5 58e3bbf713e28357476a351d3a05d056372f94c681d04ca9d62a076fdf2a643b
    2ddf3ab27d5d04409c94ce7b56849c243129c10de1058ae0bfe14c77e934800c 482c414d41f54cd18b22e5b47cb7c3cb
test_batch 177777c33ba79825320efa646ad04a94bdc3c80e4ebe3bd21724f8cdfd4b9d56
    cec8a24a1e92aa2ecaa0bbd3dbfa86bf6cd8759fbd209a832824c8cf0afca9d5 40351d587109b95175f43aff81a1287e
"""
_BATCHES = [
    DataFile((name,), 10_000, *digests) for name, *digests in zip(*[iter(_CIFAR10.split())] * 4, strict=True)
]
CIFAR10 = PublishedDataset(
    name="cifar10",
    title="CIFAR-10",
    layout="cifar",
    folder="cifar-10-batches",
    shape=(3, 32, 32),
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    mean=(0.4913996786152028, 0.4821584083946074, 0.4465309144454644),
    deviation=(0.24703223246328238, 0.2434851280000556, 0.26158784172796423),
    splits={"train": tuple(_BATCHES[:5]), "test": tuple(_BATCHES[5:])},
    downloads=(
        Download(
            "cifar-10-binary.tar.gz",
            170_052_171,
            "c32a1d4ab5d03f1284b67883e8d87530",
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
                "https://storage.googleapis.com/s4tf-hosted-binaries/datasets/CIFAR10/cifar-10-binary.tar.gz",
            ),
        ),
    ),
)

DATASETS: dict[str, PublishedDataset] = {source.name: source for source in (MNIST, FASHION_MNIST, CIFAR10)}
