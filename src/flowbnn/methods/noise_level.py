"""The noise level of a regression and the size of its residuals."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from flowbnn.batches import split_batch
from flowbnn.errors import warn
from flowbnn.likelihoods.regression import Gaussian, learns_noise, least_variance, log_variance
from flowbnn.methods.fitting import preserve_rng_state
from flowbnn.posterior.base import Posterior
from flowbnn.training import is_main_process

APART = 1.5
ROWS = 4096  # examples whose residuals are looked at
DRAWS = 8
STEPS = 200  # of expectation maximisation at most
MIXED = 32  # draws of the mixture whose level is learned


@torch.no_grad()
def learn_level(posterior: Posterior, loader: Iterable[Any], seed: int | None, apart: float = 0.0) -> bool:
    r"""Set a learned noise to the maximum of the predictive likelihood of the data. False if none is learned.

    .. math:: \max_\sigma \sum_i \log \frac1S \sum_s \mathcal N(y_i \mid f_s(x_i), \sigma^2)

    The residuals of single draws, which the ELBO asks for, hold the spread of the draws, which the predictive has already. Where
    networks have levels of their own (``log_noise``), all get one factor. Predictions that are still much wider than their residuals
    are warned of.

    Args:
        apart: leave the noise as it is where predictions are at most so many times as wide as their residuals.
    """
    likelihood = posterior.likelihood
    if not learns_noise(likelihood):
        return False
    with preserve_rng_state(loader, seed or 0):
        predictive, targets = posterior.predict_with_targets(loader, MIXED, seed=0, progress=False)
    outputs, variances = predictive.samples.cpu(), predictive.sample_variances.cpu()
    truth = torch.as_tensor(targets).to(outputs).reshape(outputs.shape[1:])
    error = (truth - outputs.mean(0)).square().mean(0).double()
    noise, spread = variances.double().mean((0, 1)), outputs.double().var(0, correction=0).mean(0)
    if bool((noise + spread > apart**2 * error).any()):
        factor = best_factor((truth - outputs).square(), variances)
        least = least_variance(truth.double().mean(0), truth.double().var(0, correction=0))
        noise, before = torch.maximum(factor * noise, least), noise
        for level in (likelihood.log_scale, getattr(posterior, "log_noise", None)):
            if level is not None:
                level += ((noise / before).log() / 2.0).to(level)
    width, error = (noise + spread).sqrt(), error.sqrt()
    worst = int((width / error.clamp_min(1e-300)).argmax())
    if bool(width[worst] > APART * error[worst]) and bool((spread > noise)[worst]) and is_main_process():
        warn(
            f"predictions have a standard deviation of {width[worst]:.3g}, but their residuals on the training data are "
            f"{error[worst]:.3g}: intervals will be too wide, because the networks drawn are far apart; fit longer (epochs=...), "
            "let them differ less (a smaller rate of dropout, prior_scale of noise), or temper them on held-out data (fb.Temperature)",
            kind="width",
            width=float(width[worst]),
            residuals=float(error[worst]),
        )
    return True


def best_factor(squares: Tensor, variances: Tensor) -> Tensor:
    """The factor ``[D]`` of the variances that gives residuals ``[S, B, D]`` the largest likelihood under the mixture of S Gaussians.

    By expectation maximisation, of which every step raises the likelihood.

    >>> best_factor(torch.full((1, 4, 1), 9.0), torch.ones(1, 4, 1))  # of one network, the mean square
    tensor([9.], dtype=torch.float64)
    """
    scaled, factor = squares / variances, torch.ones(squares.shape[-1], dtype=torch.float64)
    for _ in range(STEPS):
        former = factor
        density = -0.5 * (scaled / factor.to(scaled) + variances.log()).sum(-1)
        factor = (torch.softmax(density, 0).unsqueeze(-1) * scaled).sum(0, dtype=torch.float64).mean(0)
        factor = factor.clamp_min(1e-30)
        if bool(((factor / former).log().abs() < 1e-4).all()):
            break
    return factor


def spread_of_draws(level: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """A term of value zero that lets the level in a loss of one draw follow the residuals of the mean of the draws.

    The squared residual of a draw exceeds that of the mean by the variance of the draws, half the squared difference of two.
    """
    variance = 0.5 * (one.detach() - other.detach()).square().mean(0)
    term = -0.5 * (variance * (-log_variance(level)).exp().to(variance)).sum()
    return term - term.detach()


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
    with preserve_rng_state(loader, seed or 0):
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
