r"""Fit of the noise and the weights of a stochastic network by the ELBO.

.. math:: \max \; E_q[\log p(D \mid z)] - \beta \sum_l \mathrm{KL}[q(z_l) \| p(z_l)] + \gamma \sum_l H(q(z_l))

``fb.fit``, :class:`~flowbnn.NodeNoise` and :class:`~flowbnn.MCDropout` use :func:`fit_noise`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import split_batch
from flowbnn.errors import FlowBNNError, warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.fit_options import FitOptions
from flowbnn.methods.fitting import (
    NOISE_LR,
    Loss,
    LossAndLogs,
    NetworkFunction,
    hold_out,
    make_optimizer,
    plan_fit,
    should_check_targets,
    train_posterior,
)
from flowbnn.methods.preparation import prepare
from flowbnn.methods.schedule import PlateauSchedule, SchedulerFactory, TrainingPlan, default_noise_lr
from flowbnn.methods.variational.initial_state import FinishedFit, InitialState, can_narrow, joint_noises
from flowbnn.methods.variational.judgement import (
    COMPARISON_ROWS,
    HeldOutComparison,
    compare_held_out,
    compare_retrained,
    warn_memorized,
    warn_rejected,
)
from flowbnn.methods.variational.report import make_report, spread_batches, warn_if_worse
from flowbnn.noise import noise_layers, noise_mode, parameter_groups, weight_parameters
from flowbnn.noise.base import layers_with_noise
from flowbnn.objectives import ELBO, warm_up
from flowbnn.options import Count, NonNegative, UnitInterval, options
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.report import FitReport, Gain
from flowbnn.regression import (
    NoiseScale,
    check_noise_scale,
    fit_noise_scale,
    fit_residual_scale,
    set_noise_scale,
)
from flowbnn.training import Clock, EarlyStop, is_main_process
from flowbnn.training.options import length_of
from flowbnn.training.progress import terminal
from flowbnn.training.randomness import preserve_rng_state


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


def fit_noise(
    model: nn.Module, loader: Iterable[Any], options: NoiseFitOptions, verify: bool = False
) -> NoisePosterior:
    """Fits the noise and the weights of a stochastic network in place.

    Args:
        model: Network with noise.
        loader: Batches of ``(inputs, targets)``.
        options: Options of the fit.
        verify: If True, restores the initial network if the fit does not predict held-out data better.
    """
    check_trainable(model, options)
    initial = InitialState.of(model)
    training, run_options = loader, replace(options, validation=options.held_out)
    if verify or options.epochs is None:
        training, run_options = hold_out(loader, options)
    run = run_fit(model, training, run_options, initial, stops_early=not verify)
    comparison = compare_held_out(run.fit) if verify or options.report else None
    decision = FitDecision(run, None if comparison is None else comparison.gain)
    if verify and comparison is not None and all(map(can_narrow, joint_noises(model))):
        few_data = isinstance(options.validation, float) and len(comparison.before) < COMPARISON_ROWS
        gain = comparison.gain
        if gain.after < gain.before or (few_data and not gain.is_significant):
            decision = accept_or_restore(run, comparison, (loader, training), (options, run_options))
    posterior = decision.run.fit.posterior
    if comparison is not None and decision.gain is not None and decision.accepted:
        warn_memorized(comparison)
        warn_if_worse(decision.gain, "gain", "use fb.calibrate(network, held_out) or increase gamma")
    posterior.report = report_decision(decision, comparison) if options.report else None
    print_report(posterior, options)
    return posterior


class NoiseRun(NamedTuple):
    """Fit of the noise of a network, before the comparison on held-out data and the report.

    Args:
        fit: Finished fit.
        plan: Length and schedule of the fit.
        idle_layers: Layers with noise that the network never calls.
        noise_scale: Observation noise of a regression.
    """

    fit: FinishedFit
    plan: TrainingPlan
    idle_layers: Sequence[str]
    noise_scale: NoiseScale | None


class FitDecision(NamedTuple):
    """Fit that is returned, after the comparison on held-out data.

    Args:
        run: Fit whose posterior is returned.
        gain: Held-out log-likelihood before and after the fit, or None without held-out data.
        accepted: False if the posterior is the given network.
    """

    run: NoiseRun
    gain: Gain | None
    accepted: bool = True


def run_fit(
    model: nn.Module,
    loader: Iterable[Any],
    options: NoiseFitOptions,
    initial: InitialState,
    stops_early: bool = False,
) -> NoiseRun:
    """Maximizes the ELBO of a network in place, and fits or checks the noise scale of a regression.

    Args:
        model: Network with noise.
        loader: Training data.
        options: Options of the fit. ``validation`` is a loader or None.
        initial: State of the network before the fit.
        stops_early: If True, the fit ends with the best epoch on held-out data.
    """
    prepared = prepare(model, loader, options, trains_weights(model, options))
    likelihood, targets = prepared.likelihood, prepared.data.sample[1]
    if learns_noise(likelihood):  # starts at the residuals, even if the likelihood has another value
        set_noise_scale(likelihood, [(prepared.outputs, targets)])
    plan, train_options = plan_fit(
        options.epochs, options.schedule, loader, options, warmup=options.warmup, stops_early=stops_early
    )
    noise_lr = options.noise_lr
    if noise_lr is None:
        total_steps = (length_of(loader) or 25) * plan.epochs
        noise_lr = default_noise_lr(total_steps, plan.num_epochs is not None, learns_noise(likelihood))
    objective = ELBO(likelihood, prepared.data.require_num_examples(), options.beta, options.gamma)
    posterior = NoisePosterior(model, likelihood)
    posterior.set_rows_interact(prepared.rows_interact)
    settings = {name: getattr(options, name) for name in ("beta", "gamma", "warmup", "repeats")}
    with noise_mode(model, "sample"):
        posterior.history = train_posterior(
            posterior,
            make_loss(model, objective, options, len(targets)),
            make_noise_optimizer(posterior, options, noise_lr),
            loader,
            train_options,
            plan.scheduler,
            options.validation_samples,
            settings={**settings, "num_data": objective.num_data},
            check_batch=prepared.check_batch,
            num_epochs=plan.num_epochs,
        )
    for layer in noise_layers(model).values():
        layer.fitted = True
    log_scale, noise_scale = finish_noise_scale(posterior, loader, options.seed)
    needs_batches = options.report or options.held_out is not None
    batches = spread_batches(loader, options.seed) if needs_batches else []
    fit = FinishedFit(posterior, initial, objective, log_scale, batches, options.held_out)
    return NoiseRun(fit, plan, prepared.idle_layers, noise_scale)


def accept_or_restore(
    run: NoiseRun,
    comparison: HeldOutComparison,
    loaders: tuple[Iterable[Any], Iterable[Any]],
    options: tuple[NoiseFitOptions, NoiseFitOptions],
) -> FitDecision:
    """Decides on a fit that is not clearly better than the given network on held-out data.

    If the given network may have been trained on the held-out data, :func:`compare_retrained` decides. If noise is better there, it is
    fitted to all data, otherwise the given network is restored. If retrained networks cannot decide, a fit that is worse is repeated
    with early stopping. If it is still worse, the given network is restored.

    Args:
        run: Fit of the noise.
        comparison: Log-likelihoods of held-out data.
        loaders: All data, and the training data without the held-out data.
        options: Options of the fit on all data, and of the fit on the training data.

    Returns:
        The fit that is returned, with its gain over the given network.
    """
    posterior, initial, retrained_gain = run.fit.posterior, run.fit.initial, None
    model, gain = posterior.model, comparison.gain
    if isinstance(options[0].validation, float) and not comparison.is_memorized:

        def fit(network: nn.Module, training: Iterable[Any], settings: Any) -> NoisePosterior:
            return run_fit(network, training, settings, InitialState.of(network)).fit.posterior

        retrained_gain = compare_retrained(model, initial, loaders[0], options[0], fit)
    if retrained_gain is not None and retrained_gain.after > retrained_gain.before:
        initial.restore(model)
        stage = options[0].for_stage("all-data", options[0].description, validation=None)
        return FitDecision(run_fit(model, loaders[0], stage, initial), retrained_gain)
    if retrained_gain is None and gain.after >= gain.before:
        return FitDecision(run, gain)
    if retrained_gain is None and options[0].early_stop is None:
        initial.restore(model)
        rule = EarlyStop(patience=options[0].epochs or 10)
        stage = options[1].for_stage("early-stop", options[0].description, early_stop=rule)
        repeated = run_fit(model, loaders[1], stage, initial)
        second = compare_held_out(repeated.fit)
        if second is not None and second.gain.after > second.gain.before:
            return FitDecision(repeated, second.gain)
    gain = retrained_gain or gain
    initial.restore_without_noise(model)
    with preserve_rng_state(loaders[0], 0):
        fit_residual_scale(model, posterior.likelihood, loaders[0])
    warn_rejected(gain)
    noise_scale = check_noise_scale(posterior, loaders[0], options[0].seed)
    return FitDecision(run._replace(noise_scale=noise_scale), gain, accepted=False)


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


def report_decision(decision: FitDecision, comparison: HeldOutComparison | None) -> FitReport:
    """Returns the report of the fit that is returned. The ELBO and the layers of a rejected fit are left out.

    Args:
        decision: Fit that is returned.
        comparison: Log-likelihoods of held-out data, or None without held-out data.
    """
    run = decision.run
    if decision.accepted:
        report = make_report(run.fit, run.plan.plateau, run.idle_layers, run.noise_scale)
    else:
        report = FitReport(noise_scale=run.noise_scale, accepted=False)
    memorization = None if comparison is None else comparison.memorization
    return replace(report, held_out=decision.gain, memorization=memorization)


def print_report(posterior: NoisePosterior, options: NoiseFitOptions) -> None:
    """Prints the report of a fit on a terminal."""
    if (
        posterior.report is not None
        and options.progress
        and is_main_process()
        and (console := terminal()) is not None
    ):
        console.print(str(posterior.report), highlight=False)
