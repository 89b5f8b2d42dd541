"""Progress bars on a terminal: one line for each running task, the outermost task first.

A task that begins inside another task appears below it, such as the epochs of a training below the methods of a comparison. A line
is never wider than the terminal. On a narrow one the bar shrinks first, then the elapsed time and the values are left out.
"""

import os
import random
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Self

from flowbnn.training.options import TrainingOptions, length_of

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.live import Live
    from rich.text import Text

SECONDS_BETWEEN_REFRESHES = 0.1
BAR_WIDTHS = (24, 16, 8)
GAP = "  "


def terminal() -> "Console | None":
    """Returns rich's console if it is a terminal, else None.

    rich takes 0.2 s to import, so it is imported only if there may be a terminal.
    """
    is_tty = sys.stdout is not None and sys.stdout.isatty()
    if not (is_tty or "FORCE_COLOR" in os.environ or "rich" in sys.modules):
        return None
    state = random.getstate()
    import rich.live  # draws from Python's random numbers

    random.setstate(state)
    console = rich.get_console()
    return console if console.is_terminal else None


def format_seconds(seconds: float) -> str:
    """Returns a duration as minutes and seconds, or as hours, minutes and seconds.

    >>> format_seconds(75.4), format_seconds(3 * 3600 + 62)
    ('1:15', '3:01:02')
    """
    minutes, seconds_part = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_part:02d}" if hours else f"{minutes}:{seconds_part:02d}"


