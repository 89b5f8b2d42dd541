"""Labelled images in memory, their normalization, and descriptions of the published data sets.

The SHA-256 digests are of the decoded bytes (pixels row by row and channel by channel; labels as one byte each), so one digest
serves every format of a set. They were computed from files with the published MD5 checksums.
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
    r"""Normalizes images to :math:`(x - \text{mean}) / \text{std}` in each channel.

    Images are bytes, which are divided by 255 first, or real numbers from 0 to 1. The arithmetic has 32 bits (64 for images of 64).
    The memory format is kept. After the first call on a device there is no synchronization.

    Args:
        mean, std: Mean and standard deviation of each channel, in units of [0, 1].

    >>> Normalize([0.5], [0.25])(torch.tensor([0.0, 1.0]).view(2, 1, 1, 1)).flatten()
    tensor([-2., 2.])
    """

    row_wise = True  # the result of an example does not depend on the rest of the batch

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        if len(mean) != len(std) or not all(value > 0 for value in std):
            raise FlowBNNError(
                "mean and std need one number for each channel, and std must be positive", argument="std"
            )
        self.mean, self.std = tuple(mean), tuple(std)
        self._constants: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        is_image = images.dtype == torch.uint8 or images.is_floating_point()
        if not is_image or images.ndim < 3 or images.shape[-3] != len(self.mean):
            raise FlowBNNError(
                f"Normalize needs bytes or real images [..., {len(self.mean)}, H, W], got {images.dtype} {tuple(images.shape)}",
                kind="shape",
                argument="images",
            )
        scale, shift = self._on(images.device, images.dtype)
        return torch.addcmul(shift, images.to(scale.dtype), scale)

    def _on(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if (device, dtype) not in self._constants:
            mean, std = (torch.tensor(v, dtype=torch.float64).view(-1, 1, 1) for v in (self.mean, self.std))
            kind = torch.float64 if dtype == torch.float64 else torch.float32
            scale = 1 / (std * (255 if dtype == torch.uint8 else 1))
            self._constants[device, dtype] = scale.to(device, kind), (-mean / std).to(device, kind)
        return self._constants[device, dtype]


@dataclass(frozen=True, eq=False, repr=False)
class ImageSet:
    """Labelled images in bytes, with the constants of their normalization.

    Args:
        images: Images ``[N, C, H, W]`` of uint8.
        labels: Labels ``[N]`` of int64, indices of ``classes``.
        classes: Names of the classes.
        name: Name of the data set.
        partition: ``"train"``, ``"test"`` or ``"validation"``.
        mean, std: Mean and standard deviation of each channel over the training set, in units of [0, 1]. Subsets keep them, so that
            a network trained on one subset can be tested on another.

    >>> images = torch.arange(6, dtype=torch.uint8).view(6, 1, 1, 1)
    >>> data = ImageSet(images, torch.tensor([0, 1, 0, 1, 0, 1]), ("even", "odd"), "numbers", "train", (0.5,), (0.25,))
    >>> data
    ImageSet(numbers, train: 6 images of 1x1x1 in 2 classes)
    >>> train, validation = data.split(validation=2)
    >>> len(train), sorted(validation.labels.tolist())
    (4, [0, 1])
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str
    partition: str
    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        valid_images = images.ndim == 4 and images.dtype == torch.uint8
        valid_labels = labels.shape == images.shape[:1] and labels.dtype == torch.int64
        if not (valid_images and valid_labels and len(self.mean) == len(self.std) == images.shape[1]):
            raise FlowBNNError(
                f"ImageSet needs bytes [N, C, H, W], N int64 labels and C means, got {images.dtype} {tuple(images.shape)}, "
                f"{labels.dtype} {tuple(labels.shape)} and {len(self.mean)}",
                kind="shape",
                argument="images",
            )

    def __len__(self) -> int:
        return len(self.images)

    def __repr__(self) -> str:
        size = "x".join(str(length) for length in self.images.shape[1:])
        return f"ImageSet({self.name}, {self.partition}: {len(self)} images of {size} in {len(self.classes)} classes)"

    def to(self, device: torch.device | str) -> "ImageSet":
        """Returns the set on another device, still in bytes. CIFAR-10 takes 184 MB."""
        try:
            return replace(self, images=self.images.to(device), labels=self.labels.to(device))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise FlowBNNError(f"device '{device}' is not available: {reason}", argument="device") from None

    def normalizer(self) -> Normalize:
        """Returns the normalization for networks trained on this set.

        Corrupted images, noise and images of other sets use the normalization of the set on which the network was trained.
        """
        return Normalize(self.mean, self.std)

    def normalized(self) -> Tensor:
        """Returns all images as ``(x / 255 - mean) / std``."""
        return self.normalizer()(self.images)

    def to_unit(self) -> Tensor:
        """Returns all images as real numbers from 0 to 1."""
        return self.images.float() / 255

    def subset(self, indices: Tensor | Sequence[int] | slice) -> "ImageSet":
        """Returns a subset of the images.

        Args:
            indices: Indices, a mask or a slice.
        """
        if isinstance(indices, Sequence):
            indices = torch.tensor(indices, dtype=None if indices else torch.int64)
        try:
            return replace(self, images=self.images[indices], labels=self.labels[indices])
        except (IndexError, TypeError) as error:
            raise FlowBNNError(
                f"indices must be integers below {len(self)}, a mask or a slice: {error}", argument="indices"
            ) from None

    @checked
    def split(self, validation: Count = 5000, seed: int = 0) -> tuple["ImageSet", "ImageSet"]:
        """Splits off validation images, stratified by class. Both sets keep the order.

        Args:
            validation: Number of validation images.
            seed: Seed of the split.

        Returns:
            Training set and validation set.
        """
        if validation >= len(self):
            raise FlowBNNError(
                f"validation must be at most {len(self) - 1}, got {validation}", argument="validation"
            )
        labels = self.labels.cpu()
        counts = torch.bincount(labels).tolist()
        quota = _proportional_counts(counts, validation)
        generator = torch.Generator().manual_seed(seed)
        mask = torch.zeros(len(self), dtype=torch.bool)
        for label, number in enumerate(quota):
            indices = (labels == label).nonzero().squeeze(1)
            mask[indices[torch.randperm(len(indices), generator=generator)[:number]]] = True
        return self.subset(~mask), replace(self.subset(mask), partition="validation")

    def to_color(self, size: int = 32) -> "ImageSet":
        """Returns grey images padded with zeros to ``size`` and repeated in three channels. Mean and standard deviation are
        adapted.

        The moments are exact, because zeros dilute both of them.
        """
        number, channels, height, width = self.images.shape
        if channels != 1 or size < max(height, width):
            raise FlowBNNError(
                f"to_color(size={size}) needs grey images of that size at most, got {channels}x{height}x{width}",
                argument="size",
            )
        top, left = (size - height) // 2, (size - width) // 2
        padded = self.images.new_zeros(number, 1, size, size)
        padded[:, :, top : top + height, left : left + width] = self.images
        fraction = height * width / size**2
        mean = fraction * self.mean[0]
        std = (fraction * (self.std[0] ** 2 + self.mean[0] ** 2) - mean**2) ** 0.5
        return replace(self, images=padded.repeat(1, 3, 1, 1), mean=(mean,) * 3, std=(std,) * 3)


