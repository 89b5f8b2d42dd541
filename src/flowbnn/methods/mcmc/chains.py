"""Markov chains in progress: warm-up, draws, and a file from which an interrupted run resumes to the same draws."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.methods.mcmc.adaptation import Warmup
from flowbnn.methods.mcmc.hamiltonian import Potential, State, Transition, begin
from flowbnn.training import check_writable, is_main_process, load_tensors, save_tensors, track

__all__ = ["Chains", "Kernel"]

Kernel = Callable[[State, Tensor, Tensor, Sequence[torch.Generator]], tuple[State, Transition]]
SECONDS_BETWEEN = 30.0
RECORDED = ("position", "energy", *Transition._fields)


class Chains:
    """Several chains beside each other.

    Args:
        potential: energies and gradients of positions.
        kernel: one transition from ``(state, step size, inverse mass, generators)``.
        starts: positions ``[C, D]``.
        sources: a generator for each chain.
        warmup, samples: transitions that tune step size and mass, and draws that are kept, of each chain.
        thin: keep every so many transitions.
        target: acceptance that the step size is tuned to.
        path: the file of the run, or None.
        every: write it after so many transitions; None every half minute.
        settings: plain values that must be the same when the run is resumed.
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
        self.adapting = Warmup(warmup, target, starts)
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
        with torch.no_grad():
            if self.state is None:
                self.state = begin(self.potential, self.starts)
                self.adapting.restart(self.potential, self.state, self.sources)
            total = self.warmup + self.samples * self.thin
            for number in track(range(self.number, total), description, progress and is_main_process()):
                before = self.snapshot()
                try:
                    self.advance(number)
                except KeyboardInterrupt:
                    if self.path is not None:
                        self.save(before)
                        line = f"flowbnn: interrupted after {number} transitions, saved in '{self.path}'; continue with resume=True"
                        print(line, file=sys.stderr)
                    raise
                if self.path is not None and (self.number == total or self.due()):
                    self.save(self.snapshot())
        record = {name: torch.stack(kept, 1) for name, kept in self.kept.items()}
        return {**record, "step_size": self.adapting.step_size.clone()}

    def advance(self, number: int) -> None:
        """One transition of every chain."""
        assert self.state is not None
        adapting = self.adapting
        state, transition = self.kernel(self.state, adapting.step_size, adapting.inverse_mass, self.sources)
        if number < self.warmup:
            adapting.update(number, self.potential, state, transition.acceptance, self.sources)
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
        tensors = {f"state.{name}": value for name, value in self.state._asdict().items()}
        tensors |= {f"adapting.{name}": value for name, value in self.adapting.state().items()}
        tensors["sources"] = torch.stack([source.get_state() for source in self.sources])
        return {"tensors": tensors, "number": self.number, "kept": len(self.kept["position"])}

    def save(self, snapshot: dict[str, Any]) -> None:
        if not is_main_process():
            return
        assert self.path is not None
        tensors = {name: value.clone() for name, value in snapshot["tensors"].items()}
        if snapshot["kept"]:
            kept = {name: draws[: snapshot["kept"]] for name, draws in self.kept.items()}
            tensors |= {f"kept.{name}": torch.stack(draws, 1) for name, draws in kept.items()}
        save_tensors(self.path, tensors, {"number": snapshot["number"], "settings": self.settings})
        self.written = time.monotonic()

    def load(self, path: Path) -> None:
        """Continue from the file of a run with the same settings."""
        tensors, document = load_tensors(path)
        saved = document.get("settings", {})
        for name, value in self.settings.items():
            if saved.get(name) != value:
                raise FlowBNNError(
                    f"'{path}' was written with {name}={saved.get(name)!r} and this run has {value!r}: keep it, or start again "
                    "with resume=False",
                    kind="resume",
                    argument=name,
                )
        device = self.starts.device
        self.state = State(*(tensors[f"state.{name}"].to(device) for name in State._fields))
        self.adapting.load({name: tensors[f"adapting.{name}"] for name in self.adapting.state()})
        for source, state in zip(self.sources, tensors["sources"], strict=True):
            source.set_state(state.clone())  # torch reads the memory of a view from its beginning
        if "kept.position" in tensors:
            self.kept = {name: list(tensors[f"kept.{name}"].unbind(1)) for name in RECORDED}
        self.number = int(document["number"])
