r"""Hamiltonian Monte Carlo over the weights of a network, or over the noise on its layers.

Exact as the chains grow: without minibatches and with an accept step, the only error is that of a finite number of draws, for which see
``posterior.diagnostics()``. Approximate methods are measured against it. Neal 2012, https://arxiv.org/abs/1206.1901.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.methods.base import register_method
from flowbnn.methods.mcmc.base import ChainMethod
from flowbnn.methods.mcmc.hamiltonian import Potential, State, Transition, hmc_kernel, uniforms
from flowbnn.options import Count, Positive, options

__all__ = ["HMC"]

MOST_STEPS = 1024


@register_method
@options(kw_only=True, repr=False)
class HMC(ChainMethod):
    """Hamiltonian Monte Carlo with dual averaging, a learned diagonal mass and several chains; see :class:`ChainMethod`.

    Args:
        steps: leapfrog steps of a transition at most. Their number is uniform from 1 to this for every transition and chain, so that
            trajectories do not end where they began.
        trajectory: length of the longest trajectory, in units of the standard deviations that the mass has learned (a quarter
            of a period is 1.6); the number of steps then follows from the step size.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = fb.HMC(samples=50, warmup=50, chains=2, steps=8, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.likelihoods.Gaussian(0.1), seed=0, progress=False)
    >>> len(posterior), bool((posterior.draws(100)["weight"].mean() - 2).abs() < 0.1)
    (100, True)
    """

    steps: Count = 32
    trajectory: Positive | None = None

    def transition(
        self,
        potential: Potential,
        state: State,
        step_size: Tensor,
        inverse_mass: Tensor,
        sources: Sequence[torch.Generator],
    ) -> tuple[State, Transition]:
        most = torch.full_like(step_size, self.steps)
        if self.trajectory is not None:
            most = (self.trajectory / step_size).ceil().clamp(1, MOST_STEPS)
        counts = (uniforms(sources, 1, step_size.device)[:, 0] * most).floor().long() + 1
        return hmc_kernel(potential, state, step_size, inverse_mass, counts, sources)

    def gradients_per_transition(self) -> float:
        longest = self.steps if self.trajectory is None else math.ceil(self.trajectory / 0.1)
        return longest * self.chains / (self.chains + 1)  # chains wait for the longest of them
