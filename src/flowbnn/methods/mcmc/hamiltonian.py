r"""Hamiltonian dynamics of several chains at once, and the transitions of Hamiltonian Monte Carlo and the No-U-Turn sampler.

The target is :math:`p(q) \propto e^{-U(q)}`. A momentum :math:`p \sim \mathcal N(0, M)` is added and the pair follows

.. math:: H(q, p) = U(q) + \tfrac12 p^\top M^{-1} p

by leapfrog steps, whose end is accepted with probability :math:`\min(1, e^{-\Delta H})` (Neal 2012, https://arxiv.org/abs/1206.1901).

A *potential* maps positions ``[chains, dim]`` to energies ``[chains]`` and gradients ``[chains, dim]``; :func:`with_gradient` makes one
from a differentiable function. Every chain draws from a generator of its own, so its draws do not depend on the other chains.

>>> potential = with_gradient(lambda q: 0.5 * q.square().sum(-1))
>>> state = begin(potential, torch.zeros(2, 3))
>>> state, transition = hmc_kernel(potential, state, 0.5, torch.ones(3), 5, torch.Generator().manual_seed(0))
>>> state.position.shape, bool(transition.divergent.any())
(torch.Size([2, 3]), False)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

Potential = Callable[[Tensor], tuple[Tensor, Tensor]]
Source = torch.Generator | Sequence[torch.Generator]
DIVERGENT = 1000.0  # a change of energy that no useful step size makes


class State(NamedTuple):
    """Where chains are: positions ``[C, D]``, energies ``[C]`` in float64 and gradients ``[C, D]``."""

    position: Tensor
    energy: Tensor
    gradient: Tensor

    def of(self, chains: Tensor) -> "State":
        """The state of some chains, by index or mask."""
        return State(*(part[chains] for part in self))

    def put(self, chains: Tensor, values: "State") -> "State":
        """This state with that of some chains replaced."""
        return State(*(part.index_copy(0, chains, value) for part, value in zip(self, values, strict=True)))


class Transition(NamedTuple):
    """How a transition went, for each chain: mean acceptance probability, divergence, gradients taken, tree depth (0 for HMC)."""

    acceptance: Tensor
    divergent: Tensor
    gradients: Tensor
    depth: Tensor


def with_gradient(function: Callable[[Tensor], Tensor]) -> Potential:
    """A potential from a differentiable function of positions ``[C, D]`` to energies ``[C]``, each of its own chain's position."""

    def potential(position: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            leaf = position.detach().requires_grad_()
            energy = function(leaf)
            (gradient,) = torch.autograd.grad(energy.sum(), leaf)
        return energy.detach().double(), gradient

    return potential


def begin(potential: Potential, position: Tensor) -> State:
    """The state of chains at these positions."""
    return State(position, *potential(position))


def normals(sources: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Standard normals of the shape ``[C, D]`` of ``like``, each chain's from its own generator."""
    draws = [torch.randn(like.shape[1], generator=g, dtype=like.dtype, device=g.device) for g in sources]
    return torch.stack(draws).to(like.device)


def uniforms(sources: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """Numbers between 0 and 1, ``[C, count]`` in float64."""
    draws = [torch.rand(count, generator=g, dtype=torch.float64, device=g.device) for g in sources]
    return torch.stack(draws).to(device)


def kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Kinetic energies ``[C]`` in float64."""
    return 0.5 * (momentum.square() * inverse_mass).sum(-1, dtype=torch.float64)


def leapfrog(
    potential: Potential, state: State, momentum: Tensor, step_size: Tensor, inverse_mass: Tensor
) -> tuple[State, Tensor]:
    """One step: half a kick, a drift, half a kick; step sizes are a column ``[C, 1]``, and negative ones go back in time."""
    momentum = momentum - 0.5 * step_size * state.gradient
    after = begin(potential, state.position + step_size * inverse_mass * momentum)
    return after, momentum - 0.5 * step_size * after.gradient


def energy_change(state: State, momentum: Tensor, inverse_mass: Tensor, before: Tensor) -> Tensor:
    """The change of the total energy; infinite where it is not a number."""
    change = state.energy + kinetic(momentum, inverse_mass) - before
    return torch.where(torch.isnan(change), torch.inf, change)


def choose(which: Tensor, one: State, other: State) -> State:
    """For each chain the first state where ``which`` is true, else the other."""
    masks = which[:, None], which, which[:, None]
    return State(*map(torch.where, masks, one, other))


class Start:
    """What every transition begins with: fresh momenta, and step size, mass and generator for each chain."""

    def __init__(self, state: State, step_size: float | Tensor, inverse_mass: Tensor, source: Source) -> None:
        position, chains = state.position, len(state.position)
        self.sources = [source] * chains if isinstance(source, torch.Generator) else list(source)
        self.mass = inverse_mass.to(position).expand_as(position)
        size = torch.as_tensor(step_size, dtype=position.dtype, device=position.device)
        self.size = size.reshape(-1, 1).expand(chains, 1)
        self.momentum = normals(self.sources, position) / self.mass.sqrt()
        self.energy = state.energy + kinetic(self.momentum, self.mass)


def hmc_kernel(
    potential: Potential,
    state: State,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    steps: int | Tensor,
    source: Source,
) -> tuple[State, Transition]:
    """One transition of Hamiltonian Monte Carlo.

    Args:
        state: from :func:`begin` or the transition before.
        step_size: of a leapfrog step, one number or one for each chain.
        inverse_mass: the diagonal of the inverse mass matrix, ``[D]`` or ``[C, D]``; ideally the variances of the target.
        steps: leapfrog steps, one number or one for each chain.
        source: a generator, or one for each chain.
    """
    chains, device = len(state.position), state.position.device
    start = Start(state, step_size, inverse_mass, source)
    counts = torch.as_tensor(steps).expand(chains)
    moved, momentum, size, mass = state, start.momentum, start.size, start.mass
    for number in range(int(counts.max())):
        going = counts > number
        if bool(going.all()):
            moved, momentum = leapfrog(potential, moved, momentum, size, mass)
            continue
        at = going.nonzero().squeeze(1).to(device)
        after, kicked = leapfrog(potential, moved.of(at), momentum[at], size[at], mass[at])
        moved, momentum = moved.put(at, after), momentum.index_copy(0, at, kicked)
    change = energy_change(moved, momentum, mass, start.energy)
    acceptance = torch.exp(-change).clamp(max=1.0)
    accepted = uniforms(start.sources, 1, device)[:, 0] < acceptance
    depth = torch.zeros(chains, dtype=torch.long)
    transition = Transition(acceptance.cpu(), (change > DIVERGENT).cpu(), counts.clone(), depth)
    return choose(accepted, moved, state), transition


def metropolis_kernel(
    potential: Potential, state: State, step_size: float | Tensor, inverse_mass: Tensor, source: Source
) -> tuple[State, Transition]:
    r"""One transition of random-walk Metropolis (Metropolis et al. 1953, https://doi.org/10.1063/1.1699114).

    A proposal :math:`q' \sim \mathcal N(q, \epsilon^2 M^{-1})` is accepted with probability :math:`\min(1, e^{U(q) - U(q')})`.
    The gradient is not used, and one evaluation counts as one gradient.

    Args:
        state, step_size, inverse_mass, source: as in :func:`hmc_kernel`.
    """
    start = Start(state, step_size, inverse_mass, source)
    moved = begin(potential, state.position + start.size * start.mass * start.momentum)
    change = torch.where(torch.isnan(moved.energy), torch.inf, moved.energy - state.energy)
    acceptance = torch.exp(-change).clamp(max=1.0)
    accepted = uniforms(start.sources, 1, moved.position.device)[:, 0] < acceptance
    none = torch.zeros(len(change), dtype=torch.long)
    return choose(accepted, moved, state), Transition(acceptance.cpu(), none.bool(), none + 1, none)


def nuts_kernel(
    potential: Potential,
    state: State,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    source: Source,
    max_depth: int = 10,
) -> tuple[State, Transition]:
    """One transition of the No-U-Turn sampler (Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246).

    A trajectory doubles, forward or backward in time at random, until its ends turn towards each other; the new state is drawn from its
    points with multinomial weights, with a preference for the later half (Betancourt 2017, https://arxiv.org/abs/1701.02434).

    Args:
        state, step_size, inverse_mass, source: as in :func:`hmc_kernel`.
        max_depth: doublings at most: a trajectory has at most ``2 ** max_depth - 1`` steps.
    """
    chains, device = len(state.position), state.position.device
    begun = Start(state, step_size, inverse_mass, source)
    mass, size = begun.mass, begun.size
    left, right = (state, begun.momentum), (state, begun.momentum)
    chosen, total = state, begun.momentum
    weight = torch.zeros(chains, dtype=torch.float64, device=device)
    acceptance, leaves = torch.zeros_like(weight), torch.zeros_like(weight)
    depth = torch.zeros(chains, dtype=torch.long, device=device)
    divergent = torch.zeros(chains, dtype=torch.bool, device=device)
    at = torch.arange(chains, device=device)  # those that still double
    for level in range(max_depth):
        draws = uniforms([begun.sources[chain] for chain in at.tolist()], 2**level + 2, device)
        forth = draws[:, 0] < 0.5
        start = choose(forth, right[0].of(at), left[0].of(at))
        kick = torch.where(forth[:, None], right[1][at], left[1][at])
        tree = _Subtree(start, kick, mass[at], begun.energy[at], level)
        tree.grow(potential, torch.where(forth[:, None], size[at], -size[at]), torch.log(draws[:, 2:]))
        acceptance[at] += tree.acceptance
        leaves[at] += tree.leaves
        divergent[at] |= tree.divergent
        depth[at] += 1
        live = tree.live  # those whose new half neither turned back nor diverged
        at, forth = at[live], forth[live]
        if not len(at):
            break
        accepted = torch.log(draws[live, 1]) < tree.weight - weight[at]
        chosen = chosen.put(at[accepted], tree.chosen.of(accepted))
        left, right = (
            (end.put(at[side], tree.end.of(side)), momentum.index_copy(0, at[side], tree.momentum[side]))
            for (end, momentum), side in ((left, ~forth), (right, forth))
        )
        weight[at] = torch.logaddexp(weight[at], tree.weight)
        total = total.index_add(0, at, tree.total)
        at = at[~turning(left[1][at], right[1][at], total[at], mass[at])]
        if not len(at):
            break
    return chosen, Transition((acceptance / leaves).cpu(), divergent.cpu(), leaves.long().cpu(), depth.cpu())


def turning(left: Tensor, right: Tensor, total: Tensor, inverse_mass: Tensor) -> Tensor:
    """Whether trajectories with these momenta at their ends, and this sum of momenta, have begun to turn back."""
    middle = (total - 0.5 * (left + right)) * inverse_mass
    return ((middle * left).sum(-1) <= 0) | ((middle * right).sum(-1) <= 0)


class _Subtree:
    """A doubling: ``2 ** level`` new points, or fewer where they turn back or diverge; such chains drop out of ``live``."""

    def __init__(
        self, start: State, momentum: Tensor, inverse_mass: Tensor, before: Tensor, level: int
    ) -> None:
        self.end, self.chosen, self.momentum = start, start, momentum
        self.mass, self.before, self.level = inverse_mass, before, level
        self.total = torch.zeros_like(momentum)
        self.weight = torch.full_like(before, -torch.inf)
        self.acceptance, self.leaves = torch.zeros_like(before), torch.zeros_like(before)
        self.divergent = torch.zeros_like(before, dtype=torch.bool)
        self.live = torch.arange(len(before), device=before.device)
        # momentum and sum of momenta at the leaves that subtrees begin with
        self.kept: list[tuple[Tensor, Tensor]] = []

    def grow(self, potential: Potential, size: Tensor, log_draws: Tensor) -> None:
        """Go through the leaves, by steps of this size, with the logarithm of a uniform number for every chain and leaf."""
        for leaf in range(2**self.level):
            self.end, self.momentum = leapfrog(potential, self.end, self.momentum, size, self.mass)
            change = energy_change(self.end, self.momentum, self.mass, self.before)
            weight = torch.logaddexp(self.weight, -change)
            self.chosen = choose(log_draws[:, leaf] < -change - weight, self.end, self.chosen)
            self.total, self.weight = self.total + self.momentum, weight
            self.acceptance[self.live] += torch.exp(-change).clamp(max=1.0)
            self.leaves[self.live] += 1.0
            diverges = change > DIVERGENT
            stop = diverges | self._turns(leaf) if leaf % 2 else diverges
            if bool(stop.any()):
                self.divergent[self.live] |= diverges
                size, log_draws = size[~stop], log_draws[~stop]
                self._keep_only(~stop)
                if not len(self.live):
                    return
            if leaf % 2 == 0:  # it begins as many subtrees as there are zeros at the end of its number
                self.kept[(leaf >> 1).bit_count() :] = [(self.momentum, self.total)]

    def _turns(self, leaf: int) -> Tensor:
        """Whether one of the subtrees that end with this leaf turns back."""
        last = (leaf >> 1).bit_count()
        ending = (leaf ^ (leaf + 1)).bit_count() - 1  # ones at the end of the number
        turns = torch.zeros_like(self.live, dtype=torch.bool)
        for first, before in self.kept[last - ending + 1 : last + 1]:
            turns = turns | turning(first, self.momentum, self.total - before + first, self.mass)
        return turns

    def _keep_only(self, stay: Tensor) -> None:
        self.live, self.mass, self.before = self.live[stay], self.mass[stay], self.before[stay]
        self.end, self.chosen = self.end.of(stay), self.chosen.of(stay)
        self.momentum, self.total, self.weight = self.momentum[stay], self.total[stay], self.weight[stay]
        self.kept = [(first[stay], before[stay]) for first, before in self.kept]
