"""What a run leaves behind and shows while it goes: one record of numbers per epoch, a bar on a terminal, TensorBoard logs."""

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

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import File
from flowbnn.training.options import TrainingOptions, length_of
from flowbnn.training.storage import check_writable

if TYPE_CHECKING:
    from rich.console import Console

SHORT = {"log_likelihood": "log-lik", "kl": "KL", "elbo": "ELBO"}
FIRST = ("elbo", "log_likelihood", "kl", "loss")
SECONDS_BETWEEN = 0.1


@dataclass
class History:
    """The record of a run, epoch by epoch.

    Each record holds ``loss``, the objective's logs as means over the epoch's examples, ``learning_rate``
    (of the first parameter group, at the epoch's end) and what ``validate`` returned, under ``validation_...``.

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
        """Number of whole epochs recorded."""
        return len(self.records)

    @property
    def names(self) -> list[str]:
        """Every name that some epoch recorded, in order of appearance."""
        return list(dict.fromkeys(name for record in self.records for name in record))

    @property
    def last(self) -> dict[str, float]:
        """The last epoch's record."""
        return self.records[-1] if self.records else {}

    def __getitem__(self, name: str | int) -> Any:
        """All epochs of one number by its name, or all numbers of one epoch by its index: ``history["kl"]``, ``history[-1]``."""
        if isinstance(name, int) and -len(self.records) <= name < len(self.records):
            return self.records[name]
        if name not in self.names:
            close = nearest(name, self.names) if isinstance(name, str) else f" of {len(self.records)} epochs"
            raise FlowBNNError(f"the history holds no {name!r}{close}", kind="name", argument=name)
        return [record.get(str(name), float("nan")) for record in self.records]

    def __contains__(self, name: object) -> bool:
        return name in self.names

    def __len__(self) -> int:
        return len(self.records)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "History":
        """The inverse of :meth:`to_dict`."""
        return cls(**values)


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
    """A live line: epoch, ELBO, log-likelihood, KL, the last validation, time gone and time to go; ``steps`` are those of an epoch."""

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
        # without rich's refreshing thread, which would compete with the computation
        self.bar = Progress(*columns, console=console, auto_refresh=False)
        self.steps, self.next_time = steps, 0.0
        shown: dict[str, Any] = {"epoch": 1, "epochs": options.epochs, "numbers": ""}
        self.task = self.bar.add_task(options.description, total=options.epochs * (steps or 1), **shown)
        self.validation: dict[str, float] = {}

    def __enter__(self) -> "Display":
        from rich.errors import LiveError

        with suppress(LiveError):  # the caller shows a live display of its own on this console
            self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def due(self) -> bool:
        """Whether it is time to show new numbers; reading them may wait for the device, so not at every step."""
        return time.monotonic() >= self.next_time

    def update(self, epoch: int, step: int, means: Mapping[str, float], epochs: int) -> None:
        """Show the epoch's means so far, and the last validation; ``epochs`` is how many there are to be."""
        self.next_time = time.monotonic() + SECONDS_BETWEEN
        self.validation |= {name: means[name] for name in means if name.startswith("validation_")}
        first = [name for name in FIRST if name in means][:3]
        values = {name: means[name] for name in first} | dict(list(self.validation.items())[:2])
        numbers = [f"{SHORT.get(name, name.replace('_', ' '))} {value:.4g}" for name, value in values.items()]
        done, total = (epoch, epochs) if self.steps is None else (step, self.steps * epochs)
        shown: dict[str, Any] = {
            "epoch": min(epoch + 1, epochs),
            "epochs": epochs,
            "numbers": "  ".join(numbers),
        }
        self.bar.update(self.task, completed=done, total=total, **shown)
        self.bar.refresh()


def track(loader: Any, description: str, shown: bool = True) -> Iterator[Any]:
    """The loader's batches, with a bar on a terminal."""
    console = terminal() if shown else None
    if console is None:
        yield from loader
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(description), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        yield from bar.track(loader, total=length_of(loader))


def open_tensorboard(folder: File | None, step: int) -> Any:
    """A TensorBoard writer that overwrites what a killed run logged past ``step``; None when no folder is named."""
    if folder is None:
        return None
    check_writable(Path(folder) / "events")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.utils.tensorboard import SummaryWriter  # pip install flowbnn[tensorboard]
    return SummaryWriter(str(folder), purge_step=step)
