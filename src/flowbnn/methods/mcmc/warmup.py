r"""Adaptation of the step size and the mass of Markov chains.

The step size follows dual averaging (Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246). It brings the mean acceptance to a
target, and that of every chain to at least half of the target. The inverse mass is the variance of the positions (Welford's sums) in
windows that double in length, as in Stan. The windows come after an initial phase and before a final phase, in which only the step size
is adapted.

All chains share step size and mass. A chain that adapted alone could take steps too long to ever reach narrower regions. The bound on
every chain lets chains leave steep regions far from the mode.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowbnn.methods.mcmc.hamiltonian import (
    ChainState,
    Potential,
    draw_normals,
    energy_error,
    kinetic_energy,
    leapfrog,
)


def window_ends(length: int) -> tuple[int, list[int]]:
    """Returns the transition at which the first window begins, and the ends of all windows.

    Phases are 75, 25 and 50 transitions long, as in Stan. Below 50 transitions only the step size is adapted.

    >>> window_ends(1000), window_ends(100), window_ends(40)
    ((75, [100, 150, 250, 450, 950]), (15, [80]), (40, []))
    """
    if length < 50:
        return length, []
    start, window, final = 75, 25, 50
    if start + window + final > length:
        start, final = int(0.15 * length), max(10, int(0.2 * length))
        window = length - start - final
    ends, end, last = [], start, length - final
    while end < last:
        end += window
        window *= 2
        if end + window > last:  # the next window would not fit, so this one is extended
            end = last
        ends.append(end)
    return start, ends


def find_step_size(
    potential: Potential,
    state: ChainState,
    inverse_mass: Tensor,
    generators: Sequence[torch.Generator],
    guess: Tensor,
) -> Tensor:
    """Returns a step size with an acceptance probability near 0.8 of one leapfrog step, by doubling or halving.

    Args:
        potential: Potential of the target.
        state: State of the chains.
        inverse_mass: Diagonals of the inverse mass matrix ``[C, D]``.
        generators: Generator of each chain.
        guess: Initial step sizes ``[C]``.

    Returns:
        Geometric mean over the chains, ``[C]``.
    """
    momentum = draw_normals(generators, state.position) / inverse_mass.sqrt()
    initial_energy = state.energy + kinetic_energy(momentum, inverse_mass)
    step_size = guess.clone()

    def accepts() -> Tensor:
        column = step_size.to(state.position)[:, None]
        after, new_momentum = leapfrog(potential, state, momentum, column, inverse_mass)
        return energy_error(after, new_momentum, inverse_mass, initial_energy).cpu() < -math.log(0.8)

    initially_accepted = accepts()
    factor = torch.where(initially_accepted, 2.0, 0.5).double()
    searching = torch.ones_like(initially_accepted)
    for _ in range(60):
        step_size = torch.where(searching, step_size * factor, step_size)
        searching = searching & (accepts() == initially_accepted)
        if not bool(searching.any()):
            break
    return step_size.log().mean().exp().expand_as(step_size)


class Warmup:
    """Adaptation of step size and mass.

    Args:
        potential: Potential of the target.
        generators: Generator of each chain.
        like: Positions ``[C, D]``, for shape, dtype and device.
        length: Number of transitions of the warm-up.
        target: Target of the mean acceptance probability.
    """

    STATE_NAMES = (
        "inverse_mass",
        "step_size",
        "mean",
        "squares",
        "count",
        "center",
        "error",
        "average",
        "updates",
    )

    def __init__(
        self,
        potential: Potential,
        generators: Sequence[torch.Generator],
        like: Tensor,
        length: int,
        target: float,
    ) -> None:
        self.potential, self.generators, self.length, self.target = potential, generators, length, target
        self.first_window, self.ends = window_ends(length)
        self.inverse_mass = torch.ones_like(like)
        self.step_size = torch.ones(len(like), dtype=torch.float64)
        self.center = self.error = self.average = torch.zeros_like(self.step_size)
        self.mean = self.squares = torch.zeros_like(like)
        self.count = self.updates = 0

    def restart(self, state: ChainState) -> None:
        """Searches a step size under the current mass, and resets the averages and the window."""
        self.step_size = find_step_size(
            self.potential, state, self.inverse_mass, self.generators, self.step_size
        )
        self.center = torch.log(10.0 * self.step_size)  # dual averaging shrinks the log step size towards it
        self.error = self.average = torch.zeros_like(self.center)
        self.mean = self.squares = torch.zeros_like(self.inverse_mass)
        self.count = self.updates = 0

    def update(self, number: int, state: ChainState, acceptance: Tensor) -> None:
        """Adapts step size and mass to a transition.

        Args:
            number: Index of the transition.
            state: State after the transition.
            acceptance: Acceptance probability of each chain.
        """
        self._update_step_size(acceptance)
        if self.ends and self.first_window <= number < self.ends[-1]:
            self.count += 1
            deviation = state.position - self.mean
            self.mean = self.mean + deviation / self.count
            self.squares = self.squares + deviation * (state.position - self.mean)
        if number + 1 in self.ends and self.count > 1:
            count = self.count * len(self.squares)
            # the variance of each chain around its own mean
            variance = (self.squares.mean(0) / (self.count - 1)).expand_as(self.squares)
            # shrunk towards a small variance, as in Stan, because a window has few draws
            self.inverse_mass = (count / (count + 5.0)) * variance + 1e-3 * (5.0 / (count + 5.0))
            self.restart(state)
        if number + 1 == self.length:
            # the average of fewer than ten updates is worse than the initial step size
            log_size = self.average if self.updates >= 10 else self.center - math.log(10.0)
            self.step_size = log_size.exp()

    def _update_step_size(self, acceptance: Tensor) -> None:
        """Updates the step size by dual averaging, with the constants of Hoffman and Gelman (2014)."""
        gamma, t0, kappa = 0.05, 10.0, 0.75
        self.updates += 1
        weight = 1.0 / (self.updates + t0)
        self.error = (1.0 - weight) * self.error + weight * (self.target - acceptance)
        error = torch.maximum(self.error.mean(), self.error.max() - 0.5 * self.target)
        log_size = self.center - math.sqrt(self.updates) / gamma * error
        weight = self.updates**-kappa
        self.average = weight * log_size + (1.0 - weight) * self.average
        self.step_size = log_size.exp()

    def state(self) -> dict[str, Any]:
        """Returns everything that changes."""
        return {name: getattr(self, name) for name in self.STATE_NAMES}

    def load(self, state: dict[str, Any]) -> None:
        """Restores the result of :meth:`state`."""
        for name, value in state.items():
            setattr(self, name, value.to(getattr(self, name)) if isinstance(value, Tensor) else value)
