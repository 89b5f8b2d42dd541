r"""Hamiltonian dynamics of several chains at once, and the transition of Hamiltonian Monte Carlo.

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

__all__ = [
    "DIVERGENT",
    "Potential",
    "Start",
    "State",
    "Transition",
    "begin",
    "choose",
    "energy_change",
    "hmc_kernel",
    "kinetic",
    "leapfrog",
    "normals",
    "uniforms",
    "with_gradient",
]

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
    """One step: half a kick, a drift, half a kick. Reversible and volume preserving; its energy error is of second order.

    Args:
        step_size: a column ``[C, 1]``; a negative one goes back in time.
    """
    momentum = momentum - 0.5 * step_size * state.gradient
    after = begin(potential, state.position + step_size * inverse_mass * momentum)
    return after, momentum - 0.5 * step_size * after.gradient


def energy_change(state: State, momentum: Tensor, inverse_mass: Tensor, before: Tensor) -> Tensor:
    """The change of the total energy; infinite where it is not a number."""
    change = state.energy + kinetic(momentum, inverse_mass) - before
    return torch.where(torch.isnan(change), torch.inf, change)


def choose(which: Tensor, one: State, other: State) -> State:
    """For each chain the first state where ``which`` is true, else the other."""
    column = which[:, None]
    return State(
        torch.where(column, one.position, other.position),
        torch.where(which, one.energy, other.energy),
        torch.where(column, one.gradient, other.gradient),
    )


class Start:
    """What every transition begins with: fresh momenta, and step size, mass and generator for each chain.

    Args:
        state: from :func:`begin` or the transition before.
        step_size: of a leapfrog step, one number or one for each chain.
        inverse_mass: the diagonal of the inverse mass matrix, ``[D]`` or ``[C, D]``; ideally the variances of the target.
        source: a generator, or one for each chain.
    """

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
    """One transition of Hamiltonian Monte Carlo; the arguments are those of :class:`Start`.

    Args:
        steps: leapfrog steps, one number or one for each chain.
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
