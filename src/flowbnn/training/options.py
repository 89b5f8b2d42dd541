"""What a training run is asked to do: its options, its clock and its rule for stopping early."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from os import PathLike
from pathlib import Path
from typing import Any, Literal

from flowbnn.errors import FlowBNNError, check_whole, nearest, told

__all__ = ["Clock", "EarlyStop", "TrainingOptions"]

PRECISIONS = (
    "32-true",
    "bf16-mixed",
    "16-mixed",
    "bf16-true",
    "16-true",
    "64-true",
    "32",
    "bf16",
    "16",
    "64",
)
ACCELERATIONS = ("auto", "off", "graph", "compile")
STRATEGIES = (
    "auto",
    "ddp",
    "ddp_find_unused_parameters_false",
    "ddp_find_unused_parameters_true",
)


@dataclass(frozen=True)
class Clock:
    """Where a run stands when a step is taken; annealing schedules read :attr:`progress`.

    Args:
        epoch: the present epoch, counted from 0.
        step: optimizer steps taken before this one, over all epochs.
        steps_per_epoch: the loader's length, or None when it has none.
        epochs: epochs of the whole run.

    >>> Clock(epoch=1, step=15, steps_per_epoch=10, epochs=3).progress
    0.5
    """

    epoch: int
    step: int
    steps_per_epoch: int | None
    epochs: int

    @property
    def recording(self) -> bool:
        """Whether the step is recorded for replay, where nothing may be decided on the host."""
        return False

    @property
    def progress(self) -> float:
        """Share of the run that is done, in [0, 1]; by whole epochs when the loader has no length."""
        if self.steps_per_epoch is None:
            return min(1.0, self.epoch / self.epochs)
        return min(1.0, self.step / (self.steps_per_epoch * self.epochs))


@dataclass(frozen=True)
class EarlyStop:
    """Stop when ``monitor`` has not improved by more than ``min_delta`` for ``patience`` epochs.

    Args:
        monitor: a name in the epoch's record, from the step's logs or (as ``validation_...``) from ``validate``.
        patience: epochs without improvement that are borne.
        mode: ``"min"`` when lower is better, ``"max"`` when higher is.
        restore_best: end with the weights of the best epoch instead of the last.
        min_delta: improvements up to this size do not count.

    >>> EarlyStop("elbo", mode="max").improves(-1.0, best=None), EarlyStop().improves(0.5, best=0.5)
    (True, False)
    """

    monitor: str = "validation_nll"
    patience: int = 5
    mode: Literal["min", "max"] = "min"
    restore_best: bool = True
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise FlowBNNError(f"EarlyStop mode must be 'min' or 'max', got {self.mode!r}")
        if not isinstance(self.monitor, str):
            raise FlowBNNError(f"EarlyStop monitor is a name in the epoch's record, got {self.monitor!r}")
        if not isinstance(self.patience, int) or self.patience < 1:
            raise FlowBNNError(f"EarlyStop patience must be at least 1 epoch, got {self.patience!r}")
        if not isinstance(self.min_delta, Real) or not self.min_delta >= 0:
            raise FlowBNNError(f"EarlyStop min_delta must be zero or more, got {self.min_delta!r}")

    def read(self, record: Mapping[str, float]) -> float:
        """The monitored value of one epoch."""
        if self.monitor not in record:
            raise FlowBNNError(
                f"early stopping watches {self.monitor!r}, which no epoch logs{nearest(self.monitor, record)}"
            )
        return record[self.monitor]

    def improves(self, value: float, best: float | None) -> bool:
        """Whether ``value`` beats ``best``; a NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


