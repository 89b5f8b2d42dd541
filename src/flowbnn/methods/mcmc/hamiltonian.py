r"""Hamiltonian dynamics of several chains, and the transition kernels of HMC, NUTS and random-walk Metropolis.

The target is :math:`p(q) \propto e^{-U(q)}`. With a momentum :math:`p \sim \mathcal N(0, M)` the Hamiltonian is

.. math:: H(q, p) = U(q) + \tfrac12 p^\top M^{-1} p

A trajectory of leapfrog steps simulates it. Its end is accepted with probability :math:`\min(1, e^{-\Delta H})` (Neal 2012,
https://arxiv.org/abs/1206.1901).

A *potential* maps positions ``[chains, dim]`` to energies ``[chains]`` and gradients ``[chains, dim]``; :func:`make_potential` makes
one from a differentiable function. Each chain has its own generator, so its draws do not depend on the other chains.

>>> potential = make_potential(lambda q: 0.5 * q.square().sum(-1))
>>> state = initial_state(potential, torch.zeros(2, 3))
>>> state, transition = hmc_kernel(potential, state, 0.5, torch.ones(3), 5, torch.Generator().manual_seed(0))
>>> state.position.shape, bool(transition.divergent.any())
(torch.Size([2, 3]), False)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError

Potential = Callable[[Tensor], tuple[Tensor, Tensor]]
Generators = torch.Generator | Sequence[torch.Generator]


class ChainState(NamedTuple):
    """State of several chains.

    Args:
        position: Positions ``[C, D]``.
        energy: Potential energies ``[C]`` in float64.
        gradient: Gradients of the energies, ``[C, D]``.
    """

    position: Tensor
    energy: Tensor
    gradient: Tensor

    def select(self, chains: Tensor) -> "ChainState":
        """Returns the state of some chains, by index or mask."""
        return ChainState(*(values[chains] for values in self))

    def replace(self, chains: Tensor, states: "ChainState") -> "ChainState":
        """Returns a copy in which the states of some chains, by index, are replaced."""
        return ChainState(*(old.index_copy(0, chains, new) for old, new in zip(self, states, strict=True)))


class Transition(NamedTuple):
    """Statistics of a transition of several chains, each ``[C]``.

    Args:
        acceptance: Mean acceptance probability.
        divergent: True if the energy error exceeded the threshold.
        gradients: Number of gradient evaluations.
        depth: Depth of the tree of NUTS, 0 for other kernels.
    """

    acceptance: Tensor
    divergent: Tensor
    gradients: Tensor
    depth: Tensor


def make_potential(function: Callable[[Tensor], Tensor]) -> Potential:
    """Makes a potential from a differentiable function of positions ``[C, D]`` to energies ``[C]``, one chain per row."""

    def potential(position: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = position.detach().requires_grad_()
            energy = function(leaf)
            if not energy.requires_grad:
                text = "the log-likelihood does not depend on the weights; use them in forward, without detach or no_grad"
                raise FlowBNNError(text, kind="gradient", argument="network")
            (gradient,) = torch.autograd.grad(energy.sum(), leaf)
        return energy.detach().double(), gradient

    return potential


def initial_state(potential: Potential, position: Tensor) -> ChainState:
    """Returns the state of chains at these positions ``[C, D]``."""
    return ChainState(position, *potential(position))


def draw_normals(generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Draws standard normals of the shape ``[C, D]`` of ``like``, each chain from its own generator."""
    draws = [torch.randn(like.shape[1], generator=g, dtype=like.dtype, device=g.device) for g in generators]
    return torch.stack(draws).to(like.device)


