r"""Log-evidence of a network with noise, by importance sampling, bridge sampling and tempering.

.. math:: \log p(D) = \log \int p(D \mid z)\, p(z)\, dz
"""

import math
from collections.abc import Iterable
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
from flowbnn.metrics.pareto import MIN_WEIGHTS, k_standard_error, log_mean, max_usable_k
from flowbnn.options import Bounds, Seed, checked
from flowbnn.posterior.base import Posterior

Draws = Annotated[int, Bounds(ge=MIN_WEIGHTS, le=1_000_000)]


@dataclass(frozen=True)
class ParetoK:
    r"""Result of importance sampling from a posterior.

    Args:
        k: Shape :math:`\hat k` of the tail of the weights. Good below 0.5, usable below :attr:`max_usable_k`.
        elbo: Evidence lower bound (ELBO), the mean of the log-weights, in nats.
        elbo_error: Standard error of the ELBO.
        evidence: Log-evidence estimated by Pareto-smoothed weights. Reliable if ``k`` is usable.
        evidence_error: Standard error of the log-evidence.
        effective: Effective sample size: number of draws of the exact posterior that carry the same information.
        samples: Number of draws.
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
        """Reliability of the weights: ``"good"``, ``"usable"`` or ``"bad"``."""
        # below 0.5 the variance of the weights is finite (Vehtari et al. 2024)
        return "bad" if self.k >= self.max_usable_k else "good" if self.k < 0.5 else "usable"

    @property
    def k_error(self) -> float:
        """Standard error of ``k``. With 400 draws it is about 0.2, so a value near a limit decides little."""
        return k_standard_error(self.k, self.samples)

    @property
    def max_usable_k(self) -> float:
        r"""Largest :math:`\hat k` that is usable with this many draws."""
        return max_usable_k(self.samples)

    @property
    def gap(self) -> float:
        """Estimated KL divergence to the exact posterior, in nats. A posterior that is too wide has a good ``k`` and a large gap."""
        return self.evidence - self.elbo

    @property
    def psis_evidence(self) -> "Evidence":
        """Log-evidence estimated by Pareto-smoothed weights."""
        return Evidence(self.evidence, self.evidence_error, "psis", self.k < self.max_usable_k)


@checked
def pareto_k(posterior: Posterior, loader: Iterable[Any], samples: Draws = 400, seed: Seed = 0) -> ParetoK:
    r"""Measures the quality of a posterior of noise by the importance weights of its draws, without chains.

    .. math:: w_s = \frac{p(D \mid z_s)\, p(z_s)}{q(z_s)}, \qquad z_s \sim q

    :math:`\hat k` is the shape of the tail of the weights (:mod:`flowbnn.metrics.pareto`). If it is small, weighted draws can replace
    the exact posterior. It grows with the number of dimensions, so a large value does not imply poor predictions. A posterior that is
    too wide has a small :math:`\hat k` and a large ``gap``.

    Args:
        posterior: Fitted posterior of noise.
        loader: Data that the posterior was fitted to.
        samples: Number of draws. Each takes one pass over the data.
        seed: Seed of the draws.

    >>> import flowbnn as fb
    >>> inputs = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
    >>> data = [(inputs, inputs.sum(1, keepdim=True))]
    >>> method = fb.NodeNoise(fb.noise.NormalAffine(), epochs=20)
    >>> posterior = method.fit(torch.nn.Linear(3, 1), data, seed=0, progress=False)
    >>> pareto_k(posterior, data).samples
    400
    """
    return importance_sampling(NoiseTarget(posterior, loader, seed), samples)


def importance_sampling(target: NoiseTarget, samples: int) -> ParetoK:
    """Returns the result of importance sampling from the posterior of a target density."""
    vectors, density = target.draw(samples)
    weights = target.log_joint(vectors) - density
    mean = log_mean(weights)
    elbo, error = float(weights.mean()), float(weights.std()) / math.sqrt(samples)
    return ParetoK(mean.k, elbo, error, mean.value, mean.error, mean.effective, samples)


@dataclass(frozen=True)
class Evidence:
    r"""Estimate of the log-evidence :math:`\log p(D)`.

    Args:
        value: Log-evidence in nats.
        error: Standard error in nats.
        method: Name of the estimator.
        reliable: True if k-hat is usable (``"psis"``), R-hat is at most 1.01 (``"bridge"``), or the standard
            error is below one nat (``"tempered"``).
    """

    value: float
    error: float
    method: str
    reliable: bool


@checked
def evidence(
    posterior: Posterior,
    loader: Iterable[Any],
    method: Literal["bridge", "psis", "tempered"] = "bridge",
    chains: NoiseChains | None = None,
    samples: Draws = 400,
    seed: Seed = 0,
) -> Evidence:
    r"""Estimates the log-evidence :math:`\log \int p(D \mid z)\, p(z)\, dz` of a network with noise.

    ==============  =========================================================================================================
    ``"bridge"``    Bridge sampling between long chains and a Gaussian that is fitted to half of them. This is the most accurate
                    estimator.
    ``"psis"``      Mean of Pareto-smoothed weights of the posterior's draws. Needs no chains; accurate if k-hat is usable.
    ``"tempered"``  Particles from the prior pass through :math:`p(z)\, p(D \mid z)^\beta` with :math:`\beta` from 0 to 1, moved by HMC
                    (Del Moral et al. 2006, https://doi.org/10.1111/j.1467-9868.2006.00553.x). Finds modes that chains miss.
    ==============  =========================================================================================================

    The cheaper estimates are computed as well. A :class:`~flowbnn.FlowBNNWarning` of kind ``"evidence"`` is raised if two reliable
    estimates differ by more than four standard errors.

    Args:
        posterior: Fitted posterior of noise.
        loader: Data that the posterior was fitted to.
        method: Estimator.
        chains: Chains of :func:`~flowbnn.diagnostics.noise_chains`, of this posterior or of another one with the same prior. They are
            run here by default if the estimator is ``"bridge"``.
        samples: Number of draws of ``"psis"``.
        seed: Seed of all draws.
    """
    target = NoiseTarget(posterior, loader, seed)
    if method == "bridge" and chains is None:
        chains = noise_chains(posterior, loader, seed=seed)
    bridge_estimate = None if chains is None else bridge_evidence(chains.check_target(target))
    psis_estimate = importance_sampling(target, samples).psis_evidence
    if method == "tempered":
        estimate: Evidence | None = _tempered_evidence(target)
    else:
        estimate = psis_estimate if method == "psis" else bridge_estimate
    assert estimate is not None
    for other in (bridge_estimate, psis_estimate):
        warn_if_different(estimate, other)
    return estimate


def warn_if_different(first: Evidence, second: Evidence | None) -> None:
    """Warns if two reliable estimates of the log-evidence differ by more than four standard errors."""
    if second is None or not (first.reliable and second.reliable):
        return
    difference, error = abs(first.value - second.value), math.hypot(first.error, second.error)
    if difference > 4.0 * error + 0.01:
        values = f"{first.value:.2f} ({first.method}) and {second.value:.2f} ({second.method}), standard error {error:.2f}"
        text = f"estimates of the log-evidence differ: {values}; look for missed modes with modes() and method='tempered'"
        warn(text, kind="evidence", difference=difference)


def bridge_evidence(chains: NoiseChains) -> Evidence:
    """Returns the log-evidence by bridge sampling.

    The first half of every chain gives the proposal, a Gaussian. Its covariance is shrunk towards the identity in the whitened
    coordinates. The second half is bridged to the proposal.
    """
    space, position = chains.space, chains.position.to(chains.target.device)
    half = position.shape[1] // 2
    early, late = position[:, :half].flatten(0, 1), position[:, half:]
    dim, count = early.shape[1], len(early)
    identity = torch.eye(dim, dtype=early.dtype, device=early.device)
    covariance = (count * early.T.cov(correction=0).reshape(dim, dim) + dim * identity) / (count + dim)
    proposal = torch.distributions.MultivariateNormal(early.mean(0), covariance, validate_args=False)
    generator = torch.Generator(early.device).manual_seed(chains.target.seed + 2)
    normal = standard_normal(late.flatten(0, 1).shape, early.dtype, early.device, generator)
    draws = proposal.loc + normal @ proposal.scale_tril.T
    at_chains = -chains.energy[:, half:].to(late) - proposal.log_prob(late) + space.log_det
    at_proposal = chains.target.log_joint(space.vectors(draws)) - proposal.log_prob(draws) + space.log_det
    value, error = bridge_sampling(at_chains, at_proposal)
    return Evidence(value, error, "bridge", chains.converged)


def bridge_sampling(chains: Tensor, proposal: Tensor) -> tuple[float, float]:
    r"""Returns the log-evidence and its standard error by bridge sampling between a posterior and a proposal :math:`g`.

    .. math:: p(D) = \frac{E_g[h(z)\, p(D, z)]}{E_{p(z \mid D)}[h(z)\, g(z)]}, \qquad
              h(z) \propto \frac{1}{s_1\, p(D, z) + s_2\, p(D)\, g(z)}

    The optimal bridge :math:`h` of Meng and Wong 1996 is found by iteration (Gronau et al. 2017, https://arxiv.org/abs/1703.05984).
    Both expectations are of bounded quantities, so the proposal may have lighter tails than the posterior.

    Args:
        chains: Log-ratios :math:`\log p(D, z) - \log g(z)` at draws of the posterior, ``[chains, draws]``.
        proposal: Log-ratios at draws of :math:`g`, ``[S]``.

    >>> generator = torch.Generator().manual_seed(0)
    >>> draws = torch.randn(4, 1000, generator=generator, dtype=torch.float64)
    >>> others = 1.5 * torch.randn(4000, generator=generator, dtype=torch.float64)
    >>> def ratio(z):  # exp(-z^2 / 2), whose integral is 2.5066, over N(0, 1.5^2)
    ...     return -z**2 / 2 + (z / 1.5) ** 2 / 2 + math.log(1.5 * math.sqrt(2 * math.pi))
    >>> log_evidence, error = bridge_sampling(ratio(draws), ratio(others))
    >>> abs(log_evidence - math.log(math.sqrt(2 * math.pi))) < 3 * error < 0.1
    True
    """
    chains, proposal = chains.double(), proposal.double().to(chains.device)
    effective = float(effective_sample_size(chains, "mean").clamp(max=chains.numel()))
    first, second = (math.log(n / (effective + len(proposal))) for n in (effective, float(len(proposal))))
    offset = float(proposal.median())
    inner, outer = chains.flatten() - offset, proposal - offset
    log_evidence = torch.zeros((), dtype=torch.float64, device=chains.device)
    counts = math.log(len(inner) / len(outer))
    for _ in range(1000):
        numerator = (outer - torch.logaddexp(first + outer, second + log_evidence)).logsumexp(0)
        denominator = (-torch.logaddexp(first + inner, second + log_evidence)).logsumexp(0)
        previous, log_evidence = log_evidence, numerator - denominator + counts
        if abs(float(log_evidence - previous)) < 1e-9:
            break
    bridge = torch.full_like(log_evidence, second)
    # relative mean squared error of Fruehwirth-Schnatter 2004
    numerator_terms = torch.exp(outer - log_evidence - torch.logaddexp(first + outer - log_evidence, bridge))
    denominator_terms = torch.exp(-torch.logaddexp(first + inner - log_evidence, bridge)).reshape(
        chains.shape
    )
    count = float(effective_sample_size(denominator_terms, "mean"))
    square = (
        numerator_terms.var() / numerator_terms.mean().square() / len(outer)
        + denominator_terms.var() / denominator_terms.mean().square() / count
    )
    return float(log_evidence) + offset, math.sqrt(float(square))


@torch.no_grad()
def _tempered_evidence(
    target: NoiseTarget, num_groups: int = 8, num_particles: int = 32, max_leapfrog: int = 8
) -> Evidence:
    """Returns the log-evidence by sequential Monte Carlo from the prior to the posterior.

    Groups of particles share only the temperatures, so their spread gives an unbiased standard error.

    Args:
        target: Density of the noise given the data.
        num_groups: Number of independent groups. With fewer than 8, the standard error itself is too uncertain.
        num_particles: Number of particles of a group.
        max_leapfrog: Largest number of leapfrog steps of a move.
    """
    vectors = target.draw_prior(num_groups * num_particles)
    generator = torch.Generator(target.device).manual_seed(target.seed + 3)
    log_means = vectors.new_zeros(num_groups)
    beta, step_size = 0.0, 0.3
    while beta < 1.0:
        log_likelihood = target.log_likelihood(vectors)
        increment = _next_increment(log_likelihood, 1.0 - beta)
        weights = (increment * log_likelihood).reshape(num_groups, num_particles)
        log_means += weights.logsumexp(1) - math.log(num_particles)
        beta = min(1.0, beta + increment)
        indices = _resample(weights.softmax(1), generator)
        groups = vectors.split(num_particles)
        vectors = torch.cat([group[index] for group, index in zip(groups, indices, strict=True)])
        space = target.whitening(beta)
        state = initial_state(space, space.position(vectors))
        for _ in range(2):
            steps = 1 + int(torch.randint(max_leapfrog, (), generator=generator, device=target.device))
            state, move = hmc_kernel(
                space, state, step_size, torch.ones_like(state.position), steps, generator
            )
            step_size *= math.exp(0.5 * (float(move.acceptance.mean()) - 0.8))
        vectors = space.vectors(state.position)
    value = float(log_means.logsumexp(0)) - math.log(num_groups)
    error = float((log_means - value).exp().std()) / math.sqrt(num_groups)
    return Evidence(value, error, "tempered", error < 1.0)


def _next_increment(log_likelihood: Tensor, remaining: float) -> float:
    """Returns the increment of the temperature at which the effective sample size is half the number of particles."""

    def effective_fraction(increment: float) -> float:
        weights = torch.softmax(increment * log_likelihood, 0)
        return float(1.0 / weights.square().sum()) / len(log_likelihood)

    if effective_fraction(remaining) >= 0.5:
        return remaining
    low, high = 0.0, remaining
    for _ in range(50):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if effective_fraction(middle) >= 0.5 else (low, middle)
    return max(low, 1e-12)


def _resample(weights: Tensor, generator: torch.Generator) -> Tensor:
    """Returns indices ``[G, P]`` of particles by systematic resampling of weights ``[G, P]``."""
    groups, count = weights.shape
    first = torch.rand(groups, 1, generator=generator, dtype=weights.dtype, device=weights.device)
    positions = (first + torch.arange(count, device=weights.device)) / count
    return torch.searchsorted(weights.cumsum(1).contiguous(), positions).clamp(max=count - 1)
