"""Pickles that run nothing, and that end."""

import pickle

import numpy as np
import pytest

from flowbnn_studies.data.formats import Refused, decode_array, load_inert


def nested(levels=60):
    """A few hundred bytes whose hash, or whose text, would take years: each level holds the one below twice."""
    found = "a"
    for _ in range(levels):
        found = (found, found)
    return found


@pytest.mark.parametrize(
    "raw",
    [
        b"\x80\x02}" + pickle.dumps(nested(), 2)[2:-1] + b"K\x01s.",
        b"(" + pickle.dumps(nested(), 0)[:-1] + b"I1\nd.",
        pickle.dumps({10**5000: 1}),
        pickle.dumps({"labels": [10**5000]}),
        pickle.dumps({"labels": [10**500]}, 0),
        pickle.dumps({"labels": [10**500]}, 2),
        pickle.dumps({"x": {1, 2}}, 4),
        pickle.dumps({"x": frozenset([1])}, 4),
    ],
)
def test_pickles_that_would_take_for_ever_are_refused(raw):
    with pytest.raises(Refused, match="do not trust this file"):
        load_inert(raw)


def test_a_shape_that_is_none_is_refused():
    found = load_inert(pickle.dumps({"data": np.zeros((2, 3), np.uint8)}, 2))["data"]
    assert decode_array(found, (2, 3)).shape == (2, 3)
    found.state = (1, nested(), *found.state[2:])
    with pytest.raises(Refused, match="without a shape"):
        decode_array(found, (2, 3))


@pytest.mark.parametrize("protocol", range(6))
def test_numbers_names_and_truths_come_back_in_every_protocol(protocol):
    content = {"labels": [0, 9, 255, 65536, -1, 2**40], "flag": [True, False], "more": {"a": 1}}
    found = load_inert(pickle.dumps(content, protocol))
    assert found["labels"] == content["labels"]
    assert found["flag"] == [True, False]
    assert all(type(value) is bool for value in found["flag"])
    assert {key if isinstance(key, str) else key.decode() for key in found["more"]} == {"a"}
