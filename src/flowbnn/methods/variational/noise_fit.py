r"""Fit of the noise and the weights of a stochastic network by the ELBO.

.. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

``fb.fit`` calls :func:`maximize_elbo` and verifies the result on held-out data. The methods :class:`~flowbnn.NodeNoise` and
:class:`~flowbnn.MCDropout` call :func:`fit_unverified`, which returns it in any case.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import split_weighted_batch
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.fit_options import FitOptions
from flowbnn.methods.fitting import (
    NOISE_LR,
    LossAndLogs,
    NetworkObjective,
    hold_out,
    make_optimizer,
    make_training_run,
    plan_fit,
    should_check_targets,
)
from flowbnn.methods.preparation import prepare
from flowbnn.methods.schedule import PlateauSchedule, SchedulerFactory, TrainingPlan, default_noise_lr
from flowbnn.methods.variational.held_out.comparison import compare_held_out
from flowbnn.methods.variational.initial_state import FinishedFit, InitialState
from flowbnn.methods.variational.report import FitDecision, finish_fit, spread_batches
from flowbnn.noise import noise_layers, noise_mode, parameter_groups
from flowbnn.noise.base import layers_with_noise
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, UnitInterval, options
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.regression import fit_noise_scale, set_noise_scale, widen_noise_scale
from flowbnn.training import Clock


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


def without_reporting(options: NoiseFitOptions) -> NoiseFitOptions:
    """Returns options for an internal fit, without validation, report, early stopping, files, callbacks and progress bar."""
    quiet = replace(options, validation=None, report=False, early_stop=None, progress=False)
    return replace(quiet, checkpoint=None, checkpoint_every=None, resume=False, log=None, callbacks=())


class FitData(NamedTuple):
    """Data of a fit, and its options.

    Args:
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit to these data.
    """

    loader: Iterable[Any]
    options: NoiseFitOptions


def fit_unverified(model: nn.Module, loader: Iterable[Any], options: NoiseFitOptions) -> NoisePosterior:
    """Fits the noise and the weights of a stochastic network in place, and returns the fit in any case.

    Args:
        model: Network with noise.
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit.
    """
    check_trainable(model, options)
    initial = InitialState.of(model)
    training, training_options = loader, replace(options, validation=options.validation_loader)
    if options.epochs is None:
        training, training_options = hold_out(loader, options)
    fit = maximize_elbo(model, training, training_options, initial, stops_early=True)
    comparison = compare_held_out(fit) if options.report else None
    widen_noise_scale(
        fit.posterior, fit.held_out
    )  # after the comparison, which would favor noise that fits its data
    gain = None if comparison is None else comparison.gain
    return finish_fit(FitDecision(fit, comparison, gain), options.report, options.progress)


def maximize_elbo(
    model: nn.Module,
    loader: Iterable[Any],
    options: NoiseFitOptions,
    initial: InitialState,
    stops_early: bool = False,
) -> FinishedFit:
    """Maximizes the ELBO of a network in place, and fits or checks the noise scale of a regression.

    Args:
        model: Network with noise.
        loader: Training data.
        options: Options of the fit. ``validation`` is a loader or None.
        initial: State of the network before the fit.
        stops_early: If True, the fit ends with the best epoch on held-out data.
    """
    prepared = prepare(model, loader, options, trained=options.weight_lr > 0)
    likelihood, targets = prepared.likelihood, prepared.data.sample[1]
    if learns_noise(likelihood):  # starts at the residuals, even if the likelihood has another value
        set_noise_scale(likelihood, [(prepared.outputs, targets)])
    plan, train_options = plan_fit(
        options.epochs, options.schedule, loader, options, warmup=options.warmup, stops_early=stops_early
    )
    elbo = ELBO(likelihood, prepared.data.require_num_examples(), options.beta, options.gamma)
    posterior = NoisePosterior(model, likelihood)
    posterior.set_rows_interact(prepared.rows_interact)
    settings = {name: getattr(options, name) for name in ("beta", "gamma", "warmup", "repeats")}
    with noise_mode(model, "sample"):
        run = make_training_run(
            posterior,
            NoiseObjective(model, elbo, options, len(targets), prepared.check_batch),
            make_noise_optimizer(posterior, options, plan),
            loader,
            train_options,
            plan.scheduler,
            options.validation_samples,
            fits_noise=stops_early,
            settings={**settings, "num_data": elbo.num_data},
            num_epochs=plan.num_epochs,
        )
        posterior.history = run.train()
    for layer in noise_layers(model).values():
        layer.fitted = True
    log_scale = likelihood.log_scale.detach().clone() if learns_noise(likelihood) else None
    noise_scale = fit_noise_scale(posterior, loader, options.seed)
    needs_batches = options.report or options.validation_loader is not None
    return FinishedFit(
        posterior,
        initial,
        elbo,
        plan.plateau,
        prepared.idle_layers,
        log_scale,
        noise_scale,
        batches=spread_batches(loader, options.seed) if needs_batches else [],
        held_out=options.validation_loader,
    )


class NoiseObjective(NetworkObjective):
    """Negative ELBO of a network with noise.

    A learned noise scale is limited to its initial value plus two standard errors. Early draws of the noise are wide and increase the
    residuals, which must not be mistaken for noise of the targets.

    Args:
        network: Network with noise.
        elbo: ELBO of the network.
        options: Options of the fit.
        num_rows: Number of examples from which the initial noise scale was estimated.
        check_batch: Function that checks a batch, see :class:`~flowbnn.methods.fitting.NetworkObjective`.
    """

    limit: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        elbo: ELBO,
        options: NoiseFitOptions,
        num_rows: int,
        check_batch: Callable[[Any], None],
    ) -> None:
        super().__init__(network, elbo.likelihood, check_batch)
        self.elbo, self.warmup, self.repeats = elbo, options.warmup, options.repeats
        # the estimate has no error if it is made from all examples
        error = math.sqrt(0.5 / num_rows * max(0.0, 1.0 - num_rows / elbo.num_data))
        limit = None
        if learns_noise(elbo.likelihood):
            limit = elbo.likelihood.log_scale.detach() + math.log1p(2.0 * error)
        self.register_buffer("limit", limit, persistent=False)

    def forward(self, batch: Any, clock: Clock) -> LossAndLogs:
        inputs, targets, weights = split_weighted_batch(batch)
        if self.limit is not None and learns_noise(self.likelihood):
            with torch.no_grad():
                self.likelihood.log_scale.clamp_(max=self.limit)
        scale = warm_up(clock.progress, self.warmup) if self.warmup else 1.0
        check = should_check_targets(targets, clock)
        with self.full_precision() as outputs:
            # without autocast and conversion the network itself runs, which saves two calls
            forward = self.network if outputs == self.outputs and self.is_ready(inputs) else outputs
            terms = self.elbo(self.network, inputs, targets, scale, self.repeats, forward, check, weights)
        return terms.loss, terms.logs()


def check_trainable(model: nn.Module, options: NoiseFitOptions) -> None:
    """Raises FlowBNNError if the network has no noise, or nothing that can be trained. Warns if the noise has half precision."""
    layers_with_noise(model, "network")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        message = "fit needs trainable parameters; use network.requires_grad_()"
        raise FlowBNNError(message, kind="network", argument="network")
    if options.precision in ("bf16-true", "16-true"):
        warn(f"precision={options.precision!r} rounds the noise; use 'bf16-mixed'", kind="precision")


def make_noise_optimizer(
    posterior: NoisePosterior, options: NoiseFitOptions, plan: TrainingPlan
) -> torch.optim.Optimizer:
    """Returns the optimizer of weights, noise and likelihood.

    Args:
        posterior: Posterior whose network and likelihood are trained.
        options: Options of the fit.
        plan: Length and schedule of the fit, which determine the default learning rate of the noise.
    """
    noise_lr, learned = options.noise_lr, learns_noise(posterior.likelihood)
    if noise_lr is None:
        noise_lr = default_noise_lr(
            plan.plateau.steps_per_epoch * plan.epochs, plan.num_epochs is not None, learned
        )
    groups = parameter_groups(
        posterior.model, posterior.likelihood, options.weight_lr, noise_lr, options.weight_decay
    )
    if learned and options.optimizer is None:
        for group in groups:
            # gradients decrease by orders of magnitude as the noise narrows, which needs a shorter memory of Adam
            group["betas"] = (0.9, 0.99)
            if group["name"] == "likelihood":
                group["lr"] = max(group["lr"], NOISE_LR)
    return make_optimizer(groups, options.optimizer)
