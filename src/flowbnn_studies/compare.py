"""Study of ``flowbnn compare``: all methods on a network and a data set by name, resumable method by method."""

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
from flowbnn.compare.results import SeedResults
from flowbnn.data import TensorLoader, clusters, load_digits, ring
from flowbnn.errors import FlowBNNError
from flowbnn.models import MLP, VGG16, LeNet, ResNet18, SmallConv
from flowbnn.options import Ge, options
from flowbnn_studies.data import load_images, novel_noise
from flowbnn_studies.runner.methods import MethodSettings, MethodStudy, shuffled_loader
from flowbnn_studies.runner.story import Numbers, Story
from flowbnn_studies.runner.study import Findings, Job

TensorPair = tuple[Tensor, Tensor]
SPREAD, RADIUS = 1.2, 18.0  # of the blobs and of the ring, as in clusters-2d
VALIDATION = 5000  # validation images of the large sets, as in the image studies


@dataclass(frozen=True)
class ComparisonData:
    """A data set in the format of the network.

    Args:
        train, validation, test: Inputs and targets.
        novel: Out-of-distribution inputs.
        classes: Number of classes.
        novel_label: Description of the out-of-distribution inputs.
    """

    train: TensorPair
    validation: TensorPair
    test: TensorPair
    novel: Tensor
    classes: int
    novel_label: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train[0].shape[1:])


