"""The No-U-Turn sampler (Hoffman and Gelman, 1111.4246): Hamiltonian Monte Carlo that finds the length of its trajectories itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.methods.base import check_whole, register_method
from flowbnn.methods.mcmc.base import ChainMethod
from flowbnn.methods.mcmc.chains import Kernel
from flowbnn.methods.mcmc.hamiltonian import (
    DIVERGENT,
    Potential,
    Source,
    State,
    Transition,
    choose,
    each_chain,
    energy_change,
    kinetic,
    leapfrog,
    normals,
    per_chain,
    uniforms,
)

__all__ = ["NUTS", "nuts_kernel"]

# -------------------- nuts_kernel.py


def nuts_kernel(
    potential: Potential,
    state: State,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    generator: Source,
    max_depth: int = 10,
) -> tuple[State, Transition]:
    """One transition of the No-U-Turn sampler; the arguments are those of :func:`~flowbnn.methods.mcmc.hamiltonian.hmc_kernel`.

    Args:
        max_depth: doublings at most: a trajectory has at most ``2 ** max_depth - 1`` steps.
    """
    chains, device = len(state.position), state.position.device
    sources = each_chain(generator, chains)
    mass = inverse_mass.to(state.position).expand_as(state.position)
    size = per_chain(step_size, state.position)
    momentum = normals(sources, state.position) / mass.sqrt()
    before = state.energy + kinetic(momentum, mass)
    left, right = (state, momentum), (state, momentum)
    chosen, total = state, momentum
    weight = torch.zeros(chains, dtype=torch.float64, device=device)
    acceptance, leaves = torch.zeros_like(weight), torch.zeros_like(weight)
    depth = torch.zeros(chains, dtype=torch.long, device=device)
    divergent = torch.zeros(chains, dtype=torch.bool, device=device)
    at = torch.arange(chains, device=device)  # those that still double
    for level in range(max_depth):
        draws = uniforms([sources[chain] for chain in at.tolist()], 2**level + 2, device)
        forth = draws[:, 0] < 0.5
        start = choose(forth, _part(right[0], at), _part(left[0], at))
        kick = torch.where(forth[:, None], right[1][at], left[1][at])
        tree = _Subtree(start, kick, mass[at], before[at], level)
        tree.grow(potential, torch.where(forth[:, None], size[at], -size[at]), torch.log(draws[:, 2:]))
        acceptance[at] += tree.acceptance
        leaves[at] += tree.leaves
        divergent[at] |= tree.divergent
        depth[at] += 1
        live = tree.live  # those whose new half neither turned back nor diverged
        at, forth = at[live], forth[live]
        if not len(at):
            break
        take = torch.log(draws[live, 1]) < tree.weight - weight[at]
        chosen = _put(chosen, at[take], _part(tree.chosen, take))
        left = (
            _put(left[0], at[~forth], _part(tree.end, ~forth)),
            left[1].index_copy(0, at[~forth], tree.momentum[~forth]),
        )
        right = (
            _put(right[0], at[forth], _part(tree.end, forth)),
            right[1].index_copy(0, at[forth], tree.momentum[forth]),
        )
        weight[at] = torch.logaddexp(weight[at], tree.weight)
        total = total.index_add(0, at, tree.total)
        at = at[~turning(left[1][at], right[1][at], total[at], mass[at])]
        if not len(at):
            break
    told = Transition((acceptance / leaves).cpu(), divergent.cpu(), leaves.long().cpu(), depth.cpu())
    return chosen, told


def _part(state: State, at: Tensor) -> State:
    return State(*(part[at] for part in state))


def _put(state: State, at: Tensor, values: State) -> State:
    return State(*(part.index_copy(0, at, value) for part, value in zip(state, values, strict=True)))


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
        self.kept: list[tuple[Tensor, Tensor]] = []

    def grow(self, potential: Potential, size: Tensor, log_draws: Tensor) -> None:
        """Go through the leaves.

        Args:
            size: step sizes, a column, below 0 for backwards.
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
            bad = change > DIVERGENT
            stop = bad | self.turned(leaf) if leaf % 2 else bad
            if bool(stop.any()):
                self.divergent[self.live] |= bad
                size, log_draws = self.drop(~stop, size, log_draws)
                if not len(self.live):
                    return
            if leaf % 2 == 0:
                self.keep(leaf)

    def keep(self, leaf: int) -> None:
        """Remember a leaf that subtrees begin with."""
        place = (leaf >> 1).bit_count()  # subtrees that it lies in and that began before it
        self.kept[place:] = [(self.momentum, self.total)]

    def turned(self, leaf: int) -> Tensor:
        """Whether one of the subtrees that end with this leaf turns back."""
        last = (leaf >> 1).bit_count()
        ending = (leaf ^ (leaf + 1)).bit_count() - 1  # ones at the end of the number
        found = torch.zeros_like(self.divergent[self.live])
        for first, then in self.kept[last - ending + 1 : last + 1]:
            found = found | turning(first, self.momentum, self.total - then + first, self.mass)
        return found

    def drop(self, stay: Tensor, size: Tensor, log_draws: Tensor) -> tuple[Tensor, Tensor]:
        """Leave out the chains that end here."""
        self.live, self.mass, self.before = self.live[stay], self.mass[stay], self.before[stay]
        self.end, self.chosen = _part(self.end, stay), _part(self.chosen, stay)
        self.momentum, self.total, self.weight = self.momentum[stay], self.total[stay], self.weight[stay]
        self.kept = [(first[stay], then[stay]) for first, then in self.kept]
        return size[stay], log_draws[stay]


@register_method
@dataclass(frozen=True, kw_only=True, repr=False)
class NUTS(ChainMethod):
    """The No-U-Turn sampler with multinomial weights; see :class:`ChainMethod`.

    Args:
        max_depth: doublings of a trajectory at most, which then has ``2 ** max_depth - 1`` steps.

    >>> import flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)[:, None]
    >>> method = fb.NUTS(samples=50, warmup=50, chains=2, epochs=0)
    >>> posterior = method.fit(torch.nn.Linear(1, 1), [(x, 2 * x)], likelihood=fb.Gaussian(noise=0.1), seed=0, progress=False)
    >>> posterior.diagnostics().divergences
    0
    """

    name: ClassVar[str] = "nuts"
    label: ClassVar[str] = "NUTS"

    max_depth: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("max_depth", self.max_depth)
        if self.max_depth > 15:
            raise FlowBNNError(
                f"max_depth is at most 15, which is 32,767 steps for one draw, not {self.max_depth}"
            )

    def kernel(self, potential: Any) -> Kernel:
        def transition(
            state: State, step_size: Tensor, inverse_mass: Tensor, sources: Sequence[torch.Generator]
        ) -> tuple[State, Transition]:
            return nuts_kernel(potential, state, step_size, inverse_mass, sources, self.max_depth)

        return transition

    def work(self) -> float:
        return 2.0 ** min(6, self.max_depth) - 1  # trajectories of networks have 2**5 to 2**7 steps

    def remembered(self) -> tuple[str, ...]:
        return (*super().remembered(), "max_depth")
