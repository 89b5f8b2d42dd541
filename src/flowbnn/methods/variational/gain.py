"""Whether a fit gained anything: log-likelihoods of held-out data under the network that was given and under the posterior."""

import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNWarning
from flowbnn.methods.fitting import undisturbed
from flowbnn.noise import noise_mode
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.point import PointPosterior

BATCHES = 10  # of the training data that are looked at
SAMPLES = 64


class Gain(NamedTuple):
    """Mean log-likelihood of held-out examples before and after a fit, and the standard error of the difference.

    >>> print(Gain(-0.25, -0.125, 0.01))
    held-out log-likelihood -0.250 -> -0.125 per example (+0.125, standard error 0.010)
    """

    before: float
    after: float
    error: float

    def __str__(self) -> str:
        return (
            f"held-out log-likelihood {self.before:.3f} -> {self.after:.3f} per example "
            f"({self.after - self.before:+.3f}, standard error {self.error:.3f})"
        )


def log_likelihoods(posterior: Posterior, data: Iterable[Any], samples: int = SAMPLES) -> Tensor:
    """The predictive log-likelihood of every example."""
    predictive, targets = posterior.predict_with_targets(data, samples, seed=0, progress=False)
    return -predictive.nll(targets).double().cpu().flatten()


def plain_log_likelihoods(posterior: NoisePosterior, data: Iterable[Any]) -> Tensor:
    """The same for the network with its noise off."""
    with noise_mode(posterior.model, "off"):
        return log_likelihoods(PointPosterior(posterior.model, posterior.likelihood), data, 1)


def gain(before: Tensor, posterior: NoisePosterior, held_out: Iterable[Any]) -> Gain:
    """Compare the posterior with the network that was given; a loss of more than two standard errors is warned of."""
    after = log_likelihoods(posterior, held_out)
    error = float((after - before).std() / len(before) ** 0.5) if len(before) > 1 else float("inf")
    result = Gain(float(before.mean()), float(after.mean()), error)
    if result.after < result.before - 2 * error:
        warnings.warn(
            FlowBNNWarning(
                f"the network with noise predicts worse than the one that was given: {result}; fit longer (epochs=...), give the "
                "noise a narrower prior (prior_scale=0.2), or fit it on data that the weights have not seen",
                kind="gain",
                before=result.before,
                after=result.after,
            ),
            stacklevel=4,
        )
    return result


def warn_of_memory(
    posterior: NoisePosterior, loader: Iterable[Any], held_out: Tensor, seed: int | None
) -> None:
    """Warn where the given weights score far better on the loader than on held-out data: noise fitted there is over-confident."""
    with undisturbed(loader, seed):
        seen = plain_log_likelihoods(posterior, list(islice(iter(loader), BATCHES)))
    error = float((seen.var() / len(seen) + held_out.var() / len(held_out)).sqrt())
    excess = float(seen.mean() - held_out.mean())
    if excess > max(0.1, 3 * error) and torch.isfinite(seen.mean()):
        warnings.warn(
            FlowBNNWarning(
                f"the weights have memorised this loader: log-likelihood {seen.mean():.3f} per example there, {held_out.mean():.3f} "
                "on the validation data. Noise fitted on it will be over-confident; fit it on data that the weights have not "
                'seen, with freeze(model, "weights")',
                kind="memorised",
                excess=excess,
            ),
            stacklevel=4,
        )
