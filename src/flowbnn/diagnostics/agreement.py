r"""Comparison of a posterior with long Markov chains: predictions, and draws of the noise."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.diagnostics.fixed_data import read_fixed_data
from flowbnn.diagnostics.noise_chains import NoiseChains, noise_chains
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.errors import FlowBNNError
from flowbnn.methods.mcmc.posterior import ChainPosterior
from flowbnn.options import Count, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import ContinuousPredictive, Predictive


@dataclass(frozen=True)
class Agreement:
    r"""Agreement of a posterior with Markov chains.

    Each measure has a floor: the value that two halves of the chains reach against each other.

    Args:
        agreement: Fraction of the inputs with the same most probable class. For a regression, the fraction whose predicted means
            differ by less than half of the chains' standard deviation.
        agreement_floor: Agreement of two halves of the chains.
        variation: Total variation :math:`\tfrac12 \int |p - p'|` of the predictive distributions, averaged over the inputs.
        variation_floor: Total variation between two halves of the chains.
        wasserstein: Sliced Wasserstein distance of the noise, in standard deviations. NaN for chains over weights.
        wasserstein_floor: Sliced Wasserstein distance between two halves of the chains.
        excess: Mean negative log-likelihood (NLL) of the posterior minus the NLL of the chains, the improvement that an exact posterior
            would bring.
        converged: True if the chains have mixed.
    """

    agreement: float
    agreement_floor: float
    variation: float
    variation_floor: float
    wasserstein: float
    wasserstein_floor: float
    excess: float
    converged: bool

    @property
    def within_floor(self) -> bool:
        """True if the total variation is below 0.01, or at most 1.5 times its floor."""
        return self.variation <= max(0.01, 1.5 * self.variation_floor)


@checked
def agreement(
    posterior: Posterior,
    loader: Iterable[Any],
    chains: NoiseChains | ChainPosterior | None = None,
    test: Iterable[Any] | None = None,
    samples: Count = 1000,
    seed: Seed = 0,
) -> Agreement:
    """Compares the predictions and draws of a posterior with long Markov chains.

    The measures are from the competition by Wilson et al. 2022 (https://proceedings.mlr.press/v176/wilson22a.html).

    Args:
        posterior: Fitted posterior of noise. With chains over weights, a posterior of any kind.
        loader: Data that the posterior was fitted to.
        chains: Chains of :func:`~flowbnn.diagnostics.noise_chains`, of this posterior or of another one with the same prior. They are
            run here by default. A posterior of :class:`flowbnn.HMC` or :class:`flowbnn.NUTS` compares the predictions of any
            posterior of the same network.
        test: Data at which predictions are compared. The default is the data of the loader.
        samples: Number of draws of the posterior, and the largest number of draws of the chains.
        seed: Seed of all draws.

    Raises:
        FlowBNNError: If the posterior and the chains predict different quantities.
    """
    if isinstance(chains, ChainPosterior):
        purpose = "diagnostics" if test is None else "test data"
        data = read_fixed_data(loader if test is None else test, seed, purpose, posterior.columns)
        reference = chains.predict(
            [data], min(samples, len(chains)), seed=seed, progress=False, keep_samples=True
        )
        converged = chains.diagnostics().rhat_outputs <= NoiseChains.max_rhat
        distance = distance_floor = math.nan
    else:
        target = NoiseTarget(posterior, loader, seed)
        data = target.data if test is None else target.read(test, "test data")
        chains = (chains or noise_chains(posterior, loader, seed=seed)).check_target(target)
        converged = chains.converged
        thinning = -(-chains.position[..., 0].numel() // samples)
        position = chains.position[:, ::thinning].to(target.device).flatten(0, 1)
        reference = target.likelihood.predictive(target.outputs(chains.space.vectors(position), data))
        draws, half = chains.space.position(target.draw(samples, 96)[0]), len(position) // 2
        distance = sliced_wasserstein(draws, position)
        distance_floor = sliced_wasserstein(position[:half], position[half:])
    predictive = posterior.predict(data[0], samples, seed=seed, progress=False)
    predictive = predictive.to(data[1].device)
    reference = reference.to(data[1].device)
    _check_comparable(predictive, reference)
    half = reference.num_samples // 2
    equal_fraction, variation = _compare_predictives(predictive, reference)
    equal_floor, variation_floor = _compare_predictives(
        reference.select_samples(slice(half)), reference.select_samples(slice(half, None))
    )
    excess = float(predictive.nll(data[1]).double().mean() - reference.nll(data[1]).double().mean())
    return Agreement(
        equal_fraction, equal_floor, variation, variation_floor, distance, distance_floor, excess, converged
    )


def _check_comparable(predictive: Predictive, reference: Predictive) -> None:
    """Raises FlowBNNError if two predictives are of different kinds or shapes."""
    if type(predictive) is not type(reference) or predictive.samples.shape[1:] != reference.samples.shape[1:]:
        text = "the chains predict other quantities than the posterior; use chains of the same network and targets"
        raise FlowBNNError(text, kind="shape", argument="chains")


def _compare_predictives(predictive: Any, reference: Any) -> tuple[float, float]:
    """Returns the agreement and the total variation of two predictives."""
    if not isinstance(predictive, ContinuousPredictive):
        p, q = predictive.probabilities, reference.probabilities
        equal_fraction = float((p.argmax(-1) == q.argmax(-1)).float().mean())
        return equal_fraction, 0.5 * float((p - q).abs().sum(-1).mean())
    equal_fraction = float(((predictive.mean - reference.mean).abs() < 0.5 * reference.std).double().mean())
    variations = [
        _total_variation(predictive[index].to(torch.float64), reference[index].to(torch.float64))
        for index in range(len(predictive))
    ]
    return equal_fraction, sum(variations) / len(predictive)


def _total_variation(predictive: ContinuousPredictive, reference: ContinuousPredictive) -> float:
    """Returns the total variation of two densities of one input, on a grid of 201 points for each target."""
    units = torch.linspace(-8.0, 8.0, 201, dtype=torch.float64, device=predictive.mean.device)
    width = torch.maximum(predictive.std, reference.std).reshape(-1)
    grid = 0.5 * (predictive.mean + reference.mean).reshape(-1) + units[:, None] * width
    p, q = (
        mixture._mean(mixture._log_densities(grid.mT.unsqueeze(0)).exp())[0].mT
        for mixture in (predictive, reference)
    )
    return 0.5 * float(((p - q).abs() * (units[1] - units[0]) * width).sum(0).mean())


def sliced_wasserstein(first: Tensor, second: Tensor, directions: int = 256, seed: int = 0) -> float:
    r"""Returns the mean over directions :math:`\theta` of the 1-Wasserstein distance of the projections :math:`\theta^\top z`.

    Args:
        first: Draws ``[S, D]``.
        second: Draws ``[T, D]``; the numbers of draws may differ.
        directions: Number of random directions.
        seed: Seed of the directions.

    >>> draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    >>> shift = torch.tensor([3.0, 0.0, 0.0])  # the mean of |cos| on the sphere is 1 / 2
    >>> abs(sliced_wasserstein(draws, draws + shift, directions=500) - 1.5) < 0.1
    True
    """
    generator = torch.Generator().manual_seed(seed)
    theta = torch.randn(first.shape[-1], directions, generator=generator, dtype=torch.float64)
    theta = (theta / theta.norm(dim=0)).to(first.device)
    levels = (torch.arange(256, dtype=torch.float64, device=first.device) + 0.5) / 256
    quantiles = [torch.quantile(draws.double() @ theta, levels, dim=0) for draws in (first, second)]
    return float((quantiles[0] - quantiles[1]).abs().mean())
