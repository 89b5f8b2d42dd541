"""Tests that need a new process. One start serves all of them, because its imports take most of the time."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

resource = pytest.importorskip("resource")


def test_imports_memory_and_command_line_in_a_new_process():
    script = str(Path(__file__).with_name("fresh_process.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", script]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("flowbnn: ")
    assert result.stderr.count("\n") == 1
    assert "'digits'" in result.stderr
    memory = json.loads(result.stdout)
    assert memory["value"] == 1.0
    assert memory["peak"] is None or 110 <= memory["peak"] < 400
    assert len(memory["faults"]) == 3
    if platform.libc_ver()[0] == "glibc":  # almost no page is faulted in again
        assert max(memory["faults"]) < 0.02 * 20 * 48 * 2**20 / resource.getpagesize()
