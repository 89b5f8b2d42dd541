"""Tests of published image sets in all formats, and of damaged files."""

import gzip
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn_studies.data import data_folder, load_images
from flowbnn_studies.data.images import DATASETS
from flowbnn_studies.data.load import load_dataset
from image_files import (
    binary,
    colour_source,
    grey_source,
    idx,
    write_colour,
    write_grey,
)


def error_message(source, root, split="train"):
    """Returns the message of the error, which has one line and the kind "file"."""
    with pytest.raises(FlowBNNError) as caught:
        load_dataset(source, split, root, download=False)
    assert caught.value.kind == "file"
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_idx_files_are_read(tmp_path, packed, split):
    source, content = grey_source()
    write_grey(source, content, tmp_path, packed)
    image_set = load_dataset(source, split, tmp_path, download=False)
    assert image_set.images.dtype == torch.uint8
    assert image_set.labels.dtype == torch.int64
    np.testing.assert_array_equal(image_set.images.numpy(), content[split][0])
    assert image_set.labels.tolist() == content[split][1].tolist()
    assert (image_set.name, image_set.partition, image_set.classes) == ("grey", split, ("a", "b", "c"))


@pytest.mark.parametrize("packed", [False, True])
def test_cifar_files_are_read_in_every_format(tmp_path, packed):
    source, content, _ = colour_source()
    write_colour(content, tmp_path, packed)
    image_set = load_dataset(source, "train", tmp_path, download=False)
    np.testing.assert_array_equal(
        image_set.images.numpy(), np.concatenate([content[n][0] for n in ("one", "two")])
    )
    assert image_set.labels.tolist() == [*content["one"][1], *content["two"][1]]
    assert len(load_dataset(source, "test", tmp_path, download=False)) == 6


def test_complete_format_is_preferred(tmp_path):
    source, content, _ = colour_source()
    write_colour(content, tmp_path, packed=True)
    write_colour(content, tmp_path)
    (tmp_path / "colour-bin" / "two.bin").unlink()
    assert len(load_dataset(source, "train", tmp_path, download=False)) == 12
    (tmp_path / "colour-py" / "one").unlink()
    assert "two.bin" in error_message(source, tmp_path)


@pytest.mark.parametrize(
    ("file", "damage", "words"),
    [
        ("train-images-idx3-ubyte", lambda raw: raw[:-1], ["255 bytes long", "expected 256", "truncated"]),
        ("train-images-idx3-ubyte", lambda raw: raw[:9], ["9 bytes long", "truncated"]),
        ("train-images-idx3-ubyte", lambda raw: b"", ["0 bytes long", "truncated"]),
        ("train-images-idx3-ubyte", lambda raw: raw + b"x", ["longer", "expected 256"]),
        ("train-images-idx3-ubyte", lambda raw: raw[:99] + bytes((raw[99] ^ 1,)) + raw[100:], ["does not hold the images", "SHA-256"]),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1], ["19 bytes long", "expected 20", "truncated"]),
        ("train-labels-idx1-ubyte", lambda raw: raw[:-1] + b"\x09", ["does not hold the labels", "SHA-256"]),
        ("train-labels-idx1-ubyte", lambda raw: raw[:8] + raw[:7:-1], ["does not hold the labels", "SHA-256"]),
    ],
)  # fmt: skip
def test_damaged_idx_file_is_refused(tmp_path, file, damage, words):
    source, content = grey_source()
    write_grey(source, content, tmp_path)
    path = tmp_path / source.folder / file
    path.write_bytes(damage(path.read_bytes()))
    message = error_message(source, tmp_path)
    assert message.startswith(f"{path} ")
    assert all(word in message for word in [*words, "delete it and load again"]), message


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-9], "truncated"),
        (lambda raw: b"not gzip at all", "truncated or damaged gzip file"),
        (lambda raw: raw[:30] + bytes(8) + raw[38:], "gzip"),
        (
            lambda raw: gzip.compress(idx(np.zeros((12, 5, 4), np.uint8)) + bytes(10**6)),
            "longer when unpacked",
        ),
    ],
)
def test_damaged_gzip_file_is_refused(tmp_path, damage, words):
    source, content = grey_source()
    write_grey(source, content, tmp_path, packed=True)
    path = tmp_path / source.folder / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    message = error_message(source, tmp_path)
    assert message.startswith(f"{path} ")
    assert words in message


def swap(first: Path, second: Path) -> None:
    one, two = first.read_bytes(), second.read_bytes()
    first.write_bytes(two)
    second.write_bytes(one)


