r"""A posterior beside long chains: predictions, draws, and the modes of the density that both are of."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowbnn.diagnostics.noise_chains import RHAT, NoiseChains, noise_chains
from flowbnn.diagnostics.noise_target import NoiseTarget, Whitened, fixed_data
from flowbnn.errors import FlowBNNError, warn
from flowbnn.methods.mcmc.posterior import ChainPosterior
from flowbnn.options import Count, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.predictive import GaussianPredictive

GRID = 201  # points of a target's density
TEST = "the comparison at test data"
FAR = 10.0  # nats below the highest maximum, where a mode has hardly any mass
POINTS = 15  # on the way from one maximum to another
DIP = 1.0  # nats between two maxima
STEPS = 200  # of a climb at most


@dataclass(frozen=True)
class Agreement:
    r"""A posterior's predictions and draws beside those of chains, each with the floor that two halves of the chains have.

    Args:
        agreement, agreement_floor: share of the inputs with the same most probable class; for a regression, whose predicted means are
            within half of the chains' standard deviation.
        variation, variation_floor: total variation :math:`\tfrac12 \int |p - p'|` of the predictive distributions, mean over inputs.
        wasserstein, wasserstein_floor: sliced Wasserstein distance of the noise, in standard deviations; NaN for chains of weights.
        excess: mean negative log-likelihood of the targets less that of the chains' predictions: what a perfect posterior would gain.
        certified: whether the chains have mixed.
    """

    agreement: float
    agreement_floor: float
    variation: float
    variation_floor: float
    wasserstein: float
    wasserstein_floor: float
    excess: float
    certified: bool

    @property
    def within_floor(self) -> bool:
        """Whether predictions are about as near to the chains as their halves to each other, or nearer than 0.01."""
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
    """Do a posterior and long chains predict the same (Wilson et al. 2022, the measures of their competition)?

    Args:
        posterior: of noise, fitted; of any kind where the chains are of weights.
        loader: the data that it was fitted to.
        chains: of :func:`~flowbnn.diagnostics.noise_chains`, of this posterior or another with the same prior; made here unless
            given. Or a posterior of :class:`flowbnn.HMC` or :class:`flowbnn.NUTS`, for predictions of any posterior of the same
            network.
        test: where predictions are compared; at the loader's data unless given.
        samples: draws of the posterior, and of the chains at most.
        seed: of all draws.
    """
    distances = math.nan, math.nan
    if isinstance(chains, ChainPosterior):
        data = fixed_data(loader, seed, "diagnostics") if test is None else fixed_data(test, seed, TEST)
        exact = chains.predict([data], min(samples, len(chains)), seed=seed, progress=False)
        certified = chains.diagnostics().rhat_outputs <= RHAT
    else:
        target = NoiseTarget(posterior, loader, seed)
        data = target.data if test is None else target.read(test, TEST)
        chains = (chains or noise_chains(posterior, loader, seed=seed)).checked_for(target)
        certified = chains.certified
        thin = -(-chains.position[..., 0].numel() // samples)
        position = chains.position[:, ::thin].to(target.device).flatten(0, 1)
        exact = target.likelihood.predictive(target.outputs(chains.space.vectors(position), data))
        drawn, half = chains.space.position(target.draw(samples, 96)[0]), len(position) // 2
        distances = (
            sliced_wasserstein(drawn, position),
            sliced_wasserstein(position[:half], position[half:]),
        )
    own = posterior.predict([data], samples, seed=seed, progress=False).to(data[1].device)
    exact, half = exact.to(data[1].device), exact.num_samples // 2
    if type(own) is not type(exact) or own.samples.shape[1:] != exact.samples.shape[1:]:
        raise FlowBNNError(
            "the posterior and the chains predict different things (classes and numbers, or more of them): give chains of the same "
            "network and targets",
            kind="shape",
            argument="chains",
        )
    same, far = _compared(own, exact)
    floor, least = _compared(exact.part(slice(half)), exact.part(slice(half, None)))
    excess = float(own.nll(data[1]).double().mean() - exact.nll(data[1]).double().mean())
    return Agreement(same, floor, far, least, *distances, excess, certified)


def _compared(one: Any, other: Any) -> tuple[float, float]:
    """Agreement and total variation of two predictives."""
    if not isinstance(one, GaussianPredictive):
        p, q = one.probabilities, other.probabilities
        return float((p.argmax(-1) == q.argmax(-1)).float().mean()), 0.5 * float((p - q).abs().sum(-1).mean())
    same = float(((one.mean - other.mean).abs() < 0.5 * other.std).double().mean())
    far = torch.linspace(-8.0, 8.0, GRID, dtype=torch.float64, device=one.mean.device)
    total = 0.0
    for index in range(len(one)):  # the mixture's density on a grid around one input's targets
        pair = one[index].to(torch.float64), other[index].to(torch.float64)
        width = torch.maximum(pair[0].std, pair[1].std).reshape(-1)
        grid = 0.5 * (pair[0].mean + pair[1].mean).reshape(-1) + far[:, None] * width
        p, q = (
            torch.distributions.Normal(part.samples, part.sample_variances.sqrt())
            .log_prob(grid)
            .exp()
            .mean(0)
            for part in pair
        )
        total += 0.5 * float(((p - q).abs() * (far[1] - far[0]) * width).sum(0).mean())
    return same, total / len(one)


def sliced_wasserstein(one: Tensor, other: Tensor, directions: int = 256, seed: int = 0) -> float:
    r"""Mean over directions :math:`\theta` of the 1-Wasserstein distance of the draws' projections :math:`\theta^\top z`.

    Args:
        one, other: ``[S, D]``; numbers of draws may differ.

    >>> draws = torch.randn(4000, 3, generator=torch.Generator().manual_seed(0))
    >>> moved = torch.tensor([3.0, 0.0, 0.0])  # the mean of |cos| on the sphere is 1 / 2
    >>> abs(sliced_wasserstein(draws, draws + moved, directions=500) - 1.5) < 0.1
    True
    """
    source = torch.Generator().manual_seed(seed)
    theta = torch.randn(one.shape[-1], directions, generator=source, dtype=torch.float64)
    theta = (theta / theta.norm(dim=0)).to(one.device)
    places = (torch.arange(256, dtype=torch.float64, device=one.device) + 0.5) / 256
    each = [torch.quantile((draws.double() @ theta), places, dim=0) for draws in (one, other)]
    return float((each[0] - each[1]).abs().mean())


@dataclass(frozen=True, eq=False)
class Modes:
    r"""Distinct maxima of :math:`p(z \mid D)`, the highest first.

    Args:
        vectors: the noise at them, ``[M, D]``.
        log_density: :math:`\log p(D, z)` there, ``[M]``.
        found: how many of the climbs ended at each.
        dips: ``[M, M]``, by how many nats the density falls between two, below the lower one, on the straight line.
    """

    vectors: Tensor
    log_density: Tensor
    found: tuple[int, ...]
    dips: Tensor

    def __len__(self) -> int:
        return len(self.vectors)

    def __repr__(self) -> str:
        heights = ", ".join(f"{height:.1f}" for height in self.log_density.tolist())
        return f"Modes({len(self)} found by {sum(self.found)} climbs; log-density {heights}; climbs that end there {self.found})"

    def missed(self, chains: NoiseChains) -> int:
        """How many maxima that are less than ``FAR`` nats below the highest no draw of the chains is nearest to."""
        high = self.log_density > self.log_density.max() - FAR
        places = chains.space.position(self.vectors[high].to(chains.target.device))
        draws = chains.position.to(places).flatten(0, 1)
        return len(places) - len(torch.cdist(draws, places).argmin(1).unique())


@checked
def modes(
    posterior: Posterior,
    loader: Iterable[Any],
    starts: Count = 16,
    seed: Seed = 0,
) -> Modes:
    r"""Distinct maxima of the density that a posterior approximates, by climbs (L-BFGS) from draws of the prior.

    Two ends are one maximum where the density on the line between them falls by less than one nat below the lower end. A climb that is
    not at its end after 200 steps may be anywhere below a maximum: a :class:`~flowbnn.FlowBNNWarning` of kind ``"modes"`` says so.

    Args:
        posterior: of noise, fitted.
        loader: the data.
        starts: climbs.
        seed: of the starts.
    """
    return climb(NoiseTarget(posterior, loader, seed), starts)


def climb(target: NoiseTarget, starts: int = 16) -> Modes:
    """What :func:`modes` finds of a density."""
    space = target.whitening()
    climbs = [_climb(space, start) for start in space.position(target.draw_prior(starts))]
    ends, cut = torch.stack([end for end, _ in climbs]), sum(cut for _, cut in climbs)
    if cut:
        warn(
            f"{cut} of {starts} climbs were not at their ends after {STEPS} steps, and need not be near a mode: the number of modes is "
            "not known, and chains may hardly mix",
            kind="modes",
            cut=cut,
        )
    heights = -space(ends)[0]
    order = heights.argsort(descending=True)
    ends, heights = ends[order], heights[order]
    kept: list[int] = []
    counts: list[int] = []
    for number in range(len(ends)):
        falls = [_dip(space, ends[number], ends[other]) for other in kept]
        if falls and min(falls) < DIP:
            counts[falls.index(min(falls))] += 1
        else:
            kept.append(number)
            counts.append(1)
    dips = torch.zeros(len(kept), len(kept), dtype=torch.float64)
    for row, one in enumerate(kept):
        for column, other in enumerate(kept[:row]):
            dips[row, column] = dips[column, row] = _dip(space, ends[one], ends[other])
    return Modes(space.vectors(ends[kept]), heights[kept], tuple(counts), dips)


def _climb(space: Whitened, start: Tensor) -> tuple[Tensor, bool]:
    """Where a climb ends, and whether it was cut before."""
    from scipy.optimize import minimize  # whose import changes the filters of warnings

    def energy(position: Any) -> tuple[float, Any]:
        value, slope = space(torch.as_tensor(position).to(start)[None])
        return float(value), slope[0].cpu().numpy()

    found = minimize(energy, start.cpu().numpy(), jac=True, method="L-BFGS-B", options={"maxiter": STEPS})
    return torch.as_tensor(found.x).to(start), found.status == 1


def _dip(space: Whitened, one: Tensor, other: Tensor) -> float:
    share = torch.linspace(0.0, 1.0, POINTS, dtype=one.dtype, device=one.device)[:, None]
    heights = space.target.log_joint(space.vectors(torch.lerp(one, other, share)))
    return float(torch.minimum(heights[0], heights[-1]) - heights.min())


@dataclass(frozen=True, eq=False)
class Ranks:
    """Ranks of the noise that data were simulated with, among draws of what was fitted to them.

    Args:
        ranks: ``[simulations, D]``, from 0 to ``draws``; uniform where the fits are exact.
        draws: of each fit.
    """

    ranks: Tensor
    draws: int

    def __repr__(self) -> str:
        simulations, dimensions = self.ranks.shape
        return f"Ranks({simulations} simulations x {dimensions} dimensions, {self.draws} draws; p-value {self.p_value:.2g})"

    @property
    def p_value(self) -> float:
        """Of uniform ranks: chi-squared in at most eight bins, the least over dimensions with a Bonferroni correction."""
        places = self.draws + 1  # that a rank can take
        bins = min(8, places)
        bin_of = self.ranks.cpu() * bins // places
        counts = torch.nn.functional.one_hot(bin_of, bins).sum(0).double()  # [D, bins]
        sizes = torch.bincount(torch.arange(places) * bins // places)
        mean = len(self.ranks) * sizes / places
        square = ((counts - mean).square() / mean).sum(-1)
        p = torch.special.gammaincc(torch.tensor(0.5 * (bins - 1), dtype=torch.float64), square / 2)
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
    r"""Simulation-based calibration of a way to fit posteriors, for tiny networks (Talts et al. 2018, arxiv.org/abs/1804.06788).

    Noise :math:`z \sim p(z)`, targets :math:`y \sim p(y \mid x, z)` at the loader's inputs, and a fit to these: over many of them, the
    rank of each number of :math:`z` among draws of the fit is uniform if the fits are exact. Ranks at both ends tell of posteriors
    that are too narrow, ranks in the middle of such that are too wide.

    Args:
        posterior: whose network, prior and likelihood simulate.
        loader: the inputs; its targets are not used.
        fit: makes a posterior of noise of the same layers from batches ``[(inputs, targets)]``.
        simulations: fits.
        draws: of each fit.
        seed: of everything.
    """
    target = NoiseTarget(posterior, loader, seed)
    truths = target.draw_prior(simulations)
    ranks = []
    for number, truth in enumerate(truths):
        predictive = target.likelihood.predictive(target.outputs(truth[None]))
        drawn = predictive.sample(1, seed=seed + number)[0]
        made = fit([(target.inputs, drawn.reshape(target.targets.shape).to(target.targets))])
        noise = made.draws(draws, seed=seed + number) if isinstance(made, Posterior) else {}
        found = torch.cat([noise[name] for name in target.names if name in noise] or [truth[None, :0]], -1)
        if found.shape[1:] != truth.shape:
            raise FlowBNNError(
                f"fit must give posteriors of the noise of the one that is given, of {len(truth)} numbers, not of {found.shape[-1]}",
                kind="shape",
                argument="fit",
            )
        ranks.append((found.to(truth) < truth).sum(0))
    return Ranks(torch.stack(ranks), draws)
