"""Comparison of networks with and without noise that are retrained without some rows.

The weights of a given network may have been trained on the held-out rows. They have then memorized them, and no noise looks better
there. In this case, networks of the same architecture are retrained without some rows, until they fit the other rows as well as the
given network does. Noise is fitted to each, and both are compared on the rows that were left out.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods.data_summary import count_examples
from flowbnn.methods.fit_options import FitOptions
from flowbnn.methods.fitting import (
    NOISE_LR,
    Objective,
    make_optimizer,
    make_training_run,
    negative_log_likelihood,
)
from flowbnn.methods.loader_split import split_loader
from flowbnn.methods.network_layers import reset_parameters
from flowbnn.methods.preparation import prepare
from flowbnn.methods.schedule import PlateauSchedule
from flowbnn.methods.variational.held_out.comparison import HeldOutComparison, log_likelihoods
from flowbnn.methods.variational.initial_state import InitialState
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, maximize_elbo, without_reporting
from flowbnn.networks import deepcopy_network
from flowbnn.noise import noise_mode, weight_parameters
from flowbnn.posterior.report import Gain
from flowbnn.posterior.weights import PointPosterior
from flowbnn.regression import fit_residual_scale
from flowbnn.training import History, is_main_process, track
from flowbnn.training.options import length_of
from flowbnn.training.randomness import preserve_rng_state, temporary_seed

# the standard error of fewer rows is unreliable
MIN_ROWS = 10


def compare_retrained(
    network: nn.Module, initial: InitialState, loader: Iterable[Any], options: NoiseFitOptions
) -> Gain | None:
    """Compares retrained networks with and without noise, on rows that they have not seen.

    Each of up to five networks leaves out another block of the data. All generators are restored.

    Args:
        network: Network after the fit. It is copied.
        initial: State of the network before the fit.
        loader: All data.
        options: Options of the fit, whose ``validation`` is the fraction of each block.

    Returns:
        Log-likelihood per left-out example without and with noise. None if retrained networks cannot decide. Either the weights
        cannot be initialized again, or the given network does not predict these rows better than networks that have not seen them.
    """
    initial_network = deepcopy_network(network)
    initial.restore(initial_network)
    quiet = without_reporting(options)
    count = count_examples(split_loader(loader, options.validation)[1])
    num_folds = max(
        1, min(5, math.ceil(HeldOutComparison.enough_rows / count), count_examples(loader) // count)
    )
    results: list[tuple[Tensor, Tensor, Tensor]] = []
    with warnings.catch_warnings(), preserve_rng_state(loader, 0):
        # warnings would describe networks that the user never sees
        warnings.simplefilter("ignore", FlowBNNWarning)
        label = "comparing retrained networks with and without noise"
        for fold in track(range(num_folds), label, options.progress and is_main_process(), "network"):
            training, held_out = split_loader(loader, options.validation, fold=fold)
            try:
                result = _compare_fold(initial_network, training, held_out, replace(quiet, seed=fold))
            except FlowBNNError:  # for example, a loss that is not finite
                return None
            if result is None:
                return None
            results.append(result)
            initial_values, before, after = (torch.cat(values) for values in zip(*results, strict=True))
            gain = Gain.of(before, after, "held-out log-likelihood (retrained networks)")
            if len(before) >= MIN_ROWS and abs(gain.after - gain.before) > 3 * gain.standard_error:
                break  # further folds would not change the decision
    return gain if initial_values.mean() > before.mean() else None


def _compare_fold(
    initial_network: nn.Module,
    training: Iterable[Any],
    held_out: Iterable[Any],
    options: NoiseFitOptions,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Returns the log-likelihoods of held-out rows under the given network, a network trained without them, and its noise."""
    network = deepcopy_network(initial_network)
    likelihood = prepare(initial_network, training, options, False).likelihood
    with noise_mode(initial_network, "off"):
        fit_residual_scale(initial_network, likelihood, training)
        point = PointPosterior(initial_network.eval(), likelihood)
        target = float(log_likelihoods(point, training, 1).mean())
        initial_values = log_likelihoods(point, held_out, 1)
    weights = weight_parameters(network)
    flags = [(parameter, parameter.requires_grad) for parameter in network.parameters()]
    trainable = [weight for weight in weights if weight.requires_grad] or weights
    for parameter in network.parameters():
        parameter.requires_grad_(False)
    for weight in trainable:
        weight.requires_grad_(True)
    with temporary_seed(options.seed):
        if reset_parameters(network):
            return None
    before = _train_to_target(network, training, target, options, held_out)
    for parameter, flag in flags:
        parameter.requires_grad_(flag)
    posterior = maximize_elbo(network, training, options, InitialState.of(network)).posterior
    return initial_values, before, log_likelihoods(posterior, held_out)


def _train_to_target(
    network: nn.Module, loader: Iterable[Any], target: float, options: FitOptions, held_out: Iterable[Any]
) -> Tensor:
    """Trains the weights until their log-likelihood reaches a target, and returns the log-likelihoods of held-out data."""
    weights = [parameter for parameter in network.parameters() if parameter.requires_grad]
    max_epochs = PlateauSchedule(max_steps=4000).max_epochs(length_of(loader) or 25)
    with noise_mode(network, "off"):
        prepared = prepare(network, loader, options)
        point = PointPosterior(network, prepared.likelihood)
        noise = list(prepared.likelihood.parameters())
        groups = [{"params": weights, "lr": 5e-3}, {"params": noise, "lr": NOISE_LR}]
        loss = partial(negative_log_likelihood, prepared.likelihood)

        def num_epochs(history: History) -> int:
            reached = history.epochs > 0 and history["log_likelihood"][-1] >= target
            return history.epochs if reached else max_epochs

        make_training_run(
            point,
            Objective(network, prepared.likelihood, loss, prepared.check_batch),
            make_optimizer(groups, None),
            loader,
            replace(options, epochs=max_epochs),
            num_epochs=num_epochs,
        ).train()
        fit_residual_scale(network, prepared.likelihood, loader)
        return log_likelihoods(point, held_out, 1)
