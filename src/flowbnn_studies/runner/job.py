"""One variant with one seed: where it keeps its state, and whether it is done."""

import json
import shutil
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch.optim.lr_scheduler import CosineAnnealingLR

from flowbnn_studies.runner.store import plain, read_json, write_json

__all__ = ["Job", "cosine"]

POSTERIOR = "posterior.safetensors"


def cosine(optimizer: torch.optim.Optimizer, steps: int) -> CosineAnnealingLR:
    """Learning rates that fall to nought over the run, along a cosine."""
    return CosineAnnealingLR(optimizer, steps)


@dataclass(frozen=True)
class Job:
    """A piece of a study's work, which a worker process can do on its own.

    Args:
        study: name of the study.
        variant, seed: what to train.
        settings: the study's settings.
        folder: of the study's results.
        after: key of the variant whose network this one starts from.
        resume: go on from the checkpoint of a run that was cut.
        accelerator, precision: where and how to compute, as in :class:`~flowbnn.training.TrainingOptions`.
        devices, num_nodes, strategy: on how many devices; the result does not depend on it.
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
    strategy: str = "auto"
    acceleration: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def part(self) -> Path:
        """Where the job's result is stored when it is done."""
        return self.folder / "parts" / f"{self.name}.json"

    @property
    def state(self) -> Path:
        """The folder of its checkpoint and of its trained network."""
        return self.folder / "checkpoints" / self.name

    @property
    def posterior(self) -> Path:
        """Its trained network."""
        return self.state / POSTERIOR

    @property
    def start(self) -> Path:
        """The trained network it starts from."""
        return self.folder / "checkpoints" / f"{self.after}-seed{self.seed}" / POSTERIOR

    def identity(self) -> dict[str, Any]:
        """Everything the result depends on: a stored part or checkpoint is used only if all of it is the same.

        Settings may say what of them a variant depends on, by a method ``relevant(variant)``.
        """
        relevant = getattr(self.settings, "relevant", None)
        return json.loads(
            json.dumps(
                plain(
                    {
                        "study": self.study,
                        "variant": self.variant,
                        "seed": self.seed,
                        "settings": relevant(self.variant) if relevant else asdict(self.settings),
                        "after": self.after,
                        "accelerator": self.accelerator,
                        "precision": self.precision,
                        "flowbnn": version("flowbnn"),
                    }
                )
            )
        )

    def stored(self, network: bool = True, anywhere: bool = False) -> dict[str, Any] | None:
        """The result of an earlier run of this very job, or None.

        Args:
            network: only if its trained network is there too.
            anywhere: whatever the device and the precision it was made with.
        """
        found, own = read_json(self.part), self.identity()
        there = (found or {}).get("identity")
        if anywhere and isinstance(there, dict):
            there = {**there, "accelerator": self.accelerator, "precision": self.precision}
        if found is None or there != own or (network and not self.posterior.exists()):
            return None
        content = found.get("content")
        if not isinstance(content, dict):
            return None
        stored = found["identity"]
        machine = {"device": stored["accelerator"], "torch": "?", "python": "?", **content.get("machine", {})}
        return {
            **content,
            "machine": {
                **machine,
                **{name: stored[name] for name in ("accelerator", "precision", "flowbnn")},
            },
        }

    def content(self, anywhere: bool = False) -> dict[str, Any] | None:
        """What the findings are made of: the stored result, without its network."""
        return self.stored(network=False, anywhere=anywhere)

    def begin(self) -> None:
        """Make the state folder; a checkpoint that another kind of run left there is thrown away."""
        mark = self.state / "identity.json"
        if not self.resume or read_json(mark) != self.identity():
            shutil.rmtree(self.state, ignore_errors=True)
            write_json(mark, self.identity())

    def finish(self, content: dict[str, Any]) -> None:
        """Store the result."""
        write_json(self.part, {"identity": self.identity(), "content": content})

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
            "strategy": self.strategy,
            "acceleration": self.acceleration,
            "progress": False,
            "optimizer": partial(torch.optim.Adam, fused=True) if self.accelerator == "cpu" else None,
        }
