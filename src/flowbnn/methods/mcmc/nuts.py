"""The transition of the No-U-Turn sampler (Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246), of several chains at once."""

import torch
from torch import Tensor

from flowbnn.methods.mcmc.hamiltonian import (
    DIVERGENT,
    Potential,
    Source,
    Start,
    State,
    Transition,
    choose,
    energy_change,
    leapfrog,
    uniforms,
)

__all__ = ["nuts_kernel"]


def nuts_kernel(
    potential: Potential,
    state: State,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    source: Source,
    max_depth: int = 10,
) -> tuple[State, Transition]:
    """One transition of the No-U-Turn sampler; the arguments are those of :class:`~flowbnn.methods.mcmc.hamiltonian.Start`.

    A trajectory doubles, forward or backward in time at random, until its ends turn towards each other; the new state is drawn from its
    points with multinomial weights, with a preference for the later half (Betancourt 2017, https://arxiv.org/abs/1701.02434).

    Args:
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
        self.kept: list[
            tuple[Tensor, Tensor]
        ] = []  # momentum and sum of momenta at the leaves that subtrees begin with

    def grow(self, potential: Potential, size: Tensor, log_draws: Tensor) -> None:
        """Go through the leaves.

        Args:
            size: step sizes, a column; negative ones go back in time.
            log_draws: logarithms of a uniform number for every chain and leaf.
        """
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
