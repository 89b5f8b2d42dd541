r"""Markov chains in progress: warm-up, draws, and a file from which an interrupted run resumes to the same draws.

In the warm-up the step size follows dual averaging (Hoffman and Gelman 2014, https://arxiv.org/abs/1111.4246), which brings the mean
acceptance to a target, and that of every chain to half of it at least; the inverse mass is the variance of the positions (Welford's
sums) in windows that double in length, as in Stan: a start without, the windows, and an end in which only the step size is tuned. Both
are one for all chains: a chain that tuned itself where it happened to be would take steps there that never reach the places where the
density is narrower. Under steps that only suit most of them, one that begins far out, where the density is steep, would never leave.
"""

import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, warn
from flowbnn.methods.mcmc.hamiltonian import (
    Potential,
    State,
    Transition,
    begin,
    energy_change,
    kinetic,
    leapfrog,
    normals,
)
from flowbnn.training import check_writable, is_main_process, track
from flowbnn.training.storage import TensorFile, decode_state, encode_state, save_state

Kernel = Callable[[State, Tensor, Tensor, Sequence[torch.Generator]], tuple[State, Transition]]
SECONDS_BETWEEN = 30.0
RECORDED = ("position", "energy", *Transition._fields)
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
    """A step size at which one leapfrog step is accepted with a probability near 0.8, by doubling or halving: the chains' mean."""
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
    return size.log().mean().exp().expand_as(size)


