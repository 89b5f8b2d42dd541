"""Options of a training run, its rule for early stopping, and checks of the arguments of the loop."""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from flowbnn.errors import FlowBNNError, nearest, requirement_error
from flowbnn.options import Count, File, Hint, NonNegative, Positive, Seed, options

Accelerator = Literal["auto", "cpu", "cuda", "gpu", "mps"]
MixedPrecision = Literal["32-true", "bf16-mixed", "16-mixed"]  # the weights keep their dtype
Precision = Literal["32-true", "bf16-mixed", "16-mixed", "64-true", "bf16-true", "16-true"]


class Clock(NamedTuple):
    """Position of a training run when a step is taken. Annealing schedules read ``progress``.

    Args:
        epoch: Index of the current epoch.
        step: Number of optimizer steps before this one, over all epochs.
        steps_per_epoch: Length of the loader, or None if it has none.
        epochs: Number of epochs of the run.
        progress: Fraction of the run that is done, in [0, 1]. It grows by whole epochs if the loader has no length. It is a tensor
            if ``recording`` is True.
        recording: True while the step is recorded as a CUDA graph. Nothing may then be decided on the host.
    """

    epoch: int
    step: int
    steps_per_epoch: int | None
    epochs: int
    progress: float | Tensor = 0.0
    recording: bool = False


class Epoch(NamedTuple):
    """Record of an epoch, which every callback of a run gets at its end.

    Args:
        number: Number of epochs that are done, including this one.
        epochs: Largest number of epochs of the run.
        metrics: Values of the epoch by name, as in :class:`History`: ``loss``, ``elbo``, ``kl``, ``validation_nll``, ...
        seconds: Duration of the run so far.
        description: Name of the run, such as ``"member 2 of 5"``.
        model: Network, flow or autoencoder that is trained, in evaluation mode.
    """

    number: int
    epochs: int
    metrics: dict[str, float]
    seconds: float
    description: str
    model: nn.Module


Callback = Callable[[Epoch], Any]


@options
class EarlyStop:
    """Rule that stops a run if a value has not improved for some epochs.

    Args:
        monitor: Name of a recorded value: a log of the objective, or ``validation_...`` for a value of ``validate``.
        patience: Number of epochs without improvement before the run stops.
        mode: ``"min"`` if lower values are better, ``"max"`` if higher values are.
        restore_best: If True, the run ends with the weights of the best epoch instead of the last.
        min_delta: Smallest change that counts as an improvement.

    >>> EarlyStop("elbo", mode="max").improves(-1.0, best=None), EarlyStop().improves(0.5, best=0.5)
    (True, False)
    """

    monitor: str = "validation_nll"
    patience: Count = 5
    mode: Literal["min", "max"] = "min"
    restore_best: bool = True
    min_delta: NonNegative = 0.0

    def read(self, record: Mapping[str, float]) -> float:
        """Returns the monitored value of an epoch."""
        if self.monitor not in record:
            text = f"early stopping monitors {self.monitor!r}, which is not recorded{nearest(self.monitor, record)}"
            raise FlowBNNError(text, kind="monitor", argument="early_stop")
        return record[self.monitor]

    def improves(self, value: float, best: float | None) -> bool:
        """Returns True if ``value`` is better than ``best``. NaN is never better."""
        if math.isnan(value):
            return False
        if best is None:
            return True
        return value < best - self.min_delta if self.mode == "min" else value > best + self.min_delta


