"""The code in the README, in CONTRIBUTING and in the docs runs as it is written."""

import doctest
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.methods import METHODS
from flowbnn_studies import get_study, run_study
from flowbnn_studies.runner.study import STUDIES

ROOT = Path(__file__).parent.parent
SMALL = "IAF(2, length=1, hidden=(4,))"  # for the pages' IAF(2), whose steps take longer


def blocks(name: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs teach the noise nothing
def test_the_readmes_ten_lines_run(capsys):
    code, *_ = blocks("README.md")
    assert len([line for line in code.splitlines() if line.strip() and "import" not in line]) <= 8
    names: dict = {}
    code = code.replace("fit(bayesian, train, seed=0", "fit(bayesian, train, epochs=5, seed=0")
    exec(re.sub(r"epochs=\d+(.*)seed=0", r"epochs=5\1seed=0, progress=False", code), names)
    printed = capsys.readouterr().out
    assert "novelty_auroc" in printed
    assert re.search(r"tensor\(\[.*-?\d", printed)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a network that has learned nothing
def test_the_readmes_calibration_runs(capsys):
    _, code, _ = blocks("README.md")
    torch.manual_seed(0)
    held_out = [(torch.randn(40, 4), torch.arange(40) % 3)]
    names = {"fb": fb, "network": torch.nn.Linear(4, 3), "held_out": held_out}
    exec(code, names)
    assert "temperature" in capsys.readouterr().out


def test_the_readmes_flows_run():
    code = blocks("README.md")[-1].replace("IAF(2)", SMALL)
    few = "epochs=1, progress=False, accelerator='cpu')"
    lines = []
    for line in code.strip().splitlines():
        call = line.split("#")[0].rstrip()
        lines.append(call if "NodeNoise" in call or "epochs" in call else f"{call.removesuffix(')')}, {few}")
    torch.manual_seed(0)
    names = {"fb": fb, "points": torch.randn(40, 2), "images": torch.rand(20, 1, 8, 8).round()}
    names["log_density"] = lambda x: -0.5 * x.square().sum(-1)
    exec("\n".join(lines), names)
    assert names["density"].log_prob(names["points"]).shape == (40,)
    assert names["target"].evidence(100)["log_evidence"] == pytest.approx(math.log(2 * math.pi), abs=0.1)
    assert names["vae"].history.epochs == 1
    assert names["noise"].name == "node-noise"


def test_the_lines_of_the_page_on_flows_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # which the densities are saved to
    torch.manual_seed(0)
    points, field = torch.randn(20, 2), fb.flows.FFJORD(2)
    few = {"epochs": 1, "progress": False, "accelerator": "cpu"}
    names = {"fb": fb, "torch": torch, "partial": partial, "few": few, "dim": 2, "context": None}
    names |= dict.fromkeys(("x", "data"), points) | {"held_out": points, "base": field().base}
    names |= {"transform": field.transform, "log_density": lambda x: -0.5 * x.square().sum(-1)}
    for code in blocks("docs/flows.md"):
        of_bytes = "Glow" in code
        names["images"] = torch.randint(256, (2, 3, 8, 8)) if of_bytes else torch.rand(8, 1, 28, 28).round()
        code = re.sub(r"(fb[.\w]*\.fit_\w+)\(", r"partial(\1, **few)(", code)
        exec(
            code.replace("32, 32", "8, 8").replace("IAF(2)", SMALL).replace("samples=1000", "samples=10"),
            names,
        )
    assert names["detector"].p_value(points).shape == (20,)
    assert names["fitted"].evidence(100)["log_evidence"] == pytest.approx(math.log(2 * math.pi), abs=0.1)


def test_the_lines_of_the_page_on_noise_run(capsys):
    (code,) = blocks("docs/noise.md")
    exec(code, {"fb": fb, "nn": torch.nn})
    assert re.search(r"conv2 .*InvConv.*\n.*fc1 .*Planar", capsys.readouterr().out)


def test_the_own_loop_runs():
    code = next(code for code in blocks("docs/fitting.md") if "fb.ELBO" in code)
    assert len(code.strip().splitlines()) == 8
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    model = fb.to_stochastic(torch.nn.Linear(4, 3), {"*": fb.noise.NormalPlanar()})
    before = {name: value.clone() for name, value in model.named_parameters()}
    names = {"fb": fb, "torch": torch, "model": model, "dataset": dataset, "loader": DataLoader(dataset, 4)}
    exec(code, names)
    assert all(not torch.equal(before[name], value) for name, value in model.named_parameters())


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs, eight examples in a fold
def test_the_lines_on_cross_fitting_run():
    code = next(code for code in blocks("docs/fitting.md") if "make_network" in code)
    assert len(code.strip().splitlines()) <= 10
    code = code.replace(
        "MAP().fit(make_network(), train", "MAP(epochs=2).fit(make_network(), train, progress=False"
    )
    code = code.replace("likelihood=plain", "folds=0, progress=False, likelihood=plain")
    torch.manual_seed(0)
    names = {"fb": fb, "torch": torch, "inputs": torch.randn(40, 4), "targets": torch.arange(40) % 3}
    names |= {"make_network": lambda: torch.nn.Linear(4, 3), "test_inputs": torch.randn(6, 4)}
    exec(code, names)
    assert torch.allclose(names["probabilities"].sum(-1), torch.ones(6))
    assert [member.calibration.examples for member in names["members"]] == [8] * 5


def test_the_lines_of_the_page_on_prediction_run():
    (code,) = blocks("docs/prediction.md")
    assert len([line for line in code.splitlines() if line.strip()]) <= 10
    names: dict = {}
    torch.manual_seed(0)
    exec(code, names)
    assert names["full"].probabilities.shape == (64, 10)
    assert 8 <= names["quick"].sample_counts.double().mean() <= 128


@pytest.mark.filterwarnings(
    "ignore::flowbnn.errors.FlowBNNWarning"
)  # nothing is trained long enough to be healthy
def test_the_lines_of_the_page_on_methods_run():
    (loop,) = blocks("docs/methods.md")
    few = "method = replace(method, epochs=1, **quick(method))\n    posterior = method.fit(network, train_loader, progress=False)"
    code = loop.replace("posterior = method.fit(network, train_loader)", few)
    assert code != loop

    def quick(method):
        chains = {"hmc": {"samples": 2, "warmup": 2, "chains": 1}, "sgld": {"samples": 1, "cycles": 1}}
        return chains.get(method.name, {})

    loader = small_loader()
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
    assert all(0.0 <= numbers["accuracy"] <= 1.0 for numbers in names["report"].values())


def small_loader():
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 3), batch_size=3
    )


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch trains nothing
def test_the_skeletons_of_contributing_run(tmp_path):
    names: dict = {}
    try:
        for code in blocks("CONTRIBUTING.md"):
            exec(code, names)
        value, log_det = names["Shift"](3)(torch.zeros(2, 3))
        assert (value.shape, log_det.shape) == ((2, 3), (2,))
        parser, runner = doctest.DocTestParser(), doctest.DocTestRunner()
        runner.run(parser.get_doctest(names["Shift"].__doc__, names, "Shift", None, 0))
        assert runner.summarize().failed == 0
        method = fb.methods.METHODS["snapshots"](epochs=1)
        assert len(method.fit(torch.nn.Linear(4, 3), small_loader(), progress=False)) == 3
        likelihood = names["LaplaceNoise"](2.0)
        assert likelihood.log_prob(torch.zeros(1, 1), torch.ones(1)).item() == pytest.approx(
            -0.5 - math.log(4.0)
        )
        assert likelihood.predictive(torch.zeros(3, 1, 1)).variance.item() == pytest.approx(8.0)
        results = run_study(get_study("slope"), out=tmp_path, progress=False)
        assert results["answer"] == "The mean is 3.0."
    finally:
        METHODS.pop("snapshots", None)
        STUDIES.pop("slope", None)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_to_files_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), f"{name} links to {target}, which is not there"
    for target in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / target).exists(), f"{name} names {target}, which is not there"
