"""A checkpoint that is damaged, or of something else, gives one line and changes nothing."""

import pytest
import torch
from checkpoint_runs import halving, make, refused, run, snapshot

from flowbnn.training import EarlyStop, load_tensors, save_tensors


@pytest.mark.parametrize("share", [0.05, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_a_changed_byte_gives_one_line_and_changes_nothing(stopped, share):
    path = stopped / "last.safetensors"
    content = bytearray(path.read_bytes())
    content[int(share * len(content))] ^= 1
    path.write_bytes(content)
    refused(stopped, make(schedule=halving), "damaged", early_stop=EarlyStop("loss"))


def test_what_was_not_damaged_is_resumed_to_the_bit(stopped):
    resumed, straight = make(schedule=halving), make(schedule=halving)
    history = run(resumed, stopped, resume=True, epochs=4, early_stop=EarlyStop("loss"))
    expected = run(straight, None, epochs=4, early_stop=EarlyStop("loss"))
    assert history.records == expected.records
    assert all(torch.equal(a, b) for a, b in zip(snapshot(resumed)[0], snapshot(straight)[0], strict=True))


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("weights/network.2.bias", torch.tensor([torch.nan]), "NaN or infinite weights in '2.bias'"),
        ("best_weights/network.0.weight", torch.full((3, 2), -torch.inf), "weights in '0.weight'"),
        ("weights/network.2.bias", torch.zeros(3), "2.bias ((3,) there, (1,) here)"),
    ],
)
def test_weights_of_other_shapes_or_not_finite(stopped, name, value, words):
    path = stopped / "last.safetensors"
    tensors, document = load_tensors(path)
    assert name in tensors
    save_tensors(path, {**tensors, name: value}, document)
    refused(stopped, make(schedule=halving), words, early_stop=EarlyStop("loss"))


def test_files_of_something_else(stopped):
    path = stopped / "last.safetensors"
    save_tensors(path, {"weight": torch.ones(2)}, {"kind": "posterior"})
    refused(stopped, make(schedule=halving), "no checkpoint of a training run")
    torch.save({"weight": torch.ones(2)}, path)
    refused(stopped, make(schedule=halving), "pickle")
    path.write_text("hello")
    refused(stopped, make(schedule=halving), "no safetensors file")
