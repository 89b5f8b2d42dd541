"""Cross-validation of a fit to data that are too few to hold out a part.

The noise is fitted once for each fold, without the rows of the fold, and compared with the given network on these rows.
"""

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from flowbnn.errors import FlowBNNError, FlowBNNWarning, pluralize, warn
from flowbnn.methods.data_summary import count_examples
from flowbnn.methods.fitting import FEW_ROWS
from flowbnn.methods.loader_split import RowSplit, split_loader
from flowbnn.methods.variational.held_out.comparison import HeldOutComparison, compare_held_out
from flowbnn.methods.variational.initial_state import FinishedFit
from flowbnn.methods.variational.noise_fit import NoiseFitOptions, maximize_elbo, without_reporting
from flowbnn.networks import deepcopy_network
from flowbnn.training import is_main_process, track
from flowbnn.training.randomness import preserve_rng_state

FOLD_FRACTION = 0.2  # fraction of the rows that a fold has


def cross_validate_noise(
    fit: FinishedFit, loader: Iterable[Any], options: NoiseFitOptions
) -> HeldOutComparison | None:
    """Compares noise with the given network on rows that the noise was not fitted to, each row once. All generators are restored.

    A warning is raised if the noise cannot be fitted without the rows of a fold.

    Args:
        fit: Fit to all data, whose network is copied.
        loader: All data.
        options: Options of the fit.

    Returns:
        Log-likelihoods of all rows, or None if the data are many, cannot be split, or are not to be compared.
    """
    if not isinstance(options.validation, float):
        return None
    try:
        training, held_out = split_loader(loader, FOLD_FRACTION)
    except FlowBNNError:  # a warning has been raised before the fit
        return None
    number = count_examples(training) + count_examples(held_out)
    if number >= FEW_ROWS:  # an unusual loader, whose split failed before the fit
        return None
    num_folds = math.ceil(number / RowSplit(number, FOLD_FRACTION).count)
    model, quiet = deepcopy_network(fit.posterior.model), without_reporting(options)
    if options.num_data is not None:
        quiet = replace(quiet, num_data=max(1, round(options.num_data * (1.0 - FOLD_FRACTION))))
    comparisons: list[HeldOutComparison] = []
    with warnings.catch_warnings(), preserve_rng_state(loader, 0):
        # warnings would describe networks that the user never sees
        warnings.simplefilter("ignore", FlowBNNWarning)
        label = "cross-validating the noise"
        for fold in track(range(num_folds), label, options.progress and is_main_process(), "fold"):
            training, held_out = split_loader(loader, FOLD_FRACTION, fold=fold)
            fit.initial.restore(model)
            try:
                finished = maximize_elbo(model, training, replace(quiet, seed=fold), fit.initial)
                finished = replace(finished, batches=list(training), held_out=held_out)
                comparison = compare_held_out(finished)
            except FlowBNNError:  # for example, a loss that is not finite
                break
            if comparison is not None:
                comparisons.append(comparison)
    if len(comparisons) == num_folds:
        return HeldOutComparison.concatenate(comparisons)
    if is_main_process():
        rows = pluralize(number, "example")
        text = f"the noise cannot be compared with the given network on {rows}; set validation= to held-out data, or to None"
        warn(text, kind="split", argument="validation")
    return None
