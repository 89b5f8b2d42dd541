"""Tests of the digits: disjoint splits and one novel class."""

import pytest
import torch

from flowbnn.data import load_digits
from flowbnn.errors import FlowBNNError


def rows(images):
    return {tuple(image.flatten().tolist()) for image in images}


def test_splits_are_disjoint_and_complete():
    digits = load_digits(novel=8, seed=1)
    splits = [digits.train[0], digits.validation[0], digits.test[0], digits.novel[0]]
    assert sum(len(images) for images in splits) == 1797
    assert sum(len(rows(images)) for images in splits) == len(rows(torch.cat(splits)))


def test_labels_index_the_known_digits_and_splits_are_stratified():
    digits = load_digits(novel=3, seed=0)
    assert digits.known == (0, 1, 2, 4, 5, 6, 7, 8, 9)
    assert set(digits.novel[1].tolist()) == {3}
    for _, labels in (digits.train, digits.validation, digits.test):
        assert set(labels.tolist()) == set(range(9))
    counts = [torch.bincount(labels, minlength=9).double() for _, labels in (digits.train, digits.test)]
    assert torch.allclose(counts[0] / counts[1], torch.tensor(0.6 / 0.25, dtype=torch.float64), rtol=0.06)


def test_splits_depend_on_the_seed():
    first, again, other = load_digits(seed=4), load_digits(seed=4), load_digits(seed=5)
    assert torch.equal(first.test[0], again.test[0])
    assert rows(first.test[0]) != rows(other.test[0])
    assert float(first.train[0].min()) == 0.0
    assert float(first.train[0].max()) == 1.0


@pytest.mark.parametrize("arguments", [{"novel": 10}, {"novel": True}, {"seed": "a"}])
def test_invalid_arguments_are_refused(arguments):
    with pytest.raises(FlowBNNError) as caught:
        load_digits(**arguments)
    assert caught.value.argument in arguments
    assert "\n" not in str(caught.value)
