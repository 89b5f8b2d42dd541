r"""The exact posterior of a network's noise by long chains, which approximations are measured against."""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from flowbnn.diagnostics.noise_target import NoiseTarget, Whitened
from flowbnn.errors import FlowBNNError, pluralize, warn
from flowbnn.methods.mcmc.chain_sampler import ChainSampler
from flowbnn.methods.mcmc.hamiltonian import nuts_kernel
from flowbnn.metrics.convergence import FEWEST, effective_sample_size, split_rhat
from flowbnn.options import Count, Ge, Probability, Seed, checked
from flowbnn.posterior.base import Posterior
from flowbnn.posterior.weights import generator_of

RHAT = 1.01  # up to which chains are taken for the truth
TRANSITIONS, PILOT = 800, 12  # of chains, and those that tell how long they take


@dataclass(frozen=True, eq=False)
class NoiseChains:
    r"""Draws of the exact posterior of all noise, and whether they may be taken for it.

    Args:
        target: the density that they are of.
        space: the coordinates in which they ran.
        position: there, ``[chains, draws, D]``.
        energy: minus the log-density, ``[chains, draws]``.
        rhat: the largest :math:`\hat R` over dimensions.
        worst: the layer that it is in.
        effective: the smallest effective number of draws over dimensions.
        divergences: transitions whose energy was not conserved.
    """

    target: NoiseTarget
    space: Whitened
    position: Tensor
    energy: Tensor
    rhat: float
    worst: str
    effective: float
    divergences: int

    def __repr__(self) -> str:
        chains, draws, dimensions = self.position.shape
        verdict = "certified" if self.certified else f"not certified: R-hat is above {RHAT}"
        return (
            f"NoiseChains({pluralize(chains, 'chain')} x {pluralize(draws, 'draw')} x {pluralize(dimensions, 'dimension')}, "
            f"R-hat {self.rhat:.3f} in layer '{self.worst}', "
            f"smallest effective sample size {self.effective:.0f}, divergences {self.divergences}; {verdict})"
        )

    @property
    def certified(self) -> bool:
        """Whether R-hat is at most 1.01."""
        return self.rhat <= RHAT

    @property
    def vectors(self) -> Tensor:
        """The noise of all layers, ``[chains, draws, D]``."""
        return self.space.vectors(self.position.to(self.target.device))

    @property
    def draws(self) -> dict[str, Tensor]:
        """The noise of each layer, ``{layer: [chains, draws, dim]}``."""
        return self.target.by_layer(self.vectors)

    def checked_for(self, target: NoiseTarget) -> "NoiseChains":
        """These chains, if they are of this density: of the same network, prior and data."""
        same = target.sizes == self.target.sizes and target.device == self.target.device
        if same:
            there = -target.log_joint(self.vectors[:, -1])
            same = torch.allclose(there, self.energy[:, -1].to(there), rtol=1e-4, atol=1e-2)
        if not same:
            raise FlowBNNError(
                "these chains are of another network, prior or data; run noise_chains with this posterior and loader",
                argument="chains",
            )
        return self


@checked
def noise_chains(
    posterior: Posterior,
    loader: Iterable[Any],
    samples: Annotated[int, Ge(FEWEST)] = 500,
    warmup: Count = 300,
    chains: Annotated[int, Ge(2)] = 4,
    target_accept: Probability = 0.8,
    longest: Count = 4,
    seed: Seed = 0,
    progress: bool = False,
) -> NoiseChains:
    r"""Sample the exact posterior of all noise jointly by the No-U-Turn sampler, the weights fixed.

    The prior is that of the posterior's own noise. Chains run in the coordinates in which a Gaussian of precision
    :math:`E_q[G(z)] + V^{-1}` is a standard normal (:math:`G`: the Gauss-Newton matrix, :math:`V`: the variance of the prior), which is
    a dense mass matrix known from the start. Half of them begin at draws of the prior, half at draws of the posterior.

    Args:
        posterior: of noise, fitted; up to 6,000 dimensions.
        loader: the data.
        samples: draws of each chain, which double where R-hat is above 1.01.
        warmup: transitions of each before.
        chains: run beside each other.
        target_accept: mean acceptance probability that the step size is tuned to.
        longest: times the draws asked for, at most.
        seed: of all draws.
        progress: show a bar.

    Returns:
        The chains; a :class:`~flowbnn.FlowBNNWarning` of kind ``"chains"`` says where they are not to be trusted.
    """
    target = NoiseTarget(posterior, loader, seed)
    run = _begun(target, samples, warmup, chains, target_accept)
    while True:
        record = run.run(progress=progress, description="sampling the noise")
        position = record["position"]
        rhat = split_rhat(position)
        if float(rhat.max()) <= RHAT or 2 * run.samples > longest * samples:
            break
        run.samples *= 2
    place = int(rhat.argmax())
    owners = [name for name, size in zip(target.names, target.sizes, strict=True) for _ in range(size)]
    found = NoiseChains(
        target,
        target.whitening(),
        position,
        record["energy"],
        float(rhat.max()),
        owners[place],
        float(effective_sample_size(position, "bulk").min()),
        int(record["divergent"].sum()),
    )
    _warn(found, warmup)
    return found


def _begun(target: NoiseTarget, samples: int, warmup: int, chains: int, target_accept: float) -> ChainSampler:
    """Half of the chains are at draws of the prior, half at draws of the posterior."""
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


def seconds_for(target: NoiseTarget, limit: float) -> float:
    """What :func:`noise_chains` will take, by a few of its transitions; infinite where a gradient says that it is beyond the limit."""
    began = time.perf_counter()
    target.gradient(target.draw(4, 97)[0])
    if TRANSITIONS * (time.perf_counter() - began) > limit:  # of one leapfrog step each
        return math.inf
    run = _begun(target, FEWEST, PILOT, 4, 0.8)
    # from the posterior, since the way there from the prior is soon over
    run.starts = run.starts[2:].repeat(2, 1)
    run.run(progress=False)
    began = time.perf_counter()
    for number in range(PILOT):
        run.advance(number + PILOT)
    return TRANSITIONS * (time.perf_counter() - began) / PILOT


def _warn(chains: NoiseChains, warmup: int) -> None:
    count, samples, _ = chains.position.shape
    share = chains.divergences / (count * samples)
    if not chains.certified:
        line = (
            f"{count} chains of {samples} draws after {warmup} have not mixed (R-hat {chains.rhat:.3f} in layer '{chains.worst}', "
            f"above {RHAT}): do not take them for the exact posterior. Run them longer (samples=, warmup=), look for several modes "
            "with modes(), and trust pareto_k and evidence(method='tempered') meanwhile, which need no chains"
        )
        warn(line, kind="chains", rhat=chains.rhat, layers=[chains.worst])
    elif share > 0.01:
        line = (
            f"{share:.1%} of the transitions diverged: narrow parts of the density may be missing; target_accept=0.95 takes smaller "
            "steps"
        )
        warn(line, kind="chains", divergences=chains.divergences)
