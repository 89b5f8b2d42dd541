"""Verification of a fit: the given network is returned if the fit does not predict held-out data better."""

from dataclasses import replace

from flowbnn.errors import warn
from flowbnn.methods.variational.held_out.comparison import HeldOutComparison, compare_held_out
from flowbnn.methods.variational.held_out.cross_validation import FOLD_FRACTION, cross_validate_noise
from flowbnn.methods.variational.held_out.retrained_networks import compare_retrained
from flowbnn.methods.variational.initial_state import FinishedFit, can_narrow, joint_noises
from flowbnn.methods.variational.noise_fit import FitData, maximize_elbo
from flowbnn.methods.variational.report import FitDecision
from flowbnn.posterior.report import Gain
from flowbnn.regression import check_noise_scale, fit_residual_scale
from flowbnn.training import EarlyStop, History, is_main_process
from flowbnn.training.randomness import preserve_rng_state


def verify_fit(fit: FinishedFit, all_data: FitData, training: FitData) -> FitDecision:
    """Compares a fit with the given network on held-out data, and returns the one to use.

    1. A fit that is clearly better is returned.
    2. If the given network may have been trained on the held-out data, :func:`compare_retrained` decides. If noise is better there, it
       is fitted to all data. Otherwise, the given network is restored.
    3. If retrained networks cannot decide, a fit that is worse is repeated with early stopping.
    4. If it is still worse, the given network is restored.

    Data that are too few to hold out a part are cross-validated, see :func:`cross_validate_noise`. Such a fit is not repeated.

    Args:
        fit: Fit to the training data.
        all_data: All data, and the options of a fit to them.
        training: Training data, which are all data or all but the held-out ones, and the options of the fit.
    """
    comparison = compare_held_out(fit) or cross_validate_noise(fit, *all_data)
    if comparison is None:
        return FitDecision(fit)
    gain, splits = comparison.gain, isinstance(all_data.options.validation, float)
    few_rows = splits and len(comparison.before) < comparison.enough_rows
    is_clear = gain.after >= gain.before and (gain.is_significant or not few_rows)
    if is_clear or not all(map(can_narrow, joint_noises(fit.posterior.model))):
        return FitDecision(fit, comparison, gain)
    if splits and not comparison.is_memorized:
        loader, options = all_data
        if fit.held_out is None:
            options = replace(options, validation=FOLD_FRACTION)
        retrained_gain = compare_retrained(fit.posterior.model, fit.initial, loader, options)
        if retrained_gain is not None:
            return _decide_by_retrained(fit, comparison, retrained_gain, all_data)
    if gain.after >= gain.before:
        return FitDecision(fit, comparison, gain)
    return _repeat_or_restore(fit, comparison, all_data, training)


def _decide_by_retrained(
    fit: FinishedFit, comparison: HeldOutComparison, gain: Gain, all_data: FitData
) -> FitDecision:
    """Fits the noise to all data if it has improved retrained networks. Otherwise restores the given network."""
    if gain.after <= gain.before:
        return restore_given(fit, comparison, gain, all_data)
    if fit.held_out is None:  # has been fitted to all data
        return FitDecision(fit, comparison, gain)
    loader, options = all_data
    fit.initial.restore(fit.posterior.model)
    stage = options.for_stage("all-data", options.description, validation=None)
    return FitDecision(maximize_elbo(fit.posterior.model, loader, stage, fit.initial), comparison, gain)


def _repeat_or_restore(
    fit: FinishedFit, comparison: HeldOutComparison, all_data: FitData, training: FitData
) -> FitDecision:
    """Repeats a fit with early stopping. Restores the given network if the fit is still worse."""
    if all_data.options.early_stop is None and fit.held_out is not None:
        fit.initial.restore(fit.posterior.model)
        rule = EarlyStop(patience=training.options.epochs or 10)
        stage = training.options.for_stage("early-stop", training.options.description, early_stop=rule)
        repeated = maximize_elbo(fit.posterior.model, training.loader, stage, fit.initial)
        second = compare_held_out(repeated)
        if second is not None and second.gain.after > second.gain.before:
            return FitDecision(repeated, comparison, second.gain)
    return restore_given(fit, comparison, comparison.gain, all_data)


def restore_given(
    fit: FinishedFit, comparison: HeldOutComparison, gain: Gain, all_data: FitData
) -> FitDecision:
    """Restores the given network, with noise of almost no width. A warning is raised.

    Args:
        fit: Fit that is rejected.
        comparison: Log-likelihoods of held-out data.
        gain: Gain that the decision is based on.
        all_data: All data, to which the noise scale of a regression is fitted, and the options.
    """
    posterior, (loader, options) = fit.posterior, all_data
    fit.initial.restore_without_noise(posterior.model)
    posterior.history = History()  # the given network was not trained here
    with preserve_rng_state(loader, 0):
        fit_residual_scale(posterior.model, posterior.likelihood, loader)
    if is_main_process():
        values = f"log-likelihood {gain.before:.3f} -> {gain.after:.3f} per held-out example"
        text = f"the given network is returned, as noise made it no better ({values}); use fb.calibrate(network, held_out) or gamma=1"
        warn(text, kind="gain", before=gain.before, after=gain.after)
    noise_scale = check_noise_scale(posterior, loader, options.seed)
    return FitDecision(replace(fit, noise_scale=noise_scale), comparison, gain, accepted=False)
