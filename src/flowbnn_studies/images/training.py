"""Training one variant, and what its method costs over the plain network: time of a step and of a prediction, memory in training.

Where cost is measured, every method goes through the same functions as in the study, with the same batches, precision and
acceleration. The methods take turns in every round, so that whatever else the machine does falls on all of them, and a ratio is that of
two medians.
"""

import gc
import math
import statistics
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flowbnn.compare.candidates import clock
from flowbnn.convert import to_stochastic
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNWarning
from flowbnn.methods import MLE, FitOptions, Posterior, fit
from flowbnn_studies.images.data import ImageData
from flowbnn_studies.images.evaluation import predict
from flowbnn_studies.images.settings import GROUPS, ImageSettings, Training, make_network, rules_for


def make_optimizer(training: Training) -> Callable[..., Optimizer]:
    """From parameter groups, which bring their own rates, to the optimizer; fused kernels throughout."""
    if training.optimizer == "sgd":
        return partial(SGD, lr=0.0, momentum=0.9, nesterov=training.nesterov, fused=True)
    return partial({"adam": Adam, "adamw": AdamW}[training.optimizer], fused=True)


def rate_at(schedule: str, rise: float, progress: float) -> float:
    """The factor of the learning rates at a point of the run.

    >>> [round(rate_at("cosine", 0.2, p), 3) for p in (0.0, 0.1, 0.2, 0.6, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> rate_at("linear", 0.0, 0.75), rate_at("constant", 0.5, 0.25)
    (0.25, 0.5)
    """
    if progress < rise:
        return progress / rise
    left = 1.0 - (progress - rise) / (1.0 - rise) if rise < 1.0 else 1.0
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 - 0.5 * math.cos(math.pi * left)
    return left


def make_schedule(training: Training) -> Callable[[Optimizer, int], LambdaLR] | None:
    """A schedule of the learning rates for :func:`flowbnn.fit`; None where they stay as they are."""
    if training.schedule == "constant" and not training.rise:
        return None

    def make(optimizer: Optimizer, steps: int) -> LambdaLR:
        # a step later than its number, so that the first does not have a rate of zero
        return LambdaLR(
            optimizer,
            lambda step: rate_at(training.schedule, training.rise, min(1.0, (step + 1) / (steps + 1))),
        )

    return make


def fit_variant(
    variant: str,
    architecture: str,
    training: Training,
    network: nn.Module,
    pictures: ImageData,
    options: dict[str, Any],
    seed: int,
    curve_samples: int = 0,
    loader: Any = None,
) -> Posterior:
    """Train ``network`` as a variant says, and give its posterior.

    Args:
        variant: its key, which names the method and the site.
        architecture: ``"lenet"`` or ``"vgg16"``.
        network: the plain network, fresh or trained.
        pictures: the data, on the device where training takes place.
        options: of the run, as for :func:`flowbnn.fit`.
        seed: of the order of the images.
        curve_samples: above 0, accuracy and ECE on the test images are recorded after each epoch, for display.
        loader: of the training images, instead of the one that the training asks for.
    """
    loader = pictures.loader(training, seed) if loader is None else loader
    rules = rules_for(architecture, variant, training)
    model = to_stochastic(network, rules) if rules else network
    model.to(pictures.device)
    how: dict[str, Any] = {"optimizer": make_optimizer(training), "schedule": make_schedule(training)}
    validation = [pictures.test] if curve_samples else None
    given: dict[str, Any] = {**options, "validation": validation, "epochs": training.epochs}
    if not rules:
        method = MLE(lr=training.weight_lr, **how)
        return method.start(model, loader, FitOptions(**given), training.weight_decay)
    names = ("weight_lr", "noise_lr", "weight_decay", "beta", "warmup")
    how |= {name: getattr(training, name) for name in names}
    how |= {"num_data": pictures.num_data, "validation_samples": curve_samples or 8}
    return fit(model, loader, **how, **given)


# -------------------- what a method costs

Train = Callable[[str, Training, Any], Posterior]  # of a method by its name, on the batches of a loader

STEPS, PASSES, FEW = 100, 4, 12
IMAGES, ON_GPU = 500, 2000  # to predict; with fewer on a GPU the launches would be measured


class TimedLoader:
    """A loader that ends each of its passes after some steps and records how long a step took."""

    def __init__(self, loader: TensorLoader, steps: int) -> None:
        self.loader, self.steps = loader, min(steps, len(loader))
        self.generator, self.num_data = loader.generator, loader.num_data
        self.seconds: list[float] = []

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        device = self.loader.tensors[0].device
        started = clock(device)
        for _, batch in zip(range(self.steps), self.loader, strict=False):
            yield batch
        self.seconds.append((clock(device) - started) / self.steps)


