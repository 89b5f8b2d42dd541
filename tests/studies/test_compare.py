"""Tests of ``flowbnn compare``: networks and data by name, and the command line."""

import json

import pytest
from typer.testing import CliRunner

from flowbnn_studies.cli import app
from flowbnn_studies.compare import DATA, NETWORKS, prepare_data

QUICK = ["--quick", "--jobs", "1", "--no-progress", "--set", "train=60", "--set", "test=40", "--epochs", "2"]


def call(*words):
    """Returns the result of a command."""
    return CliRunner().invoke(app, [str(word) for word in words])


def test_every_network_takes_images():
    for name in NETWORKS:
        data = prepare_data(name, "digits", seed=0, train=4, test=4)
        network = NETWORKS[name][0](data.shape, data.classes).eval()
        assert network(data.test[0]).shape == (4, data.classes)
    assert set(DATA) == {"digits", "clusters", "mnist", "fashion-mnist", "cifar10"}


def test_command_compares_and_resumes(tmp_path):
    words = ["compare", "--network", "mlp", "--data", "clusters", "--out", tmp_path, *QUICK]
    done = call(*words, "--methods", "map")
    assert done.exit_code == 0, done.output
    results = json.loads((tmp_path / "compare-mlp-clusters" / "results.json").read_text())
    assert {row["key"] for row in results["rows"]} == {"mle", "map"}
    command = "flowbnn compare --network mlp --data clusters --methods map --epochs 2"
    assert results["command"].startswith(command)
    assert results["title"].startswith("Which method for mlp on clusters? (")
    columns = ("Accuracy", "NLL", "ECE", "Brier", "Novelty AUROC", "Training", "Prediction", "Parameters")
    for column in columns:
        assert column in done.output
    path = tmp_path / "compare-mlp-clusters" / "parts" / "map-seed0.json"
    modified = path.stat().st_mtime_ns
    resumed = call(*words, "--methods", "map,mc-dropout", "--resume")
    assert resumed.exit_code == 0, resumed.output
    assert path.stat().st_mtime_ns == modified
    assert "MC dropout" in resumed.output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--network", "lenett"], "did you mean 'lenet'"),
        (["--data", "digit"], "did you mean 'digits'"),
        (["--data", "clusters"], "--network mlp"),
        (["--methods", "laplac"], "did you mean 'laplace'"),
        (["--epochs", "0"], "(epochs=...) must be an integer of at least 1"),
    ],
)
def test_bad_options_give_one_line(words, message, tmp_path):
    result = call("compare", "--quick", "--jobs", "1", "--out", tmp_path, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
