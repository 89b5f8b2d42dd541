"""Tests of the command line: commands, one-line errors and exit codes."""

import json
import runpy
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from flowbnn.errors import FlowBNNError
from flowbnn_studies import cli, studies
from flowbnn_studies.cli import _setting, app
from flowbnn_studies.runner import run as running

SMALL = ["--quick", "--seeds", "1", "--epochs", "1", "--jobs", "1", "--set", "train=200", "--set", "test=200"]


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_version_and_list():
    assert call("--version").output.strip() == version("flowbnn")
    listed = call("list")
    assert listed.exit_code == 0
    assert [line.split()[0] for line in listed.output.splitlines()] == [study.name for study in studies()]


def test_run_writes_results_and_report_writes_the_page(tmp_path):
    done = call("run", "two-clusters", "--out", tmp_path, *SMALL, "--set", "grid=7", "--set", "noise_lr=1")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "two-clusters" / "results.json").read_text())
    assert results["command"] == (
        "flowbnn run two-clusters --seeds 1 --epochs 1 --set train=200 --set test=200 --set grid=7 --set noise_lr=1 --quick"
    )
    assert results["settings"]["noise_lr"] == 1.0
    assert len(results["figures"][0]["data"]["models"][0]["grid"]) == 49
    assert results["settings"]["epochs"] == 1
    assert "Flow noise" in done.output
    assert "published" not in done.output  # trial runs show no published values
    assert "trial run with tiny settings" in done.output
    assert results["answer"] in done.output
    content = {**results, "figures": results["figures"][2:3]}
    (tmp_path / "two-clusters" / "results.json").write_text(json.dumps(content))
    page = call("report", tmp_path, "--out", tmp_path / "page.html")
    assert page.exit_code == 0, page.output
    assert results["title"] in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "two-cluster"], "did you mean 'two-clusters'"),
        (["run", "digits", "--seeds", "0"], "seeds must be a number of at least 1"),
        (["run", "digits", "--seeds", "a"], "expects a number or a list such as 3,4, got 'a'"),
        (["run", "digits", "--epochs", "0"], "(epochs=...) must be an integer of at least 1, got 0"),
        (["run", "digits", "--jobs", "0"], "(jobs=...) must be an integer of at least 1, got 0"),
        (["run", "digits", "--set", "novel"], "--set expects name=value"),
        (["run", "digits", "--set", "novl=3"], "did you mean 'novel'"),
        (["run", "digits", "--set", "width=1.5"], "(width=...) must be an integer of at least 1, got 1.5"),
        (["compare", "--set", "network=x"], "(network=...) must be 'mlp'"),
        (["report", "no-such-folder"], "no-such-folder"),
        (["playground", "--port", "70000"], "got 70000"),
    ],
)
def test_errors_are_one_line_with_exit_code_2(words, message):
    result = call(*words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize("word", ["true", "True", "false", "FALSE"])
def test_boolean_settings_ignore_case(word):
    assert _setting(f"flip={word}") == ("flip", word.lower() == "true")


@pytest.mark.parametrize("command", [["run", "two-clusters"], ["demo"]])
def test_unwritable_folder_is_reported_before_training(tmp_path, command):
    (tmp_path / "file").write_text("")
    result = call(*command, "--quick", "--jobs", "1", "--out", tmp_path / "file")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "cannot write" in result.stderr


def test_interrupt_during_import_is_one_line():
    code = """
import os, signal, sys, flowbnn_command
signal.signal(signal.SIGINT, signal.default_int_handler)
class Finder:
    def find_spec(self, name, *_):
        if name == "torch":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
flowbnn_command.main()
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (130, "flowbnn: interrupted\n")


def test_interrupt_prints_the_command_to_continue(tmp_path, monkeypatch):
    from flowbnn_studies.two_clusters import TwoClusters

    def interrupted(self, job):
        raise KeyboardInterrupt

    monkeypatch.setattr(TwoClusters, "train", interrupted)
    folder = tmp_path / "two words"
    result = call("run", "two-clusters", "--out", folder, "--acceleration", "off", *SMALL)
    assert result.exit_code == 130
    line = result.stderr.strip().splitlines()[-1]
    words = shlex.split(line.partition("continue with: ")[2])
    assert words[:3] == ["flowbnn", "run", "two-clusters"]
    assert words[words.index("--out") + 1] == str(folder)
    assert words[words.index("--acceleration") + 1] == "off"
    assert words[words.index("--jobs") + 1] == "1"
    assert words[-1] == "--resume"


def test_demo_runs_two_studies_and_writes_the_report(tmp_path, monkeypatch, sketched):
    tiny = {"train": 200, "test": 200, "short_epochs": 1, "epochs": 1, "samples": 2, "grid": 5}
    for study, settings in (
        ("two_clusters.TwoClusters", tiny),
        ("digits.DigitsStudy", {"start_epochs": 1, "epochs": 1, "samples": 2, "width": 2, "hidden": 8}),
    ):
        monkeypatch.setattr(f"flowbnn_studies.{study}.seeds", 1)
        monkeypatch.setattr(f"flowbnn_studies.{study}.quick", settings)
    done = call("demo", "--out", tmp_path, "--quick", "--jobs", "1", "--no-progress")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "report.html").exists()
    assert str(tmp_path / "report.html") in done.output
    assert "two-clusters:" in done.output
    assert "digits:" in done.output


@pytest.mark.parametrize("wrong", ["epochs=-1", "weight_lr=-1", "hidden=0", "novel=12", "samples=0"])
def test_invalid_settings_are_refused_before_archiving(wrong, tmp_path):
    paths = [tmp_path / "digits" / place / "plain-seed0.json" for place in ("parts", "earlier")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.write_text(path.parent.name)
    for _ in range(2):
        assert call("run", "digits", "--seeds", "1", "--set", wrong, "--out", tmp_path).exit_code == 2
    assert [path.read_text() for path in paths] == ["parts", "earlier"]


@pytest.mark.parametrize("device", ["tpu", "abacus"])
def test_missing_device_is_refused_before_archiving(device, tmp_path):
    finished = tmp_path / "digits" / "parts" / "plain-seed0.json"
    finished.parent.mkdir(parents=True)
    finished.write_text("{}")
    done = call("run", "digits", "--quick", "--device", device, "--out", tmp_path)
    assert done.exit_code == 2
    assert finished.exists()
    assert done.stderr.startswith("flowbnn: --device: ")
    assert device in done.stderr


@pytest.mark.parametrize("missing", ["jinja2", "matplotlib"])
def test_missing_package_is_one_line(missing, monkeypatch):
    def write_report(*arguments, **options):
        raise ModuleNotFoundError(f"No module named {missing!r}", name=missing)

    monkeypatch.setattr("flowbnn_studies.report.write_report", write_report)
    done = call("report", Path(__file__).parents[2] / "docs" / "results")
    assert done.exit_code == 2
    assert done.stderr == f"flowbnn: {missing} is not installed; run pip install flowbnn[studies]\n"


@pytest.mark.parametrize("missing", ["starlette", "uvicorn"])
def test_missing_package_of_the_playground_is_one_line(missing, monkeypatch):
    monkeypatch.delitem(sys.modules, "flowbnn_studies.playground.server", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    done = call("playground", "--no-browser")
    assert done.exit_code == 2
    assert done.stderr == f"flowbnn: {missing} is not installed; run pip install flowbnn[playground]\n"


def test_missing_typer_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    with pytest.raises(SystemExit) as caught:
        runpy.run_path(cli.__file__)
    assert caught.value.code == "flowbnn: typer is not installed; run pip install flowbnn[studies]"


@pytest.mark.parametrize(
    ("words", "parallel"),
    [
        (["images"], False),
        (["images", "--device", "cpu"], True),
        (["two-clusters"], True),
        (["two-clusters", "--device", "cuda"], False),
    ],
)
def test_gpu_trains_one_variant_at_a_time(monkeypatch, words, parallel):
    numbers = []

    def runner(context, jobs):
        numbers.append(jobs)
        raise FlowBNNError("enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(running, "available_cores", lambda: 8)
    monkeypatch.setattr(cli, "_study_runner", runner)
    assert "enough" in call("run", *words).output
    assert numbers == [4 if parallel else 1]


@pytest.mark.parametrize(
    "words",
    [
        ("run", "two-clusters", "--out", ""),
        ("report", ""),
        ("report", ".", "--out", " "),
        ("demo", "--out", ""),
    ],
)
def test_empty_paths_are_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert call(*words).exit_code == 2
    assert list(tmp_path.iterdir()) == []