def measure_cost(
    architecture: str, settings: ImageSettings, pictures: ImageData, options: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Medians of every method, and their ratios to the plain network's.

    Args:
        architecture, settings, pictures: as in the study.
        options: of the run, as for :func:`flowbnn.fit`.
        precision: of the run; predictions are made in it too.
    """
    methods = {group.replace("_", "-"): _training(settings, group) for group in GROUPS}
    steps: dict[str, list[float]] = {name: [] for name in methods}
    memory: dict[str, list[float]] = {}
    posteriors: dict[str, Posterior] = {}

    def train(name: str, training: Training, loader: Any) -> Posterior:
        network = make_network(architecture, pictures.channels, settings.width)
        return fit_variant(
            f"best-{name}", architecture, training, network, pictures, options, 0, loader=loader
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlowBNNWarning)  # nothing is trained long enough to be healthy
        for name, training in methods.items():
            memory[name] = [_peak(train, name, training, pictures)] if pictures.device.type == "cuda" else []
        for _ in range(settings.rounds):
            for name, training in methods.items():
                loader = TimedLoader(pictures.loader(training, 0), STEPS)
                posteriors[name] = train(name, training, loader)
                steps[name].append(statistics.median(loader.seconds[1:]))  # the first pass warms up
    number = min(ON_GPU if pictures.device.type == "cuda" else IMAGES, len(pictures.tested))
    predictions = _predict(posteriors, pictures.test[0][:number], settings, precision)
    measured = {"step": steps, "memory": memory, "prediction": predictions}
    medians = {
        name: {kind: statistics.median(values[name]) for kind, values in measured.items() if values[name]}
        for name in methods
    }
    ratios = {
        name: {kind: value / medians["plain"][kind] for kind, value in median.items()}
        for name, median in medians.items()
    }
    rows = number * settings.samples
    where = "a GPU" if pictures.device.type == "cuda" else "a CPU"
    caption = (
        f"Ratios to the plain network in the same run on {where}: batch {settings.plain.batch}, precision {precision}, medians of "
        f"{settings.rounds} rounds in which the methods take turns. A step is all of it: batch, forward, backward, update; "
        f"{_taken(options, pictures.device)}. "
        f"A prediction is of {number} images with {settings.samples} samples, against the plain network on {rows} images."
    )
    if any(memory.values()):
        caption += f" Memory is the peak of {FEW} steps on one batch: weights, gradients, the optimizer's state and work space."
    return {"values": {}, "medians": medians, "ratios": ratios, "caption": caption}


def _taken(options: dict[str, Any], device: torch.device) -> str:
    """How the steps were taken, which changes what they cost."""
    asked = options.get("acceleration", "auto") if device.type == "cuda" else "off"
    words = {"off": "taken one by one", "compile": "compiled and recorded as a CUDA graph"}
    return f"steps are {words.get(asked, 'recorded as a CUDA graph, not compiled')}"


def _training(settings: ImageSettings, group: str) -> Training:
    """A method's own noise under the plain network's optimizer, batches and schedule."""
    own: Training = getattr(settings, group)
    noise = "prior_scale base_scale components positions rate dropped noise_lr warmup"
    same = {name: getattr(own, name) for name in noise.split()}
    return replace(settings.plain, epochs=PASSES, **same)


def _peak(train: Train, name: str, training: Training, pictures: ImageData) -> float:
    """Bytes at the peak of a few steps on one batch, which is there before; what earlier methods left behind is cleared away."""
    batch = tuple(tensor.clone() for tensor in next(iter(pictures.loader(training, 0))))
    gc.collect()  # a recorded step keeps its memory until then
    release: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if release is not None:  # kept for every stream that ever asked, else
        release()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(pictures.device)
    before = torch.cuda.memory_allocated(pictures.device)
    train(name, replace(training, epochs=1), [batch] * FEW)
    return float(torch.cuda.max_memory_allocated(pictures.device) - before)


def _predict(
    posteriors: dict[str, Posterior], images: Tensor, settings: ImageSettings, precision: str
) -> dict[str, list[float]]:
    """Seconds of predictions with all samples; of the plain network, for as many rows."""
    many = images.repeat(settings.samples, 1, 1, 1)
    seconds: dict[str, list[float]] = {name: [] for name in posteriors}
    for turn in range(settings.rounds + 1):
        for name, posterior in posteriors.items():
            started = clock(images.device)
            predict(posterior, many if name == "plain" else images, settings.samples, precision)
            if turn:  # the first is for warming up
                seconds[name].append(clock(images.device) - started)
    return seconds