class Warmup:
    """The adaptation of chains with positions like these: so many transitions, to this mean acceptance probability."""

    CHANGING = ("inverse_mass", "step_size", "mean", "sums", "count", "centre", "error", "smooth", "updates")

    def __init__(
        self,
        potential: Potential,
        sources: Sequence[torch.Generator],
        like: Tensor,
        length: int,
        target: float,
    ) -> None:
        self.potential, self.sources, self.length, self.target = potential, sources, length, target
        self.begins, self.ends = window_ends(length)
        self.inverse_mass = torch.ones_like(like)
        self.step_size = torch.ones(len(like), dtype=torch.float64)
        self.centre = self.error = self.smooth = torch.zeros_like(self.step_size)
        self.mean = self.sums = torch.zeros_like(like)
        self.count = self.updates = 0

    def restart(self, state: State) -> None:
        """Search a step size under the present mass, and begin a window and to average anew."""
        self.step_size = reasonable_step(
            self.potential, state, self.inverse_mass, self.sources, self.step_size
        )
        self.centre = torch.log(10.0 * self.step_size)  # dual averaging shrinks the log step size towards it
        self.error = self.smooth = torch.zeros_like(self.centre)
        self.mean = self.sums = torch.zeros_like(self.inverse_mass)
        self.count = self.updates = 0

    def update(self, number: int, state: State, acceptance: Tensor) -> None:
        """Learn from the transition of this number."""
        self.updates += 1
        share = 1.0 / (self.updates + DELAY)
        self.error = (1.0 - share) * self.error + share * (self.target - acceptance)
        error = torch.maximum(self.error.mean(), self.error.max() - 0.5 * self.target)
        log_size = self.centre - math.sqrt(self.updates) / GAMMA * error
        weight = self.updates**-FORGET
        self.smooth = weight * log_size + (1.0 - weight) * self.smooth
        self.step_size = log_size.exp()
        if self.ends and self.begins <= number < self.ends[-1]:
            self.count += 1
            away = state.position - self.mean
            self.mean = self.mean + away / self.count
            self.sums = self.sums + away * (state.position - self.mean)
        if number + 1 in self.ends and self.count > 1:
            count = self.count * len(self.sums)
            # each chain's around its own mean
            variance = (self.sums.mean(0) / (self.count - 1)).expand_as(self.sums)
            # shrunk a little towards a small variance, as Stan does, because a window has few draws
            self.inverse_mass = (count / (count + 5.0)) * variance + 1e-3 * (5.0 / (count + 5.0))
            self.restart(state)
        if number + 1 == self.length:
            log_size = self.smooth if self.updates >= ENOUGH else self.centre - math.log(10.0)
            self.step_size = log_size.exp()

    def state(self) -> dict[str, Any]:
        """Everything that changes."""
        return {name: getattr(self, name) for name in self.CHANGING}

    def load(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` gave."""
        for name, value in state.items():
            setattr(self, name, value.to(getattr(self, name)) if isinstance(value, Tensor) else value)


class Chains:
    """Several chains beside each other, from positions ``[C, D]`` and with a generator for each.

    ``every`` so many transitions (None: every half minute) they are written to ``path``; a run that resumes must have the same
    ``settings``.
    """

    def __init__(
        self,
        potential: Potential,
        kernel: Kernel,
        starts: Tensor,
        sources: Sequence[torch.Generator],
        *,
        warmup: int,
        samples: int,
        thin: int = 1,
        target: float = 0.8,
        path: Path | None = None,
        every: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.potential, self.kernel, self.sources = potential, kernel, list(sources)
        self.warmup, self.samples, self.thin = warmup, samples, thin
        self.path, self.every, self.settings = path, every, dict(settings or {})
        self.adapting = Warmup(potential, self.sources, starts, warmup, target)
        self.starts = starts
        self.state: State | None = None
        self.number = 0
        self.kept: dict[str, list[Tensor]] = {name: [] for name in RECORDED}
        self.written = time.monotonic()

    def run(
        self, resume: bool = False, progress: bool = True, description: str = "sampling"
    ) -> dict[str, Tensor]:
        """Run all remaining transitions.

        Returns:
            ``position`` ``[C, S, D]``; ``energy`` and the fields of :class:`Transition` ``[C, S]``; ``step_size`` ``[C]``.
        """
        if self.path is not None:
            check_writable(self.path)
            if resume and self.path.exists():
                self.load(self.path)
        total = self.warmup + self.samples * self.thin
        with torch.no_grad():
            if self.state is None:
                self.state = begin(self.potential, self.starts)
                self.adapting.restart(self.state)
            before = self.snapshot()
            try:
                for number in track(range(self.number, total), description, progress and is_main_process()):
                    before = self.snapshot()
                    self.advance(number)
                    if self.number == total or self.due():
                        self.save(self.snapshot())
            finally:
                if self.number < total and self.save(before):
                    line = f"flowbnn: stopped after {before['number']} transitions, saved in '{self.path}'; continue with resume=True"
                    print(line, file=sys.stderr)
        record = {name: torch.stack(kept, 1) for name, kept in self.kept.items()}
        return {**record, "step_size": self.adapting.step_size.clone()}

    def advance(self, number: int) -> None:
        """One transition of every chain."""
        assert self.state is not None
        adapting = self.adapting
        state, transition = self.kernel(self.state, adapting.step_size, adapting.inverse_mass, self.sources)
        if number < self.warmup:
            adapting.update(number, state, transition.acceptance)
        elif (number - self.warmup + 1) % self.thin == 0:
            values = {"position": state.position.cpu(), "energy": state.energy.cpu(), **transition._asdict()}
            for name, kept in self.kept.items():
                kept.append(values[name])
        self.state, self.number = state, number + 1

    def due(self) -> bool:
        """Whether it is time to write the file."""
        if self.every is not None:
            return self.number % self.every == 0
        return time.monotonic() - self.written > SECONDS_BETWEEN

    def snapshot(self) -> dict[str, Any]:
        """The present state. Its tensors are never written over, so none is copied."""
        assert self.state is not None
        sources = [source.get_state() for source in self.sources]
        parts = {"state": self.state._asdict(), "adapting": self.adapting.state(), "sources": sources}
        return {"number": self.number, **parts}

    def save(self, snapshot: dict[str, Any]) -> bool:
        """Write the file of the run, with the draws up to then; False where there is none."""
        if self.path is None or not is_main_process():
            return False
        count = max(0, snapshot["number"] - self.warmup) // self.thin
        kept = {name: torch.stack(draws[:count], 1) for name, draws in self.kept.items() if count}
        save_state(self.path, {**snapshot, "kept": kept, "settings": self.settings})
        self.written = time.monotonic()
        return True

    def load(self, path: Path) -> None:
        """Continue from the file of a run with the same settings; warn where its energies are not those of this run's data."""
        file = TensorFile(path, self.starts.shape[1])
        settings = file.document.get("settings") or {}
        changed = next((name for name in self.settings if settings.get(name) != self.settings[name]), None)
        if changed is not None:
            raise FlowBNNError(
                f"'{path}' was written with {changed}={settings.get(changed)!r} and this run has {self.settings[changed]!r}: keep "
                "it, or start again with resume=False",
                kind="resume",
                argument=changed,
            )
        found = {name: view.shape for name, view in file.views.items()}
        if found != self._shapes(file.document.get("number", 0)):  # before anything is read
            raise FlowBNNError(f"'{path}' is no file of these chains", kind="file")
        saved = decode_state(file.document, file.tensors)
        self.number = saved["number"]
        self.state = State(**{name: value.to(self.starts.device) for name, value in saved["state"].items()})
        self.adapting.load(saved["adapting"])
        for source, state in zip(self.sources, saved["sources"], strict=True):
            source.set_state(state)
        self.kept |= {name: list(draws.unbind(1)) for name, draws in saved["kept"].items()}
        with torch.no_grad():
            here = begin(self.potential, self.state.position)
        if not torch.allclose(here.energy, self.state.energy, rtol=1e-4, atol=1e-3):
            self.state = here
            line = f"'{path}' is resumed with other data: the draws that it holds are not of their posterior; resume=False begins again"
            warn(line, kind="changed data", path=str(path))

    def _shapes(self, number: int) -> dict[str, torch.Size]:
        """Of all that :meth:`save` writes after so many transitions."""
        chains, dim = self.starts.shape
        count = max(0, number - self.warmup) // self.thin
        rows = self.starts.new_empty(chains, count, dim, device="meta")
        kept = dict.fromkeys(RECORDED, rows[..., 0]) | {"position": rows}
        tensors: dict[str, Tensor] = {}
        parts = {
            "state": State(self.starts, self.adapting.step_size, self.starts)._asdict(),
            "adapting": self.adapting.state(),
            "sources": [source.get_state() for source in self.sources],
            "kept": kept if count else {},
        }
        for name, part in parts.items():
            encode_state(part, name, tensors)
        return {name: tensor.shape for name, tensor in tensors.items()}
