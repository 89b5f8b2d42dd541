"""The code in the README and in CONTRIBUTING runs as it is written."""

import doctest
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from flowbnn.errors import FlowBNNWarning
from flowbnn.methods import METHODS
from flowbnn.models import LeNet

ROOT = Path(__file__).parent.parent


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # ten images teach the noise nothing
def test_the_readmes_ten_lines_run():
    code, _ = blocks("README.md")
    lines = [line for line in code.splitlines() if line.strip()]
    assert len(lines) <= 11
    images, labels = torch.randn(10, 1, 28, 28), torch.arange(10)
    names = {
        "LeNet": LeNet,
        "train_as_usual": lambda network: network,
        "train_loader": DataLoader(TensorDataset(images, labels), batch_size=5),
        "images": images,
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FlowBNNWarning)
        exec(code.replace("epochs=20", "epochs=1, progress=False").replace("samples=128", "samples=4"), names)
    assert names["prediction"].probabilities.shape == (10, 10)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs teach the noise nothing
def test_the_readmes_program_runs(tmp_path, monkeypatch, capsys):
    _, code = blocks("README.md")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    names: dict = {}
    exec(code.replace("epochs=20", "epochs=2").replace("epochs=10", "epochs=2"), names)
    told = capsys.readouterr().out
    assert "novelty_auroc" in told
    assert names["novel"].probabilities.shape == (10, 9)
    assert (tmp_path / "digits.safetensors").exists()


def test_the_lines_of_the_page_on_prediction_run():
    (code,) = blocks("docs/prediction.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict = {}
    torch.manual_seed(0)
    exec(code, names)
    assert names["full"].probabilities.shape == (64, 10)
    assert 8 <= names["quick"].samples_spent.double().mean() <= 128


@pytest.mark.filterwarnings(
    "ignore::flowbnn.errors.FlowBNNWarning"
)  # nothing is trained long enough to be healthy
def test_the_lines_of_the_page_on_methods_run():
    loop, skeleton = blocks("docs/methods.md")
    generator = torch.Generator().manual_seed(0)
    inputs, labels = torch.randn(24, 4, generator=generator), torch.arange(24) % 3
    loader = DataLoader(TensorDataset(inputs, labels), batch_size=3)
    few = "method = replace(method, epochs=1, **quick(method))\n    posterior = method.fit(network, train_loader, progress=False)"
    code = loop.replace("posterior = method.fit(network, train_loader)", few)
    assert code != loop

    def quick(method):
        chains = {"hmc": {"samples": 2, "warmup": 2, "chains": 1}, "sgld": {"samples": 1, "cycles": 1}}
        return chains.get(method.name, {})

    names = {
        "network": torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 3)),
        "train_loader": loader,
        "test_loader": loader,
        "other_loader": loader,
        "report": {},
        "replace": replace,
        "quick": quick,
    }
    exec(code, names)
    assert len(names["report"]) == 10
    assert all(0.0 <= found["accuracy"] <= 1.0 for found in names["report"].values())
    try:
        exec(skeleton, names)
        posterior = names["Snapshots"](epochs=1).fit(names["network"], loader, progress=False)
        assert len(posterior) == 3
    finally:
        METHODS.pop("snapshots", None)


def test_the_skeletons_of_contributing_run():
    names: dict = {}
    for code in blocks("CONTRIBUTING.md"):
        exec(code, names)
    shift = names["Shift"](3)
    value, log_det = shift(torch.zeros(2, 3))
    assert (value.shape, log_det.shape) == ((2, 3), (2,))
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
    runner.run(parser.get_doctest(names["Shift"].__doc__, names, "Shift", None, 0))
    assert runner.summarize().failed == 0


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), f"{name} links to {target}, which is not there"
    for target in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / target).exists(), f"{name} names {target}, which is not there"
