"""Functions that report on a finished fit of noise. Each returns a value and may raise a warning."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, move, split_weighted_batch
from flowbnn.errors import warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.data_summary import empty_loader
from flowbnn.methods.schedule import PlateauRun, elbo_drop, elbo_gain
from flowbnn.methods.variational.held_out.comparison import HeldOutComparison
from flowbnn.methods.variational.initial_state import FinishedFit, copy_into
from flowbnn.networks import evaluation_mode
from flowbnn.noise import noise_mode
from flowbnn.noise.collapse import health_warnings, posterior_health
from flowbnn.objectives import ELBO
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.report import FitReport, Gain
from flowbnn.training import History, is_main_process
from flowbnn.training.options import length_of
from flowbnn.training.progress import terminal
from flowbnn.training.randomness import preserve_rng_state, seed_all


class FitDecision(NamedTuple):
    """Fit whose posterior is returned, after the comparison on held-out data.

    Args:
        fit: Finished fit.
        comparison: Log-likelihoods of held-out data before and after the first fit, or None without held-out data.
        gain: Gain that the decision is based on, or None without held-out data.
        accepted: False if the posterior is the given network.
    """

    fit: FinishedFit
    comparison: HeldOutComparison | None = None
    gain: Gain | None = None
    accepted: bool = True


def finish_fit(decision: FitDecision, report: bool, progress: bool) -> NoisePosterior:
    """Returns the posterior of a decision, with its report. A warning is raised for every problem.

    Args:
        decision: Fit whose posterior is returned.
        report: If True, computes the report of the fit.
        progress: If True, prints the report on a terminal.
    """
    posterior = decision.fit.posterior
    if decision.comparison is not None and decision.gain is not None and decision.accepted:
        warn_memorized(decision.comparison)
        warn_if_worse(decision.gain, "gain", "use fb.calibrate(network, held_out) or increase gamma")
    if report:
        posterior.report = make_report(decision)
        if progress and is_main_process() and (console := terminal()) is not None:
            console.print(str(posterior.report), highlight=False)
    return posterior


def make_report(decision: FitDecision) -> FitReport:
    """Returns the report of the fit that is returned. The ELBO and the layers of a rejected fit are left out.

    Args:
        decision: Fit whose posterior is returned.
    """
    fit, comparison = decision.fit, decision.comparison
    memorization = None if comparison is None else comparison.memorization
    if not decision.accepted:
        return FitReport(None, decision.gain, memorization, noise_scale=fit.noise_scale, accepted=False)
    elbo = compare_elbo(fit)
    collapsed = find_collapsed_layers(fit.posterior.model, fit.idle_layers)
    rise, drop = check_convergence(fit.posterior.history, fit.plateau)
    return FitReport(elbo, decision.gain, memorization, collapsed, rise, drop, fit.noise_scale)


def spread_batches(loader: Iterable[Any], seed: int | None, count: int = 10) -> list[Any]:
    """Returns batches spread evenly over a loader, because the first ones do not represent a loader in a fixed order.

    Args:
        loader: Loader to read. All generators are restored.
        seed: Seed for the order of a shuffled loader.
        count: Number of batches. Ten give standard errors of some hundredths of a nat.

    Raises:
        FlowBNNError: If the loader has become empty since it was first read.
    """
    with preserve_rng_state(loader, seed):
        step = math.ceil((length_of(loader) or 1) / count)
        batches = list(islice(iter(loader), 0, step * count, step))
    if not batches:
        raise empty_loader("the report")
    return batches


# -------------------- ELBO


def example_elbos(model: nn.Module, objective: ELBO, batches: Iterable[Any]) -> Tensor:
    """Returns the ELBO of every example, with the same draws at every call. All generators are restored."""
    device, dtype, values = device_of(model), dtype_of(model), []
    # a new objective, because shapes recorded in earlier passes would change the order of the draws
    objective = ELBO(objective.likelihood, objective.num_data, objective.beta, objective.gamma)
    with preserve_rng_state(None), evaluation_mode(model), noise_mode(model, "sample"):
        seed_all(0)
        for batch in batches:
            inputs, targets, _ = split_weighted_batch(batch)
            terms = objective(model, move(inputs, device, dtype), targets := move(targets, device))
            log_likelihoods = objective.likelihood.log_prob(terms.outputs, targets).double().cpu()
            values.append(log_likelihoods + float(terms.elbo - terms.log_likelihood))
    return torch.cat(values)


def compare_elbo(fit: FinishedFit) -> Gain | None:
    """Returns the ELBO before and after a fit, or None if it was not finite before.

    The ELBO after the fit is computed for two noise scales, the one from training and the one that was fitted to the predictions. The
    larger value is used. A warning is raised if the ELBO has decreased by more than two standard errors.
    """
    model, likelihood = fit.posterior.model, fit.posterior.likelihood
    with fit.initial_network():
        before = example_elbos(model, fit.elbo, fit.batches)
    if not bool(torch.isfinite(before).all()):
        return None
    after = [example_elbos(model, fit.elbo, fit.batches)]
    if learns_noise(likelihood) and fit.log_scale is not None:
        fitted = likelihood.log_scale.detach().clone()
        copy_into(likelihood, {"log_scale": fit.log_scale})
        after.append(example_elbos(model, fit.elbo, fit.batches))
        copy_into(likelihood, {"log_scale": fitted})
    gain = Gain.of(before, max(after, key=Tensor.mean), "ELBO")
    warn_if_worse(gain, "elbo", "fit longer (epochs=...), or decrease the learning rates or prior_scale")
    return gain


def warn_if_worse(gain: Gain, kind: str, advice: str) -> None:
    """Warns if a fit has made its network worse by more than two standard errors.

    Args:
        gain: Values before and after the fit.
        kind: Kind of the warning.
        advice: Remedy, as the end of the message.
    """
    if gain.is_loss:
        warn(f"the fit has lowered the {gain}; {advice}", kind=kind, before=gain.before, after=gain.after)


def warn_memorized(comparison: HeldOutComparison) -> None:
    """Warns if the initial weights have memorized the training data."""
    if comparison.is_memorized and is_main_process():
        training, before = comparison.training.mean(), comparison.before.mean()
        scores = f"{training:.3f} per example, {before:.3f} on validation data"
        text = f"the weights have memorized the training data (log-likelihood {scores}); use fb.calibrate(network, held_out)"
        warn(text, kind="memorized", excess=comparison.memorization)


def check_convergence(history: History, plateau: PlateauRun) -> tuple[float, float]:
    """Returns the rise of the ELBO in the last epochs and its largest drop.

    A warning is raised if the ELBO has dropped, or is still rising at the end of a run whose length was not set.
    """
    values, window = history["elbo"], plateau.window
    drop = max(plateau.elbo_drop, elbo_drop(values[plateau.skip_epochs :], window))
    gain = elbo_gain(values, window) if len(values) >= 2 * window else 0.0
    if not history.stopped_early and is_main_process():
        warn_not_converged(plateau, drop)
    return gain, drop


def warn_not_converged(plateau: PlateauRun, drop: float) -> None:
    """Warns if the ELBO dropped during training, or did not reach a plateau within the largest number of epochs.

    Args:
        plateau: State of the schedule.
        drop: Largest drop of the ELBO per example.
    """
    if drop > plateau.schedule.max_drop:
        text = f"the ELBO dropped by {drop:.3g} per example; shuffle the loader, or decrease the rates (weight_lr, noise_lr or lr)"
        warn(text, kind="elbo_drop", drop=drop)
    elif plateau.elbo_gain > plateau.schedule.tolerance:
        epochs = f"the last {plateau.window} of {plateau.max_epochs} epochs"
        text = f"the ELBO rose by {plateau.elbo_gain:.3f} per example in {epochs}; set epochs={2 * plateau.max_epochs}"
        warn(text, kind="convergence", gain=plateau.elbo_gain)


# -------------------- layers


def find_collapsed_layers(model: nn.Module, idle_layers: Sequence[str]) -> dict[str, str]:
    """Returns the layers whose noise has collapsed to a point or onto its prior. A warning is raised for each of the two states.

    Args:
        model: Network with noise.
        idle_layers: Layers to leave out.
    """
    healths = [health for health in posterior_health(model) if health.layer not in idle_layers]
    if is_main_process():
        for warning in health_warnings(healths):
            warn(str(warning), **warning.fields)
    return {health.layer: health.state for health in healths if health.state != "healthy"}
