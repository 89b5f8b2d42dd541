"""One variant with one seed: what it depends on, where it keeps its state, and how it is done."""

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from flowbnn.convert import to_stochastic
from flowbnn.methods import MLE, PointPosterior, Posterior, fit
from flowbnn.noise import Recipe
from flowbnn.results import plain, read_json, write_json

POSTERIOR = "posterior.safetensors"
GPUS = ("cuda", "gpu")
Made = TypeVar("Made")


def timed(work: Callable[..., Made], *given: Any, **options: Any) -> tuple[Made, float]:
    """What a function gives, and the seconds that it took; a GPU has done what was before it, and what it asked for."""

    def now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    started = now()
    made = work(*given, **options)
    return made, now() - started


@dataclass(frozen=True)
class Job:
    """A piece of a study's work, which a worker process can do on its own.

    Args:
        study: name of the study.
        variant, seed: what to train.
        settings: the study's settings.
        folder: of the study's results.
        after: key of the variant whose network this one starts from.
        resume: go on from the checkpoint of a run that was interrupted.
        accelerator, precision: where and how to compute, as in :class:`~flowbnn.training.TrainingOptions`.
        devices, num_nodes: on how many devices; the result does not depend on it.
        acceleration: how steps are taken on a GPU, which changes their time.
    """

    study: str
    variant: str
    seed: int
    settings: Any
    folder: Path
    after: str | None = None
    resume: bool = False
    accelerator: str = "cpu"
    precision: str = "32-true"
    devices: int | str = 1
    num_nodes: int = 1
    acceleration: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def device(self) -> str:
        """Where it computes, as torch calls it."""
        return "cuda" if self.accelerator in GPUS else self.accelerator

    @property
    def part(self) -> Path:
        """Where the job's result is stored when it is done."""
        return self.folder / "parts" / f"{self.name}.json"

    @property
    def state(self) -> Path:
        """The folder of its checkpoint and of its trained network."""
        return self.folder / "checkpoints" / self.name

    @property
    def mark(self) -> Path:
        """What the state in that folder belongs to."""
        return self.state / "identity.json"

    @property
    def posterior(self) -> Path:
        """Its trained network."""
        return self.state / POSTERIOR

    @property
    def start(self) -> Path:
        """The trained network it starts from."""
        return self.folder / "checkpoints" / f"{self.after}-seed{self.seed}" / POSTERIOR

    def load_start(self, network: nn.Module) -> nn.Module:
        """The network it starts from, in the architecture of ``network``."""
        return PointPosterior.load(self.start, network).model

    def fit(
        self,
        network: nn.Module,
        loader: Any,
        rules: Mapping[Any, Recipe | None] | None = None,
        *,
        epochs: int,
        weight_lr: float,
        noise_lr: float = 0.0,
        schedule: Any = None,
    ) -> Any:
        """Train a network, by maximum likelihood or with noise where there are rules, and save it for those that start from it."""
        options = {**self.options(epochs, len(loader)), "schedule": schedule}
        posterior: Posterior
        if rules:
            noisy = to_stochastic(network, rules)
            posterior = fit(noisy, loader, weight_lr=weight_lr, noise_lr=noise_lr, **options)
        else:
            own = {name: options.pop(name) for name in ("epochs", "schedule")}
            posterior = MLE(lr=weight_lr, **own).fit(network, loader, **options)
        posterior.save(self.posterior)
        return posterior

    def identity(self) -> dict[str, Any]:
        """Everything the result depends on: a stored part or checkpoint is used only if all of it is the same.

        Settings may say which of them a variant depends on, by a method ``relevant(variant)``.
        """
        relevant = getattr(self.settings, "relevant", None)
        names = ("study", "variant", "seed", "after", "accelerator", "precision")
        settings = relevant(self.variant) if relevant else asdict(self.settings)
        own = {name: getattr(self, name) for name in names}
        return plain({**own, "settings": settings, "flowbnn": version("flowbnn")})

    def stored(self, network: bool = False, anywhere: bool = False) -> dict[str, Any] | None:
        """The result of an earlier run of this very job, or None.

        Args:
            network: only if its trained network is there too.
            anywhere: whatever the device and the precision it was made with.
        """
        part = read_json(self.part) or {}
        identity, content = part.get("identity"), part.get("content")
        if not isinstance(identity, dict) or not isinstance(content, dict):
            return None
        free = {"accelerator": self.accelerator, "precision": self.precision} if anywhere else {}
        if {**identity, **free} != self.identity() or (network and not self.posterior.exists()):
            return None
        made = {name: identity[name] for name in ("accelerator", "precision", "flowbnn")}
        return {**content, "machine": {**content["machine"], **made}}

    def begin(self) -> None:
        """Make the state folder; a checkpoint that another kind of run left there is deleted."""
        if not self.resume or read_json(self.mark) != self.identity():
            shutil.rmtree(self.state, ignore_errors=True)
            write_json(self.mark, self.identity())

    def options(self, epochs: int, steps_per_epoch: int) -> dict[str, Any]:
        """Options for the fit functions; about ten checkpoints in a run, since each waits for the disk."""
        return {
            "epochs": epochs,
            "checkpoint": self.state,
            "checkpoint_every": max(1, epochs // 10) * steps_per_epoch,
            "resume": self.resume,
            "seed": 1 + self.seed,
            "accelerator": self.accelerator,
            "precision": self.precision,
            "devices": self.devices,
            "num_nodes": self.num_nodes,
            "acceleration": self.acceleration,
            "progress": False,
        }

    def brief(self, **more: Any) -> dict[str, Any]:
        """Options of a training of seconds, which needs no checkpoints."""
        names = ("seed", "accelerator", "precision", "acceleration", "progress")
        known = self.options(1, 1)
        return {name: known[name] for name in names} | more