@options
class TrainingOptions:
    """Options of :func:`flowbnn.training.train`.

    Args:
        epochs: Number of passes over the loader.
        checkpoint: Checkpoint file (``*.safetensors``), or a folder, in which it is called ``last.safetensors``.
        checkpoint_every: Number of steps between two checkpoints. None saves at the end of every epoch.
        resume: If True, continues from ``checkpoint`` if it exists. The random state and the hyperparameters of the optimizer and the
            schedule, such as the learning rate, are those of the file. A warning lists settings that differ. ``epochs`` may have
            increased, and early stopping may have been dropped or given more patience.
        early_stop: Rule for early stopping, or None.
        callbacks: Functions that are called at the end of every epoch with its :class:`Epoch`, in the first process. A run ends if one
            of them returns True. Random numbers that they draw do not change the run. In fits of several runs, such as those of an
            ensemble, each run calls them. Chains and calibrators without epochs do not.
        clip_gradient: Largest total norm of the gradient, or None.
        schedule_every: Unit of the learning-rate schedule, ``"step"`` or ``"epoch"``.
        accelerator: ``"cpu"``, ``"cuda"`` or ``"mps"``. ``"gpu"`` is either of the last two, ``"auto"`` a GPU if there is one.
        devices: Number of processes on each machine, one for each device. More than one needs torchrun. The batches of the loader are
            the *global* batches, and each process takes its shard, so batch size, learning rate and result are those of one process.
        num_nodes: Number of machines.
        precision: ``"32-true"`` keeps the dtype of the weights. In ``"bf16-mixed"`` layers compute in bfloat16, but weights, noise and
            flows keep their dtype. ``"16-mixed"`` (CUDA only) is the same in float16, with loss scaling. The others cast the weights.
        acceleration: Execution of steps on one CUDA device. ``"graph"`` records forward pass, backward pass and update as a CUDA graph
            and replays it. ``"compile"`` also compiles it with ``torch.compile``, which takes a minute and pays off for long runs. In
            half precision both convert convolutions to channels-last. ``"auto"`` is ``"graph"`` if that is safe (one device, a fused
            optimizer, float32 or bf16, a method of flowbnn), else ``"off"``. A warning is raised if a requested mode is not possible.
        seed: Seed of torch, numpy and ``random`` at the beginning of the run, the same in all processes.
        progress: If True, shows a progress bar on a terminal.
        log: File (``*.csv``) with one row per epoch, or a folder of TensorBoard logs with one point per epoch. A resumed run continues
            them. Otherwise a file is replaced.
        description: Label at the left of the progress bar.

    >>> TrainingOptions(epochs=3, checkpoint="runs/first").checkpoint_path.as_posix()
    'runs/first/last.safetensors'
    """

    epochs: Count = 20
    checkpoint: Annotated[File | None, Hint("such as 'runs/first'")] = None
    checkpoint_every: Count | None = None
    resume: bool = False
    early_stop: Annotated[EarlyStop | None, Hint("such as EarlyStop(patience=5)")] = None
    callbacks: Annotated[Sequence[Callback], Hint("functions of an Epoch")] = ()
    clip_gradient: Positive | None = None
    schedule_every: Literal["step", "epoch"] = "step"
    accelerator: Accelerator = "auto"
    devices: Count | Literal["auto"] = 1
    num_nodes: Count = 1
    precision: Precision = "32-true"
    acceleration: Literal["auto", "off", "graph", "compile"] = "auto"
    seed: Seed | None = None
    progress: bool = True
    log: Annotated[File | None, Hint("such as 'runs/first.csv'")] = None
    description: str = "training"

    def __post_init__(self) -> None:
        dependent = "checkpoint_every" if self.checkpoint_every is not None else "resume"
        if self.checkpoint is None and (self.resume or self.checkpoint_every is not None):
            raise FlowBNNError(f"{dependent} needs a file; set checkpoint='folder'", argument=dependent)

    @property
    def checkpoint_path(self) -> Path | None:
        """Path of the checkpoint file, or None."""
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
    """Raises an error for arguments that :func:`flowbnn.training.train` cannot use.

    Args:
        objective: Module that returns the loss of a batch.
        optimizer: Optimizer of its parameters.
        options: Options of the run.
        schedule: Learning-rate schedule, or None.
        validates: True if the run has a validation.
    """
    rule, parameters = options.early_stop, set(objective.parameters())
    if any(not parameters.issuperset(group["params"]) for group in optimizer.param_groups):
        text = "the optimizer has parameters that are not part of the objective; build it from this objective's parameters"
        raise FlowBNNError(text, argument="optimizer")
    if isinstance(optimizer, LBFGS):
        text = "LBFGS needs a closure, which train does not provide; use Adam or SGD"
        raise FlowBNNError(text, argument="optimizer")
    if isinstance(schedule, ReduceLROnPlateau) and options.schedule_every == "step":
        raise FlowBNNError("ReduceLROnPlateau needs schedule_every='epoch'", argument="schedule_every")
    if rule is not None and not validates and rule.monitor.startswith("validation_"):
        text = f"early stopping monitors {rule.monitor!r}, but there is no validation data; provide it or use EarlyStop('loss')"
        raise FlowBNNError(text, kind="monitor", argument="early_stop")


def length_of(loader: Any) -> int | None:
    """Returns the number of batches per epoch, or None if the loader has no length."""
    try:
        return len(loader)
    except TypeError:
        return None


def check_result(result: Any) -> None:
    """Raises an error if an objective does not return a scalar loss and a dictionary of scalars."""
    loss, logs = result if isinstance(result, tuple) and len(result) == 2 else (None, None)
    problem = ""
    if not isinstance(logs, Mapping):
        problem = "no dictionary"
    elif not isinstance(loss, Tensor) or loss.numel() != 1:
        problem = "no scalar loss"
    elif not loss.requires_grad:
        problem = "a detached loss"
    else:
        for name, value in logs.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                problem = f"{value.numel()} values of {name!r}"
    if problem == "a detached loss" and not torch.is_grad_enabled():
        raise requirement_error("training", "gradients", hint="leave torch.no_grad()")
    if problem:
        text = f"the objective must return a differentiable scalar loss and a dictionary of scalars, got {problem}"
        raise FlowBNNError(text, kind="objective", argument="objective")
