"""What a training run is asked to do: its options, its clock, its rule for early stopping, and what cannot work."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, ReduceLROnPlateau

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import Count, File, Hint, NonNegative, Positive, Seed, UnitInterval, checked, options

Accelerator = Literal["auto", "cpu", "cuda", "gpu", "mps"]
MixedPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]  # with the weights as they are
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true"]


class Clock(NamedTuple):
    """Where a run stands when a step is taken; annealing schedules read ``progress``.

    Args:
        epoch: the present epoch, counted from 0.
        step: optimizer steps taken before this one, over all epochs.
        steps_per_epoch: the loader's length, or None when it has none.
        epochs: epochs of the whole run.
        progress: share of the run that is done, in [0, 1], by whole epochs when the loader has no length; a tensor where ``recording``.
        recording: whether the step is being recorded as a CUDA graph, where nothing may be decided on the host.
    """

    epoch: int
    step: int
    steps_per_epoch: int | None
    epochs: int
    progress: float | Tensor = 0.0
    recording: bool = False


@options
class EarlyStop:
    """Stop when ``monitor`` has not improved by more than ``min_delta`` for ``patience`` epochs.

    Args:
        monitor: a name in the epoch's record, from the objective's logs or (as ``validation_...``) from ``validate``.
        patience: epochs without improvement before the run stops.
        mode: ``"min"`` when lower is better, ``"max"`` when higher is.
        restore_best: end with the weights of the best epoch instead of the last.
        min_delta: improvements up to this size do not count.

    >>> EarlyStop("elbo", mode="max").improves(-1.0, best=None), EarlyStop().improves(0.5, best=0.5)
    (True, False)
    """

    monitor: str = "validation_nll"
    patience: Count = 5
    mode: Literal["min", "max"] = "min"
    restore_best: bool = True
    min_delta: NonNegative = 0.0

    def read(self, record: Mapping[str, float]) -> float:
        """The monitored value of one epoch."""
        if self.monitor not in record:
            raise FlowBNNError(
                f"early stopping monitors {self.monitor!r}, which no epoch logs{nearest(self.monitor, record)}",
                kind="monitor",
                argument="early_stop",
            )
        return record[self.monitor]

    def improves(self, value: float, best: float | None) -> bool:
        """Whether ``value`` beats ``best``; a NaN never does."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


@options
class TrainingOptions:
    """How :func:`flowbnn.training.train` runs. Everything has a default that works on a laptop.

    Args:
        epochs: passes over the loader.
        checkpoint: file to write (``*.safetensors``), or a folder, in which it is called ``last.safetensors``.
        checkpoint_every: save every so many steps and at the end; None saves at the end of every epoch.
        resume: continue from ``checkpoint`` if it exists, else begin. The random numbers and the settings of the optimizer and the
            schedule (the learning rate among them) are then those of the file, and a warning lists what differs from those given.
            ``epochs`` may have grown, and early stopping may have been dropped or been given more patience.
        early_stop: an :class:`EarlyStop`, or None.
        clip_gradient: largest total norm of the gradient.
        schedule_every: whether the learning-rate schedule is stepped per ``"step"`` or per ``"epoch"``.
        accelerator: ``"cpu"``, ``"cuda"``, ``"mps"``; ``"gpu"`` is either of the last two, ``"auto"`` a GPU where there is one.
        devices, num_nodes: processes on each machine, one for each device, and machines. Under torchrun they are what it started.
            The loader's batches are the *global* ones, of which each process takes its share: batch size, learning rate and
            result are those of one process.
        precision: ``"32-true"`` leaves the weights as they are; in ``"bf16-mixed"`` layers compute in bfloat16 while weights, noise and
            flows stay as they are, in ``"16-mixed"`` (CUDA only) in float16, with loss scaling; the other ones cast the weights.
        acceleration: how steps on one CUDA device are taken. ``"graph"`` records a step once, forward, backward and update, as a
            CUDA graph and replays it; ``"compile"`` compiles it with ``torch.compile`` first, which takes a minute and pays for
            long runs. In half precision both also lay convolutions out channels-last. ``"auto"`` is ``"graph"`` where that is
            safe (one device, a fused optimizer, float32 or bf16, a method of flowbnn's own), else ``"off"``; what was asked for by name
            and is not possible is warned of.
        seed: seeds torch, numpy and ``random`` when the run begins, alike in all processes.
        progress: a live bar on a terminal; nothing is printed where there is none.
        tensorboard: folder for TensorBoard logs, one point per epoch.
        description: the word at the left of the bar.

    >>> TrainingOptions(epochs=3, checkpoint="runs/first").checkpoint_path.as_posix()
    'runs/first/last.safetensors'
    """

    epochs: Count = 20
    checkpoint: Annotated[File | None, Hint("a file or a folder, such as 'runs/first'")] = None
    checkpoint_every: Count | None = None
    resume: bool = False
    early_stop: Annotated[EarlyStop | None, Hint("such as EarlyStop(patience=5)")] = None
    clip_gradient: Positive | None = None
    schedule_every: Literal["step", "epoch"] = "step"
    accelerator: Accelerator = "auto"
    devices: Count | Literal["auto"] = 1
    num_nodes: Count = 1
    precision: Precision = "32-true"
    acceleration: Literal["auto", "off", "graph", "compile"] = "auto"
    seed: Seed | None = None
    progress: bool = True
    tensorboard: Annotated[File | None, Hint("a folder, such as 'logs'")] = None
    description: str = "training"

    def __post_init__(self) -> None:
        needed = "checkpoint_every" if self.checkpoint_every is not None else "resume" if self.resume else ""
        if needed and self.checkpoint is None:
            raise FlowBNNError(f"{needed} needs a file: give checkpoint='folder' as well", argument=needed)

    @property
    def checkpoint_path(self) -> Path | None:
        """The checkpoint's file, or None."""
        if self.checkpoint is None:
            return None
        path = Path(self.checkpoint)
        return path if path.suffix == ".safetensors" else path / "last.safetensors"


