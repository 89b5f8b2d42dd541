"""Tests of the state of random generators."""

import pytest

from flowbnn.training.randomness import RandomState


@pytest.mark.parametrize("library", ["python", "numpy"])
@pytest.mark.parametrize("word", [-1, 2**32])
def test_words_out_of_range_are_refused(library, word):
    state = RandomState().state()
    state[library][1][0] = word
    with pytest.raises(ValueError, match="32-bit"):
        RandomState().check(state)
