r"""Fit of the noise and the weights of a stochastic network by the ELBO.

.. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

``fb.fit``, :class:`~flowbnn.NodeNoise` and :class:`~flowbnn.MCDropout` use :func:`fit_noise`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import split_batch
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.fitting import (
    NOISE_LR,
    FitOptions,
    Loss,
    LossAndLogs,
    NetworkFunction,
    SchedulerFactory,
    make_optimizer,
    prepare,
    should_check_targets,
    train_posterior,
)
from flowbnn.methods.schedule import PlateauRun, PlateauSchedule, default_noise_lr
from flowbnn.methods.variational.report import FinishedFit, InitialState, make_report, spread_batches
from flowbnn.noise import noise_layers, noise_mode, parameter_groups, weight_parameters
from flowbnn.noise.base import layers_with_noise
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, UnitInterval, options
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.regression import NoiseScale, check_noise_scale, fit_noise_scale, set_noise_scale
from flowbnn.training import Clock, History, cosine, is_main_process
from flowbnn.training.options import length_of
from flowbnn.training.progress import terminal


@options(kw_only=True, owner="fit")
class NoiseFitOptions(FitOptions):
    """Options of :func:`~flowbnn.fit`. Its docstring describes them."""

    epochs: Count | None = None  # type: ignore[assignment]
    weight_lr: NonNegative = 2e-4
    noise_lr: NonNegative | None = None
    weight_decay: NonNegative = 0.0
    beta: NonNegative = 1.0
    warmup: UnitInterval = 0.0
    gamma: NonNegative = 0.0
    repeats: Count = 1
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    schedule: SchedulerFactory | PlateauSchedule | Literal["cosine"] | None = "cosine"
    validation_samples: Count = 8
    report: bool = True
    description: str = "fitting the noise"


def fit_noise(model: nn.Module, loader: Iterable[Any], options: NoiseFitOptions) -> NoisePosterior:
    """Fits the noise and the weights of a stochastic network in place.

    Args:
        model: Network with noise.
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit.
    """
    check_trainable(model, options)
    initial = InitialState.of(model) if options.report else None
    prepared = prepare(model, loader, options, trains_weights(model, options))
    likelihood, targets = prepared.likelihood, prepared.data.sample[1]
    if learns_noise(
        likelihood
    ):  # starts at the size of the residuals, even if the likelihood has another value
        set_noise_scale(likelihood, [(prepared.outputs, targets)])
    rates = choose_length_and_rates(options, loader, learns_noise(likelihood))
    objective = ELBO(likelihood, prepared.data.require_num_examples(), options.beta, options.gamma)
    posterior = NoisePosterior(model, likelihood)
    posterior.set_rows_interact(prepared.rows_interact)
    settings = {name: getattr(options, name) for name in ("beta", "gamma", "warmup", "repeats")}
    with noise_mode(model, "sample"):
        posterior.history = train_posterior(
            posterior,
            make_loss(model, objective, options, len(targets)),
            make_noise_optimizer(posterior, options, rates.noise_lr),
            loader,
            replace(options, epochs=rates.epochs),
            rates.scheduler,
            options.validation_samples,
            settings={**settings, "num_data": objective.num_data},
            check_batch=prepared.check_batch,
            num_epochs=rates.num_epochs,
        )
    for layer in noise_layers(model).values():
        layer.fitted = True
    log_scale, noise_scale = finish_noise_scale(posterior, loader, options.seed)
    if initial is not None:
        batches = spread_batches(loader, options.seed)
        fit = FinishedFit(posterior, initial, objective, log_scale, batches, options.validation)
        posterior.report = make_report(fit, rates.plateau, prepared.idle_layers, noise_scale)
        print_report(posterior, options)
    return posterior


# -------------------- checks


def check_trainable(model: nn.Module, options: NoiseFitOptions) -> None:
    """Raises FlowBNNError if the network has no noise, or nothing that can be trained. Warns if the noise has half precision."""
    layers_with_noise(model, "network")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        message = "this network has nothing to train, because both its weights and its noise are frozen"
        raise FlowBNNError(message, kind="network", argument="network")
    if options.precision in ("bf16-true", "16-true"):
        text = f"precision={options.precision!r} stores the noise in half precision, which is too coarse for flows; use 'bf16-mixed'"
        warn(text, kind="precision")


def trains_weights(model: nn.Module, options: NoiseFitOptions) -> bool:
    """Returns True if the fit changes the weights of the network."""
    return options.weight_lr > 0 and any(weight.requires_grad for weight in weight_parameters(model))


# -------------------- training


class LengthAndRates(NamedTuple):
    """Length and learning rates of a fit.

    Args:
        epochs: Number of epochs, or the largest number.
        scheduler: Function from the optimizer and the number of steps to a learning-rate scheduler, or None for constant rates.
        num_epochs: Function from the history to the number of epochs, or None if the number is fixed.
        noise_lr: Learning rate of the noise.
        plateau: State of the schedule.
    """

    epochs: int
    scheduler: SchedulerFactory | None
    num_epochs: Callable[[History], int] | None
    noise_lr: float
    plateau: PlateauRun


def choose_length_and_rates(
    options: NoiseFitOptions, loader: Iterable[Any], learned_scale: bool
) -> LengthAndRates:
    """Returns the length and the learning rates of a fit.

    There are three cases. A scheduler of the user and a number of epochs are taken as they are. A number of epochs alone has rates that
    fall along a cosine. Without either, training ends at a plateau of the ELBO.

    Args:
        options: Options of the fit.
        loader: Training data. A loader without a length is assumed to have 25 batches, and its rates are constant.
        learned_scale: If True, the likelihood learns a noise scale.
    """
    length, schedule = length_of(loader), options.schedule
    steps, decay = length or 25, length is not None and schedule is not None
    settings = schedule if isinstance(schedule, PlateauSchedule) else PlateauSchedule()
    max_epochs, scheduler, num_epochs = settings.max_epochs(steps), None, None
    # runs that end at a plateau usually need half of the epochs
    epochs = options.epochs or (max_epochs // 2 if callable(schedule) else max_epochs)
    plateau = PlateauRun(settings, steps, epochs, decay, math.ceil(options.warmup * epochs))
    if callable(schedule):
        scheduler = schedule
    elif options.epochs is not None:
        scheduler = cosine if decay else None
    else:
        scheduler, num_epochs = plateau.make_scheduler if decay else None, plateau.update
    noise_lr = options.noise_lr
    if noise_lr is None:
        noise_lr = default_noise_lr(steps * epochs, num_epochs is not None, learned_scale)
    return LengthAndRates(epochs, scheduler, num_epochs, noise_lr, plateau)


def make_noise_optimizer(
    posterior: NoisePosterior, options: NoiseFitOptions, noise_lr: float
) -> torch.optim.Optimizer:
    """Returns the optimizer of weights, noise and likelihood.

    Args:
        posterior: Posterior whose network and likelihood are trained.
        options: Options of the fit.
        noise_lr: Learning rate of the noise.
    """
    groups = parameter_groups(
        posterior.model, posterior.likelihood, options.weight_lr, noise_lr, options.weight_decay
    )
    if learns_noise(posterior.likelihood) and options.optimizer is None:
        for group in groups:
            # gradients decrease by orders of magnitude as the noise narrows, which needs a shorter memory of Adam
            group["betas"] = (0.9, 0.99)
            if group["name"] == "likelihood":
                group["lr"] = max(group["lr"], NOISE_LR)
    return make_optimizer(groups, options.optimizer)


def make_loss(model: nn.Module, objective: ELBO, options: NoiseFitOptions, num_rows: int) -> Loss:
    """Returns the negative ELBO as a loss of :class:`~flowbnn.methods.fitting.Objective`.

    A learned noise scale is limited to its initial value plus two standard errors. Early draws of the noise are wide and increase the
    residuals, which must not be mistaken for noise of the targets.

    Args:
        model: Network with noise.
        objective: ELBO of the network.
        options: Options of the fit.
        num_rows: Number of examples from which the initial noise scale was estimated.
    """
    likelihood, warmup, repeats = objective.likelihood, options.warmup, options.repeats
    log_scale = likelihood.log_scale if learns_noise(likelihood) else None
    # the estimate has no error if it is made from all examples
    error = math.sqrt(0.5 / num_rows * max(0.0, 1.0 - num_rows / objective.num_data))
    limit = None if log_scale is None else log_scale.detach() + math.log1p(2.0 * error)

    def loss(forward: NetworkFunction, batch: Any, clock: Clock) -> LossAndLogs:
        nonlocal limit
        inputs, targets = split_batch(batch)
        if log_scale is not None and limit is not None:
            limit = limit.to(log_scale.device)  # training has moved the likelihood
            with torch.no_grad():
                log_scale.clamp_(max=limit)
        weight = warm_up(clock.progress, warmup) if warmup else 1.0
        check = should_check_targets(targets, clock)
        terms = objective(model, inputs, targets, weight, repeats, forward, check)
        return terms.loss, terms.logs()

    return loss


# -------------------- after training


def finish_noise_scale(
    posterior: NoisePosterior, loader: Iterable[Any], seed: int | None
) -> tuple[Tensor | None, NoiseScale | None]:
    """Fits a learned noise scale to the predictions, or checks a fixed one.

    Args:
        posterior: Fitted posterior.
        loader: Batches of training data.
        seed: Seed for the order of a shuffled loader.

    Returns:
        The logarithm of the learned noise scale before this step, and the noise scale after it.
    """
    likelihood = posterior.likelihood
    if not learns_noise(likelihood):
        return None, check_noise_scale(posterior, loader, seed)
    log_scale = likelihood.log_scale.detach().clone()
    return log_scale, fit_noise_scale(posterior, loader, seed)


def print_report(posterior: NoisePosterior, options: NoiseFitOptions) -> None:
    """Prints the report of a fit on a terminal."""
    if options.progress and is_main_process() and (console := terminal()) is not None:
        console.print(str(posterior.report), highlight=False)