class ProgressBar:
    """Context manager that shows the progress of a task as a line on a terminal.

    The line has the label, the counter, a bar, the values of the task (such as the ELBO), the elapsed time, and the estimated remaining
    time. Nothing is shown if the output is not a terminal.

    Args:
        label: Name of the task.
        total: Number of steps, or None if it is unknown.
        unit: Word before the number of the current step, such as ``"epoch"``. Without it, the number of finished steps is shown.
        visible: If False, nothing is shown.
        start: Number of steps that were completed before, if the task is resumed.
        equal_steps: If False, the steps take different times, so the remaining time is not estimated.
        keep: If True, the line stays on the terminal when the task ends, unless the task is part of another one.
        console: Console to draw on. The default is the terminal.

    >>> with ProgressBar("sampling", total=3) as bar:
    ...     for step in range(3):
    ...         bar.update(step + 1, values=["acceptance 0.8"])
    >>> bar.completed
    3
    """

    def __init__(
        self,
        label: str,
        total: int | None = None,
        *,
        unit: str = "",
        visible: bool = True,
        start: int = 0,
        equal_steps: bool = True,
        keep: bool = False,
        console: "Console | None" = None,
    ) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.equal_steps, self.keep = equal_steps, keep
        self.console = (console or terminal()) if visible else None
        self.counter = ""  # replaces the number of steps
        self.values: Sequence[str] = ()
        self.completed = self.start = start
        self.finished = False
        self.start_time = self.step_time = time.monotonic()  # of the task, and of the current step
        self.next_time = 0.0

    def __enter__(self) -> Self:
        self.start_time = self.step_time = time.monotonic()
        if self.console is not None:
            SCREEN.open(self, self.console)
        return self

    def __exit__(self, *error: object) -> None:
        self.finished = True
        if self.console is not None:
            SCREEN.close(self, self.console)

    def is_due(self) -> bool:
        """Returns True if the line is shown and has not been drawn for a tenth of a second."""
        return self.console is not None and time.monotonic() >= self.next_time

    def update(
        self,
        completed: int | None = None,
        *,
        total: int | None = None,
        label: str | None = None,
        counter: str | None = None,
        values: Sequence[str] | None = None,
    ) -> None:
        """Sets the values that are not None, and draws the line at most ten times a second.

        Args:
            completed: Number of completed steps.
            total: Number of steps.
            label: Name of the task.
            counter: Text that replaces the number of steps.
            values: Values of the step, the most important first.
        """
        if completed is not None and completed != self.completed:
            self.completed, self.step_time = completed, time.monotonic()
        self.total = self.total if total is None else total
        self.label = self.label if label is None else label
        self.counter = self.counter if counter is None else counter
        self.values = self.values if values is None else values
        if self.console is not None and (self.is_due() or label is not None or self.completed == self.total):
            self.next_time = time.monotonic() + SECONDS_BETWEEN_REFRESHES
            SCREEN.refresh()

    @property
    def seconds_left(self) -> float | None:
        """Estimated time until the task ends, in seconds. None if it is unknown."""
        new_steps = self.completed - self.start
        if (
            self.finished
            or not self.equal_steps
            or self.total is None
            or new_steps <= 0
            or self.completed >= self.total
        ):
            return None
        seconds_per_step = (self.step_time - self.start_time) / new_steps
        return max(
            0.0, seconds_per_step * (self.total - self.completed) - (time.monotonic() - self.step_time)
        )

    def render(self, width: int, indent: int = 0) -> "Text":
        """Returns the line of the task.

        Args:
            width: Number of columns.
            indent: Number of columns before the label.
        """
        from rich.text import Text

        before, bar_width, after = self._fit(width - indent)
        line = Text(" " * indent, no_wrap=True, overflow="ellipsis", end="")
        line.append(before[0], "bold").append("".join(GAP + word for word in before[1:]))
        if bar_width and self.total:
            filled_width = round(bar_width * min(1.0, self.completed / self.total))
            line.append(GAP).append("━" * filled_width, "cyan").append(
                "─" * (bar_width - filled_width), "dim"
            )
        line.append("".join(GAP + word for word in after))
        line.truncate(width, overflow="ellipsis")
        return line

    def _fit(self, width: int) -> tuple[list[str], int, list[str]]:
        """Returns the words before the bar, the width of the bar, and the words after it, which fit into a number of columns."""
        counter = self.counter
        if not counter and self.total is not None:
            current = min(self.completed + bool(self.unit), self.total)
            counter = f"{current:,}/{self.total:,}"
        elif not counter and self.completed:
            counter = f"{self.completed:,}"
        elapsed, seconds_left = format_seconds(time.monotonic() - self.start_time), self.seconds_left
        times = [elapsed] if seconds_left is None else [f"{elapsed}, {format_seconds(seconds_left)} left"]
        times += [] if seconds_left is None else [f"{format_seconds(seconds_left)} left"]
        before = [self.label, *([f"{self.unit} {counter}".strip()] if counter else [])]
        all_values = list(self.values)
        for values in [all_values[:count] for count in range(len(all_values), 0, -1)] or [[]]:
            for text in times:
                for bar_width in BAR_WIDTHS if self.total else (0,):
                    words = [*before, *values, text]
                    num_columns = len(GAP.join(words)) + (bar_width + len(GAP) if bar_width else 0)
                    if num_columns <= width:
                        return before, bar_width, [*values, text]
        for values in (all_values[:1], []):
            if len(GAP.join([*before, *values, times[-1]])) <= width:
                return before, 0, [*values, times[-1]]
        words = [counter, times[-1]] if counter else [times[-1]]
        label_width = max(2, width - len(GAP.join(["", *words])))
        label = self.label if len(self.label) <= label_width else f"{self.label[: label_width - 1]}…"
        return [label, *words], 0, []


