r"""How far a posterior is from the exact one, in nats: k-hat, the evidence, and the gap of the ELBO.

.. math:: \mathrm{KL}[q(z) \,\|\, p(z \mid D)] = \log p(D) - \mathrm{ELBO}(q)
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from flowbnn.diagnostics.noise_chains import NoiseChains, noise_chains
from flowbnn.diagnostics.noise_target import NoiseTarget
from flowbnn.distributions.draws import standard_normal
from flowbnn.errors import warn
from flowbnn.methods.mcmc.hamiltonian import hmc_kernel, initial_state
from flowbnn.metrics.convergence import effective_sample_size
from flowbnn.metrics.pareto import FEWEST, GOOD, log_mean, usable
from flowbnn.options import Bounds, Seed, checked
from flowbnn.posterior.base import Posterior

Draws = Annotated[int, Bounds(ge=FEWEST, le=1_000_000)]
# of tempering: independent groups, particles of each, leapfrog steps of a move
GROUPS, PARTICLES, STEPS = 8, 32, 8


@dataclass(frozen=True)
class ParetoK:
    r"""What importance sampling from a posterior says of it.

    Args:
        k: :math:`\hat k`, below 0.5 good, usable below 0.7, or below less where draws are few (``usable``).
        elbo, elbo_error: mean and standard error of the log-weights, in nats.
        evidence, evidence_error: the log-evidence by Pareto-smoothed weights, trusted where ``k`` is usable.
        effective: number of draws of the exact posterior that the draws are worth.
        samples: draws.
    """

    k: float
    elbo: float
    elbo_error: float
    evidence: float
    evidence_error: float
    effective: float
    samples: int

    @property
    def verdict(self) -> Literal["good", "usable", "bad"]:
        return "bad" if self.k >= self.usable else "good" if self.k < GOOD else "usable"

    @property
    def usable(self) -> float:
        """The k-hat up to which so many draws suffice."""
        return usable(self.samples)

    @property
    def gap(self) -> float:
        """Nats from the exact posterior, by these weights; a posterior that is too wide has a good ``k`` and a large gap."""
        return self.evidence - self.elbo

    @property
    def smoothed(self) -> "Evidence":
        """The log-evidence by Pareto-smoothed weights."""
        return Evidence(self.evidence, self.evidence_error, "psis", self.k < self.usable)


@checked
def pareto_k(posterior: Posterior, loader: Iterable[Any], samples: Draws = 400, seed: Seed = 0) -> ParetoK:
    r"""How well draws of a posterior of noise can stand for the exact one, by their importance weights. Needs no chains.

    .. math:: w_s = \frac{p(D \mid z_s)\, p(z_s)}{q(z_s)}, \qquad z_s \sim q

    :math:`\hat k` is the shape of their tail (:mod:`flowbnn.metrics.pareto`). It grows with the number of dimensions for an
    approximation that is off by the same amount in each, so a large one is a reason to look at predictions, not a verdict on them.
    A small one says that weighted draws can stand for the exact posterior; a posterior that is too wide has one, and a large ``gap``.

    Args:
        posterior: of noise, fitted.
        loader: the data that it was fitted to.
        samples: draws, one pass over the data each.
        seed: of the draws.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    >>> data = [(inputs, inputs.sum(1, keepdim=True))]
    >>> method = fb.NodeNoise(fb.noise.NormalAffine(), epochs=20)
    >>> posterior = method.fit(torch.nn.Linear(3, 1), data, seed=0, progress=False)
    >>> pareto_k(posterior, data).samples
    400
    """
    return _importance(NoiseTarget(posterior, loader, seed), samples)


def _importance(target: NoiseTarget, samples: int) -> ParetoK:
    vectors, density = target.draw(samples)
    weights = target.log_joint(vectors) - density
    found = log_mean(weights)
    elbo, error = float(weights.mean()), float(weights.std()) / math.sqrt(samples)
    return ParetoK(found.k, elbo, error, found.value, found.error, found.effective, samples)


@dataclass(frozen=True)
class Evidence:
    r"""A log-evidence :math:`\log p(D)` in nats, its standard error, and whether to believe it.

    Args:
        value, error: in nats.
        method: how it was found.
        trusted: whether k-hat is usable (``"psis"``), or R-hat at most 1.01 (``"bridge"``).
    """

    value: float
    error: float
    method: str
    trusted: bool


@checked
def evidence(
    posterior: Posterior,
    loader: Iterable[Any],
    method: Literal["bridge", "psis", "tempered"] = "bridge",
    chains: NoiseChains | None = None,
    samples: Draws = 400,
    seed: Seed = 0,
) -> Evidence:
    r"""The log-evidence :math:`\log \int p(D \mid z)\, p(z)\, dz` of the network with this noise, and its standard error.

    ==============  =========================================================================================================
    ``"bridge"``    bridge sampling between long chains and a Gaussian that is fitted to one half of them; the most accurate
    ``"psis"``      the mean of Pareto-smoothed weights of the posterior's own draws; no chains, right where k-hat is usable
    ``"tempered"``  particles from the prior, through :math:`p(z)\, p(D \mid z)^\beta` with :math:`\beta` from 0 to 1, moved by HMC (Del
                    Moral et al. 2006, https://doi.org/10.1111/j.1467-9868.2006.00553.x); finds what chains around one mode miss
    ==============  =========================================================================================================

    The cheaper estimates are made beside it; where two that are to be trusted differ by more than four standard errors, a
    :class:`~flowbnn.FlowBNNWarning` of kind ``"evidence"`` says so.

    Args:
        posterior: of noise, fitted.
        loader: the data.
        chains: of :func:`~flowbnn.diagnostics.noise_chains`, where there are any; of this posterior or another with the same prior.
        samples: draws of ``"psis"``.
        seed: of all draws.
    """
    target = NoiseTarget(posterior, loader, seed)
    if method == "bridge" and chains is None:
        chains = noise_chains(posterior, loader, seed=seed)
    bridged = None if chains is None else _bridge(chains.checked_for(target))
    smoothed = _importance(target, samples).smoothed
    found = _tempered(target) if method == "tempered" else smoothed if method == "psis" else bridged
    assert found is not None
    for other in (bridged, smoothed):
        warn_of_disagreement(found, other)
    return found


def warn_of_disagreement(one: Evidence, other: Evidence | None) -> None:
    """Warn where two estimates that are both to be trusted differ."""
    if other is None or not (one.trusted and other.trusted):
        return
    away, error = abs(one.value - other.value), math.hypot(one.error, other.error)
    if away > 4.0 * error + 0.01:
        warn(
            f"the log-evidence is {one.value:.2f} by {one.method} and {other.value:.2f} by {other.method}, {away:.2f} nats apart "
            f"where chance explains {error:.2f}: there may be modes that one of them does not see; method='tempered' and modes() "
            "look for them",
            kind="evidence",
            difference=away,
        )


def _bridge(chains: NoiseChains) -> Evidence:
    """The first half of every chain gives the proposal, a Gaussian drawn to the coordinates' own; the second half is bridged to."""
    space, position = chains.space, chains.position.to(chains.target.device)
    half = position.shape[1] // 2
    early, late = position[:, :half].flatten(0, 1), position[:, half:]
    dim, count = early.shape[1], len(early)
    unit = torch.eye(dim, dtype=early.dtype, device=early.device)
    covariance = (count * early.T.cov(correction=0).reshape(dim, dim) + dim * unit) / (count + dim)
    proposal = torch.distributions.MultivariateNormal(early.mean(0), covariance, validate_args=False)
    source = torch.Generator(early.device).manual_seed(chains.target.seed + 2)
    normal = standard_normal(late.flatten(0, 1).shape, early.dtype, early.device, source)
    drawn = proposal.loc + normal @ proposal.scale_tril.T
    inner = -chains.energy[:, half:].to(late) - proposal.log_prob(late) + space.log_det
    outer = chains.target.log_joint(space.vectors(drawn)) - proposal.log_prob(drawn) + space.log_det
    value, error = bridge_sampling(inner, outer)
    return Evidence(value, error, "bridge", chains.certified)


def bridge_sampling(chains: Tensor, proposal: Tensor) -> tuple[float, float]:
    r"""The log-evidence and its standard error from draws of the posterior and of a proposal :math:`g`: bridge sampling.

    .. math:: p(D) = \frac{E_g[h(z)\, p(D, z)]}{E_{p(z \mid D)}[h(z)\, g(z)]}, \qquad
              h(z) \propto \frac{1}{s_1\, p(D, z) + s_2\, p(D)\, g(z)}

    with the optimal bridge :math:`h` of Meng and Wong 1996 found by iteration (Gronau et al. 2017, https://arxiv.org/abs/1703.05984).
    Both expectations are of bounded quantities, so that the proposal may have lighter tails than the posterior.

    Args:
        chains: :math:`\log p(D, z) - \log g(z)` at draws of the posterior, ``[chains, draws]``.
        proposal: the same at draws of :math:`g`, ``[S]``.

    >>> source = torch.Generator().manual_seed(0)
    >>> draws = torch.randn(4, 1000, generator=source, dtype=torch.float64)
    >>> others = 1.5 * torch.randn(4000, generator=source, dtype=torch.float64)
    >>> def ratio(z):  # exp(-z^2 / 2), whose integral is 2.5066, over N(0, 1.5^2)
    ...     return -z**2 / 2 + (z / 1.5) ** 2 / 2 + math.log(1.5 * math.sqrt(2 * math.pi))
    >>> log_evidence, error = bridge_sampling(ratio(draws), ratio(others))
    >>> abs(log_evidence - math.log(math.sqrt(2 * math.pi))) < 3 * error < 0.1
    True
    """
    chains, proposal = chains.double(), proposal.double().to(chains.device)
    own = float(effective_sample_size(chains, "mean").clamp(max=chains.numel()))
    first, second = (math.log(n / (own + len(proposal))) for n in (own, float(len(proposal))))
    low = float(proposal.median())
    inner, outer = chains.flatten() - low, proposal - low
    log_evidence = torch.zeros((), dtype=torch.float64, device=chains.device)
    counts = math.log(len(inner) / len(outer))
    for _ in range(1000):
        top = (outer - torch.logaddexp(first + outer, second + log_evidence)).logsumexp(0)
        bottom = (-torch.logaddexp(first + inner, second + log_evidence)).logsumexp(0)
        before, log_evidence = log_evidence, top - bottom + counts
        if abs(float(log_evidence - before)) < 1e-9:
            break
    bridge = torch.full_like(log_evidence, second)
    # relative mean squared error, Fruehwirth-Schnatter 2004
    above = torch.exp(outer - log_evidence - torch.logaddexp(first + outer - log_evidence, bridge))
    below = torch.exp(-torch.logaddexp(first + inner - log_evidence, bridge)).reshape(chains.shape)
    count = float(effective_sample_size(below, "mean"))
    square = above.var() / above.mean().square() / len(outer) + below.var() / below.mean().square() / count
    return float(log_evidence) + low, math.sqrt(float(square))


@torch.no_grad()
def _tempered(target: NoiseTarget) -> Evidence:
    """Groups of particles share the temperatures and nothing else, so that their spread is an honest error."""
    total = GROUPS * PARTICLES
    vectors = target.draw_prior(total)
    source = torch.Generator(target.device).manual_seed(target.seed + 3)
    groups = vectors.new_zeros(GROUPS)
    beta, size = 0.0, 0.3
    while beta < 1.0:
        fitted = target.log_likelihood(vectors)
        step = _next_step(fitted, 1.0 - beta)
        weights = (step * fitted).reshape(GROUPS, PARTICLES)
        groups += weights.logsumexp(1) - math.log(PARTICLES)
        beta = min(1.0, beta + step)
        chosen = _systematic(weights.softmax(1), source)
        vectors = torch.cat([one[at] for one, at in zip(vectors.split(PARTICLES), chosen, strict=True)])
        space = target.whitening(beta)
        state = initial_state(space, space.position(vectors))
        for _ in range(2):
            steps = 1 + int(torch.randint(STEPS, (), generator=source, device=target.device))
            state, went = hmc_kernel(space, state, size, torch.ones_like(state.position), steps, source)
            size *= math.exp(0.5 * (float(went.acceptance.mean()) - 0.8))
        vectors = space.vectors(state.position)
    value = float(groups.logsumexp(0)) - math.log(GROUPS)
    error = float((groups - value).exp().std()) / math.sqrt(GROUPS)
    return Evidence(value, error, "tempered", error < 1.0)


def _next_step(fitted: Tensor, rest: float) -> float:
    """How far the temperature may rise until the weights are worth half of the particles, at most the rest."""

    def worth(step: float) -> float:
        return float(1.0 / torch.softmax(step * fitted, 0).square().sum()) / len(fitted)

    if worth(rest) >= 0.5:
        return rest
    low, high = 0.0, rest
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if worth(middle) >= 0.5 else (low, middle)
    return max(low, 1e-12)


def _systematic(weights: Tensor, source: torch.Generator) -> Tensor:
    """Indices ``[G, P]`` of particles by systematic resampling of weights ``[G, P]``."""
    groups, count = weights.shape
    first = torch.rand(groups, 1, generator=source, dtype=weights.dtype, device=weights.device)
    places = (first + torch.arange(count, device=weights.device)) / count
    return torch.searchsorted(weights.cumsum(1).contiguous(), places).clamp(max=count - 1)


@dataclass(frozen=True)
class Gap:
    r"""The KL divergence from a posterior to the exact one, :math:`\log p(D) - \mathrm{ELBO}`, in nats, and what it is made of.

    Args:
        nats, error: the whole, and its standard error.
        within: what correlation within layers would gain.
        across: what correlation across layers would gain.
        dimensions, examples: of the noise, and of the data.
        evidence: that it was measured by.
        elbo: of the posterior.
    """

    nats: float
    error: float
    within: float
    across: float
    dimensions: int
    examples: int
    evidence: Evidence
    elbo: float

    @property
    def rest(self) -> float:
        """What no Gaussian correlation explains: means and widths that are off, and shapes that are not Gaussian."""
        return self.nats - self.within - self.across

    @property
    def per_dimension(self) -> float:
        return self.nats / self.dimensions

    @property
    def per_example(self) -> float:
        """What tells whether it can matter in predictions."""
        return self.nats / self.examples


@checked
def elbo_gap(
    posterior: Posterior,
    loader: Iterable[Any],
    chains: NoiseChains | None = None,
    samples: Draws = 400,
    seed: Seed = 0,
) -> Gap:
    r"""How many nats the ELBO of a posterior lies below the log-evidence, and how many of them correlation would gain.

    With :math:`T(\Lambda)` the nats that a Gaussian's correlations within, or across, layers are worth
    (:func:`correlation_nats`) and :math:`\Lambda_r = E_r[G(z)] + V^{-1}` the precision that natural
    gradients at draws of :math:`r` ask for (:math:`G`: Gauss-Newton matrix, :math:`V`: variance of the prior), the posterior lacks

    .. math:: T(\Lambda_p) \Big(1 - \frac{T(C_q^{-1})}{T(\Lambda_q)}\Big)

    what they are worth in the exact posterior :math:`p`, by the share that is missing from its own covariance :math:`C_q`.

    Args:
        posterior: of noise, fitted.
        loader: the data.
        chains: of :func:`~flowbnn.diagnostics.noise_chains`, of this posterior or another with the same prior; made here unless given.
        samples: draws of the ELBO.
        seed: of all draws.
    """
    target = NoiseTarget(posterior, loader, seed)
    chains = (chains or noise_chains(posterior, loader, seed=seed)).checked_for(target)
    found, best = _importance(target, samples), _bridge(chains)
    warn_of_disagreement(best, found.smoothed)
    own = target.draw(max(4096, 16 * target.dim), 98)[0]
    covariance = own.T.cov().reshape(target.dim, target.dim)
    has = correlation_nats(torch.linalg.inv(covariance), target.sizes, len(own) - 1.0)
    wants = correlation_nats(target.precision(own), target.sizes)
    exact = correlation_nats(target.precision(chains.vectors.flatten(0, 1)), target.sizes)
    within, across = (
        worth * min(1.0, max(0.0, 1.0 - got / max(want, 1e-3)))
        for worth, got, want in zip(exact, has, wants, strict=True)
    )
    nats, error = best.value - found.elbo, math.hypot(best.error, found.elbo_error)
    return Gap(nats, error, within, across, target.dim, target.count, best, found.elbo)


def correlation_nats(
    precision: Tensor, sizes: Sequence[int], freedom: float | None = None
) -> tuple[float, float]:
    r"""By how much the ELBO of a Gaussian falls when it loses its correlations within blocks, and those across them.

    Of a Gaussian with precision :math:`\Lambda`, in blocks :math:`l` with entries :math:`i`, the best approximation by independent
    blocks, or by independent numbers, has its diagonal blocks, or its diagonal, as precision, and

    .. math:: \mathrm{across} = \tfrac12 \Big(\sum_l \log|\Lambda_{ll}| - \log|\Lambda|\Big), \qquad
              \mathrm{within} = \tfrac12 \Big(\sum_i \log\Lambda_{ii} - \sum_l \log|\Lambda_{ll}|\Big)

    (Turner and Sahani 2011, https://doi.org/10.1017/CBO9780511984679.006).

    Args:
        precision: ``[D, D]``.
        sizes: of the blocks, D in all.
        freedom: where it is the inverse of a sample covariance, the degrees of freedom of that, draws less one: the bias of the
            determinants of Wishart matrices is taken out.

    Returns:
        ``(within, across)``.

    >>> precision = torch.linalg.inv(torch.tensor([[1.0, 0.8], [0.8, 1.0]]))  # correlation 0.8: -log(1 - 0.64) / 2 = 0.51
    >>> [[round(value, 2) for value in correlation_nats(precision, sizes)] for sizes in ([2], [1, 1])]
    [[0.51, 0.0], [0.0, 0.51]]
    """
    dim = len(precision)

    def log_det(matrix: Tensor) -> float:
        value, own = float(torch.linalg.slogdet(matrix.double())[1]), len(matrix)
        if freedom is None:
            return value
        # the inverse of a diagonal block is Wishart with the degrees of freedom that the other dimensions leave
        ranks = freedom - (dim - own) - torch.arange(own, dtype=torch.float64)
        return value + float(torch.special.digamma(ranks / 2.0).sum()) + own * math.log(2.0 / freedom)

    blocks = [block.split(list(sizes), 1)[at] for at, block in enumerate(precision.split(list(sizes)))]
    diagonal = sum(log_det(entry.reshape(1, 1)) for entry in precision.diagonal())
    between = sum(log_det(block) for block in blocks)
    return 0.5 * (diagonal - between), 0.5 * (between - log_det(precision))
