"""Networks and data sets by name, made to fit each other."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.data import clusters, load_digits, ring
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.models import MLP, VGG16, LeNet, SmallConv
from flowbnn_studies.data import load_images, novel_noise

__all__ = [
    "DATA",
    "NETWORKS",
    "Bundle",
    "DataEntry",
    "NetworkEntry",
    "check_names",
    "count_weights",
    "make_network",
    "prepare_data",
]

Pair = tuple[Tensor, Tensor]
SPREAD, RADIUS = 1.2, 18.0  # of the blobs, and of the ring about them
HELD_OUT = 5000  # images put aside of the large sets


@dataclass(frozen=True)
class Bundle:
    """Data as a network takes it.

    Args:
        train, validation, test: inputs and targets.
        novel: inputs of a kind that training does not see.
        classes: how many there are.
        strange: what the novel inputs are, in words.
    """

    train: Pair
    validation: Pair
    test: Pair
    novel: Tensor
    classes: int
    strange: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train[0].shape[1:])


@dataclass(frozen=True)
class NetworkEntry:
    """A network by name: how it is made for inputs of a shape, and the size of images it needs, None for any input."""

    make: Callable[[tuple[int, ...], int], nn.Module]
    size: int | None = None


@dataclass(frozen=True)
class DataEntry:
    """A data set by name: how it is loaded from a seed, and whether it holds images."""

    load: Callable[[int], Bundle]
    images: bool = True


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    inputs = math.prod(shape)
    return MLP(inputs, (32, 32) if inputs < 16 else (128,), classes)


NETWORKS: dict[str, NetworkEntry] = {
    "mlp": NetworkEntry(_mlp),
    "small-conv": NetworkEntry(lambda shape, classes: SmallConv(shape[0], classes), 8),
    "lenet": NetworkEntry(lambda shape, classes: LeNet(shape[0], classes), 28),
    "vgg16": NetworkEntry(lambda shape, classes: VGG16(shape[0], classes), 32),
}


def _digits(seed: int) -> Bundle:
    found = load_digits(8, seed)
    return Bundle(
        found.train, found.validation, found.test, found.novel[0], len(found.known), "the digit 8, never seen"
    )


def _clusters(seed: int) -> Bundle:
    generator = torch.Generator().manual_seed(1000 + seed)
    parts = [clusters(number, SPREAD, generator) for number in (800, 200, 4000)]
    return Bundle(parts[0], parts[1], parts[2], ring(1000, RADIUS, generator), 2, "a ring of far-away points")


def _published(name: str, stranger: str | None) -> Callable[[int], Bundle]:
    def load(seed: int) -> Bundle:
        learned, aside = load_images(name, "train").split(HELD_OUT, seed)
        test = load_images(name, "test")
        as_learned = learned.normalizer()
        if stranger is None:
            generator = torch.Generator().manual_seed(1000 + seed)
            strange = novel_noise(2000, tuple(test.images.shape[1:]), generator)
        else:
            strange = load_images(stranger, "test").to_unit()
        return Bundle(
            (learned.normalized(), learned.labels),
            (as_learned(aside.images), aside.labels),
            (as_learned(test.images), test.labels),
            as_learned(strange),
            len(learned.classes),
            "images of noise" if stranger is None else f"images of {stranger}",
        )

    return load


DATA: dict[str, DataEntry] = {
    "digits": DataEntry(_digits),
    "clusters": DataEntry(_clusters, images=False),
    "mnist": DataEntry(_published("mnist", "fashion-mnist")),
    "fashion-mnist": DataEntry(_published("fashion-mnist", "mnist")),
    "cifar10": DataEntry(_published("cifar10", None)),
}


def check_names(network: str, data: str) -> None:
    """Refuse names that are not there, and pairs that do not fit."""
    if network not in NETWORKS:
        raise FlowBNNError(f"there is no network '{network}'{nearest(network, NETWORKS)}")
    if data not in DATA:
        raise FlowBNNError(f"there is no data set '{data}'{nearest(data, DATA)}")
    if NETWORKS[network].size is not None and not DATA[data].images:
        raise FlowBNNError(f"network '{network}' takes images, and '{data}' are points; take --network mlp")


def prepare_data(network: str, data: str, seed: int, train: int = 0, test: int = 0) -> Bundle:
    """A data set as a network takes it: images of another size are scaled to the one it needs.

    Args:
        network, data: names.
        seed: of the split, or of the points.
        train, test: at most that many examples; 0 for all.

    >>> prepare_data("lenet", "digits", seed=0).shape
    (1, 28, 28)
    >>> prepare_data("lenet", "clusters", seed=0)
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: network 'lenet' takes images, and 'clusters' are points; take --network mlp
    """
    check_names(network, data)
    size = NETWORKS[network].size
    found = DATA[data].load(seed)

    def fitted(inputs: Tensor) -> Tensor:
        if size is None or inputs.shape[-1] == size:
            return inputs
        smaller = size < inputs.shape[-1]
        return F.interpolate(inputs, (size, size), mode="bilinear", align_corners=False, antialias=smaller)

    def cut(pair: Pair, most: int) -> Pair:
        inputs, targets = (part[:most] if most else part for part in pair)
        return fitted(inputs), targets

    return Bundle(
        cut(found.train, train),
        cut(found.validation, test),
        cut(found.test, test),
        fitted(found.novel[:test] if test else found.novel),
        found.classes,
        found.strange,
    )


def make_network(name: str, bundle: Bundle) -> nn.Module:
    """A fresh network for this data."""
    return NETWORKS[name].make(bundle.shape, bundle.classes)


def count_weights(network: nn.Module) -> int:
    """How many weights a network has, tied ones once."""
    return sum(parameter.numel() for parameter in network.parameters())
