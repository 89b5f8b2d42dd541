"""Comparison of a fit with its initial network on held-out data.

The fitted noise is returned only if it predicts held-out data better than the given network.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.methods.variational.initial_state import FinishedFit
from flowbnn.noise import noise_mode
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.report import Gain
from flowbnn.posterior.weights import PointPosterior


@dataclass(frozen=True)
class HeldOutComparison:
    """Log-likelihoods per example of the initial network and of the posterior.

    Args:
        before: Log-likelihoods of the held-out examples under the initial network.
        after: Log-likelihoods of the held-out examples under the posterior.
        training: Log-likelihoods of some training examples under the initial network.
    """

    enough_rows: ClassVar[int] = 200  # held-out rows, on which a gain of 0.1 nats is usually significant

    before: Tensor
    after: Tensor
    training: Tensor

    @classmethod
    def concatenate(cls, comparisons: Sequence["HeldOutComparison"]) -> "HeldOutComparison":
        """Returns the comparison on the examples of several comparisons."""
        columns = zip(*((each.before, each.after, each.training) for each in comparisons), strict=True)
        return cls(*map(torch.cat, columns))

    @property
    def gain(self) -> Gain:
        """Held-out log-likelihood before and after the fit."""
        return Gain.of(self.before, self.after, "held-out log-likelihood")

    @property
    def memorization(self) -> float:
        """Training log-likelihood minus held-out log-likelihood of the initial network."""
        return float(self.training.mean() - self.before.mean())

    @property
    def is_memorized(self) -> bool:
        """True if the initial weights have memorized the training data, but not the held-out data."""
        return is_memorized(self.training, self.before)


def log_likelihoods(posterior: Posterior, data: Iterable[Any], samples: int = 64) -> Tensor:
    """Returns the predictive log-likelihood of every example."""
    predictive, targets = posterior.predict_with_targets(data, samples, seed=0, progress=False)
    return -predictive.nll(targets).double().cpu().flatten()


def compare_held_out(fit: FinishedFit) -> HeldOutComparison | None:
    """Returns the log-likelihoods of held-out data before and after a fit, or None without held-out data."""
    if fit.held_out is None:
        return None
    model, likelihood = fit.posterior.model, fit.posterior.likelihood
    with fit.initial_network():
        if fit.initial.mode == "off":
            with noise_mode(model, "off"):
                network = PointPosterior(model, likelihood)
                before, training = (log_likelihoods(network, data, 1) for data in (fit.held_out, fit.batches))
        else:
            before, training = (log_likelihoods(fit.posterior, data) for data in (fit.held_out, fit.batches))
    return HeldOutComparison(before, log_likelihoods(fit.posterior, fit.held_out), training)


def is_memorized(training_values: Tensor, held_out_values: Tensor) -> bool:
    """Returns True if the training log-likelihood exceeds the held-out log-likelihood significantly, and by more than 0.1 nats.

    Significance is measured after a sigmoid. Otherwise, a few confident errors among the held-out examples would hide any difference.

    >>> training, wrong = torch.full((60,), -0.02), -torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 7, 7, 10, 11, 12, 23, 28, 40])
    >>> is_memorized(training, torch.cat([training[15:], wrong])), is_memorized(training, torch.cat([training[2:], wrong[-2:]]))
    (True, False)
    """
    median = torch.cat([training_values, held_out_values]).median()
    first, second = torch.sigmoid(training_values - median), torch.sigmoid(held_out_values - median)
    error = (first.var() / len(first) + second.var() / len(second)).sqrt()
    exceeds = bool(training_values.mean() > held_out_values.mean() + 0.1)
    return exceeds and bool(first.mean() > second.mean() + 3 * error)