def _proportional_counts(counts: list[int], total: int) -> list[int]:
    """Divides ``total`` in proportion to ``counts`` into integers. The largest remainders are rounded up.

    >>> _proportional_counts([50, 30, 20], 5)
    [3, 1, 1]
    """
    size = sum(counts)
    shares = [count * total // size for count in counts]
    by_remainder = sorted(range(len(counts)), key=lambda index: -(counts[index] * total % size))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def device_loader(
    data: ImageSet,
    batch_size: int,
    device: torch.device | str | None = None,
    *,
    prepare: Callable[[Tensor], Tensor] | None = None,
    **options: Any,
) -> TensorLoader:
    """Returns batches of an image set that is held in bytes on a device. Batches are augmented and normalized there.

    Args:
        data: Image set. The training images of CIFAR-10 take 154 MB.
        batch_size: Number of images in a batch.
        device: Device of the images; None leaves them where they are.
        prepare: Conversion of bytes to the input of the network; None for :meth:`~ImageSet.normalizer` of the set. Images of
            another set than that of the training need the normalizer of the training set.
        options: Options ``shuffle``, ``augment``, ``generator`` and ``drop_last`` of :class:`TensorLoader`.

    >>> images = torch.full((4, 1, 8, 8), 255, dtype=torch.uint8)
    >>> data = ImageSet(images, torch.arange(4), tuple("abcd"), "white", "train", (0.5,), (0.25,))
    >>> [(len(labels), round(batch.mean().item(), 4)) for batch, labels in device_loader(data, 3, "cpu")]
    [(3, 2.0), (1, 2.0)]
    """
    moved = data if device is None else data.to(device)
    prepare = data.normalizer() if prepare is None else prepare
    return TensorLoader(moved.images, moved.labels, batch_size=batch_size, prepare=prepare, **options)


# -------------------- published files

FileFormat = Literal["idx", "cifar"]


@dataclass(frozen=True)
class DataFile:
    """One file of CIFAR, or one pair of IDX files.

    Args:
        files: Names without endings: images and labels, or the one file that has both.
        count: Number of images.
        pixels, labels: SHA-256 of the decoded bytes.
        pickle_md5: MD5 of the published pickled file, for CIFAR.
    """

    files: tuple[str, ...]
    count: int
    pixels: str
    labels: str
    pickle_md5: str = ""


@dataclass(frozen=True)
class Download:
    """A published file.

    Args:
        file: Name.
        size: Number of bytes.
        md5: MD5 checksum.
        mirrors: Addresses.
    """

    file: str
    size: int
    md5: str
    mirrors: tuple[str, ...]


@dataclass(frozen=True)
class PublishedDataset:
    """Description of a data set and its files.

    Args:
        name, title: Name in code, and name in texts.
        layout: ``"idx"`` (files in ``folder``) or ``"cifar"`` (files in ``folder-bin`` or ``folder-py``).
        folder: Folder below the root.
        shape: Channels, height and width.
        classes: Names of the classes in the order of the labels.
        mean, std: Mean and standard deviation of each channel over the training images, in units of [0, 1].
        splits: Files of ``"train"`` and ``"test"``, in order.
        downloads: For IDX the files themselves, for CIFAR one archive.
    """

    name: str
    title: str
    layout: FileFormat
    folder: str
    shape: tuple[int, int, int]
    classes: tuple[str, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    splits: Mapping[str, tuple[DataFile, ...]]
    downloads: tuple[Download, ...] = field(default=())


def _idx(
    name: str, title: str, classes: str, moments: tuple[float, float], table: str, mirrors: tuple[str, ...]
) -> PublishedDataset:
    """Returns the description of a data set of IDX files.

    Args:
        name, title: Name in code, and name in texts.
        classes: Names of the classes, separated by commas.
        moments: Mean and standard deviation.
        table: Length and MD5 of the .gz files and SHA-256 of their content, for images and labels of both splits.
        mirrors: Addresses of the folders.
    """
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

# name of the file, SHA-256 of the pixels and of the labels, MD5 of the pickled file
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
    std=(0.24703223246328238, 0.2434851280000556, 0.26158784172796423),
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
