r"""Simulation-based calibration, a test of a procedure that fits posteriors of noise."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.errors import check_shape
from flowbnn.options import Count, Seed, checked
from flowbnn.posterior.base import Posterior


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks of simulated noise among the draws of the posteriors that were fitted to the simulated data.

    Args:
        ranks: Ranks from 0 to ``draws``, ``[simulations, D]``. They are uniform if the fits are exact.
        draws: Number of draws of each fit.
    """

    ranks: Tensor
    draws: int

    def __repr__(self) -> str:
        simulations, dimensions = self.ranks.shape
        return f"Ranks({simulations} simulations x {dimensions} dimensions, {self.draws} draws; p-value {self.p_value:.2g})"

    @property
    def p_value(self) -> float:
        """P-value of the hypothesis that all ranks are uniform.

        It is the smallest p-value of chi-squared tests with at most eight bins over the dimensions, with a Bonferroni correction.
        """
        num_ranks = self.draws + 1
        bins = min(8, num_ranks)
        bin_index = self.ranks.cpu() * bins // num_ranks
        counts = torch.nn.functional.one_hot(bin_index, bins).sum(0).double()  # [D, bins]
        sizes = torch.bincount(torch.arange(num_ranks) * bins // num_ranks)
        expected = len(self.ranks) * sizes / num_ranks
        statistic = ((counts - expected).square() / expected).sum(-1)
        p = torch.special.gammaincc(torch.tensor(0.5 * (bins - 1), dtype=torch.float64), statistic / 2)
        return min(1.0, float(p.min()) * self.ranks.shape[1])


@checked
def simulation_ranks(
    posterior: Posterior,
    loader: Iterable[Any],
    fit: Callable[[list[tuple[Any, Tensor]]], Any],
    simulations: Count = 64,
    draws: Count = 63,
    seed: Seed = 0,
) -> Ranks:
    r"""Checks a fitting procedure by simulation-based calibration, for tiny networks (Talts et al. 2018, https://arxiv.org/abs/1804.06788).

    Each simulation draws noise :math:`z \sim p(z)` and targets :math:`y \sim p(y \mid x, z)`, and fits a posterior to them. If the fits
    are exact, the rank of each component of :math:`z` among the draws of the fit is uniform. Ranks at both ends indicate posteriors
    that are too narrow. Ranks in the middle indicate posteriors that are too wide.

    Args:
        posterior: Posterior whose network, prior and likelihood simulate the data.
        loader: Inputs. The targets are ignored.
        fit: Function that fits a posterior of noise of the same layers to batches ``[(inputs, targets)]``.
        simulations: Number of fits.
        draws: Number of draws of each fit.
        seed: Seed of simulations and draws.

    Raises:
        FlowBNNError: If ``fit`` does not return a posterior of the noise of the same layers.
    """
    target = NoiseTarget(posterior, loader, seed)
    prior_draws = target.draw_prior(simulations)
    ranks = []
    for number, noise_draw in enumerate(prior_draws):
        predictive = target.likelihood.predictive(target.outputs(noise_draw[None]))
        targets = predictive.sample(1, seed=seed + number)[0]
        fitted = fit([(target.inputs, targets.reshape(target.targets.shape).to(target.targets))])
        noise = fitted.draws(draws, seed=seed + number) if isinstance(fitted, Posterior) else {}
        vectors = torch.cat(
            [noise[name] for name in target.names if name in noise] or [noise_draw[None, :0]], -1
        )
        check_shape(
            "fit",
            vectors,
            ("draws", *noise_draw.shape),
            hint="return a posterior of noise in the same layers",
        )
        ranks.append((vectors.to(noise_draw) < noise_draw).sum(0))
    return Ranks(torch.stack(ranks), draws)
