"""Training one variant: its network, its loader, its optimizer and schedule, a running average, and the fit."""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from flowbnn.convert import to_stochastic
from flowbnn.methods import FitOptions, Posterior, fit
from flowbnn.methods.fitting import fit_point
from flowbnn.noise import noise_layers, noise_mode
from flowbnn_studies.images.data import Pictures
from flowbnn_studies.images.settings import Training, rules_for

__all__ = ["Average", "fit_variant", "make_optimizer", "make_schedule", "rate_at"]

KEY, COUNT = "average", "average_steps"


def make_optimizer(training: Training) -> Callable[..., Optimizer]:
    """From parameter groups, which bring their own rates, to the optimizer; fused kernels throughout."""
    if training.optimizer == "sgd":
        return partial(SGD, lr=0.0, momentum=training.momentum, nesterov=training.nesterov, fused=True)
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


class Average:
    r"""A running average of what an optimizer trains, :math:`\bar\theta \leftarrow \bar\theta + (1 - a_t)(\theta - \bar\theta)`.

    :meth:`settle` puts it in place at the end. The averages lie in the optimizer's state, beside the momenta, so that a checkpoint
    has them. The decay grows as ``t / (t + 9)`` up to ``decay``: early values are forgotten fast.

    >>> layer = nn.Linear(1, 1, bias=False)
    >>> average = Average(layer, decay=0.5)
    >>> optimizer = average.follow(torch.optim.SGD(layer.parameters(), lr=1.0))
    >>> with torch.no_grad():
    ...     _ = layer.weight.fill_(4.0)
    >>> for _ in range(2):
    ...     layer.weight.grad = torch.ones(1, 1)  # 4 -> 3 -> 2
    ...     optimizer.step()
    >>> average.settle([])
    >>> round(layer.weight.item(), 3)  # 3 + (1 - 2/11) * (2 - 3)
    2.182
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model, self.decay = model, decay
        self.optimizer: Optimizer | None = None

    def follow(self, optimizer: Optimizer) -> Optimizer:
        """Average after each step of this optimizer from now on."""
        self.optimizer = optimizer
        optimizer.register_step_post_hook(self._after_step)
        return optimizer

    @torch.no_grad()
    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        new = [p for p in parameters if KEY not in optimizer.state[p]]
        for parameter in new:
            optimizer.state[parameter][KEY] = parameter.detach().clone()
        first = optimizer.state[parameters[0]]
        if COUNT not in first:
            first[COUNT] = torch.zeros((), device=parameters[0].device)
        first[COUNT] += 1
        weight = 1.0 - (first[COUNT] / (first[COUNT] + 9)).clamp(max=self.decay)
        averages = [optimizer.state[p][KEY] for p in parameters]
        # tensors throughout: a step that is captured and replayed on the device keeps counting
        torch._foreach_add_(averages, torch._foreach_mul(torch._foreach_sub(parameters, averages), weight))

    @torch.no_grad()
    def settle(self, loader: Iterable[Any]) -> None:
        """The average into the network, whose BatchNorm statistics are then taken anew over one pass of the loader."""
        assert self.optimizer is not None, "follow comes first"
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if KEY in self.optimizer.state[parameter]:
                    parameter.copy_(self.optimizer.state[parameter][KEY])
        norms = [module for module in self.model.modules() if isinstance(module, _BatchNorm)]
        if norms:
            _measure(self.model, norms, loader)


def _measure(model: nn.Module, norms: list[_BatchNorm], loader: Iterable[Any]) -> None:
    """BatchNorm's running mean and variance as plain averages over the batches, with the noise as in training."""
    momenta = [norm.momentum for norm in norms]
    model.train()
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
    try:
        for inputs, _ in loader:
            if noise_layers(model):
                with noise_mode(model, "sample"):
                    model(inputs)
            else:
                model(inputs)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
        model.eval()


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
    average = Average(model, training.average) if training.average else None
    make = make_optimizer(training)
    how: dict[str, Any] = {
        "optimizer": make if average is None else lambda groups: average.follow(make(groups)),
        "schedule": make_schedule(training),
        "weight_decay": training.weight_decay,
    }
    given: dict[str, Any] = {
        **{name: value for name, value in options.items() if name != "optimizer"},
        "clip_gradient": training.clip or None,
        "validation": [pictures.test] if curve_samples else None,
        "epochs": training.epochs,
    }
    posterior: Posterior
    if not rules:
        posterior = fit_point(model, loader, FitOptions(**given), lr=training.weight_lr, **how)
    else:
        posterior = fit(
            model,
            loader,
            weight_lr=training.weight_lr,
            noise_lr=training.noise_lr,
            beta=training.beta,
            gamma=training.gamma,
            warmup=training.warmup,
            samples=training.samples,
            num_data=pictures.num_data,
            validation_samples=curve_samples or 8,
            **how,
            **given,
        )
    if average is not None:
        average.settle(loader)
    return posterior
