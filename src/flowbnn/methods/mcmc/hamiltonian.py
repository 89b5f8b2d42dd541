r"""Hamiltonian Monte Carlo as pure functions of positions and a potential, for several chains at once.

The target is :math:`p(q) \propto e^{-U(q)}`. A momentum :math:`p \sim \mathcal N(0, M)` is added and the pair follows

.. math:: H(q, p) = U(q) + \tfrac12 p^\top M^{-1} p

by leapfrog steps, whose end is accepted with probability :math:`\min(1, e^{-\Delta H})` (Neal, 1206.1901).

A *potential* takes positions ``[chains, dim]`` and gives energies ``[chains]`` and gradients ``[chains, dim]``;
:func:`with_gradient` makes one of a differentiable function. Every chain draws from a generator of its own, so that it does not
matter which others run beside it.

>>> potential = with_gradient(lambda q: 0.5 * q.square().sum(-1))
>>> state = begin(potential, torch.zeros(2, 3))
>>> state, told = hmc_kernel(potential, state, 0.5, torch.ones(3), 5, torch.Generator().manual_seed(0))
>>> state.position.shape, bool(told.divergent.any())
(torch.Size([2, 3]), False)
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = [
    "Potential",
    "State",
    "Transition",
    "begin",
    "choose",
    "each_chain",
    "energy_change",
    "hmc_kernel",
    "kinetic",
    "leapfrog",
    "normals",
    "per_chain",
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


class Transition(NamedTuple):
    """How a transition went, for each chain: mean acceptance probability, divergence, gradients taken, doublings of the tree (0 for
    HMC)."""

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


def each_chain(source: Source, chains: int) -> list[torch.Generator]:
    """A generator for every chain; a single one serves them in turn."""
    return [source] * chains if isinstance(source, torch.Generator) else list(source)


def normals(sources: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """Standard normals of the shape ``[C, D]`` of ``like``, every chain's from its own generator."""
    drawn = [torch.randn(like.shape[1], generator=g, dtype=like.dtype, device=g.device) for g in sources]
    return torch.stack(drawn).to(like.device)


def uniforms(sources: Sequence[torch.Generator], count: int, device: torch.device) -> Tensor:
    """Numbers between 0 and 1, ``[C, count]`` in float64."""
    drawn = [torch.rand(count, generator=g, dtype=torch.float64, device=g.device) for g in sources]
    return torch.stack(drawn).to(device)


def kinetic(momentum: Tensor, inverse_mass: Tensor) -> Tensor:
    """Kinetic energies ``[C]`` in float64."""
    return 0.5 * (momentum.square() * inverse_mass).sum(-1, dtype=torch.float64)


def per_chain(value: float | Tensor, like: Tensor) -> Tensor:
    """A number, or one for each chain, as a column that multiplies ``[C, D]``."""
    column = torch.as_tensor(value, dtype=like.dtype, device=like.device).reshape(-1, 1)
    return column.expand(len(like), 1)


def leapfrog(
    potential: Potential, state: State, momentum: Tensor, step_size: Tensor, inverse_mass: Tensor
) -> tuple[State, Tensor]:
    """One step: half a kick, a drift, half a kick. Reversible and volume preserving; its error in the energy is of second order.

    Args:
        step_size: a column ``[C, 1]``; below 0 goes back in time.
    """
    momentum = momentum - 0.5 * step_size * state.gradient
    after = begin(potential, state.position + step_size * inverse_mass * momentum)
    return after, momentum - 0.5 * step_size * after.gradient


def energy_change(state: State, momentum: Tensor, inverse_mass: Tensor, before: Tensor) -> Tensor:
    """The change of the whole energy; infinite where it is none."""
    change = state.energy + kinetic(momentum, inverse_mass) - before
    return torch.where(torch.isnan(change), torch.inf, change)


def choose(which: Tensor, one: State, other: State) -> State:
    """For each chain the first state where ``which`` says so, else the other."""
    column = which[:, None]
    return State(
        torch.where(column, one.position, other.position),
        torch.where(which, one.energy, other.energy),
        torch.where(column, one.gradient, other.gradient),
    )


def hmc_kernel(
    potential: Potential,
    state: State,
    step_size: float | Tensor,
    inverse_mass: Tensor,
    steps: int | Tensor,
    generator: Source,
) -> tuple[State, Transition]:
    """One transition of Hamiltonian Monte Carlo.

    Args:
        potential: energies and gradients of positions.
        state: from :func:`begin` or the transition before.
        step_size: of a leapfrog step, one number or one for each chain.
        inverse_mass: the diagonal of the inverse mass matrix, ``[D]`` or ``[C, D]``; best the variances of the target.
        steps: leapfrog steps, one number or one for each chain.
        generator: one, or one for each chain.
    """
    chains, device = len(state.position), state.position.device
    sources = each_chain(generator, chains)
    mass = inverse_mass.to(state.position).expand_as(state.position)
    size = per_chain(step_size, state.position)
    counts = torch.as_tensor(steps).expand(chains)
    momentum = normals(sources, state.position) / mass.sqrt()
    before = state.energy + kinetic(momentum, mass)
    moved = state
    for number in range(int(counts.max())):
        going = counts > number
        if bool(going.all()):
            moved, momentum = leapfrog(potential, moved, momentum, size, mass)
            continue
        at = going.nonzero().squeeze(1).to(device)
        here = State(*(part[at] for part in moved))
        after, kicked = leapfrog(potential, here, momentum[at], size[at], mass[at])
        momentum = momentum.index_copy(0, at, kicked)
        moved = State(*(whole.index_copy(0, at, part) for whole, part in zip(moved, after, strict=True)))
    change = energy_change(moved, momentum, mass, before)
    acceptance = torch.exp(-change).clamp(max=1.0)
    accepted = uniforms(sources, 1, device)[:, 0] < acceptance
    told = Transition(
        acceptance.cpu(), (change > DIVERGENT).cpu(), counts.clone(), torch.zeros(chains, dtype=torch.long)
    )
    return choose(accepted, moved, state), told
