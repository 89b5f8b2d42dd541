r"""Long Markov chains over the noise of a network, the reference for approximate posteriors."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from flowbnn import plots
from flowbnn.diagnostics.noise_target import NoiseTarget, WhitenedDensity
from flowbnn.errors import FlowBNNError, pluralize, warn
from flowbnn.methods.mcmc.chain_sampler import ChainSampler
from flowbnn.methods.mcmc.hamiltonian import nuts_kernel
from flowbnn.metrics.convergence import MIN_DRAWS, effective_sample_size, split_rhat
from flowbnn.options import Count, Ge, Probability, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import generator_of


@dataclass(frozen=True, eq=False)
class NoiseChains:
    r"""Draws of the exact posterior of the noise of all layers, with convergence diagnostics.

    Args:
        target: Density that the chains sample from.
        space: WhitenedDensity coordinates of the chains.
        position: Draws in these coordinates, ``[chains, draws, D]``.
        energy: Negative log-density, ``[chains, draws]``.
        rhat: Largest :math:`\hat R` over the dimensions.
        worst_layer: Name of the layer with the largest :math:`\hat R`.
        effective: Smallest effective sample size over the dimensions.
        divergences: Number of divergent transitions.
    """

    max_rhat: ClassVar[float] = 1.01  # threshold for mixed chains (Vehtari et al. 2021)

    target: NoiseTarget
    space: WhitenedDensity
    position: Tensor
    energy: Tensor
    rhat: float
    worst_layer: str
    effective: float
    divergences: int

    def __repr__(self) -> str:
        chains, draws, dimensions = self.position.shape
        verdict = "converged" if self.converged else f"not converged: R-hat is above {self.max_rhat}"
        return (
            f"NoiseChains({pluralize(chains, 'chain')} x {pluralize(draws, 'draw')} x {pluralize(dimensions, 'dimension')}, "
            f"R-hat {self.rhat:.3f} in layer '{self.worst_layer}', "
            f"smallest effective sample size {self.effective:.0f}, divergences {self.divergences}; {verdict})"
        )

    @property
    def converged(self) -> bool:
        """True if R-hat is at most 1.01."""
        return self.rhat <= self.max_rhat

    @property
    def vectors(self) -> Tensor:
        """Noise of all layers, ``[chains, draws, D]``."""
        return self.space.vectors(self.position.to(self.target.device))

    @property
    def draws(self) -> dict[str, Tensor]:
        """Noise of each layer, ``{layer: [chains, draws, dim]}``."""
        return self.target.by_layer(self.vectors)

    plot_trace, plot_ranks = plots.plot_trace, plots.plot_ranks

    def check_target(self, target: NoiseTarget) -> "NoiseChains":
        """Returns these chains if they sample from the given density.

        Args:
            target: Density of a posterior of noise.

        Raises:
            FlowBNNError: If the chains are of another network, prior or data.
        """
        matches = target.sizes == self.target.sizes and target.device == self.target.device
        if matches:
            energy = -target.log_joint(self.vectors[:, -1])
            matches = torch.allclose(energy, self.energy[:, -1].to(energy), rtol=1e-4, atol=1e-2)
        if not matches:
            text = "the chains are of another network, prior or data; run noise_chains with this posterior and loader"
            raise FlowBNNError(text, kind="chains", argument="chains")
        return self


@checked
def noise_chains(
    posterior: Posterior,
    loader: Iterable[Any],
    samples: Annotated[int, Ge(MIN_DRAWS)] = 500,
    warmup: Count = 300,
    chains: Annotated[int, Ge(2)] = 4,
    target_accept: Probability = 0.8,
    max_extension: Count = 4,
    seed: Seed = 0,
    progress: bool = False,
) -> NoiseChains:
    r"""Samples the exact joint posterior of the noise of all layers by the No-U-Turn sampler (NUTS), with fixed weights.

    The prior is the prior of the noise. Chains run in coordinates in which a Gaussian of precision
    :math:`E_q[G(z)] + V^{-1}` is a standard normal, with the Gauss-Newton matrix :math:`G` and the prior variance :math:`V`. This
    is equivalent to a dense mass matrix that is set before the warm-up. Half of the chains start at draws of the prior, half at draws
    of the posterior.

    Args:
        posterior: Fitted posterior of noise with at most 6,000 dimensions.
        loader: Data that the posterior was fitted to.
        samples: Number of draws of each chain. It doubles as long as R-hat is above 1.01.
        warmup: Number of warm-up transitions of each chain.
        chains: Number of chains.
        target_accept: Mean acceptance probability that the step size is tuned to.
        max_extension: Largest number of draws, as a multiple of ``samples``.
        seed: Seed of all draws.
        progress: If True, shows a progress bar.

    Returns:
        The chains. A :class:`~flowbnn.FlowBNNWarning` of kind ``"chains"`` is raised if they have not mixed, or if more than 1 % of the
        transitions diverged.
    """
    target = NoiseTarget(posterior, loader, seed)
    sampler = _make_sampler(target, samples, warmup, chains, target_accept)
    while True:
        record = sampler.run(progress=progress, description="sampling the noise")
        position = record["position"]
        rhat = split_rhat(position)
        if float(rhat.max()) <= NoiseChains.max_rhat or 2 * sampler.samples > max_extension * samples:
            break
        sampler.samples *= 2
    layers = [name for name, size in zip(target.names, target.sizes, strict=True) for _ in range(size)]
    result = NoiseChains(
        target,
        target.whitening(),
        position,
        record["energy"],
        float(rhat.max()),
        layers[int(rhat.argmax())],
        float(effective_sample_size(position, "bulk").min()),
        int(record["divergent"].sum()),
    )
    _warn_not_mixed(result, warmup)
    return result


def _make_sampler(
    target: NoiseTarget, samples: int, warmup: int, chains: int, target_accept: float
) -> ChainSampler:
    """Returns a NUTS sampler with half of its chains at draws of the prior, and half at draws of the posterior."""
    space = target.whitening()
    starts = torch.cat([target.draw_prior(chains // 2), target.draw(chains - chains // 2, 97)[0]])
    return ChainSampler(
        space,
        partial(nuts_kernel, space, max_depth=10),
        space.position(starts),
        [generator_of(target.seed, chain) for chain in range(chains)],
        warmup=warmup,
        samples=samples,
        target=target_accept,
    )


def estimate_seconds(target: NoiseTarget, limit: float, transitions: int = 800, pilot: int = 12) -> float:
    """Estimates the running time of :func:`noise_chains` from a few transitions.

    Args:
        target: Density of the noise given the data.
        limit: Time limit in seconds. The result is infinite if the gradients alone exceed it.
        transitions: Number of transitions of :func:`noise_chains` with its default arguments.
        pilot: Number of transitions that are timed.
    """
    start = time.perf_counter()
    target.gradient(target.draw(4, 97)[0])
    if transitions * (time.perf_counter() - start) > limit:  # a transition takes at least one gradient
        return math.inf
    sampler = _make_sampler(target, MIN_DRAWS, pilot, 4, 0.8)
    # start at the posterior, because chains from the prior soon arrive there
    sampler.starts = sampler.starts[2:].repeat(2, 1)
    sampler.run(progress=False)
    start = time.perf_counter()
    for number in range(pilot):
        sampler.advance(number + pilot)
    return transitions * (time.perf_counter() - start) / pilot


def _warn_not_mixed(chains: NoiseChains, warmup: int) -> None:
    """Warns if chains have not mixed, or if more than 1 % of their transitions diverged."""
    count, samples, _ = chains.position.shape
    divergent = chains.divergences / (count * samples)
    if not chains.converged:
        where = f"{count} chains of {samples} draws after {warmup} of warm-up, layer '{chains.worst_layer}'"
        text = f"R-hat is {chains.rhat:.3f}, so the chains have not mixed ({where}); increase samples or warmup, or see modes()"
        warn(text, kind="chains", rhat=chains.rhat, layers=[chains.worst_layer])
    elif divergent > 0.01:
        text = f"{divergent:.1%} of the transitions diverged, so draws may miss narrow regions; set target_accept=0.95"
        warn(text, kind="chains", divergences=chains.divergences)
