"""Sampler of several Markov chains, with checkpoints from which an interrupted run resumes to the same draws."""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowbnn.batches import first_nonfinite_tensor
from flowbnn.errors import FlowBNNError, warn
from flowbnn.methods.mcmc.hamiltonian import ChainState, Potential, Transition, initial_state
from flowbnn.methods.mcmc.warmup import Warmup
from flowbnn.training import ProgressBar, check_writable, is_main_process
from flowbnn.training.compatibility import check_tensors
from flowbnn.training.storage import TensorFile, decode_state, encode_state, save_state

Kernel = Callable[[ChainState, Tensor, Tensor, Sequence[torch.Generator]], tuple[ChainState, Transition]]


class ChainSampler:
    """Warm-up and sampling of several chains.

    Args:
        potential: Potential of the target.
        kernel: Function from state, step size, inverse mass and generators to the next state and its statistics.
        starts: Initial positions ``[C, D]``.
        generators: Generator of each chain.
        warmup: Number of transitions of the warm-up.
        samples: Number of draws of each chain.
        thin: Number of transitions per draw.
        target: Target of the mean acceptance probability.
        path: Checkpoint file, or None.
        checkpoint_every: Number of transitions between checkpoints. None writes one every 30 seconds.
        settings: Plain values that a resumed run must share.

    >>> from functools import partial
    >>> from flowbnn.methods.mcmc.hamiltonian import make_potential, nuts_kernel
    >>> potential = make_potential(lambda q: 0.5 * q.square().sum(-1))
    >>> generators = [torch.Generator().manual_seed(chain) for chain in range(2)]
    >>> sampler = ChainSampler(potential, partial(nuts_kernel, potential), torch.zeros(2, 3), generators, warmup=20, samples=5)
    >>> sampler.run(progress=False)["position"].shape
    torch.Size([2, 5, 3])
    """

    record_names = ("position", "energy", *Transition._fields)

    def __init__(
        self,
        potential: Potential,
        kernel: Kernel,
        starts: Tensor,
        generators: Sequence[torch.Generator],
        *,
        warmup: int,
        samples: int,
        thin: int = 1,
        target: float = 0.8,
        path: Path | None = None,
        checkpoint_every: int | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        self.potential, self.kernel, self.generators = potential, kernel, list(generators)
        self.num_warmup, self.samples, self.thin = warmup, samples, thin
        self.warmup_start = 0  # transition at which the last warm-up begins
        self.first_draw = warmup  # transition at which the draws begin
        self.path, self.checkpoint_every, self.settings = path, checkpoint_every, dict(settings or {})
        self.warmup = Warmup(potential, self.generators, starts, warmup, target)
        self.starts = starts
        self.state: ChainState | None = None
        self.number = 0
        self.draws: dict[str, list[Tensor]] = {name: [] for name in self.record_names}
        self.last_save = time.monotonic()

    def run(
        self, resume: bool = False, progress: bool = True, description: str = "sampling"
    ) -> dict[str, Tensor]:
        """Runs all remaining transitions.

        Args:
            resume: If True, continues from the checkpoint file, if it exists.
            progress: If True, shows a progress bar.
            description: Label of the progress bar.

        Returns:
            ``position`` ``[C, S, D]``; ``energy`` and the fields of :class:`Transition` ``[C, S]``; ``step_size`` ``[C]``.
        """
        if self.path is not None:
            check_writable(self.path)
            if resume and self.path.exists():
                self.load(self.path)
        total = self.first_draw + self.samples * self.thin
        with torch.no_grad():
            if self.state is None:
                self.state = initial_state(self.potential, self.starts)
                self.warmup.restart(self.state)
            previous = self.snapshot()
            try:
                visible = progress and is_main_process()
                with ProgressBar(description, total, start=self.number, visible=visible) as bar:
                    for number in range(self.number, total):
                        previous = self.snapshot()
                        transition = self.advance(number)
                        if self.number == total or self.is_save_due():
                            self.save(self.snapshot())
                        if bar.is_due():
                            bar.update(self.number, values=self._describe(transition))
            finally:
                if self.number < total and self.save(previous):
                    message = f"stopped after {previous['number']} transitions, saved in '{self.path}'; continue with resume=True"
                    print(f"flowbnn: {message}", file=sys.stderr)
        record = {name: torch.stack(draws, 1) for name, draws in self.draws.items()}
        return {**record, "step_size": self.warmup.step_size.clone()}

    def extend(self) -> None:
        """Begins as many draws again, with twice as many transitions per draw. The draws so far become part of the warm-up.

        If the mean acceptance probability of a chain is below half of the target, another warm-up adapts step size and mass first. This
        happens if chains reach narrower regions after the first warm-up.
        """
        assert self.state is not None
        acceptance = torch.stack(self.draws["acceptance"]).mean(0)
        self.first_draw, self.thin = self.number, 2 * self.thin
        self.draws = {name: [] for name in self.record_names}
        if float(acceptance.min()) < 0.5 * self.warmup.target:
            self.warmup_start, self.first_draw = self.number, self.number + self.num_warmup
            with torch.no_grad():
                self.warmup.restart(self.state)

    def _describe(self, transition: Transition) -> list[str]:
        """Returns the stage of the chains, the acceptance probability of their last transition, and the step size."""
        stage = "warm-up" if self.number <= self.warmup_start + self.num_warmup else "draws"
        acceptance, step_size = float(transition.acceptance.mean()), float(self.warmup.step_size.mean())
        return [stage, f"acceptance {acceptance:.2f}", f"step size {step_size:.2g}"]

    def advance(self, number: int) -> Transition:
        """Takes one transition of every chain, and returns it."""
        assert self.state is not None
        warmup = self.warmup
        state, transition = self.kernel(self.state, warmup.step_size, warmup.inverse_mass, self.generators)
        if number < self.warmup_start + self.num_warmup:
            warmup.update(number - self.warmup_start, state, transition.acceptance)
        elif (number - self.first_draw + 1) % self.thin == 0:
            values = {"position": state.position.cpu(), "energy": state.energy.cpu(), **transition._asdict()}
            for name, draws in self.draws.items():
                draws.append(values[name])
        self.state, self.number = state, number + 1
        return transition

    def is_save_due(self) -> bool:
        """Returns True if it is time to write the checkpoint."""
        if self.checkpoint_every is not None:
            return self.number % self.checkpoint_every == 0
        return time.monotonic() - self.last_save > 30.0

    def snapshot(self) -> dict[str, Any]:
        """Returns the current state without copies, because its tensors are never modified in place."""
        assert self.state is not None
        return {
            "number": self.number,
            "warmup_start": self.warmup_start,
            "first_draw": self.first_draw,
            "thin": self.thin,
            "state": self.state._asdict(),
            "warmup": self.warmup.state(),
            "generators": [generator.get_state() for generator in self.generators],
        }

    def save(self, snapshot: dict[str, Any]) -> bool:
        """Writes the checkpoint of a snapshot with its draws. Returns False if there is no file to write."""
        if self.path is None or not is_main_process():
            return False
        count = max(0, snapshot["number"] - snapshot["first_draw"]) // snapshot["thin"]
        draws = {name: torch.stack(values[:count], 1) for name, values in self.draws.items() if count}
        save_state(self.path, {**snapshot, "draws": draws, "settings": self.settings})
        self.last_save = time.monotonic()
        return True

    def load(self, path: Path) -> None:
        """Continues from a checkpoint of a run with the same settings; warns if its energies differ under the current data.

        Raises:
            FlowBNNError: If the settings or the shapes in the file differ.
        """
        file = TensorFile(path, self.starts.shape[1])
        self._check_file(path, file)
        with file.reading():
            saved = decode_state(file.document, file.tensors)
        for name in ("number", "warmup_start", "first_draw", "thin"):
            setattr(self, name, saved[name])
        self.state = ChainState(
            **{name: value.to(self.starts.device) for name, value in saved["state"].items()}
        )
        self.warmup.load(saved["warmup"])
        for generator, state in zip(self.generators, saved["generators"], strict=True):
            generator.set_state(state)
        self.draws |= {name: list(draws.unbind(1)) for name, draws in saved["draws"].items()}
        with torch.no_grad():
            state = initial_state(self.potential, self.state.position)
        if not torch.allclose(state.energy, self.state.energy, rtol=1e-4, atol=1e-3):
            self.state = state
            text = f"'{path}' was written with different data; its draws are kept, use resume=False to discard them"
            warn(text, kind="changed data", path=str(path))

    def _check_file(self, path: Path, file: TensorFile) -> None:
        """Raises FlowBNNError if the settings or the shapes in a checkpoint differ from those of this run."""
        settings = file.document.get("settings") or {}
        changed = next((name for name in self.settings if settings.get(name) != self.settings[name]), None)
        if changed is not None:
            stored = settings.get(changed)
            text = f"'{path}' has {changed}={stored!r}, not {self.settings[changed]!r}; use the same value, or resume=False"
            raise FlowBNNError(text, kind="resume", argument=changed)
        number, first, thin = (file.document.get(name, 0) for name in ("number", "first_draw", "thin"))
        expected = self._expected_tensors(max(0, number - first) // max(1, thin))
        for name, view in file.views.items():
            is_record = name in expected and name.removeprefix("draws/") in self.record_names
            if is_record and view.dtype in (torch.bool, torch.int64, torch.float32, torch.float64):
                expected[name] = expected[name].to(view.dtype)
        check_tensors(expected, file.views, path, owner="these chains")  # before any tensor is read
        numbers = {name: value for name, value in file.tensors.items() if value.is_floating_point()}
        bad = first_nonfinite_tensor(iter(numbers.items()))
        if bad:
            raise FlowBNNError(f"'{path}' is damaged: '{bad}' is not finite", kind="file")

    def _expected_tensors(self, count: int) -> dict[str, Tensor]:
        """Returns tensors like those of a checkpoint with this number of draws of each chain, without their values."""
        num_chains, dim = self.starts.shape
        positions = self.starts.new_empty(num_chains, count, dim, device="meta")
        draws = dict.fromkeys(self.record_names, positions[..., 0]) | {"position": positions}
        tensors: dict[str, Tensor] = {}
        contents = {
            "state": ChainState(self.starts, self.warmup.step_size, self.starts)._asdict(),
            "warmup": self.warmup.state(),
            "generators": [generator.get_state() for generator in self.generators],
            "draws": draws if count else {},
        }
        for name, values in contents.items():
            encode_state(values, name, tensors)
        return tensors
