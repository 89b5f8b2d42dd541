"""The record of a training run, its progress bar on a terminal, and its TensorBoard logs."""

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowbnn import plots
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import File
from flowbnn.training.options import TrainingOptions, length_of
from flowbnn.training.storage import check_writable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass
class History:
    """Record of a training run, epoch by epoch.

    Each epoch records ``loss``, the objective's logs as means over the examples, ``learning_rate`` (of the first parameter group, at
    the end of the epoch) and the values of ``validate`` as ``validation_...``.

    Args:
        records: Values of each epoch by name.
        steps: Number of optimizer steps.
        seconds: Duration of the run.
        stopped_early: True if early stopping ended the run.
        best_epoch: Index of the best epoch, if early stopping is used.

    >>> history = History([{"loss": 2.0, "kl": 5.0}, {"loss": 1.0, "kl": 4.5}])
    >>> history["kl"], history.epochs, history.last["loss"]
    ([5.0, 4.5], 2, 1.0)
    >>> History.from_dict(history.to_dict()) == history
    True
    """

    records: list[dict[str, float]] = field(default_factory=list)
    steps: int = 0
    seconds: float = 0.0
    stopped_early: bool = False
    best_epoch: int | None = None

    @property
    def epochs(self) -> int:
        """Number of complete epochs."""
        return len(self.records)

    @property
    def names(self) -> list[str]:
        """Names of all recorded values, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record))

    @property
    def last(self) -> dict[str, float]:
        """Record of the last epoch."""
        return self.records[-1] if self.records else {}

    def __getitem__(self, name: str | int) -> Any:
        """Returns one value of all epochs (``history["kl"]``) or all values of one epoch (``history[-1]``)."""
        if isinstance(name, int) and -len(self.records) <= name < len(self.records):
            return self.records[name]
        if name not in self.names:
            hint = nearest(name, self.names) if isinstance(name, str) else f"; there are {self.epochs} epochs"
            raise FlowBNNError(f"the history lacks {name!r}{hint}", kind="name", argument=name)
        return [record.get(str(name), float("nan")) for record in self.records]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.records)

    plot, plot_kl = plots.plot_history, plots.plot_kl

    def to_dict(self) -> dict[str, Any]:
        """Returns plain values that JSON can store."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "History":
        """Returns the history that :meth:`to_dict` stored."""
        return cls(**values)


def terminal() -> "Console | None":
    """Returns rich's console if it is a terminal, else None.

    rich takes 0.2 s to import, so it is imported only if there may be a terminal.
    """
    is_tty = sys.stdout is not None and sys.stdout.isatty()
    if not (is_tty or "FORCE_COLOR" in os.environ or "rich" in sys.modules):
        return None
    state = random.getstate()
    import rich.progress  # draws from Python's random numbers

    random.setstate(state)
    console = rich.get_console()
    return console if console.is_terminal else None


class Display:
    """Progress bar with epoch, ELBO, log-likelihood, KL, last validation, elapsed and remaining time.

    Args:
        options: Options of the training run.
        steps: Number of steps per epoch, or None if unknown.
        console: Console to draw on.
    """

    def __init__(self, options: TrainingOptions, steps: int | None, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        # no refresh thread, which would compete with the computation
        self.bar = Progress(*columns, console=console, auto_refresh=False)
        self.steps, self.next_time = steps, 0.0
        fields: dict[str, Any] = {"epoch": 1, "epochs": options.epochs, "numbers": ""}
        self.task = self.bar.add_task(options.description, total=options.epochs * (steps or 1), **fields)
        self.validation: dict[str, float] = {}

    def __enter__(self) -> "Display":
        from rich.errors import LiveError

        with suppress(LiveError):  # the caller shows its own live display on this console
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def is_due(self) -> bool:
        """Returns True every tenth of a second, because reading the values may wait for the device."""
        return time.monotonic() >= self.next_time

    def update(self, epoch: int, step: int, means: Mapping[str, float], epochs: int) -> None:
        """Shows the means of the epoch and the last validation.

        Args:
            epoch: Index of the current epoch.
            step: Number of steps that are done.
            means: Means of the values logged in this epoch.
            epochs: Number of epochs of the run.
        """
        self.next_time = time.monotonic() + 0.1
        self.validation |= {name: means[name] for name in means if name.startswith("validation_")}
        names = [name for name in ("elbo", "log_likelihood", "kl", "loss") if name in means][:3]
        values = {name: means[name] for name in names} | dict(list(self.validation.items())[:2])
        labels = {"log_likelihood": "log-lik", "kl": "KL", "elbo": "ELBO"}
        numbers = [f"{labels.get(key, key.replace('_', ' '))} {value:.4g}" for key, value in values.items()]
        done, total = (epoch, epochs) if self.steps is None else (step, self.steps * epochs)
        fields: dict[str, Any] = {
            "epoch": min(epoch + 1, epochs),
            "epochs": epochs,
            "numbers": "  ".join(numbers),
        }
        self.bar.update(self.task, completed=done, total=total, **fields)
        self.bar.refresh()


def track(loader: Any, description: str, visible: bool = True) -> Iterator[Any]:
    """Yields the batches of a loader and shows a progress bar on a terminal.

    Args:
        loader: Iterable of batches.
        description: Label at the left of the bar.
        visible: If False, no bar is shown.

    >>> list(track([1, 2], "batches"))
    [1, 2]
    """
    console = terminal() if visible else None
    if console is None:
        yield from loader
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(loader, total=length_of(loader))


def open_tensorboard(folder: File | None, step: int) -> Any:
    """Returns a TensorBoard writer, or None without a folder.

    Args:
        folder: Folder of the logs, or None.
        step: First step of this run. Later steps that a killed run logged are overwritten.
    """
    if folder is None:
        return None
    check_writable(Path(folder) / "events")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter  # pip install flowbnn[tensorboard]
    return SummaryWriter(str(folder), purge_step=step)