@dataclass(frozen=True)
class TrainingOptions:
    """How :func:`flowbnn.training.train` runs. Everything has a default that works on a laptop.

    Args:
        epochs: passes over the loader.
        checkpoint: file to write (``*.safetensors``), or a folder, in which it is called ``last.safetensors``.
        checkpoint_every: save every so many steps and at the end; None saves at the end of every epoch.
        resume: continue from ``checkpoint`` if it is there, else begin. The random numbers and the settings of the
            optimizer and the schedule (the learning rate among them) are then those of the file, not those given now, and a
            warning names what differs.
            ``epochs`` may have grown, and early stopping may have been dropped or been given more patience.
        early_stop: an :class:`EarlyStop`, or None.
        clip_gradient: largest total norm of the gradient.
        schedule_every: whether the learning-rate schedule is stepped per ``"step"`` or per ``"epoch"``.
        accelerator, precision: as in Lightning Fabric.
        devices, num_nodes: processes on each machine, one for each device, and machines; torchrun's numbers go before these.
            The loader's batches are the *global* ones, of which each process takes its share: batch size, learning rate and
            result are those of one process.
        strategy: ``"auto"`` or ``"ddp"``, which are the same here; Lightning's names for variants of it are taken too.
        acceleration: how steps on one CUDA device are taken. ``"graph"`` records a step once, forward, backward and update, as a
            CUDA graph and replays it; ``"compile"`` compiles it with ``torch.compile`` first, which takes a minute and pays for
            long runs. In half precision both also lay convolutions out channels-last. ``"auto"`` is ``"graph"`` where that is
            safe (one device, a fused optimizer, float32 or bf16, a method of flowbnn's own), else ``"off"``; asked for by name,
            what cannot be had is warned of.
        seed: seeds torch, numpy and ``random`` when the run begins, alike in all processes.
        progress: a live bar on a terminal; nothing is printed where there is none.
        tensorboard: folder for TensorBoard logs, one point per epoch.
        description: the word at the left of the bar.

    >>> TrainingOptions(epochs=3, checkpoint="runs/first").checkpoint_path.as_posix()
    'runs/first/last.safetensors'
    """

    epochs: int = 20
    checkpoint: str | Path | None = None
    checkpoint_every: int | None = None
    resume: bool = False
    early_stop: EarlyStop | None = None
    clip_gradient: float | None = None
    schedule_every: Literal["step", "epoch"] = "step"
    accelerator: str = "auto"
    devices: int | str = 1
    num_nodes: int = 1
    strategy: str = "auto"
    precision: str = "32-true"
    acceleration: Literal["auto", "off", "graph", "compile"] = "auto"
    seed: int | None = None
    progress: bool = True
    tensorboard: str | Path | None = None
    description: str = "training"

    def __post_init__(self) -> None:
        check_whole("epochs", self.epochs)
        _place("checkpoint", self.checkpoint, "a file or a folder, such as checkpoint='runs/first'")
        _place("tensorboard", self.tensorboard, "a folder, such as tensorboard='logs'")
        if self.early_stop is not None and not isinstance(self.early_stop, EarlyStop):
            wanted = self.early_stop
            patience = (
                wanted if isinstance(wanted, int) and not isinstance(wanted, bool) and wanted > 0 else 5
            )
            raise FlowBNNError(
                f"early_stop must be an EarlyStop, such as EarlyStop(patience={patience}), got {told(wanted)}"
            )
        if self.checkpoint_every is not None:
            check_whole("checkpoint_every", self.checkpoint_every)
            if self.checkpoint is None:
                raise FlowBNNError("checkpoint_every needs a file: give checkpoint='folder' as well")
        if self.resume and self.checkpoint is None:
            raise FlowBNNError("resume=True needs to know the file: give checkpoint='folder' as well")
        norm = self.clip_gradient
        if norm is not None and not (isinstance(norm, Real) and norm > 0):
            raise FlowBNNError(f"clip_gradient must be a positive norm, got {norm!r:.60}")
        if self.schedule_every not in ("step", "epoch"):
            raise FlowBNNError(f"schedule_every must be 'step' or 'epoch', got {self.schedule_every!r}")
        if self.seed is not None and not (isinstance(self.seed, Integral) and 0 <= self.seed < 2**32):
            raise FlowBNNError(f"seed must lie in 0 .. 2**32 - 1, got {self.seed!r:.60}")
        if self.precision not in PRECISIONS:
            raise FlowBNNError(
                f"precision {self.precision!r} is not known; it is one of {', '.join(PRECISIONS)}"
            )
        if self.acceleration not in ACCELERATIONS:
            raise FlowBNNError(
                f"acceleration {self.acceleration!r} is not known; it is one of {', '.join(ACCELERATIONS)}"
            )
        if self.strategy not in STRATEGIES:
            raise FlowBNNError(
                f"strategy {self.strategy!r} is not supported{nearest(str(self.strategy), STRATEGIES)}"
            )

    @property
    def checkpoint_path(self) -> Path | None:
        """The checkpoint's file, or None."""
        if self.checkpoint is None:
            return None
        path = Path(self.checkpoint)
        return path if path.suffix == ".safetensors" else path / "last.safetensors"


def _place(name: str, value: Any, wanted: str) -> None:
    if value is not None and not isinstance(value, str | PathLike):
        raise FlowBNNError(f"{name} must be {wanted}, got {told(value)}")
