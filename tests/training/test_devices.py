"""Several processes train one model: what one process would have reached, and no silence when one of them dies."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flowbnn.training import TrainingOptions, connect, load_tensors

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


def module(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def command_that_starts_again(script, folder, monkeypatch):
    """What a script that asks for two processes is replaced by."""
    started = []

    def replaced(path, words):
        started.extend(words)
        raise SystemExit

    monkeypatch.setattr(os, "execv", replaced)
    monkeypatch.setattr(sys, "argv", [str(script), str(folder)])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
    with pytest.raises(SystemExit):
        connect(TrainingOptions(accelerator="cpu", devices=2))
    return started


def test_two_processes_reach_what_one_reaches_and_end_when_one_of_them_dies(tmp_path, monkeypatch):
    """One start of two processes, whose imports take longer than all that they do, serves several tests."""
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    command = command_that_starts_again(HERE / "shared_run.py", two, monkeypatch)
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 1, done.stderr
    assert time.time() - (two / "begun").stat().st_mtime < 120
    trained, studied = done.stdout.split("a study\n")
    assert trained == ""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module("shared_run").train_all(one)
    finally:
        torch.set_num_threads(threads)
    compare_runs(one, two)
    check_the_failed(two)
    check_the_killed(two, done.stderr)
    check_the_study(two / "study" / "two-clusters", studied, done.stderr)


def compare_runs(one, two):
    names = [path.name.removesuffix("-0.safetensors") for path in sorted(one.glob("*-0.safetensors"))]
    assert len(names) == 11
    for name in names:
        expected, document = load_tensors(one / f"{name}-0.safetensors")
        first, told = load_tensors(two / f"{name}-0.safetensors")
        second, told_too = load_tensors(two / f"{name}-1.safetensors")
        if name == "predictions":
            refused = [key for key in first if key.startswith("worker 1 of 2 cannot predict its share")]
            assert len(refused) == 1
            assert "hold NaN" in refused[0]
            first.pop(refused[0])
            second = {key: value for key, value in second.items() if not key.startswith("the inputs hold")}
        assert expected.keys() == first.keys() == second.keys(), name
        for key in first:
            assert torch.equal(first[key], second[key]), f"{name}: {key} differs between the processes"
        apart = max((expected[key].double() - first[key].double()).abs().max() for key in first)
        if name == "statistics":
            assert apart > 1e-3, "BatchNorm's statistics are each process's own"
            assert "BatchNorm" in told["told"][0]
            assert told_too["told"] == []
            continue
        assert apart < 1e-5, name
        if "history" in document:
            assert told["history"] == told_too["history"]
            assert document["after"] == told["after"] == told_too["after"], (
                "all generators end in the same state"
            )
            for ours, theirs in zip(document["history"]["records"], told["history"]["records"], strict=True):
                if name != "own_step":  # which logs how many rows it saw
                    assert ours == pytest.approx(theirs, abs=1e-5, rel=1e-7)  # a KL of thousands is a float32


def check_the_failed(place):
    """The second process raised an error of the user's own and ended."""
    checkpoint = place / "failing" / "last.safetensors"
    message = (place / "message.txt").read_text()
    assert message.startswith("worker 1 of 2 died in epoch 2, step 7, which ends the run")
    assert f"'{checkpoint}', resume=True" in message
    assert load_tensors(checkpoint)[1]["position"]["step"] == 6


def check_the_killed(place, errors):
    fit, checkpoint = module("dying_run").fit, place / "run" / "last.safetensors"
    lines = [line for line in errors.splitlines() if "FlowBNNError: " in line]
    assert len(lines) == 1, errors
    assert "worker 1 of 2 died in epoch 2, step 7" in lines[0]
    assert f"its state is in '{checkpoint}', resume=True" in lines[0]
    assert load_tensors(checkpoint)[1]["position"]["step"] == 6
    resumed, peaceful = fit(place / "run", resume=True), fit(place / "peaceful")
    assert resumed.history.epochs == 3
    for left, right in zip(resumed.model.parameters(), peaceful.model.parameters(), strict=True):
        assert (left - right).abs().max() < 1e-5


def check_the_study(folder, shown, told):
    assert shown.count("\n  one seed\n") == 1
    lines = [line for line in told.splitlines() if " done (" in line]
    assert len(lines) == len(set(lines)) > 1
    results = (folder / "results.json").read_text()
    assert "2 processes" in results
    assert "--devices 2" in results
