"""Functions that report on a finished fit of noise. Each returns a value and may raise a warning."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, move, split_batch
from flowbnn.errors import warn
from flowbnn.likelihoods import Likelihood, learns_noise
from flowbnn.methods.schedule import PlateauRun, elbo_drop, elbo_gain
from flowbnn.networks import evaluation_mode
from flowbnn.noise import noise_layers, noise_mode
from flowbnn.noise.collapse import health_warnings, posterior_health
from flowbnn.noise.contexts import Mode
from flowbnn.objectives import ELBO
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.posterior.report import FitReport, Gain
from flowbnn.posterior.weights import state_of
from flowbnn.regression import LOC, SCALE, NoiseScale, outputs_and_targets, set_noise_scale
from flowbnn.training import History, is_main_process
from flowbnn.training.options import length_of
from flowbnn.training.randomness import preserve_rng_state, seed_all


@dataclass(frozen=True)
class InitialState:
    """Copy of the weights and the noise of a network, taken before a fit.

    Args:
        tensors: Parameters and buffers by name, on the CPU.
        mode: Mode of the noise when a single network is needed: ``"mean"`` if the noise was fitted before, otherwise ``"off"``.
    """

    tensors: Mapping[str, Tensor]
    mode: Mode

    @classmethod
    def of(cls, model: nn.Module) -> "InitialState":
        """Returns the state of a network."""
        fitted = any(layer.fitted for layer in noise_layers(model).values())
        return cls(
            {name: value.cpu() for name, value in state_of(model).items()}, "mean" if fitted else "off"
        )

    @contextmanager
    def restored(self, model: nn.Module, likelihood: Likelihood, batches: Sequence[Any]) -> Iterator[None]:
        """Context manager that restores the initial network, with its output scale and the noise scale of its residuals.

        Args:
            model: Network after the fit. Its weights and noise are restored at the end of the block.
            likelihood: Likelihood after the fit. Its learned noise is restored, too.
            batches: Batches from which the noise scale of the initial network is estimated.
        """
        weights, noise = state_of(model), state_of(likelihood)
        initial = dict(self.tensors)
        if SCALE in weights and SCALE not in initial:
            initial |= {LOC: torch.zeros_like(weights[LOC]), SCALE: torch.ones_like(weights[SCALE])}
        _copy_into(model, initial)
        try:
            if learns_noise(likelihood):
                with evaluation_mode(model), noise_mode(model, self.mode):
                    set_noise_scale(likelihood, outputs_and_targets(model, batches))
            yield
        finally:
            _copy_into(model, weights)
            _copy_into(likelihood, noise)


@torch.no_grad()
def _copy_into(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies values into the parameters and buffers of a module. Buffers that were resized, such as caches, are left out."""
    state = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, value in tensors.items():
        if name in state and state[name].shape == value.shape:
            state[name].copy_(value)


@dataclass(frozen=True)
class FinishedFit:
    """Finished fit, with the data that the report needs.

    Args:
        posterior: Fitted posterior.
        initial: Network before the fit.
        objective: ELBO that was maximized.
        log_scale: Logarithm of the noise scale that maximizes the ELBO, before the fit to the predictions. None if no noise is learned.
        batches: Batches of training data, spread evenly over the loader.
        validation: Loader of held-out data, or None.
    """

    posterior: NoisePosterior
    initial: InitialState
    objective: ELBO
    log_scale: Tensor | None
    batches: Sequence[Any]
    validation: Iterable[Any] | None

    def initial_network(self) -> Any:
        """Context manager that restores the initial network."""
        return self.initial.restored(self.posterior.model, self.posterior.likelihood, self.batches)


def make_report(
    fit: FinishedFit, plateau: PlateauRun, idle_layers: Sequence[str], noise_scale: NoiseScale | None
) -> FitReport:
    """Returns the report of a fit.

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
    held_out, memorization = compare_held_out(fit)
    return FitReport(elbo, held_out, memorization, collapsed, gain, drop, noise_scale)


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
        _copy_into(likelihood, {"log_scale": fit.log_scale})
        after.append(example_elbos(model, fit.objective, fit.batches))
        _copy_into(likelihood, {"log_scale": fitted})
    gain = Gain.of(before, max(after, key=Tensor.mean), "ELBO")
    warn_if_worse(gain, "elbo")
    return gain


def warn_if_worse(gain: Gain, kind: str) -> None:
    """Warns if a fit has made its network worse by more than two standard errors.

    Args:
        gain: Values before and after the fit.
        kind: Kind of the warning.
    """
    if gain.is_loss:
        text = f"the fit has lowered the {gain}; fit longer (epochs=...), or decrease the learning rates or prior_scale"
        warn(text, kind=kind, before=gain.before, after=gain.after)


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


# -------------------- held-out data


def log_likelihoods(posterior: Posterior, data: Iterable[Any], samples: int = 64) -> Tensor:
    """Returns the predictive log-likelihood of every example."""
    predictive, targets = posterior.predict_with_targets(data, samples, seed=0, progress=False)
    return -predictive.nll(targets).double().cpu().flatten()


def compare_held_out(fit: FinishedFit) -> tuple[Gain | None, float | None]:
    """Returns the held-out log-likelihood before and after a fit, and the memorization of the initial network.

    Memorization is the training log-likelihood minus the validation log-likelihood. Both results are None without validation
    data. A warning is raised if the log-likelihood has decreased by more than two standard errors, or
    if the training data are memorized.
    """
    if fit.validation is None:
        return None, None
    model, likelihood = fit.posterior.model, fit.posterior.likelihood
    with fit.initial_network(), noise_mode(model, "off"):
        network = PointPosterior(model, likelihood)
        before = log_likelihoods(network, fit.validation, 1)
        training = log_likelihoods(network, fit.batches, 1)
    excess = float(training.mean() - before.mean())
    if is_memorized(training, before):
        scores = f"{training.mean():.3f} per example, {before.mean():.3f} on validation data"
        text = f"the weights have memorized the training data (log-likelihood {scores}); use fb.calibrate(network, held_out)"
        warn(text, kind="memorized", excess=excess)
    gain = Gain.of(before, log_likelihoods(fit.posterior, fit.validation), "held-out log-likelihood")
    warn_if_worse(gain, "gain")
    return gain, excess


def is_memorized(training: Tensor, held_out: Tensor) -> bool:
    """Returns True if the training log-likelihood exceeds the held-out log-likelihood significantly, and by more than 0.1 nats.

    Significance is measured after a sigmoid. Otherwise, a few confident errors among the held-out examples would hide any difference.

    >>> training, wrong = torch.full((60,), -0.02), -torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 7, 7, 10, 11, 12, 23, 28, 40])
    >>> is_memorized(training, torch.cat([training[15:], wrong])), is_memorized(training, torch.cat([training[2:], wrong[-2:]]))
    (True, False)
    """
    median = torch.cat([training, held_out]).median()
    first, second = torch.sigmoid(training - median), torch.sigmoid(held_out - median)
    error = (first.var() / len(first) + second.var() / len(second)).sqrt()
    exceeds = bool(training.mean() > held_out.mean() + 0.1)
    return exceeds and bool(first.mean() > second.mean() + 3 * error)


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
