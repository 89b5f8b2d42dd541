"""Whether a fit gained anything: ELBO and held-out log-likelihoods of the network that was given and of the posterior."""

from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from flowbnn.batches import device_of, dtype_of, evaluation_mode, move, split_batch
from flowbnn.errors import warn
from flowbnn.noise import noise_mode
from flowbnn.objectives import ELBO
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.calibration import Gain
from flowbnn.posterior.noise import NoisePosterior
from flowbnn.posterior.point import PointPosterior
from flowbnn.training.options import length_of
from flowbnn.training.randomness import preserve_rng_state, seed_all

BATCHES = 10  # of the training data that are looked at
SAMPLES = 64


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
    result = Gain.of(before, log_likelihoods(posterior, held_out), "held-out log-likelihood")
    return result.told(
        f"the network with noise predicts worse than the one that was given: {result}; fit longer (epochs=...), give the "
        "noise a narrower prior (prior_scale=0.2), or fit it on data that the weights have not seen",
        "gain",
    )


def warn_of_memory(
    posterior: NoisePosterior, loader: Iterable[Any], held_out: Tensor, seed: int | None
) -> None:
    """Warn where the given weights score far better on the loader than on held-out data: noise fitted there is over-confident."""
    with preserve_rng_state(loader, seed):
        seen = plain_log_likelihoods(posterior, list(islice(iter(loader), BATCHES)))
    if memorised(seen, held_out):
        warn(
            f"the weights have memorised this loader: log-likelihood {seen.mean():.3f} per example there, {held_out.mean():.3f} "
            "on the validation data. Noise that is fitted to it will be over-confident: fit it to data that the weights have not "
            'seen, by fb.calibrate(network, held_out), or by fit on those after freeze(model, "weights")',
            kind="memorised",
            excess=float(seen.mean() - held_out.mean()),
        )


def memorised(seen: Tensor, held_out: Tensor) -> bool:
    """Whether log-likelihoods of seen examples exceed those of others by 0.1 nats, and by more than chance.

    Chance is measured in bounded numbers: the few examples that a network is sure and wrong of hide any difference of plain means.

    >>> seen, wrong = torch.full((60,), -0.02), -torch.tensor([1.0, 2, 3, 4, 5, 6, 7, 7, 7, 10, 11, 12, 23, 28, 40])
    >>> memorised(seen, torch.cat([seen[15:], wrong])), memorised(seen, torch.cat([seen[2:], wrong[-2:]]))
    (True, False)
    """
    middle = torch.cat([seen, held_out]).median()
    one, other = torch.sigmoid(seen - middle), torch.sigmoid(held_out - middle)
    error = (one.var() / len(one) + other.var() / len(other)).sqrt()
    return bool(seen.mean() > held_out.mean() + 0.1) and bool(one.mean() > other.mean() + 3 * error)


def elbos(model: nn.Module, objective: ELBO, batches: Iterable[Any]) -> Tensor:
    """The ELBO of every example, with the same draws whenever it is asked; all generators are left as they were."""
    device, dtype, found = device_of(model), dtype_of(model), []
    # one of its own: what an earlier pass has asked for is drawn in another order
    objective = ELBO(objective.likelihood, objective.num_data, objective.beta, objective.gamma)
    with preserve_rng_state(None), evaluation_mode(model), noise_mode(model, "sample"):
        seed_all(0)
        for batch in batches:
            inputs, targets = split_batch(batch)
            terms = objective(model, move(inputs, device, dtype), targets := move(targets, device))
            each = objective.likelihood.log_prob(terms.outputs, targets).double().cpu()
            found.append(each + float(terms.elbo - terms.log_likelihood))
    return torch.cat(found)


def bound_of_given(
    model: nn.Module, objective: ELBO, loader: Iterable[Any], seed: int | None
) -> tuple[list[Any], Tensor] | None:
    """Batches spread evenly over the loader, and the ELBO of their examples before the fit. None where they cannot be served."""
    try:
        with preserve_rng_state(loader, seed):
            # the first alone say little of a loader that is in order
            step = -(-(length_of(loader) or 0) // BATCHES) or 1
            batches = list(islice(iter(loader), 0, step * BATCHES, step))
        before = elbos(model, objective, batches)
    except Exception:  # the training meets the same batches, and says what is wrong with them and where
        return None
    return (batches, before) if bool(torch.isfinite(before).all()) else None


def bound_gain(before: Tensor, after: Tensor) -> Gain:
    """Compare the ELBO after a fit with :func:`bound_of_given`; a loss of more than two standard errors is warned of."""
    result = Gain.of(before, after, "ELBO")
    return result.told(
        f"the fit has made the ELBO worse than that of the network that was given: {result}; take smaller rates "
        "(weight_lr=..., noise_lr=...; lr=... of a method), or fit longer (epochs=...)",
        "elbo",
    )
