"""Tests of the tables of Papamakarios et al. 2017 on small files of the published format."""

import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from flowbnn import FlowBNNError
from flowbnn_studies.data.tables import load_table, load_uci


def test_power_and_miniboone_are_split_and_standardized(tmp_path):
    random = np.random.RandomState(0)
    for name, columns in (("power", 8), ("miniboone", 5)):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "data.npy", 3.0 + random.rand(1000, columns))
    power, boone = load_table("power", tmp_path), load_table("miniboone", tmp_path)
    assert [tuple(subset.shape) for subset in power] == [(810, 6), (90, 6), (100, 6)]
    assert [tuple(subset.shape) for subset in boone] == [(810, 5), (90, 5), (100, 5)]
    for train, validation, test in (power, boone):
        reference = torch.cat([train, validation]).double()
        torch.testing.assert_close(reference.mean(0), torch.zeros_like(reference[0]), atol=1e-5, rtol=0)
        torch.testing.assert_close(
            reference.std(0, correction=0), torch.ones_like(reference[0]), atol=1e-5, rtol=0
        )
        assert test.dtype == torch.float32
    table = np.load(tmp_path / "miniboone" / "data.npy")
    expected = (table[900:] - table[:900].mean(0)) / table[:900].std(0)
    np.testing.assert_allclose(boone[2].numpy(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mass", [False, True])
def test_hepmass_keeps_the_signal_and_columns_without_repetition(tmp_path, mass):
    """The published test file has one more column name than the training file. If its rows have the column, it is dropped."""
    random = np.random.RandomState(0)
    (tmp_path / "hepmass").mkdir()
    tables = {}
    for subset, rows in (("train", 200), ("test", 60)):
        table = tables[subset] = random.rand(rows, 5)
        table[:, 0] = np.arange(rows) % 2  # the label
        table[:, 2] = np.arange(rows) // 2 % 3  # steps
        table[10:40, 4] = 2.0  # repeated, but not the least value, which is what the authors count
        names, rows_ = "# label,f0,f1,f2,f3", table
        if subset == "test":
            names += ",mass"
            rows_ = np.hstack((table, np.full((rows, 1), 1000.0))) if mass else table
        np.savetxt(
            tmp_path / "hepmass" / f"1000_{subset}.csv", rows_, "%.18e", ",", header=names, comments=""
        )
    parts = load_table("hepmass", tmp_path)
    assert [tuple(subset.shape) for subset in parts] == [(90, 3), (10, 3), (30, 3)]
    train, test = (table[table[:, 0] == 1][:, [1, 3, 4]] for table in tables.values())
    for values, rows_ in zip(parts, (train[:90], train[90:], test), strict=True):
        expected = (rows_ - train.mean(0)) / train.std(0, ddof=1)
        np.testing.assert_allclose(values.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_gas_keeps_one_of_correlated_columns(tmp_path):
    """Columns are dropped one by one, the first that is still correlated with another one, so the last of each group remains."""
    random = np.random.RandomState(0)
    sensors = random.rand(1000, 6)
    sensors[:, 0] = sensors[:, 2] + 1e-3 * sensors[:, 1]
    sensors[:, 4] = -sensors[:, 1]  # which is no correlation above 0.98
    sensors[:, 5] = sensors[:, 2] - 1e-3 * sensors[:, 1]
    (tmp_path / "gas").mkdir()
    np.save(tmp_path / "gas" / "ethylene_CO.npy", sensors)
    train, validation, test = load_table("gas", tmp_path)
    assert [len(train), len(validation), len(test)] == [810, 90, 100]
    columns = sensors[:, [1, 3, 4, 5]]
    expected = (columns - columns.mean(0)) / columns.std(0, ddof=1)
    for table, rows in zip((train, validation, test), np.split(expected, [810, 900]), strict=True):
        np.testing.assert_allclose(table.numpy(), rows, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("content", [b"rubbish", b""])
def test_unreadable_file_is_refused(tmp_path, content):
    (tmp_path / "power").mkdir()
    (tmp_path / "power" / "data.npy").write_bytes(content)
    with pytest.raises(FlowBNNError) as caught:
        load_table("power", tmp_path)
    assert caught.value.kind == "file"
    np.save(tmp_path / "power" / "data.npy", np.zeros((10, 3)))
    with pytest.raises(FlowBNNError) as caught:
        load_table("power", tmp_path)
    assert caught.value.kind == "file"


def test_missing_file_or_table_is_refused(tmp_path):
    with pytest.raises(FlowBNNError) as caught:
        load_table("gas", tmp_path)
    assert (caught.value.kind, caught.value.argument) == ("file", "root")
    with pytest.raises(FlowBNNError) as caught:
        load_table("powr", tmp_path)
    assert caught.value.argument == "name"


class Harmful:
    """Object whose pickle creates a file when it is read."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


def test_pickles_are_never_read(tmp_path):
    (tmp_path / "gas").mkdir()
    content = pickle.dumps(Harmful(tmp_path / "harm"))
    for name in ("ethylene_CO.pickle", "ethylene_CO.npy"):
        (tmp_path / "gas" / name).write_bytes(content)
        with pytest.raises(FlowBNNError) as caught:
            load_table("gas", tmp_path)
        assert caught.value.kind == "file"
    assert not (tmp_path / "harm").exists()


UCI_DAMAGES = {
    "rows": ("index_test_0.txt", "77\n"),
    "negative": ("index_train_0.txt", "-1\n"),
    "no rows": ("index_train_0.txt", ""),
    "no columns": ("index_features.txt", ""),
    "nan": ("data.txt", "1 nan 2\n" * 6),
}


@pytest.mark.filterwarnings("ignore:loadtxt. input contained no data:UserWarning")
@pytest.mark.parametrize(
    "damage", ["data.txt", "index_features.txt", "index_train_0.txt", "missing", *UCI_DAMAGES]
)
def test_damaged_uci_files_are_refused(tmp_path, damage):
    folder = tmp_path / "uci" / "yacht"
    folder.mkdir(parents=True)
    np.savetxt(folder / "data.txt", np.random.RandomState(0).rand(6, 3))
    for name, values in {
        "features": [0, 1],
        "target": [2],
        "train_0": [0, 1, 2, 3],
        "test_0": [4, 5],
    }.items():
        np.savetxt(folder / f"index_{name}.txt", values, fmt="%d")
    if damage in UCI_DAMAGES:
        name, content = UCI_DAMAGES[damage]
        (folder / name).write_text(content)
    elif damage == "missing":
        (folder / "index_test_0.txt").unlink()
    else:
        (folder / damage).write_bytes(b"\xff\xfe rubbish")
    with pytest.raises(FlowBNNError) as caught:
        load_uci("yacht", 0, tmp_path)
    assert caught.value.kind == "file"
    with pytest.raises(FlowBNNError):
        load_uci("yacht", 99, tmp_path)


def test_headers_of_tables_beyond_memory_are_refused(tmp_path):
    (tmp_path / "miniboone").mkdir()
    path = tmp_path / "miniboone" / "data.npy"
    header = {"descr": "<f8", "fortran_order": False, "shape": (10**12,)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        file.write(bytes(64))
    with pytest.raises(FlowBNNError) as caught:
        load_table("miniboone", tmp_path)
    assert caught.value.kind == "file"
