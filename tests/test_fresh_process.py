"""What only a process without a past can show: one start, whose imports take longer than all that it does."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

resource = pytest.importorskip("resource")


def test_imports_change_nothing_memory_is_kept_from_pass_to_pass_and_the_command_line_speaks():
    script = str(Path(__file__).with_name("fresh_process.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.stderr == "flowbnn: there is no study 'digit'; did you mean 'digits'?\n"
    assert done.returncode == 2
    memory = json.loads(done.stdout)
    assert memory["value"] == 1.0
    assert memory["peak"] is None or 110 <= memory["peak"] < 400
    assert len(memory["faults"]) == 3
    if platform.libc_ver()[0] == "glibc":  # next to none, where it was each page in every pass
        assert max(memory["faults"]) < 0.02 * 20 * 48 * 2**20 / resource.getpagesize()
