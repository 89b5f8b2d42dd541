"""Tables of Papamakarios, Pavlakou and Murray 2017 (https://arxiv.org/abs/1705.07057), which densities are compared on, from their
published files (zenodo.org/records/1161203), prepared as there."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.options import File
from flowbnn_studies.data.load import data_folder

FILES = {
    "power": ("power/data.npy",),
    "gas": ("gas/ethylene_CO.pickle",),
    "hepmass": ("hepmass/1000_train.csv", "hepmass/1000_test.csv"),
    "miniboone": ("miniboone/data.npy",),
}


def load_table(name: str, root: File | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Rows to learn from, to choose on and to test on, of mean 0 and standard deviation 1 as in the paper.

    Args:
        name: ``"power"`` (6 columns), ``"gas"`` (8), ``"hepmass"`` (21) or ``"miniboone"`` (43).
        root: the folder that holds ``power/``, ``gas/``, ``hepmass/`` and ``miniboone/``; ``FLOWBNN_DATA`` unless given.
    """
    if name not in FILES:
        raise FlowBNNError(f"there is no table '{name}'{nearest(name, FILES)}", argument="name")
    paths = [data_folder(root) / file for file in FILES[name]]
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


def _standardized(parts: list[np.ndarray], fitted: np.ndarray) -> list[np.ndarray]:
    mean, deviation = fitted.mean(0), fitted.std(0)
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
    values = (values - values.mean(0)) / values.std(0, ddof=1)
    return _shares(values)


def _hepmass(paths: list[Path]) -> list[np.ndarray]:
    """The signal of mass 1000; without columns whose least value comes more than five times."""
    train, test = (np.loadtxt(path, delimiter=",", skiprows=1) for path in paths)
    train, test = train[train[:, 0] == 1, 1:], test[test[:, 0] == 1, 1:]
    test = test[:, :-1] if test.shape[1] > train.shape[1] else test
    test, train = _standardized([test, train], train)
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