class _Screen:
    """Lines of all running tasks, the outermost task first."""

    def __init__(self) -> None:
        self.bars: list[ProgressBar] = []
        self.live: Live | None = None
        self.lock = threading.RLock()

    def open(self, bar: ProgressBar, console: "Console") -> None:
        """Adds the line of a task."""
        from rich.errors import LiveError
        from rich.live import Live

        with self.lock:
            self.bars.append(bar)
            if self.live is None:
                # no refresh thread, which would compete with the computation
                live = Live(self, console=console, auto_refresh=False, transient=True)
                with suppress(LiveError):  # the caller shows a live display of their own on this console
                    live.start()
                    self.live = live
            self.refresh()

    def close(self, bar: ProgressBar, console: "Console") -> None:
        """Removes the line of a task."""
        with self.lock:
            self.refresh()
            self.bars.remove(bar)
            if self.live is not None and not self.bars:
                self.live.stop()
                self.live = None
            self.refresh()
            if bar.keep and not self.bars:
                console.print(bar.render(console.width))

    def refresh(self) -> None:
        """Draws all lines."""
        with self.lock:
            if self.live is not None:
                self.live.refresh()

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "Iterator[Text]":
        for depth, bar in enumerate(self.bars):
            line = bar.render(options.max_width, 2 * depth)
            line.end = "\n"
            yield line


SCREEN = _Screen()


class TrainingDisplay:
    """Progress bar of a training run, with epoch, ELBO or log-likelihood, last validation, KL divergence, and the remaining time.

    Args:
        options: Options of the training run.
        steps: Number of steps per epoch, or None if unknown.
        console: Console to draw on.
        epoch: Number of epochs that were completed before, if the run is resumed.
        step: Number of steps that were completed before.
    """

    labels: ClassVar[dict[str, str]] = {
        "elbo": "ELBO",
        "log_likelihood": "log-lik",
        "kl": "KL",
        "validation_nll": "validation NLL",
        "validation_rmse": "validation RMSE",
    }

    def __init__(
        self, options: TrainingOptions, steps: int | None, console: "Console", epoch: int = 0, step: int = 0
    ) -> None:
        self.bar = ProgressBar(
            options.description,
            options.epochs * (steps or 1),
            unit="epoch",
            start=epoch if steps is None else step,
            keep=True,
            console=console,
        )
        self.bar.counter = f"{epoch + 1}/{options.epochs}"
        self.steps = steps
        self.validation: dict[str, float] = {}

    def __enter__(self) -> "TrainingDisplay":
        self.bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.__exit__(*error)

    def is_due(self) -> bool:
        """Returns True at most ten times a second, because reading the values may wait for the device."""
        return self.bar.is_due()

    def update(self, epoch: int, step: int, means: Mapping[str, float], epochs: int) -> None:
        """Shows the means of the epoch and the last validation.

        Args:
            epoch: Index of the current epoch.
            step: Number of completed steps.
            means: Means of the values logged in this epoch.
            epochs: Number of epochs of the run.
        """
        self.validation |= {name: means[name] for name in means if name.startswith("validation_")}
        objective_names = [name for name in ("elbo", "log_likelihood", "kl") if name in means] or ["loss"]
        validation_names = sorted(self.validation, key=lambda name: name != "validation_nll")[:2]
        values = {
            name: {**means, **self.validation}[name]
            for name in [*objective_names[:1], *validation_names, *objective_names[1:]]
        }
        self.bar.update(
            epoch if self.steps is None else step,
            total=epochs if self.steps is None else self.steps * epochs,
            counter=f"{min(epoch + 1, epochs)}/{epochs}",
            values=[
                f"{self.labels.get(name, name.replace('_', ' '))} {value:.4g}"
                for name, value in values.items()
            ],
        )


def track(
    loader: Iterable[Any], label: str, visible: bool = True, unit: str = "", keep: bool = False
) -> Iterator[Any]:
    """Yields the entries of an iterable, such as the batches of a loader, and shows a progress bar on a terminal.

    Args:
        loader: Iterable of batches.
        label: Name of the task.
        visible: If False, no bar is shown.
        unit: Word before the counter, such as ``"batch"``.
        keep: If True, the line stays on the terminal when the task ends, unless the task is part of another one.

    >>> list(track([1, 2], "predicting"))
    [1, 2]
    """
    bar = ProgressBar(label, length_of(loader), unit=unit, visible=visible, keep=keep)
    if bar.console is None:
        yield from loader
        return
    with bar:
        for number, entry in enumerate(loader, 1):
            yield entry
            bar.update(number)
