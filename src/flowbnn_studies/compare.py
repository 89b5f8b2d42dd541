"""``flowbnn compare``: all methods on a network and a data set by name, resumable method by method."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowbnn.compare import Comparison
from flowbnn.compare.candidates import BASELINE, Candidate, find_candidates
from flowbnn.compare.measurement import measure, warm_up
from flowbnn.compare.results import Parts
from flowbnn.data import TensorLoader, clusters, load_digits, ring
from flowbnn.errors import FlowBNNError
from flowbnn.models import MLP, VGG16, LeNet, ResNet18, SmallConv
from flowbnn.options import Ge, options
from flowbnn_studies.data import load_images, novel_noise
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, shuffled_loader
from flowbnn_studies.runner.study import Findings, Job

TensorPair = tuple[Tensor, Tensor]
SPREAD, RADIUS = 1.2, 18.0  # of the blobs, and of the ring about them
HELD_OUT = 5000  # images put aside of the large sets


@dataclass(frozen=True)
class ComparisonData:
    """A data set as a network takes it: inputs and targets, novel inputs, and what these are, in words."""

    train: TensorPair
    validation: TensorPair
    test: TensorPair
    novel: Tensor
    classes: int
    strange: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train[0].shape[1:])


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    inputs = math.prod(shape)
    return MLP(inputs, (32, 32) if inputs < 16 else (128,), classes)


# how a network is made for inputs of a shape, and the size of images it needs; 0 for any input
NETWORKS: dict[str, tuple[Callable[[tuple[int, ...], int], nn.Module], int]] = {
    "mlp": (_mlp, 0),
    "small-conv": (lambda shape, classes: SmallConv(shape[0], classes), 8),
    "lenet": (lambda shape, classes: LeNet(shape[0], classes), 28),
    "vgg16": (lambda shape, classes: VGG16(shape[0], classes), 32),
    "resnet18": (lambda shape, classes: ResNet18(shape[0], classes), 32),
}


def _digits(seed: int) -> ComparisonData:
    digits = load_digits(8, seed)
    strange = "the digit 8, never seen"
    return ComparisonData(
        digits.train, digits.validation, digits.test, digits.novel[0], len(digits.known), strange
    )


def _clusters(seed: int) -> ComparisonData:
    generator = torch.Generator().manual_seed(1000 + seed)
    train, validation, test = (clusters(number, SPREAD, generator) for number in (800, 200, 4000))
    return ComparisonData(
        train, validation, test, ring(1000, RADIUS, generator), 2, "a ring of far-away points"
    )


def _images(name: str, novel: str) -> Callable[[int], ComparisonData]:
    def load(seed: int) -> ComparisonData:
        train, aside = load_images(name, "train").split(HELD_OUT, seed)
        test, normalize = load_images(name, "test"), train.normalizer()
        if novel == "noise":
            generator = torch.Generator().manual_seed(1000 + seed)
            strange = novel_noise(2000, tuple(test.images.shape[1:]), generator)
        else:
            strange = load_images(novel, "test").to_unit()
        validation, tested = ((normalize(one.images), one.labels) for one in (aside, test))
        pairs = ((train.normalized(), train.labels), validation, tested)
        return ComparisonData(*pairs, normalize(strange), len(train.classes), f"images of {novel}")

    return load


DATA: dict[str, Callable[[int], ComparisonData]] = {
    "digits": _digits,
    "clusters": _clusters,
    "mnist": _images("mnist", "fashion-mnist"),
    "fashion-mnist": _images("fashion-mnist", "mnist"),
    "cifar10": _images("cifar10", "noise"),
}


def prepare_data(network: str, data: str, seed: int, train: int = 0, test: int = 0) -> ComparisonData:
    """A data set as a network takes it: images of another size are scaled to the one it needs.

    Args:
        network, data: names.
        seed: of the split, or of the points.
        train, test: at most that many examples; 0 for all.

    >>> prepare_data("lenet", "digits", seed=0).shape
    (1, 28, 28)
    """
    size = NETWORKS[network][1]

    def fitted(inputs: Tensor) -> Tensor:
        if not size or inputs.shape[-1] == size:
            return inputs
        smaller = size < inputs.shape[-1]
        return F.interpolate(inputs, (size, size), mode="bilinear", align_corners=False, antialias=smaller)

    def cut(pair: TensorPair, most: int) -> TensorPair:
        inputs, targets = (part[: most or None] for part in pair)
        return fitted(inputs), targets

    whole = DATA[data](seed)
    return replace(
        whole,
        train=cut(whole.train, train),
        validation=cut(whole.validation, test),
        test=cut(whole.test, test),
        novel=fitted(whole.novel[: test or None]),
    )


@options
class Settings(MethodSettings):
    """What the comparison depends on, besides :class:`MethodSettings`; the plain network is always among the methods.

    Args:
        network, data: their names.
        train, test: at most that many examples; 0 for all.
    """

    network: Literal["mlp", "small-conv", "lenet", "vgg16", "resnet18"] = "lenet"
    data: Literal["digits", "clusters", "mnist", "fashion-mnist", "cifar10"] = "digits"
    train: Annotated[int, Ge(0)] = 0
    test: Annotated[int, Ge(0)] = 0


class CompareStudy(MethodStudy):
    name = "compare"
    title = "Which method should I use?"
    description = (
        "all methods on a network and data of your choice, with what they cost; by default LeNet on digits"
    )
    question = "On this network and this data, which method should one use, and what does it cost?"
    source = "no published counterpart: the methods are those of Ahn and Lee's lecture and Ravenda's report"
    seeds = 1
    settings = Settings
    specific: ClassVar[dict[str, dict[str, Any]]] = {  # chains as long as a comparison of minutes allows
        "hmc": {"samples": 30, "warmup": 30, "chains": 1, "steps": 6},
        "nuts": {"samples": 25, "warmup": 25, "chains": 1, "max_depth": 3},
    }
    quick: ClassVar[dict[str, Any]] = {"epochs": 2, "samples": 4, "train": 128, "test": 64}

    def folder(self, settings: Settings) -> str:
        return f"{self.name}-{settings.network}-{settings.data}"

    def heading(self, settings: Settings) -> str:
        return f"Which method for {settings.network} on {settings.data}?"

    def candidates(self, settings: Settings) -> list[Candidate]:
        if settings.data == "clusters" and NETWORKS[settings.network][1]:
            raise FlowBNNError(
                f"network '{settings.network}' takes images, and 'clusters' are points; take --network mlp",
                argument="network",
            )
        return (
            find_candidates([BASELINE, *settings.methods])
            if settings.methods
            else super().candidates(settings)
        )

    def evaluate(self, job: Job, candidate: Candidate) -> dict[str, Any]:
        s: Settings = job.settings
        data = prepare_data(s.network, s.data, job.seed, s.train, s.test)
        torch.manual_seed(job.seed)
        network = NETWORKS[s.network][0](data.shape, data.classes)
        weights = sum(parameter.numel() for parameter in network.parameters())
        if weights > (candidate.max_weights or math.inf):
            return {"values": {}, "refused": f"with {weights:,} weights it would take hours"}
        loader = shuffled_loader(data.train, s.batch, job.seed)
        warm_up(network, loader)
        method, more = self.make_method(job, candidate, len(loader))
        test, novel = TensorLoader(*data.test, batch_size=512), TensorLoader(data.novel, batch_size=512)
        held_out = TensorLoader(*data.validation, batch_size=s.batch) if candidate.held_out else None
        more |= {"novel": novel, "validation": held_out, "samples": s.samples}
        content = measure(method, network, loader, test, **more)
        sizes = {"train": len(data.train[0]), "test": len(data.test[0]), "novel": len(data.novel)}
        told = {"method": repr(method), "weights": weights, "sizes": sizes, "strange": data.strange}
        return {**content, **told}

    def findings(self, settings: Settings, parts: Parts) -> Findings:
        one = parts.of(self.evaluated_candidates(settings, parts)[0].key)[0]
        table = Comparison(self.candidates(settings), parts)
        sizes = one["sizes"]
        notes = [
            f"{settings.network} has {one['weights']:,} weights; {sizes['train']} examples to learn from, {sizes['test']} to test "
            f"on, and as novel inputs {sizes['novel']} of {one['strange']}. {settings.epochs} epochs, batches of "
            f"{settings.batch}, a learning rate of {settings.lr:g}; up to {settings.samples} networks in a prediction. No setting "
            "was tuned for a method: a row shows what it gives with its defaults, and the Markov chains are as short as a "
            "comparison of minutes allows.",
            "Times are CPU seconds of one thread, so that what else runs on the machine counts little; the time of a prediction is "
            "the least of up to three.",
        ]
        return Findings(table.answer, table.metrics, table.table_rows(), table.figures(), notes)
