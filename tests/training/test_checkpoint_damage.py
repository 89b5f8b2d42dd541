"""Tests that damaged or foreign checkpoints are refused in one line and change nothing."""

import pytest
import torch
from checkpoint_runs import equal_snapshots, halving, make, refusal, run

from flowbnn.training import EarlyStop, load_tensors, save_tensors


@pytest.mark.parametrize("fraction", [0.05, 0.2, 0.4, 0.6, 0.8, 0.99])
def test_changed_bytes_are_refused(interrupted, fraction):
    path = interrupted / "last.safetensors"
    content = bytearray(path.read_bytes())
    content[int(fraction * len(content))] ^= 1
    path.write_bytes(content)
    assert refusal(interrupted, make(schedule=halving), early_stop=EarlyStop("loss")).kind == "file"


def test_intact_checkpoints_resume_bitwise_equal(interrupted):
    resumed, expected = make(schedule=halving), make(schedule=halving)
    history = run(resumed, interrupted, resume=True, epochs=4, early_stop=EarlyStop("loss"))
    expected_history = run(expected, None, epochs=4, early_stop=EarlyStop("loss"))
    assert history.records == expected_history.records
    assert equal_snapshots(resumed, expected)


@pytest.mark.parametrize(
    ("name", "value", "kind", "layer"),
    [
        ("weights/network.2.bias", torch.tensor([torch.nan]), "not finite", "2.bias"),
        ("best_weights/network.0.weight", torch.full((3, 2), -torch.inf), "not finite", "0.weight"),
        ("weights/network.2.bias", torch.zeros(3), "file", None),
    ],
)
def test_weights_of_other_shapes_or_not_finite_are_refused(interrupted, name, value, kind, layer):
    path = interrupted / "last.safetensors"
    tensors, document = load_tensors(path)
    assert name in tensors
    save_tensors(path, {**tensors, name: value}, document)
    error = refusal(interrupted, make(schedule=halving), early_stop=EarlyStop("loss"))
    assert (error.kind, error.layer) == (kind, layer)


def test_other_files_are_refused(interrupted):
    path = interrupted / "last.safetensors"
    save_tensors(path, {"weight": torch.ones(2)}, {"kind": "posterior"})
    assert refusal(interrupted, make(schedule=halving)).kind == "checkpoint"
    torch.save({"weight": torch.ones(2)}, path)
    assert "pickle" in str(refusal(interrupted, make(schedule=halving)))
    path.write_text("hello")
    assert refusal(interrupted, make(schedule=halving)).kind == "file"
