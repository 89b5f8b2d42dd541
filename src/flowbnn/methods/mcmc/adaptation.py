r"""Finding the step size and the mass matrix of Hamiltonian samplers, for each chain by itself.

The step size follows dual averaging (Hoffman and Gelman, 1111.4246), which brings the mean acceptance to a target; the inverse mass
is the variance of the positions (Welford's sums), taken in windows that double in length, as Stan does: a start without, the
windows, and an end in which only the step size is tuned.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flowbnn.methods.mcmc.hamiltonian import Potential, State, energy_change, kinetic, leapfrog, normals

__all__ = ["Warmup", "reasonable_step", "window_ends"]

START, END, WINDOW = 75, 50, 25
SHORT = 50
ENOUGH = 10  # updates after which the averaged step size is better than the one that was looked for
GAMMA, DELAY, FORGET = 0.05, 10.0, 0.75  # of dual averaging, as in the paper


def window_ends(length: int) -> tuple[int, list[int]]:
    """Where the mass begins to be learned, and the transitions at whose end it is set anew.

    Fewer than 50 transitions are too few to learn a mass from: they tune the step size only.

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
    searching = torch.ones_like(up)
    for _ in range(60):
        factor = torch.where(up, 2.0, 0.5)
        size = torch.where(searching, size * factor.double(), size)
        searching = searching & (accepts() == up)
        if not bool(searching.any()):
            break
    return size


class Warmup:
    """The adaptation of chains that run beside each other.

    Args:
        length: transitions of the warm-up.
        target: mean acceptance probability to come to.
        like: positions ``[C, D]``.
    """

    def __init__(self, length: int, target: float, like: Tensor) -> None:
        self.length, self.target = length, target
        self.begins, self.ends = window_ends(length)
        chains = len(like)
        self.inverse_mass = torch.ones_like(like)
        self.step_size = torch.ones(chains, dtype=torch.float64)
        self.count = 0
        self.mean, self.sums = torch.zeros_like(like), torch.zeros_like(like)
        self.centre = torch.zeros(chains, dtype=torch.float64)
        self.error, self.smooth = torch.zeros_like(self.centre), torch.zeros_like(self.centre)
        self.updates = 0

    def restart(self, potential: Potential, state: State, sources: Sequence[torch.Generator]) -> None:
        """Look for a step size under the present mass and begin to average anew."""
        self.step_size = reasonable_step(potential, state, self.inverse_mass, sources, self.step_size)
        self.centre = torch.log(10.0 * self.step_size)
        self.error, self.smooth = torch.zeros_like(self.centre), torch.zeros_like(self.centre)
        self.updates = 0

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
            # a little towards a small variance, as Stan does: a window of few draws knows little
            self.inverse_mass = (count / (count + 5.0)) * variance + 1e-3 * (5.0 / (count + 5.0))
            self.count, self.mean, self.sums = (
                0,
                torch.zeros_like(self.mean),
                torch.zeros_like(self.sums),
            )
            self.restart(potential, state, sources)
        if number + 1 == self.length and self.updates:
            found = self.smooth if self.updates >= ENOUGH else self.centre - math.log(10.0)
            self.step_size = found.exp()

    def state(self) -> dict[str, Tensor]:
        """Everything that changes, as tensors."""
        names = ("inverse_mass", "step_size", "mean", "sums", "centre", "error", "smooth")
        counts = torch.tensor([self.count, self.updates])
        return {**{name: getattr(self, name) for name in names}, "counts": counts}

    def load(self, state: dict[str, Tensor]) -> None:
        """Put back what :meth:`state` gave."""
        for name, value in state.items():
            if name != "counts":
                setattr(self, name, value.to(getattr(self, name)))
        self.count, self.updates = (int(number) for number in state["counts"])
