"""Tests of ``flowbnn run --devices``, which starts torchrun as a child process."""

import pytest

from flowbnn_studies.cli import app
from flowbnn_studies.runner import launch


@pytest.fixture
def commands(monkeypatch):
    """Commands that would be started."""
    started = []
    monkeypatch.setattr(launch.subprocess, "call", lambda command, **options: started.append(command) or 3)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return started


def test_devices_start_torchrun_and_return_its_status(monkeypatch, commands):
    arguments = ["run", "digits", "--device", "cpu", "--devices", "2"]
    monkeypatch.setattr("sys.argv", ["flowbnn", *arguments])
    with pytest.raises(SystemExit) as ended:
        app(arguments)
    assert ended.value.code == 3
    assert commands == [launch.torchrun_command(2, arguments)]


@pytest.mark.parametrize(
    "options",
    [
        ["--device", "cuda", "--devices", "2"],
        ["--device", "cuda"],
        ["--device", "cpu", "--devices", "1000000"],
        ["--device", "cpu", "--devices", "2", "--jobs", "2"],
        ["--device", "cpu", "--nodes", "2"],
    ],
)
def test_unavailable_devices_are_one_line_on_the_command_line(monkeypatch, capsys, commands, options):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SystemExit) as ended:
        app(["run", "digits", *options])
    assert ended.value.code == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert output.err.startswith("flowbnn: ")
    assert commands == []
