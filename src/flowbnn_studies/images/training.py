"""Training of one variant, and the cost of its method relative to the deterministic network: time of a step and of a prediction,
memory.

For the cost, every method uses the same functions as in the study, with the same batches, precision and acceleration. The methods
take turns in every round, so that other load on the machine affects all of them. A ratio is that of two medians.
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

from flowbnn.compare.measurement import clock
from flowbnn.convert import to_stochastic
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNWarning
from flowbnn.methods import MLE, FitOptions, Posterior
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, fit_unverified
from flowbnn_studies.images.data import ImageData
from flowbnn_studies.images.evaluation import predict
from flowbnn_studies.images.settings import GROUPS, ImageSettings, Training, make_network, rules_for


def make_optimizer(training: Training) -> Callable[..., Optimizer]:
    """Returns a factory of the optimizer with fused kernels. Learning rates are set by the parameter groups."""
    if training.optimizer == "sgd":
        return partial(SGD, lr=0.0, momentum=0.9, nesterov=training.nesterov, fused=True)
    return partial({"adam": Adam, "adamw": AdamW}[training.optimizer], fused=True)


def rate_at(schedule: str, warmup: float, progress: float) -> float:
    """Returns the factor of the learning rates at a point of the run.

    Args:
        schedule: Name of the schedule.
        warmup: Fraction of the run over which the rate grows.
        progress: Fraction of the run that is done.

    >>> [round(rate_at("cosine", 0.2, p), 3) for p in (0.0, 0.1, 0.2, 0.6, 1.0)]
    [0.0, 0.5, 1.0, 0.5, 0.0]
    >>> rate_at("linear", 0.0, 0.75), rate_at("constant", 0.5, 0.25)
    (0.25, 0.5)
    """
    if progress < warmup:
        return progress / warmup
    remaining = 1.0 - (progress - warmup) / (1.0 - warmup) if warmup < 1.0 else 1.0
    if schedule == "constant":
        return 1.0
    if schedule == "cosine":
        return 0.5 - 0.5 * math.cos(math.pi * remaining)
    return remaining


def make_schedule(training: Training) -> Callable[[Optimizer, int], LambdaLR] | None:
    """Returns the learning-rate schedule for :func:`flowbnn.fit`; None for constant rates."""
    if training.schedule == "constant" and not training.lr_warmup:
        return None

    def make(optimizer: Optimizer, steps: int) -> LambdaLR:
        # the steps are counted from one, so that the first rate is not zero
        return LambdaLR(
            optimizer,
            lambda step: rate_at(training.schedule, training.lr_warmup, min(1.0, (step + 1) / (steps + 1))),
        )

    return make


def fit_variant(
    variant: str,
    architecture: str,
    training: Training,
    network: nn.Module,
    images: ImageData,
    options: dict[str, Any],
    seed: int,
    curve_samples: int = 0,
    loader: Any = None,
) -> Posterior:
    """Trains a network as a variant and returns its posterior.

    Args:
        variant: Key of the variant, which names the method and the site.
        architecture: ``"lenet"``, ``"vgg16"`` or ``"resnet18"``.
        training: Training of the variant.
        network: Deterministic network, untrained or trained.
        images: Images on the device of the training.
        options: Options of :func:`flowbnn.fit`.
        seed: Seed of the order of the images.
        curve_samples: If positive, accuracy and ECE on the test images are recorded after each epoch, for display.
        loader: Batches of training images that replace those of ``training``.
    """
    loader = images.loader(training, seed) if loader is None else loader
    rules = rules_for(architecture, variant, training)
    model = to_stochastic(network, rules) if rules else network
    model.to(images.device)
    method_options: dict[str, Any] = {
        "optimizer": make_optimizer(training),
        "schedule": make_schedule(training),
    }
    validation = [images.test] if curve_samples else None
    fit_options: dict[str, Any] = {**options, "validation": validation, "epochs": training.epochs}
    if not rules:
        method = MLE(epochs=training.epochs, lr=training.weight_lr, **method_options)
        return method.fit_point(model, loader, FitOptions(**fit_options), training.weight_decay)
    names = ("weight_lr", "noise_lr", "weight_decay", "beta", "warmup", "repeats")
    method_options |= {name: getattr(training, name) for name in names}
    method_options |= {"num_data": images.num_data, "validation_samples": curve_samples or 8}
    # not verified as by fb.fit: the curves are computed on test images, which must not decide on the result
    return fit_unverified(model, loader, NoiseFitOptions(**method_options, **fit_options))


# -------------------- cost of a method

Train = Callable[[str, Training, Any], Posterior]  # trains a method by its name on the batches of a loader
MEMORY_STEPS = 12  # steps of the measurement of memory, which is constant after the first few


class TimedLoader:
    """Loader that ends each pass after some steps and records the time of a step.

    Args:
        loader: Loader of the batches.
        steps: Largest number of steps in a pass.
    """

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
    architecture: str, settings: ImageSettings, images: ImageData, options: dict[str, Any], precision: str
) -> dict[str, Any]:
    """Measures medians of every method and their ratios to those of the deterministic network.

    Args:
        architecture: Name of the network.
        settings: Settings of the study.
        images: Images on the device of the training.
        options: Options of :func:`flowbnn.fit`.
        precision: Precision of the training and of the predictions.
    """
    methods = {group.replace("_", "-"): _cost_training(settings, group) for group in GROUPS}
    steps: dict[str, list[float]] = {name: [] for name in methods}
    memory: dict[str, list[float]] = {}
    posteriors: dict[str, Posterior] = {}

    def train(name: str, training: Training, loader: Any) -> Posterior:
        network = make_network(architecture, images.channels, settings.width)
        return fit_variant(f"best-{name}", architecture, training, network, images, options, 0, loader=loader)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlowBNNWarning)  # the trainings are too short to converge
        for name, training in methods.items():
            memory[name] = (
                [_peak_memory(train, name, training, images)] if images.device.type == "cuda" else []
            )
        for _ in range(settings.cost_rounds):
            for name, training in methods.items():
                loader = TimedLoader(images.loader(training, 0), 100)  # 100 steps make a stable mean
                posteriors[name] = train(name, training, loader)
                steps[name].append(statistics.median(loader.seconds[1:]))  # the first pass warms up
    # with fewer images on a GPU, the time would be that of kernel launches
    number = min(2000 if images.device.type == "cuda" else 500, len(images.test_set))
    predictions = _time_predictions(posteriors, images.test[0][:number], settings, precision)
    measured = {"step": steps, "memory": memory, "prediction": predictions}
    medians = {
        name: {kind: statistics.median(values[name]) for kind, values in measured.items() if values[name]}
        for name in methods
    }
    ratios = {
        name: {kind: value / medians["plain"][kind] for kind, value in median.items()}
        for name, median in medians.items()
    }
    caption = _cost_caption(settings, options, images.device, precision, number)
    if any(memory.values()):
        caption += f" Memory is the peak of {MEMORY_STEPS} steps on one batch: weights, gradients, optimizer state and work space."
    return {"values": {}, "medians": medians, "ratios": ratios, "caption": caption}


def _cost_caption(
    settings: ImageSettings, options: dict[str, Any], device: torch.device, precision: str, number: int
) -> str:
    """Returns the conditions of the measurement in words."""
    return (
        f"Ratios to the deterministic network in the same run on a {'GPU' if device.type == 'cuda' else 'CPU'}: batch "
        f"{settings.plain.batch}, precision {precision}, medians of {settings.cost_rounds} rounds in which the methods take turns. "
        f"A step includes batch, forward pass, backward pass and update; {_describe_steps(options, device)}. "
        f"A prediction has {number} images and {settings.samples} samples, compared with the deterministic network on "
        f"{number * settings.samples} images."
    )


def _describe_steps(options: dict[str, Any], device: torch.device) -> str:
    """Returns the execution of the steps in words."""
    acceleration = options.get("acceleration", "auto") if device.type == "cuda" else "off"
    words = {"off": "executed one by one", "compile": "compiled and recorded as a CUDA graph"}
    return f"steps are {words.get(acceleration, 'recorded as a CUDA graph, not compiled')}"


def _cost_training(settings: ImageSettings, group: str) -> Training:
    """Returns the noise of a method with the optimizer, batches and schedule of the deterministic network."""
    training: Training = getattr(settings, group)
    names = "prior_scale base_scale components positions dropout_rate dropout_layers noise_lr warmup"
    noise = {name: getattr(training, name) for name in names.split()}
    return replace(settings.plain, epochs=4, **noise)  # one pass to warm up, three to measure


def _peak_memory(train: Train, name: str, training: Training, images: ImageData) -> float:
    """Returns the peak memory of a few steps on one batch, in bytes. Memory of earlier methods is released before."""
    batch = tuple(tensor.clone() for tensor in next(iter(images.loader(training, 0))))
    gc.collect()  # recorded steps keep their memory until then
    release: Any = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if release is not None:  # otherwise every stream keeps its work space
        release()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(images.device)
    before = torch.cuda.memory_allocated(images.device)
    train(name, replace(training, epochs=1), [batch] * MEMORY_STEPS)
    return float(torch.cuda.max_memory_allocated(images.device) - before)


def _time_predictions(
    posteriors: dict[str, Posterior], images: Tensor, settings: ImageSettings, precision: str
) -> dict[str, list[float]]:
    """Returns the seconds of predictions with all samples; for the deterministic network, of predictions for as many rows."""
    repeated = images.repeat(settings.samples, 1, 1, 1)
    seconds: dict[str, list[float]] = {name: [] for name in posteriors}
    for turn in range(settings.cost_rounds + 1):
        for name, posterior in posteriors.items():
            started = clock(images.device)
            predict(posterior, repeated if name == "plain" else images, settings.samples, precision)
            if turn:  # the first turn warms up
                seconds[name].append(clock(images.device) - started)
    return seconds
