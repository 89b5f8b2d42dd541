"""Training one variant: its network, its loader, its optimizer and schedule, and the fit."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flowbnn.convert import to_stochastic
from flowbnn.methods import MLE, FitOptions, Posterior, fit
from flowbnn_studies.images.data import Pictures
from flowbnn_studies.images.settings import Training, rules_for


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
    pictures: Pictures,
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
    how: dict[str, Any] = {
        "optimizer": make_optimizer(training),
        "schedule": make_schedule(training),
        "weight_decay": training.weight_decay,
    }
    given: dict[str, Any] = {
        **options,
        "validation": [pictures.test] if curve_samples else None,
        "epochs": training.epochs,
    }
    if not rules:
        decay = how.pop("weight_decay")
        return MLE(lr=training.weight_lr, **how).start(model, loader, FitOptions(**given), decay)
    return fit(
        model,
        loader,
        weight_lr=training.weight_lr,
        noise_lr=training.noise_lr,
        beta=training.beta,
        warmup=training.warmup,
        num_data=pictures.num_data,
        validation_samples=curve_samples or 8,
        **how,
        **given,
    )
