"""What a run shows while it goes: a bar on a terminal, and TensorBoard logs where they are asked for."""

import random
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn.options import File
from flowbnn.training.options import TrainingOptions
from flowbnn.training.storage import check_writable

# rich draws from Python's random numbers when it is imported; importing flowbnn changes nothing
_state = random.getstate()

from rich import get_console  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.errors import LiveError  # noqa: E402
from rich.progress import (  # noqa: E402
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

random.setstate(_state)

__all__ = ["Display", "open_tensorboard", "track"]

SHORT = {"log_likelihood": "log-lik", "kl": "KL", "elbo": "ELBO"}
FIRST = ("elbo", "log_likelihood", "kl", "loss")
SECONDS_BETWEEN = 0.1


class Display:
    """A live line: epoch, ELBO, log-likelihood, KL, the last validation, time gone and time to go.

    Silent unless ``shown`` and the console is a terminal.
    """

    def __init__(
        self, options: TrainingOptions, shown: bool, steps: int | None, console: Console | None = None
    ):
        console = console or get_console()
        self.bar: Progress | None = None
        self.task = TaskID(0)
        self.epochs = options.epochs
        self.steps = steps
        self.watched = options.early_stop.monitor if options.early_stop else None
        self.validation: dict[str, float] = {}
        self.next_time = 0.0
        if shown and options.progress and console.is_terminal:
            columns = (
                TextColumn("{task.description}"),
                TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
                BarColumn(bar_width=20),
                TextColumn("{task.fields[numbers]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            # refreshed by hand: a refreshing thread would compete with the computation
            self.bar = Progress(*columns, console=console, auto_refresh=False)
            total = float(options.epochs * (steps or 1))
            self.task = self.bar.add_task(
                options.description, total=total, epoch=1, epochs=options.epochs, numbers=""
            )

    def __enter__(self) -> "Display":
        if self.bar is not None:
            try:
                self.bar.start()
            except LiveError:  # the caller shows a live display of its own on this console
                self.bar = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bar is not None:
            self.bar.refresh()
            self.bar.stop()

    def due(self) -> bool:
        """Whether it is time to show new numbers; reading them may wait for the device, so not at every step."""
        return self.bar is not None and time.monotonic() >= self.next_time

    def update(self, epoch: int, step: int, means: Mapping[str, float]) -> None:
        """Show the epoch's means so far."""
        if self.bar is None:
            return
        self.next_time = time.monotonic() + SECONDS_BETWEEN
        done = float(step if self.steps is not None else epoch)
        self.bar.update(
            self.task,
            completed=done,
            epoch=min(epoch + 1, self.epochs),
            numbers=self.numbers(means),
        )
        self.bar.refresh()

    def numbers(self, means: Mapping[str, float]) -> str:
        """The few numbers worth a line."""
        shown = [name for name in FIRST if name in means]
        shown = [name for name in shown if name != "loss" or len(shown) == 1]
        if self.watched is not None and self.watched in means and self.watched not in shown:
            shown.append(self.watched)
        values = {name: means[name] for name in shown} | dict(list(self.validation.items())[:2])
        return "  ".join(
            f"{SHORT.get(name, name.replace('_', ' '))} {value:.4g}" for name, value in values.items()
        )

    def validated(self, record: Mapping[str, float]) -> None:
        """Remember the validation numbers of an epoch that ended."""
        names = [name for name in record if name.startswith("validation_")]
        names.sort(key=lambda name: name != self.watched)
        self.validation = {name: record[name] for name in names}


def track(loader: Any, description: str, shown: bool = True) -> Iterator[Any]:
    """The loader's batches, with a bar on a terminal."""
    console = get_console()
    if not shown or not console.is_terminal:
        yield from loader
        return
    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(loader, total=len(loader) if hasattr(loader, "__len__") else None)


def open_tensorboard(folder: File | None, step: int) -> Any:
    """A TensorBoard writer that overwrites what a killed run logged past ``step``; None when no folder is named."""
    if folder is None:
        return None
    check_writable(Path(folder) / "events")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise FlowBNNError(
            "tensorboard logs were asked for but tensorboard is not there: pip install flowbnn[tensorboard]"
        ) from None
    return SummaryWriter(str(folder), purge_step=step)
