"""Tests that docs/data.md agrees with the code."""

import re
from pathlib import Path

import pytest
import torch

import flowbnn_studies.data
from flowbnn_studies.data import CORRUPTIONS, ImageSet
from flowbnn_studies.data.images import DATASETS

PAGE = (Path(__file__).parents[3] / "docs" / "data.md").read_text()


def generated(name: str, split: str = "train") -> ImageSet:
    source = DATASETS[name]
    number = 6000 if split == "train" else 50
    images = torch.randint(0, 256, (number, *source.shape), dtype=torch.uint8)
    return ImageSet(images, torch.arange(number) % 10, source.classes, name, split, source.mean, source.std)


def test_example_runs(monkeypatch):
    monkeypatch.setattr(flowbnn_studies.data, "load_images", generated)
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (code,) = (block for block in blocks if "load_images" in block)
    names: dict = {}
    exec(code, names)
    assert (len(names["train"]), len(names["validation"])) == (1000, 5000)
    for loader, rows in (("train_loader", 128), ("test_loader", 50), ("novel_loader", 50)):
        images, labels = next(iter(names[loader]))
        assert (images.shape, labels.shape) == ((rows, 3, 32, 32), (rows,))
    assert names["noisy"].shape == (50, 3, 32, 32)


@pytest.mark.parametrize("kind", CORRUPTIONS)
def test_table_of_corruptions_agrees_with_the_code(kind):
    (row,) = re.findall(rf"^\| `{kind}` \|[^|]*\|(.*)\|$", PAGE, re.MULTILINE)
    assert tuple(float(cell) for cell in row.split("|")) == CORRUPTIONS[kind]


@pytest.mark.parametrize("name", DATASETS)
def test_table_of_sets_agrees_with_the_code(name):
    source = DATASETS[name]
    (row,) = re.findall(rf"^\| `{name}` \|(.*)\|$", PAGE, re.MULTILINE)
    shape, counts, constants = row.split("|")
    assert "x".join(map(str, source.shape)) in shape
    train, test = (sum(data_file.count for data_file in source.splits[split]) for split in ("train", "test"))
    assert counts.strip() == f"{train:,} / {test:,}"
    written = [float(number) for number in re.findall(r"\.\d+", constants)]
    assert written == pytest.approx([*source.mean, *source.std], abs=5e-5)
