"""Markov chains in progress: warm-up, draws, and a file from which a run that was stopped goes on to the same end."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.methods.mcmc.adaptation import Warmup
from flowbnn.methods.mcmc.hamiltonian import Potential, State, Transition, begin
from flowbnn.training import check_writable, is_main_process, load_tensors, save_tensors, track

__all__ = ["Chains", "Kernel", "Trace"]

Kernel = Callable[[State, Tensor, Tensor, Sequence[torch.Generator]], tuple[State, Transition]]
SECONDS_BETWEEN = 30.0
KEPT = ("acceptance", "divergent", "gradients", "depth", "energy")


@dataclass
class Trace:
    """What chains left behind: positions ``[C, S, D]`` and, for each draw ``[C, S]``, its energy and how it was come by."""

    position: Tensor
    energy: Tensor
    acceptance: Tensor
    divergent: Tensor
    gradients: Tensor
    depth: Tensor
    step_size: Tensor
    warmup_gradients: int


class Chains:
    """Several chains beside each other.

    Args:
        potential: energies and gradients of positions.
        kernel: one transition from ``(state, step size, inverse mass, generators)``.
        starts: positions ``[C, D]``.
        sources: a generator for each chain.
        warmup, samples: transitions in which step size and mass are found, and those that are kept, of each chain.
        thin: keep every so many of these.
        target: acceptance that the step size is tuned to.
        path: the file of the run, or None.
        every: write it after so many transitions; None every half minute.
        told: what must be the same when the run is taken up again.
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
        told: Mapping[str, Any] | None = None,
    ) -> None:
        self.potential, self.kernel, self.sources = potential, kernel, list(sources)
        self.warmup, self.samples, self.thin = warmup, samples, thin
        self.path, self.every, self.told = path, every, dict(told or {})
        self.adapting = Warmup(warmup, target, starts)
        self.starts = starts
        self.state: State | None = None
        self.number = self.warmup_gradients = 0
        self.kept: dict[str, list[Tensor]] = {name: [] for name in ("position", *KEPT)}
        self.written = time.monotonic()

    def run(self, resume: bool = False, progress: bool = True, description: str = "sampling") -> Trace:
        """All transitions that are left."""
        if self.path is not None:
            check_writable(self.path)
        if resume and self.path is not None and self.path.exists():
            self.load(self.path)
        with torch.no_grad():
            if self.state is None:
                self.state = begin(self.potential, self.starts)
                self.adapting.restart(self.potential, self.state, self.sources)
            total = self.warmup + self.samples * self.thin
            ahead = range(self.number, total)
            for number in track(ahead, description, progress and is_main_process()):
                before = self.snapshot()
                try:
                    self.advance(number)
                except KeyboardInterrupt:
                    self.save_interrupted(before)
                    raise
                if self.due(number + 1, total):
                    self.save(self.snapshot())
        return self.trace()

    def advance(self, number: int) -> None:
        """One transition of every chain."""
        assert self.state is not None
        adapting = self.adapting
        state, told = self.kernel(self.state, adapting.step_size, adapting.inverse_mass, self.sources)
        if number < self.warmup:
            adapting.update(number, self.potential, state, told.acceptance, self.sources)
            self.warmup_gradients += int(told.gradients.sum())
        elif (number - self.warmup + 1) % self.thin == 0:
            values = {**told._asdict(), "energy": state.energy.cpu(), "position": state.position.cpu()}
            for name, kept in self.kept.items():
                kept.append(values[name])
        self.state, self.number = state, number + 1

    def trace(self) -> Trace:
        found: dict[str, Any] = {name: torch.stack(kept, 1) for name, kept in self.kept.items()}
        return Trace(
            **found, step_size=self.adapting.step_size.clone(), warmup_gradients=self.warmup_gradients
        )

    def due(self, number: int, total: int) -> bool:
        if self.path is None or not is_main_process():
            return False
        if number == total:
            return True
        if self.every is not None:
            return number % self.every == 0
        return time.monotonic() - self.written > SECONDS_BETWEEN

    def snapshot(self) -> dict[str, Any]:
        """The present state; what it holds is never written over, so nothing needs to be copied."""
        assert self.state is not None
        return {
            "number": self.number,
            "warmup_gradients": self.warmup_gradients,
            "state": self.state,
            "adapting": self.adapting.state(),
            "sources": [source.get_state() for source in self.sources],
            "kept": len(self.kept["position"]),
        }

    def save(self, snapshot: dict[str, Any]) -> None:
        assert self.path is not None
        tensors = {f"state.{name}": value for name, value in snapshot["state"]._asdict().items()}
        tensors |= {f"adapting.{name}": value for name, value in snapshot["adapting"].items()}
        tensors["sources"] = torch.stack(snapshot["sources"])
        if snapshot["kept"]:
            for name, kept in self.kept.items():
                tensors[f"kept.{name}"] = torch.stack(kept[: snapshot["kept"]], 1)
        document = {
            "kind": "chains",
            "number": snapshot["number"],
            "warmup_gradients": snapshot["warmup_gradients"],
            "told": self.told,
        }
        save_tensors(self.path, {name: value.clone() for name, value in tensors.items()}, document)
        self.written = time.monotonic()

    def save_interrupted(self, snapshot: dict[str, Any]) -> None:
        if self.path is not None and is_main_process():
            self.save(snapshot)
            print(
                f"flowbnn: interrupted after {snapshot['number']} transitions; the chains are in '{self.path}', resume=True goes on "
                "from there",
                file=sys.stderr,
            )

    def load(self, path: Path) -> None:
        """Take up what the file holds, or say why it does not fit."""
        tensors, document = load_tensors(path)
        if document.get("kind") != "chains" or not isinstance(document.get("told"), dict):
            raise FlowBNNError(f"'{path}' holds no Markov chains")
        for name, value in self.told.items():
            if document["told"].get(name) != value:
                raise FlowBNNError(
                    f"'{path}' was written with {name}={document['told'].get(name)!r} and this run has {value!r}: keep it, or begin "
                    "anew with resume=False"
                )
        try:
            parts = {name: tensors[f"state.{name}"] for name in State._fields}
            if parts["position"].shape != self.starts.shape:
                raise ValueError(f"its chains have the shape {tuple(parts['position'].shape)}")
            device = self.starts.device
            adapting = {name: tensors[f"adapting.{name}"] for name in self.adapting.state()}
            sources = tensors["sources"]
            kept = {
                name: list(tensors[f"kept.{name}"].unbind(1)) if f"kept.{name}" in tensors else []
                for name in self.kept
            }
            number, gradients = int(document["number"]), int(document["warmup_gradients"])
            self.adapting.load(adapting)
            for source, state in zip(self.sources, sources, strict=True):
                source.set_state(state.clone())  # torch reads the memory of a view from its beginning
        except (KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
            raise FlowBNNError(f"'{path}' does not fit this run: {error!r:.150}") from None
        self.state = State(**{name: value.to(device) for name, value in parts.items()})
        self.kept, self.number, self.warmup_gradients = kept, number, gradients
