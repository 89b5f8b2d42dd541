"""The noise level of a regression and the size of its residuals."""

from collections.abc import Iterable
from typing import Any

import torch

from flowbnn.batches import split_batch
from flowbnn.errors import warn
from flowbnn.likelihoods import Gaussian, learns_noise, least_variance
from flowbnn.methods.fitting import undisturbed
from flowbnn.posterior.base import Posterior
from flowbnn.training import is_main_process

APART = 1.5
ROWS = 4096  # examples whose residuals are looked at
DRAWS = 8


@torch.no_grad()
def learn_level(posterior: Posterior, loader: Iterable[Any], seed: int | None) -> bool:
    """Set a learned noise to what maximises the ELBO, the size of the residuals of networks drawn. False if none is learned."""
    likelihood = posterior.likelihood
    if not learns_noise(likelihood):
        return False
    with undisturbed(loader, seed or 0):
        predictive, targets = posterior.predict_with_targets(loader, DRAWS, seed=0, progress=False)
    likelihood.settle((outputs, torch.as_tensor(targets)) for outputs in predictive.samples)
    return True


@torch.no_grad()
def warn_of_level(posterior: Posterior, loader: Iterable[Any], seed: int | None) -> None:
    """Warn where the noise level and the residuals of networks drawn from a posterior are more than a factor of 1.5 apart.

    A noise that is predicted from the inputs has no level to be looked at.
    """
    likelihood = posterior.likelihood
    if not isinstance(likelihood, Gaussian) or likelihood.noise == "predicted":
        return
    batches: list[Any] = []
    rows = 0
    with undisturbed(loader, seed or 0):
        for batch in loader:
            batches.append(batch)
            rows += len(split_batch(batch)[1])
            if rows >= ROWS:
                break
    samples = min(DRAWS, posterior.default_samples)
    predictive, targets = posterior.predict_with_targets(batches, samples, seed=0, progress=False)
    outputs, variances = predictive.samples.double(), predictive.sample_variances.double()
    truth = torch.as_tensor(targets).to(outputs).reshape(outputs.shape[1:])
    sizes, levels = (value.mean((0, 1)).sqrt() for value in ((truth - outputs).square(), variances))
    least = least_variance(truth.mean(0), truth.var(0, correction=0))  # below which no level is learned
    sizes = torch.maximum(sizes, least.sqrt())
    worst = int((sizes / levels).log().abs().argmax())
    size, level = float(sizes[worst]), float(levels[worst])
    if (level <= APART * size and size <= APART * level) or not size or not is_main_process():
        return
    which = f" of target {worst}" if len(sizes) > 1 else ""
    longer = "fit longer (epochs=...)"
    advice = longer if learns_noise(likelihood) else f"{longer}, or let it be learned (likelihood='gaussian')"
    warn(
        f"the noise level{which} is {level:.3g}, but the residuals on the training data are {size:.3g}: intervals will be too "
        f"{'narrow' if size > level else 'wide'}; {advice}",
        kind="noise_level",
        level=level,
        residuals=size,
    )