def _mlp(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Returns an MLP for inputs of a shape."""
    inputs = math.prod(shape)
    return MLP(inputs, (32, 32) if inputs < 16 else (128,), classes)


# factory of a network for inputs of a shape, and the size of the images that it needs; 0 for any input
NETWORKS: dict[str, tuple[Callable[[tuple[int, ...], int], nn.Module], int]] = {
    "mlp": (_mlp, 0),
    "small-conv": (lambda shape, classes: SmallConv(shape[0], classes), 8),
    "lenet": (lambda shape, classes: LeNet(shape[0], classes), 28),
    "vgg16": (lambda shape, classes: VGG16(shape[0], classes), 32),
    "resnet18": (lambda shape, classes: ResNet18(shape[0], classes), 32),
}


def _digits(seed: int) -> ComparisonData:
    """Returns the 8x8 digits without the digit 8."""
    digits = load_digits(8, seed)
    return ComparisonData(
        digits.train, digits.validation, digits.test, digits.novel[0], len(digits.known), "the unseen digit 8"
    )


def _clusters(seed: int) -> ComparisonData:
    """Returns four blobs of two classes and a ring."""
    generator = torch.Generator().manual_seed(1000 + seed)
    train, validation, test = (clusters(number, SPREAD, generator) for number in (800, 200, 4000))
    return ComparisonData(
        train, validation, test, ring(1000, RADIUS, generator), 2, "a ring far from the data"
    )


def _images(name: str, novel: str) -> Callable[[int], ComparisonData]:
    """Returns a loader of a published image set."""

    def load(seed: int) -> ComparisonData:
        train, validation_set = load_images(name, "train").split(VALIDATION, seed)
        test, normalize = load_images(name, "test"), train.normalizer()
        if novel == "noise":
            generator = torch.Generator().manual_seed(1000 + seed)
            novel_images = novel_noise(2000, tuple(test.images.shape[1:]), generator)
        else:
            novel_images = load_images(novel, "test").to_unit()
        validation_pair, test_pair = (
            (normalize(images.images), images.labels) for images in (validation_set, test)
        )
        pairs = ((train.normalized(), train.labels), validation_pair, test_pair)
        return ComparisonData(*pairs, normalize(novel_images), len(train.classes), f"images of {novel}")

    return load


DATA: dict[str, Callable[[int], ComparisonData]] = {
    "digits": _digits,
    "clusters": _clusters,
    "mnist": _images("mnist", "fashion-mnist"),
    "fashion-mnist": _images("fashion-mnist", "mnist"),
    "cifar10": _images("cifar10", "noise"),
}


def prepare_data(network: str, data: str, seed: int, train: int = 0, test: int = 0) -> ComparisonData:
    """Returns a data set in the format of a network. Images are scaled to the size that it needs.

    Args:
        network, data: Names of the network and the data set.
        seed: Seed of the split or of the points.
        train, test: Largest number of training and test examples; 0 for all.

    >>> prepare_data("lenet", "digits", seed=0).shape
    (1, 28, 28)
    """
    size = NETWORKS[network][1]

    def resize(inputs: Tensor) -> Tensor:
        if not size or inputs.shape[-1] == size:
            return inputs
        smaller = size < inputs.shape[-1]
        return F.interpolate(inputs, (size, size), mode="bilinear", align_corners=False, antialias=smaller)

    def truncate(pair: TensorPair, limit: int) -> TensorPair:
        inputs, targets = (tensor[: limit or None] for tensor in pair)
        return resize(inputs), targets

    complete = DATA[data](seed)
    return replace(
        complete,
        train=truncate(complete.train, train),
        validation=truncate(complete.validation, test),
        test=truncate(complete.test, test),
        novel=resize(complete.novel[: test or None]),
    )


@options
class Settings(MethodSettings):
    """Settings of the comparison, in addition to :class:`MethodSettings`. The deterministic network is always included.

    Args:
        network, data: Names of the network and the data set.
        train, test: Largest number of training and test examples; 0 for all.
    """

    network: Literal["mlp", "small-conv", "lenet", "vgg16", "resnet18"] = "lenet"
    data: Literal["digits", "clusters", "mnist", "fashion-mnist", "cifar10"] = "digits"
    train: Annotated[int, Ge(0)] = 0
    test: Annotated[int, Ge(0)] = 0


class CompareStudy(MethodStudy):
    name = "compare"
    title = "Which method should I use?"
    description = (
        "all methods on a network and data set of your choice, with their costs; by default LeNet on digits"
    )
    question = "Which method should be used with this network and these data, and what does it cost?"
    source = "no published counterpart; methods of Ahn and Lee's lecture and Ravenda's report"
    seeds = 1
    settings = Settings
    specific: ClassVar[dict[str, dict[str, Any]]] = {  # short chains, for a comparison of minutes
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
                f"network '{settings.network}' needs images, and 'clusters' has points; use --network mlp",
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
            return {"values": {}, "refused": f"it would take hours with {weights:,} weights"}
        loader = shuffled_loader(data.train, s.batch, job.seed)
        warm_up(network, loader)
        method, options = self.make_method(job, candidate, len(loader))
        test, novel = TensorLoader(*data.test, batch_size=512), TensorLoader(data.novel, batch_size=512)
        validation = TensorLoader(*data.validation, batch_size=s.batch) if candidate.needs_held_out else None
        options |= {"novel": novel, "validation": validation, "samples": s.samples}
        content = measure(method, network, loader, test, **options)
        sizes = {"train": len(data.train[0]), "test": len(data.test[0]), "novel": len(data.novel)}
        description = {
            "method": repr(method),
            "weights": weights,
            "sizes": sizes,
            "novel_label": data.novel_label,
        }
        return {**content, **description}

    def story(self, numbers: Numbers) -> Story:
        best, second = numbers.ranked("nll")[:2]
        rivals = [key for key in numbers.ranked("nll")[1:] if numbers.better(best, key, "nll") == 0]
        return Story(
            numbers.results["title"],
            f"{numbers.name(best)} has the lowest NLL ({numbers.text(best, 'nll', '.3f')}), but over {numbers.seeds} seeds it is not "
            f"significantly better than {len(rivals)} of the other methods, and a prediction takes "
            f"{numbers.text(best, 'prediction', '.0f')} times as long as that of one network ({numbers.name(second)}: "
            f"{numbers.text(second, 'prediction', '.0f')})."
            if rivals
            else f"{numbers.name(best)} has the lowest NLL ({numbers.text(best, 'nll', '.3f')}), but a prediction takes "
            f"{numbers.text(best, 'prediction', '.0f')} times as long as that of one network.",
            numbers.text(best, "nll", ".3f"),
            f"NLL of {numbers.name(best)}; {numbers.name(second)} has {numbers.text(second, 'nll', '.3f')}",
            ("nll", "ece", "training", "prediction"),
            rows=numbers.main_rows(best, second),
        )

    def findings(self, settings: Settings, parts: SeedResults) -> Findings:
        part = parts.of(self.evaluated_candidates(settings, parts)[0].key)[0]
        comparison = Comparison(self.candidates(settings), parts)
        sizes = part["sizes"]
        notes = [
            f"{settings.network} has {part['weights']:,} weights. There are {sizes['train']} training examples, {sizes['test']} "
            f"test examples and {sizes['novel']} out-of-distribution inputs ({part['novel_label']}). {settings.epochs} epochs, "
            f"batches of {settings.batch}, learning rate {settings.lr:g}, up to {settings.samples} networks in a prediction. No "
            "setting was tuned for a method: a row shows its defaults, and the Markov chains are short.",
            "Times are CPU seconds of one thread, so that other load on the machine has little effect. The time of a prediction is "
            "the smallest of up to three.",
        ]
        return Findings(
            comparison.answer, comparison.metrics, comparison.table_rows(), comparison.figures(), notes
        )
