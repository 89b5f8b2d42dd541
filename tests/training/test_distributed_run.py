"""Tests of two processes that train one model: they reach the result of one process and end if one of them dies."""

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


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_two_processes_reach_the_result_of_one_and_end_if_one_dies(tmp_path, monkeypatch):
    """One start of two processes serves several checks, because their imports take longer than the training."""
    one, two = tmp_path / "one", tmp_path / "two"
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, str(HERE / "two_process_run.py"), str(two)]
    environment = {**os.environ, "PYTHONWARNINGS": "ignore"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 1, result.stderr
    assert time.time() - (two / "begun").stat().st_mtime < 120
    training_output, study_output = result.stdout.split("--- output of the study\n")
    assert training_output == ""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        load_script("two_process_run").train_all(one)
    finally:
        torch.set_num_threads(threads)
    check_equal_results(one, two)
    check_failed_run(two)
    check_killed_run(two, result.stderr)
    check_study(two / "study" / "two-clusters", study_output, result.stderr)


def check_equal_results(one, two):
    names = [path.name.removesuffix("-0.safetensors") for path in sorted(one.glob("*-0.safetensors"))]
    assert len(names) == 11
    for name in names:
        expected, document = load_tensors(one / f"{name}-0.safetensors")
        first, first_document = load_tensors(two / f"{name}-0.safetensors")
        second, second_document = load_tensors(two / f"{name}-1.safetensors")
        if name == "predictions":
            first.pop("error of kind worker")
            second.pop("error of kind finite")
        assert expected.keys() == first.keys() == second.keys(), name
        for key in first:
            assert torch.equal(first[key], second[key]), f"{name}: {key} differs between the processes"
        difference = max((expected[key].double() - first[key].double()).abs().max() for key in first)
        if name == "statistics":
            assert difference > 1e-3, "each process has its own BatchNorm statistics"
            assert first_document["warnings"] == ["batch norm"]
            assert second_document["warnings"] == []
            continue
        assert difference < 1e-5, name
        if "history" in document:
            assert first_document["history"] == second_document["history"]
            assert document["random"] == first_document["random"] == second_document["random"]
            records = document["history"]["records"], first_document["history"]["records"]
            for expected_record, record in zip(*records, strict=True):
                if name != "own_step":  # it logs its number of rows
                    # a KL of thousands is a float32
                    assert expected_record == pytest.approx(record, abs=1e-5, rel=1e-7)


def check_failed_run(folder):
    """The second process raised an error in the user's code and ended; the first one reports it."""
    checkpoint = folder / "failing" / "last.safetensors"
    message = (folder / "message.txt").read_text()
    assert message.startswith("worker lost: worker 1 of 2 died in epoch 2, step 7")
    assert f"'{checkpoint}'" in message
    assert load_tensors(checkpoint)[1]["position"]["step"] == 6


def check_killed_run(folder, errors):
    fit, checkpoint = load_script("failing_fit").fit, folder / "run" / "last.safetensors"
    lines = [line for line in errors.splitlines() if "FlowBNNError: " in line]
    assert len(lines) == 1, errors
    assert "worker 1 of 2 died in epoch 2, step 7" in lines[0]
    assert f"'{checkpoint}'" in lines[0]
    assert load_tensors(checkpoint)[1]["position"]["step"] == 6
    resumed, uninterrupted = fit(folder / "run", resume=True), fit(folder / "uninterrupted")
    assert resumed.history.epochs == 3
    for left, right in zip(resumed.model.parameters(), uninterrupted.model.parameters(), strict=True):
        assert (left - right).abs().max() < 1e-5


def check_study(folder, output, errors):
    """Only the first process prints and writes the results."""
    assert output.count("results.json") == 1
    lines = [line for line in errors.splitlines() if line.startswith("two-clusters: ")]
    assert len(lines) == len(set(lines)) > 1
    results = (folder / "results.json").read_text()
    assert "2 processes" in results
    assert "--devices 2" in results
