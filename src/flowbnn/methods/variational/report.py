"""Functions that report on a finished fit of noise. Each returns a value and may raise a warning."""

import math
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, move, split_batch
from flowbnn.errors import warn
from flowbnn.likelihoods import learns_noise
from flowbnn.methods.schedule import PlateauRun, elbo_drop, elbo_gain
from flowbnn.methods.variational.initial_state import FinishedFit, copy_into
from flowbnn.networks import evaluation_mode
from flowbnn.noise import noise_mode
from flowbnn.noise.collapse import health_warnings, posterior_health
from flowbnn.objectives import ELBO
from flowbnn.posterior.report import FitReport, Gain
from flowbnn.regression import NoiseScale
from flowbnn.training import History, is_main_process
from flowbnn.training.options import length_of
from flowbnn.training.randomness import preserve_rng_state, seed_all


def make_report(
    fit: FinishedFit, plateau: PlateauRun, idle_layers: Sequence[str], noise_scale: NoiseScale | None
) -> FitReport:
    """Returns the report of a fit, without the comparison on held-out data.

    Args:
        fit: Finished fit.
        plateau: State of the schedule.
        idle_layers: Layers with noise that the network never calls.
        noise_scale: Observation noise, from :func:`~flowbnn.regression.fit_noise_scale` or
            :func:`~flowbnn.regression.check_noise_scale`.
    """
    elbo = compare_elbo(fit)
    collapsed = find_collapsed_layers(fit.posterior.model, idle_layers)
    gain, drop = check_convergence(fit.posterior.history, plateau)
    return FitReport(elbo, None, None, collapsed, gain, drop, noise_scale)


def spread_batches(loader: Iterable[Any], seed: int | None, count: int = 10) -> list[Any]:
    """Returns batches spread evenly over a loader, because the first ones do not represent a loader in a fixed order.

    Args:
        loader: Loader to read. All generators are restored.
        seed: Seed for the order of a shuffled loader.
        count: Number of batches. Ten give standard errors of some hundredths of a nat.
    """
    with preserve_rng_state(loader, seed):
        step = math.ceil((length_of(loader) or 1) / count)
        return list(islice(iter(loader), 0, step * count, step))


# -------------------- ELBO


def example_elbos(model: nn.Module, objective: ELBO, batches: Iterable[Any]) -> Tensor:
    """Returns the ELBO of every example, with the same draws at every call. All generators are restored."""
    device, dtype, values = device_of(model), dtype_of(model), []
    # a new objective, because shapes recorded in earlier passes would change the order of the draws
    objective = ELBO(objective.likelihood, objective.num_data, objective.beta, objective.gamma)
    with preserve_rng_state(None), evaluation_mode(model), noise_mode(model, "sample"):
        seed_all(0)
        for batch in batches:
            inputs, targets = split_batch(batch)
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
        before = example_elbos(model, fit.objective, fit.batches)
    if not bool(torch.isfinite(before).all()):
        return None
    after = [example_elbos(model, fit.objective, fit.batches)]
    if learns_noise(likelihood) and fit.log_scale is not None:
        fitted = likelihood.log_scale.detach().clone()
        copy_into(likelihood, {"log_scale": fit.log_scale})
        after.append(example_elbos(model, fit.objective, fit.batches))
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