def test_swapped_files_are_refused(tmp_path):
    source, content = grey_source()
    write_grey(source, content, tmp_path)
    folder = tmp_path / source.folder
    swap(folder / "train-images-idx3-ubyte", folder / "train-labels-idx1-ubyte")
    assert "train-images-idx3-ubyte is 20 bytes long, expected 256" in error_message(source, tmp_path)
    colour, parts, _ = colour_source()
    write_colour(parts, tmp_path)
    swap(tmp_path / "colour-bin" / "two.bin", tmp_path / "colour-bin" / "three.bin")
    assert "two.bin does not hold the images of Colour (train, two)" in error_message(colour, tmp_path)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda raw: raw[:-1], "is 293 bytes long, expected 294 bytes: it is truncated"),
        (lambda raw: raw + raw, "is longer, expected 294 bytes"),
        (
            lambda raw: raw[:100] + bytes((raw[100] ^ 1,)) + raw[101:],
            "does not hold the images of Colour (train, two)",
        ),
        (lambda raw: b"\x07" + raw[1:], "does not hold the labels of Colour (train, two)"),
    ],
)
def test_damaged_binary_file_is_refused(tmp_path, damage, words):
    source, content, _ = colour_source()
    write_colour(content, tmp_path)
    path = tmp_path / "colour-bin" / "two.bin"
    path.write_bytes(damage(path.read_bytes()))
    message = error_message(source, tmp_path)
    assert message.startswith(f"{path} ")
    assert words in message


LABELS = [0] * 6


class Call:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_unpublished_pickle_is_not_executed(tmp_path, protocol):
    source, content, _ = colour_source()
    write_colour(content, tmp_path, packed=True)
    path, witness = tmp_path / "colour-py" / "two", tmp_path / "witness"
    attack = pickle.dumps({"labels": LABELS, "data": Call(os.system, f"touch {witness}")}, protocol=protocol)
    for raw in (attack, path.read_bytes()[:-20], b"", b"garbage", bytes(10**6)):
        path.write_bytes(raw)
        message = error_message(source, tmp_path)
        assert message.startswith(f"{path} ")
        assert "not unpickled" in message
        assert not witness.exists()
    pickle.loads(attack)  # an ordinary unpickler executes the attack
    assert witness.exists()


def test_missing_files_are_named_with_their_folder(tmp_path):
    source, content = grey_source()
    write_grey(source, content, tmp_path)
    (tmp_path / source.folder / "train-labels-idx1-ubyte").unlink()
    message = error_message(source, tmp_path)
    assert f"put train-labels-idx1-ubyte (or with .gz) into {tmp_path / source.folder}" in message
    assert "FLOWBNN_DATA" in message
    colour, _, _ = colour_source()
    message = error_message(colour, tmp_path)
    assert (
        f"put one.bin, two.bin (or colour.tar.gz into {tmp_path}) into {tmp_path / 'colour-bin'}" in message
    )


def test_unreadable_file_is_refused(tmp_path, monkeypatch):
    source, content, _ = colour_source()
    write_colour(content, tmp_path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "one.bin cannot be read: Permission denied" in error_message(source, tmp_path)


def test_unknown_names_and_splits_are_refused():
    for call, argument in (
        (lambda: load_images("fashion_mnist"), "name"),
        (lambda: load_images("CIFAR10"), "name"),
        (lambda: load_images("imagenet"), "name"),
        (lambda: load_images("mnist", "tset"), "split"),
        (lambda: load_images("mnist", "validation"), "split"),
    ):
        with pytest.raises(FlowBNNError) as caught:
            call()
        assert caught.value.argument == argument


def test_data_folder_is_argument_environment_or_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLOWBNN_DATA", str(tmp_path / "environment"))
    assert data_folder(tmp_path / "argument") == tmp_path / "argument"
    assert data_folder() == tmp_path / "environment"
    monkeypatch.setenv("FLOWBNN_DATA", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "flowbnn"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "flowbnn"
    (tmp_path / "file").touch()
    with pytest.raises(FlowBNNError) as caught:
        data_folder(tmp_path / "file")
    assert caught.value.kind == "file"


def test_published_sets_are_complete():
    data_files = [
        data_file for source in DATASETS.values() for split in source.splits.values() for data_file in split
    ]
    digests = [digest for data_file in data_files for digest in (data_file.pixels, data_file.labels)]
    assert len(set(digests)) == len(digests) == 20
    assert all(len(digest) == 64 and int(digest, 16) for digest in digests)
    assert {
        name: [sum(p.count for p in s) for s in source.splits.values()] for name, source in DATASETS.items()
    } == {
        "mnist": [60_000, 10_000],
        "fashion-mnist": [60_000, 10_000],
        "cifar10": [50_000, 10_000],
    }
    for source in DATASETS.values():
        assert len(source.classes) == 10
        assert len(source.mean) == len(source.std) == source.shape[0]
        assert all(len(download.md5) == 32 and len(download.mirrors) > 1 for download in source.downloads)
        if source.layout == "idx":
            names = {
                name for split in source.splits.values() for data_file in split for name in data_file.files
            }
            assert {download.file.removesuffix(".gz") for download in source.downloads} == names


def test_binary_format_is_label_then_channels():
    raw = binary((np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2), np.array([9, 8], np.uint8)))
    assert list(raw) == [9, 0, 1, 2, 3, 8, 4, 5, 6, 7]