def draw_uniforms(generators: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """Draws uniform numbers in [0, 1), ``[C, count]`` in float64, each chain from its own generator."""
    draws = [torch.rand(count, generator=g, dtype=torch.float64, device=g.device) for g in generators]
    return torch.stack(draws).to(device)


def kinetic_energy(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Returns kinetic energies ``[C]`` in float64."""
    return 0.5 * (momentum.square() * inverse_mass).sum(-1, dtype=torch.float64)


def leapfrog(
    potential: Potential, state: ChainState, momentum: Tensor, step_size: Tensor, inverse_mass: Tensor
) -> tuple[ChainState, Tensor]:
    """Takes one leapfrog step and returns the new state and momentum.

    Args:
        potential: Potential of the target.
        state: State of the chains.
        momentum: Momenta ``[C, D]``.
        step_size: Step sizes ``[C, 1]``. Negative values go backward in time.
        inverse_mass: Diagonals of the inverse mass matrix ``[C, D]``.
    """
    momentum = momentum - 0.5 * step_size * state.gradient
    after = initial_state(potential, state.position + step_size * inverse_mass * momentum)
    return after, momentum - 0.5 * step_size * after.gradient


def energy_error(state: ChainState, momentum: Tensor, inverse_mass: Tensor, initial_energy: Tensor) -> Tensor:
    """Returns the change of the total energy, with NaN replaced by infinity."""
    error = state.energy + kinetic_energy(momentum, inverse_mass) - initial_energy
    return torch.where(torch.isnan(error), torch.inf, error)


def is_divergent(error: Tensor, threshold: float = 1000.0) -> Tensor:
    """Returns True for each energy error above a threshold in nats. The default is the threshold of Stan."""
    return error > threshold


def where_state(mask: Tensor, state: ChainState, other: ChainState) -> ChainState:
    """Returns ``state`` for the chains where ``mask`` is True, and ``other`` for the rest."""
    masks = mask[:, None], mask, mask[:, None]
    return ChainState(*map(torch.where, masks, state, other))


class TransitionStart:
    """Start of a transition: fresh momenta, and step size, mass and generator of each chain.

    Args:
        state: State of the chains.
        step_size: Step size, one for all chains or one for each.
        inverse_mass: Diagonal of the inverse mass matrix, ``[D]`` or ``[C, D]``.
        generators: Generator, one for all chains or one for each.
    """

    def __init__(
        self, state: ChainState, step_size: float | Tensor, inverse_mass: Tensor, generators: Generators
    ) -> None:
        position, num_chains = state.position, len(state.position)
        self.generators = (
            [generators] * num_chains if isinstance(generators, torch.Generator) else list(generators)
        )
        self.inverse_mass = inverse_mass.to(position).expand_as(position)
        step_size = torch.as_tensor(step_size, dtype=position.dtype, device=position.device)
        self.step_size = step_size.reshape(-1, 1).expand(num_chains, 1)
        self.momentum = draw_normals(self.generators, position) / self.inverse_mass.sqrt()
        self.energy = state.energy + kinetic_energy(self.momentum, self.inverse_mass)


def hmc_kernel(
    potential: Potential,
    state: ChainState,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    num_steps: int | Tensor,
    generators: Generators,
) -> tuple[ChainState, Transition]:
    """Takes one transition of Hamiltonian Monte Carlo.

    Args:
        potential: Potential of the target.
        state: State from :func:`initial_state` or the previous transition.
        step_size: Leapfrog step size, one for all chains or one for each.
        inverse_mass: Diagonal of the inverse mass matrix, ``[D]`` or ``[C, D]``; ideally the variances of the target.
        num_steps: Number of leapfrog steps, one for all chains or one for each.
        generators: Generator, one for all chains or one for each.
    """
    num_chains, device = len(state.position), state.position.device
    start = TransitionStart(state, step_size, inverse_mass, generators)
    counts = torch.as_tensor(num_steps).expand(num_chains)
    proposal, momentum, size, mass = state, start.momentum, start.step_size, start.inverse_mass
    for number in range(int(counts.max())):
        active = counts > number
        if bool(active.all()):
            proposal, momentum = leapfrog(potential, proposal, momentum, size, mass)
            continue
        index = active.nonzero().squeeze(1).to(device)
        after, new_momentum = leapfrog(
            potential, proposal.select(index), momentum[index], size[index], mass[index]
        )
        proposal = proposal.replace(index, after)
        momentum = momentum.index_copy(0, index, new_momentum)
    error = energy_error(proposal, momentum, mass, start.energy)
    acceptance = torch.exp(-error).clamp(max=1.0)
    accepted = draw_uniforms(start.generators, 1, device)[:, 0] < acceptance
    depth = torch.zeros(num_chains, dtype=torch.long)
    divergent = is_divergent(error).cpu()
    return where_state(accepted, proposal, state), Transition(
        acceptance.cpu(), divergent, counts.clone(), depth
    )


def metropolis_kernel(
    potential: Potential,
    state: ChainState,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    generators: Generators,
) -> tuple[ChainState, Transition]:
    r"""Takes one transition of random-walk Metropolis (Metropolis et al. 1953, https://doi.org/10.1063/1.1699114).

    A proposal :math:`q' \sim \mathcal N(q, \epsilon^2 M^{-1})` is accepted with probability :math:`\min(1, e^{U(q) - U(q')})`.
    The gradient is not used. One evaluation of the energy counts as one gradient.

    Args:
        potential: Potential of the target.
        state: State from :func:`initial_state` or the previous transition.
        step_size: Step size :math:`\epsilon`, one for all chains or one for each.
        inverse_mass: Diagonal of :math:`M^{-1}`, ``[D]`` or ``[C, D]``.
        generators: Generator, one for all chains or one for each.
    """
    start = TransitionStart(state, step_size, inverse_mass, generators)
    proposal = initial_state(
        potential, state.position + start.step_size * start.inverse_mass * start.momentum
    )
    error = torch.where(torch.isnan(proposal.energy), torch.inf, proposal.energy - state.energy)
    acceptance = torch.exp(-error).clamp(max=1.0)
    accepted = draw_uniforms(start.generators, 1, proposal.position.device)[:, 0] < acceptance
    zeros = torch.zeros(len(error), dtype=torch.long)
    transition = Transition(acceptance.cpu(), zeros.bool(), zeros + 1, zeros)
    return where_state(accepted, proposal, state), transition


def nuts_kernel(
    potential: Potential,
    state: ChainState,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    generators: Generators,
    max_depth: int = 10,
) -> tuple[ChainState, Transition]:
    """Takes one transition of the No-U-Turn sampler (Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246).

    A trajectory doubles, forward or backward in time at random, until its ends turn towards each other. The new state is drawn from
    its points with multinomial weights, with a preference for the later half (Betancourt 2017, https://arxiv.org/abs/1701.02434).

    Args:
        potential: Potential of the target.
        state: State from :func:`initial_state` or the previous transition.
        step_size: Leapfrog step size, one for all chains or one for each.
        inverse_mass: Diagonal of the inverse mass matrix, ``[D]`` or ``[C, D]``.
        generators: Generator, one for all chains or one for each.
        max_depth: Maximum number of doublings; a trajectory has at most ``2 ** max_depth - 1`` steps.
    """
    num_chains, device = len(state.position), state.position.device
    start = TransitionStart(state, step_size, inverse_mass, generators)
    mass, size = start.inverse_mass, start.step_size
    left, right = (state, start.momentum), (state, start.momentum)
    sample, momentum_sum = state, start.momentum
    log_weight = torch.zeros(num_chains, dtype=torch.float64, device=device)
    acceptance, num_leaves = torch.zeros_like(log_weight), torch.zeros_like(log_weight)
    depth = torch.zeros(num_chains, dtype=torch.long, device=device)
    divergent = torch.zeros(num_chains, dtype=torch.bool, device=device)
    index = torch.arange(num_chains, device=device)  # chains that still double
    for level in range(max_depth):
        if not len(index):
            break
        draws = draw_uniforms([start.generators[chain] for chain in index.tolist()], 2**level + 2, device)
        forward = draws[:, 0] < 0.5
        end = where_state(forward, right[0].select(index), left[0].select(index))
        momentum = torch.where(forward[:, None], right[1][index], left[1][index])
        tree = _Subtree(end, momentum, mass[index], start.energy[index], level)
        signed_size = torch.where(forward[:, None], size[index], -size[index])
        tree.grow(potential, signed_size, torch.log(draws[:, 2:]))
        acceptance[index] += tree.acceptance
        num_leaves[index] += tree.num_leaves
        divergent[index] |= tree.divergent
        depth[index] += 1
        active = tree.active  # chains whose new half neither turned nor diverged
        index, forward = index[active], forward[active]
        accepted = torch.log(draws[active, 1]) < tree.log_weight - log_weight[index]
        sample = sample.replace(index[accepted], tree.sample.select(accepted))
        left, right = (
            (
                state.replace(index[side], tree.end.select(side)),
                momentum.index_copy(0, index[side], tree.momentum[side]),
            )
            for (state, momentum), side in ((left, ~forward), (right, forward))
        )
        log_weight[index] = torch.logaddexp(log_weight[index], tree.log_weight)
        momentum_sum = momentum_sum.index_add(0, index, tree.momentum_sum)
        index = index[~has_turned(left[1][index], right[1][index], momentum_sum[index], mass[index])]
    return sample, Transition(
        (acceptance / num_leaves).cpu(), divergent.cpu(), num_leaves.long().cpu(), depth.cpu()
    )


def has_turned(left: Tensor, right: Tensor, momentum_sum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Returns True for trajectories whose ends approach each other.

    Args:
        left: Momenta at the left end.
        right: Momenta at the right end.
        momentum_sum: Sums of the momenta of all points.
        inverse_mass: Diagonals of the inverse mass matrix.
    """
    inner_sum = (momentum_sum - 0.5 * (left + right)) * inverse_mass
    return ((inner_sum * left).sum(-1) <= 0) | ((inner_sum * right).sum(-1) <= 0)


class _Subtree:
    """Doubling of a trajectory by ``2 ** level`` points.

    Chains that turn or diverge end early and leave ``active``.
    """

    def __init__(
        self, start: ChainState, momentum: Tensor, inverse_mass: Tensor, initial_energy: Tensor, level: int
    ) -> None:
        self.end, self.sample, self.momentum = start, start, momentum
        self.mass, self.initial_energy, self.level = inverse_mass, initial_energy, level
        self.momentum_sum = torch.zeros_like(momentum)
        self.log_weight = torch.full_like(initial_energy, -torch.inf)
        self.acceptance, self.num_leaves = torch.zeros_like(initial_energy), torch.zeros_like(initial_energy)
        self.divergent = torch.zeros_like(initial_energy, dtype=torch.bool)
        self.active = torch.arange(len(initial_energy), device=initial_energy.device)
        # momentum and sum of momenta at the first leaves of subtrees
        self.first_leaves: list[tuple[Tensor, Tensor]] = []

    def grow(self, potential: Potential, step_size: Tensor, log_uniforms: Tensor) -> None:
        """Visits the leaves by leapfrog steps.

        Args:
            potential: Potential of the target.
            step_size: Step sizes ``[C, 1]``.
            log_uniforms: Logarithm of a uniform number for every chain and leaf.
        """
        for leaf in range(2**self.level):
            self.end, self.momentum = leapfrog(potential, self.end, self.momentum, step_size, self.mass)
            error = energy_error(self.end, self.momentum, self.mass, self.initial_energy)
            log_weight = torch.logaddexp(self.log_weight, -error)
            self.sample = where_state(log_uniforms[:, leaf] < -error - log_weight, self.end, self.sample)
            self.momentum_sum, self.log_weight = self.momentum_sum + self.momentum, log_weight
            self.acceptance[self.active] += torch.exp(-error).clamp(max=1.0)
            self.num_leaves[self.active] += 1.0
            diverges = is_divergent(error)
            stop = diverges | self._turns(leaf) if leaf % 2 else diverges
            if bool(stop.any()):
                self.divergent[self.active] |= diverges
                step_size, log_uniforms = step_size[~stop], log_uniforms[~stop]
                self._restrict(~stop)
                if not len(self.active):
                    return
            if leaf % 2 == 0:  # an even leaf is the first of as many subtrees as its index has trailing zeros
                self.first_leaves[(leaf >> 1).bit_count() :] = [(self.momentum, self.momentum_sum)]

    def _turns(self, leaf: int) -> Tensor:
        """Returns True for chains in which a subtree that ends with this leaf turns."""
        last = (leaf >> 1).bit_count()
        num_subtrees = (leaf ^ (leaf + 1)).bit_count() - 1  # trailing ones of the index
        turns = torch.zeros_like(self.active, dtype=torch.bool)
        for first, sum_before in self.first_leaves[last - num_subtrees + 1 : last + 1]:
            momentum_sum = self.momentum_sum - sum_before + first
            turns = turns | has_turned(first, self.momentum, momentum_sum, self.mass)
        return turns

    def _restrict(self, mask: Tensor) -> None:
        """Keeps only the chains of this mask."""
        self.active, self.mass = self.active[mask], self.mass[mask]
        self.initial_energy = self.initial_energy[mask]
        self.end, self.sample = self.end.select(mask), self.sample.select(mask)
        self.momentum, self.momentum_sum = self.momentum[mask], self.momentum_sum[mask]
        self.log_weight = self.log_weight[mask]
        self.first_leaves = [(first[mask], before[mask]) for first, before in self.first_leaves]
