"""Several processes train one model: what one process would have reached, and no silence when one of them dies."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from flowbnn.training import load_tensors

HERE = Path(__file__).parent
pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(), reason="needs gloo"
)


def module(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def launch(*words, seconds=240):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    return subprocess.run(
        [sys.executable, *map(str, words)], capture_output=True, text=True, timeout=seconds, env=environment
    )


def test_two_processes_of_torchrun_reach_what_one_reaches(tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        module("shared_run").train_all(one)
    finally:
        torch.set_num_threads(threads)
    torchrun = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = launch(*torchrun, HERE / "shared_run.py", two)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    failing = two / "failing" / "last.safetensors"
    message = (two / "message.txt").read_text()
    assert message.startswith("worker 1 of 2 died in epoch 2, step 7, which ends the run")
    assert f"'{failing}', resume=True" in message
    assert load_tensors(failing)[1]["position"]["step"] == 6
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


def test_a_worker_that_dies_ends_the_run_and_leaves_a_checkpoint(tmp_path):
    fit = module("dying_run").fit
    begun = time.monotonic()
    done = launch(HERE / "dying_run.py", tmp_path / "run", "killed")
    assert done.returncode == 1
    assert time.monotonic() - begun < 120
    lines = [line for line in done.stderr.splitlines() if "FlowBNNError: " in line]
    assert len(lines) == 1, done.stderr
    checkpoint = tmp_path / "run" / "last.safetensors"
    assert "worker 1 of 2 died in epoch 2, step 7" in lines[0]
    assert f"its state is in '{checkpoint}', resume=True" in lines[0]
    assert load_tensors(checkpoint)[1]["position"]["step"] == 6
    resumed, peaceful = fit(tmp_path / "run", resume=True), fit(tmp_path / "peaceful")
    assert resumed.history.epochs == 3
    for left, right in zip(resumed.model.parameters(), peaceful.model.parameters(), strict=True):
        assert (left - right).abs().max() < 1e-5


def test_a_study_on_two_devices(tmp_path):
    words = ["run", "two-clusters", "--quick", "--seeds", "1", "--epochs", "1", "--devices", "2"]
    done = launch("-m", "flowbnn_studies.cli", *words, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n  one seed\n") == 1
    lines = [line for line in done.stderr.splitlines() if " done (" in line]
    assert len(lines) == len(set(lines)) > 1
    results = (tmp_path / "two-clusters" / "results.json").read_text()
    assert "2 processes" in results
    assert "--devices 2" in results
