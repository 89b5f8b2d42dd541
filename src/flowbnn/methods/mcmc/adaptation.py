r"""Warm-up of Hamiltonian samplers: the step size and the mass matrix, for each chain by itself.

The step size follows dual averaging (Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246), which brings the mean acceptance to a
target; the inverse mass is the variance of the positions (Welford's sums) in windows that double in length, as in Stan: a start
without, the windows, and an end in which only the step size is tuned.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.methods.mcmc.hamiltonian import Potential, State, energy_change, kinetic, leapfrog, normals

__all__ = ["Warmup", "reasonable_step", "window_ends"]

START, END, WINDOW = 75, 50, 25
SHORT = 50  # transitions below which only the step size is tuned
ENOUGH = 10  # updates from which on the averaged step size is better than the initial one
GAMMA, DELAY, FORGET = 0.05, 10.0, 0.75  # of dual averaging, as in the paper


def window_ends(length: int) -> tuple[int, list[int]]:
    """The transition at which learning of the mass begins, and those at whose end it is set anew.

    >>> window_ends(1000), window_ends(100), window_ends(40)
    ((75, [100, 150, 250, 450, 950]), (15, [80]), (40, []))
    """
    if length < SHORT:
        return length, []
    start, end, window = START, END, WINDOW
    if start + window + end > length:
        start, end = int(0.15 * length), max(ENOUGH, int(0.2 * length))
        window = length - start - end
    ends, at, last = [], start, length - end
    while at < last:
        at += window
        window *= 2
        if at + window > last:  # the next one would not fit: this one takes what is left
            at = last
        ends.append(at)
    return start, ends


def reasonable_step(
    potential: Potential,
    state: State,
    inverse_mass: Tensor,
    sources: Sequence[torch.Generator],
    guess: Tensor,
) -> Tensor:
    """For each chain a step size at which one leapfrog step is accepted with a probability near 0.8, by doubling or halving."""
    momentum = normals(sources, state.position) / inverse_mass.sqrt()
    before = state.energy + kinetic(momentum, inverse_mass)
    size = guess.clone()

    def accepts() -> Tensor:
        column = size.to(state.position)[:, None]
        after, kicked = leapfrog(potential, state, momentum, column, inverse_mass)
        return energy_change(after, kicked, inverse_mass, before).cpu() < -math.log(0.8)

    up = accepts()
    factor = torch.where(up, 2.0, 0.5).double()
    searching = torch.ones_like(up)
    for _ in range(60):
        size = torch.where(searching, size * factor, size)
        searching = searching & (accepts() == up)
        if not bool(searching.any()):
            break
    return size


class Warmup:
    """The adaptation of chains that run beside each other.

    Args:
        length: transitions of the warm-up.
        target: mean acceptance probability to reach.
        like: positions ``[C, D]``.
    """

    CHANGING = ("inverse_mass", "step_size", "mean", "sums", "centre", "error", "smooth")

    def __init__(self, length: int, target: float, like: Tensor) -> None:
        self.length, self.target = length, target
        self.begins, self.ends = window_ends(length)
        self.inverse_mass = torch.ones_like(like)
        self.step_size = torch.ones(len(like), dtype=torch.float64)
        self.centre = torch.zeros_like(self.step_size)  # dual averaging shrinks the log step size towards it
        self._restart_averaging()
        self._restart_window()

    def _restart_averaging(self) -> None:
        self.error, self.smooth, self.updates = (
            torch.zeros_like(self.centre),
            torch.zeros_like(self.centre),
            0,
        )

    def _restart_window(self) -> None:
        self.mean, self.sums = torch.zeros_like(self.inverse_mass), torch.zeros_like(self.inverse_mass)
        self.count = 0

    def restart(self, potential: Potential, state: State, sources: Sequence[torch.Generator]) -> None:
        """Search a step size under the present mass and begin to average anew."""
        self.step_size = reasonable_step(potential, state, self.inverse_mass, sources, self.step_size)
        self.centre = torch.log(10.0 * self.step_size)
        self._restart_averaging()

    def update(
        self,
        number: int,
        potential: Potential,
        state: State,
        acceptance: Tensor,
        sources: Sequence[torch.Generator],
    ) -> None:
        """Learn from the transition of this number."""
        self.updates += 1
        share = 1.0 / (self.updates + DELAY)
        self.error = (1.0 - share) * self.error + share * (self.target - acceptance)
        log_size = self.centre - math.sqrt(self.updates) / GAMMA * self.error
        weight = self.updates**-FORGET
        self.smooth = weight * log_size + (1.0 - weight) * self.smooth
        self.step_size = log_size.exp()
        if self.ends and self.begins <= number < self.ends[-1]:
            self.count += 1
            away = state.position - self.mean
            self.mean = self.mean + away / self.count
            self.sums = self.sums + away * (state.position - self.mean)
        if number + 1 in self.ends and self.count > 1:
            variance, count = self.sums / (self.count - 1), self.count
            # shrunk a little towards a small variance, as Stan does, because a window has few draws
            self.inverse_mass = (count / (count + 5.0)) * variance + 1e-3 * (5.0 / (count + 5.0))
            self._restart_window()
            self.restart(potential, state, sources)
        if number + 1 == self.length:
            log_size = self.smooth if self.updates >= ENOUGH else self.centre - math.log(10.0)
            self.step_size = log_size.exp()

    def state(self) -> dict[str, Tensor]:
        """Everything that changes, as tensors."""
        counts = torch.tensor([self.count, self.updates])
        return {**{name: getattr(self, name) for name in self.CHANGING}, "counts": counts}

    def load(self, state: dict[str, Tensor]) -> None:
        """Restore what :meth:`state` gave."""
        for name in self.CHANGING:
            setattr(self, name, state[name].to(getattr(self, name)))
        self.count, self.updates = (int(number) for number in state["counts"])
