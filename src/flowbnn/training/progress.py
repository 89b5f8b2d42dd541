"""What a run shows while it goes: a bar on a terminal, and TensorBoard logs where they are asked for."""

import os
import random
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowbnn.errors import FlowBNNError
from flowbnn.options import File
from flowbnn.training.options import TrainingOptions
from flowbnn.training.storage import check_writable

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Display", "open_tensorboard", "terminal", "track"]

SHORT = {"log_likelihood": "log-lik", "kl": "KL", "elbo": "ELBO"}
FIRST = ("elbo", "log_likelihood", "kl", "loss")
SECONDS_BETWEEN = 0.1


def terminal() -> "Console | None":
    """rich's console where that is a terminal, else None; rich, which takes 0.2 s to import, is not imported without need."""
    on_screen = sys.stdout is not None and sys.stdout.isatty()
    if not (on_screen or "FORCE_COLOR" in os.environ or "rich" in sys.modules):
        return None
    state = random.getstate()
    import rich.progress  # which draws from Python's random numbers

    random.setstate(state)
    console = rich.get_console()
    return console if console.is_terminal else None


class Display:
    """A live line: epoch, ELBO, log-likelihood, KL, the last validation, time gone and time to go; nothing without a console.

    Args:
        options: of the run.
        steps: per epoch, where that is known.
        console: where to draw; None shows nothing.
    """

    def __init__(self, options: TrainingOptions, steps: int | None, console: "Console | None") -> None:
        self.bar: Any = None
        self.epochs, self.steps = options.epochs, steps
        self.watched = options.early_stop.monitor if options.early_stop else None
        self.validation: dict[str, float] = {}
        self.next_time = 0.0
        if console is None:
            return
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        columns = (
            TextColumn("{task.description}"),
            TextColumn("epoch {task.fields[epoch]}/{task.fields[epochs]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        # without rich's refreshing thread, which would compete with the computation
        self.bar = Progress(*columns, console=console, auto_refresh=False)
        total = float(self.epochs * (steps or 1))
        self.task = self.bar.add_task(
            options.description, total=total, epoch=1, epochs=self.epochs, numbers=""
        )

    def __enter__(self) -> "Display":
        if self.bar is not None:
            from rich.errors import LiveError

            try:
                self.bar.start()
            except LiveError:  # the caller shows a live display of its own on this console
                self.bar = None
        return self

    def __exit__(self, *error: object) -> None:
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
        shown = min(epoch + 1, self.epochs)
        self.bar.update(self.task, completed=done, epoch=shown, numbers=self.numbers(means))
        self.bar.refresh()

    def numbers(self, means: Mapping[str, float]) -> str:
        """The few numbers worth a line."""
        names = [name for name in FIRST if name in means]
        names = [name for name in names if name != "loss" or len(names) == 1]
        if self.watched is not None and self.watched in means and self.watched not in names:
            names.append(self.watched)
        values = {name: means[name] for name in names} | dict(list(self.validation.items())[:2])
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
    console = terminal() if shown else None
    if console is None:
        yield from loader
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

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