def check_arguments(
    objective: nn.Module,
    optimizer: Optimizer,
    options: TrainingOptions,
    schedule: LRScheduler | None,
    validates: bool,
) -> None:
    """Refuse what :func:`flowbnn.training.train` cannot do before anything begins."""
    rule, own = options.early_stop, set(objective.parameters())
    trouble = ""
    if any(not own.issuperset(group["params"]) for group in optimizer.param_groups):
        trouble = "the optimizer has parameters that are not part of the objective: build it from this objective's parameters"
    elif isinstance(optimizer, LBFGS):
        trouble = "LBFGS needs a closure, which this loop does not give; use Adam or SGD"
    elif isinstance(schedule, ReduceLROnPlateau) and options.schedule_every == "step":
        trouble = "ReduceLROnPlateau goes by whole epochs: set schedule_every='epoch'"
    elif rule is not None and not validates and rule.monitor.startswith("validation_"):
        trouble = (
            f"early stopping monitors {rule.monitor!r}, but this run has no validation: give it validation data, or monitor one of "
            "the training's own numbers, such as EarlyStop('loss')"
        )
    if trouble:
        raise FlowBNNError(trouble, kind="call")


def length_of(loader: Any) -> int | None:
    """Batches per epoch, where the loader knows."""
    try:
        return len(loader)
    except TypeError:
        return None


def check_result(result: Any) -> None:
    """Refuse an objective that does not return a loss and logs."""
    loss, logs = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    trouble = ""
    if not isinstance(logs, Mapping):
        trouble = "must return two things: the loss and a dictionary of logs"
    elif not isinstance(loss, Tensor) or loss.numel() != 1:
        trouble = "must return a loss that is a tensor of one number"
    elif not loss.requires_grad:
        trouble = "gives a loss that depends on no trainable parameter; is the whole model frozen?"
    else:
        for name, value in logs.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                trouble = f"logs {name!r} with {value.numel()} values; log one number"
    if trouble:
        raise FlowBNNError(f"the objective {trouble}", kind="call", argument="objective")


@checked
def cosine(optimizer: Optimizer, steps: Count, rise: UnitInterval = 0.0) -> LRScheduler:
    """Rates that fall from full to zero along half a cosine, after growing along a line over the first share ``rise`` of the steps.

    >>> import torch
    >>> engine = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    >>> schedule, rates = cosine(engine, steps=4, rise=0.5), []
    >>> for _ in range(5):
    ...     rates.append(round(schedule.get_last_lr()[0], 2))
    ...     engine.step()
    ...     schedule.step()
    >>> rates
    [0.5, 0.85, 0.5, 0.15, 0.0]
    """
    first = max(1.0, rise * steps)

    def rate(step: int) -> float:
        return min(1.0, (step + 1) / first) * (0.5 + 0.5 * math.cos(math.pi * min(1.0, step / steps)))

    return LambdaLR(optimizer, rate)
