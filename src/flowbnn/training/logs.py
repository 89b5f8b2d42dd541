"""Logs of a training run: a CSV file with one row per epoch, or TensorBoard."""

import csv
import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from flowbnn.errors import FlowBNNError, optional_import
from flowbnn.options import File
from flowbnn.training.history import History
from flowbnn.training.storage import atomic_write, check_writable


class Log(Protocol):
    """Log of a training run."""

    def write(self, history: History) -> None:
        """Writes the last epoch of a history."""

    def close(self) -> None:
        """Closes the log."""


def is_csv(path: File) -> bool:
    """Returns True for the path of a CSV file, and False for a folder of TensorBoard logs."""
    return Path(path).suffix == ".csv"


def open_log(path: File | None, history: History) -> Log | None:
    """Opens a log that has the epochs of a history and no later ones, or returns None without a path.

    Args:
        path: File (``*.csv``) or folder of the log, or None.
        history: Record of the epochs before this run, which is empty if the run is not resumed.
    """
    if path is None:
        return None
    return CSVLog(Path(path), history) if is_csv(path) else TensorBoardLog(Path(path), history)


class CSVLog:
    """CSV file with one row per epoch. The first columns are the number of the epoch and the duration of the run in seconds.

    A row is appended by one call of the operating system. A file with other columns is written again and replaced.

    Args:
        path: Path of the file.
        history: Record of the epochs before this run.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "run.csv"
    >>> log, history = CSVLog(path, History()), History([{"loss": 0.5}], seconds=1.25)
    >>> log.write(history)
    >>> path.read_text().split()
    ['epoch,seconds,loss', '1,1.25,0.5']
    """

    def __init__(self, path: Path, history: History) -> None:
        check_writable(path)
        self.path = path
        self.seconds = _stored_seconds(path)[: history.epochs]
        self.columns: list[str] = []
        self.replace(history)

    def write(self, history: History) -> None:
        """Writes the last epoch of a history."""
        self.seconds.append(f"{history.seconds:.2f}")
        if history.names != self.columns:
            self.replace(history)
            return
        with self.path.open("ab", buffering=0) as file:
            file.write(_rows([self._row(history, history.epochs - 1)]))

    def replace(self, history: History) -> None:
        """Writes all epochs of a history to a new file, which replaces the old one."""
        self.columns = history.names
        rows = [self._row(history, index) for index in range(history.epochs)]
        with atomic_write(self.path) as temporary:
            temporary.write_bytes(_rows([["epoch", "seconds", *self.columns], *rows]))

    def _row(self, history: History, index: int) -> list[str]:
        """Returns the row of an epoch. Values that it lacks are empty."""
        record = history.records[index]
        seconds = self.seconds[index] if index < len(self.seconds) else ""
        values = [repr(record[name]) if name in record else "" for name in self.columns]
        return [str(index + 1), seconds, *values]

    def close(self) -> None:
        """Does nothing, because the file is open only while a row is written."""


def _rows(rows: Sequence[Sequence[str]]) -> bytes:
    """Returns rows in the format of a CSV file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode()


def _stored_seconds(path: Path) -> list[str]:
    """Returns the durations in the rows of a file, which a history does not have. None of them if there is no such file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        header, *rows = [*csv.reader(file)] or [[]]
    if header and header[:2] != ["epoch", "seconds"]:
        text = f"'{path}' is no log of a training run; name another file or remove it"
        raise FlowBNNError(text, kind="file", argument="log")
    return [row[1] if len(row) > 1 else "" for row in rows]


class TensorBoardLog:
    """Folder of TensorBoard logs with one point per epoch.

    Args:
        folder: Folder of the logs.
        history: Record of the epochs before this run. Later epochs that a killed run logged are overwritten.
    """

    def __init__(self, folder: Path, history: History) -> None:
        check_writable(folder / "events")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with optional_import("a log that is no CSV file", "tensorboard", "flowbnn[tensorboard]"):
                from torch.utils.tensorboard import SummaryWriter
        self.writer: Any = SummaryWriter(str(folder), purge_step=history.epochs + 1)

    def write(self, history: History) -> None:
        """Writes the last epoch of a history."""
        for name, value in history.last.items():
            self.writer.add_scalar(name, value, history.epochs)

    def close(self) -> None:
        """Closes the files."""
        self.writer.close()
