"""Runs the code blocks of the README, of CONTRIBUTING and of the documentation."""

import doctest
import math
import re
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import matplotlib.pyplot
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn.methods import METHODS
from flowbnn_studies import get_study, run_study
from flowbnn_studies.data import ImageSet
from flowbnn_studies.runner.study import STUDIES

ROOT = Path(__file__).parent.parent
# flows that replace those of the documents, whose steps take longer
SMALL_IAF, SMALL_NSF = "IAF(2, length=1, hidden=(4,))", "NSF(2, length=1, hidden=(4,))"


def code_blocks(name: str) -> list[str]:
    """Returns the Python code blocks of a document."""
    return re.findall(r"```python\n(.*?)```", (ROOT / name).read_text(), re.DOTALL)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few for the noise
def test_readme_examples(capsys):
    """The example of training with noise continues that of calibration."""
    calibration, training = code_blocks("README.md")
    names: dict = {}
    exec(calibration.replace("seed=0)", "seed=0, progress=False)"), names)
    posterior, output = names["posterior"], capsys.readouterr().out
    assert "temperature" in output
    assert -1 in posterior.predict(names["digits"].novel[0][:8]).decide(abstain_above=0.3).values
    plain = fb.posterior.PointPosterior(names["network"], fb.likelihoods.Categorical())
    before, after = (fb.evaluate(each, names["digits"].test, progress=False) for each in (plain, posterior))
    assert after["nll"] < 0.7 * before["nll"]
    exec(training.replace("train, seed=0)", "train, epochs=2, seed=0, progress=False)"), names)
    assert "auroc_energy" in capsys.readouterr().out


def test_readme_is_short():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 700
    assert len(re.findall(r"\d\.\d", text)) <= 20


def test_every_page_with_code_is_executed():
    """Every page with Python has a test that executes it, of all its blocks or in parts."""
    tests = Path(__file__).read_text() + (ROOT / "tests" / "test_site.py").read_text()
    pages = [path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
    for page in pages:
        if "generated" not in page.parts and code_blocks(str(page)):
            assert f'"{page}"' in tests or f'"{page.name}"' in tests, page


def test_commands_of_documents_exist():
    """Studies and benchmarks that documents name exist."""
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        text = path.read_text()
        assert set(re.findall(r"flowbnn run ([a-z][\w-]+)", text)) - {"slope"} <= set(STUDIES), path
        for name in re.findall(r"python (benchmarks/\w+\.py)", text):
            assert (ROOT / name).exists(), path


def test_start_page():
    (code,) = code_blocks("docs/index.md")
    names = {
        "network": torch.nn.Linear(4, 3),
        "held_out": small_loader(),
        "inputs": torch.randn(2, 4),
        "fb": fb,
    }
    exec(code.replace("held_out)", "held_out, candidates=['temperature'], progress=False)"), names)
    assert names["prediction"].labels.shape == (2,)


def test_flows_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the densities are saved there
    torch.manual_seed(0)
    points, field = torch.randn(20, 2), fb.flows.FFJORD(2)
    short = {"epochs": 1, "progress": False, "accelerator": "cpu"}
    names = {"fb": fb, "torch": torch, "partial": partial, "short": short, "dim": 2, "context": None}
    names |= dict.fromkeys(("x", "data"), points) | {"held_out": points, "base": field().base}
    names |= {"transform": field.transform, "log_density": lambda x: -0.5 * x.square().sum(-1)}
    for code in code_blocks("docs/flows.md"):
        needs_bytes = "Glow" in code
        names["images"] = (
            torch.randint(256, (2, 3, 8, 8)) if needs_bytes else torch.rand(8, 1, 28, 28).round()
        )
        code = re.sub(r"(fb[.\w]*\.fit_\w+)\(", r"partial(\1, **short)(", code)
        exec(
            code.replace("32, 32", "8, 8").replace("IAF(2)", SMALL_IAF).replace("samples=1000", "samples=10"),
            names,
        )
    assert names["detector"].p_value(points).shape == (20,)
    assert names["fitted"].evidence(100)["log_evidence"] == pytest.approx(math.log(2 * math.pi), abs=0.1)


def test_noise_page(capsys):
    (code,) = code_blocks("docs/noise.md")
    exec(code, {"fb": fb, "nn": torch.nn})
    assert re.search(r"conv2 .*InvConv.*\n.*fc1 .*Planar", capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch is too few
def test_targets_page():
    names: dict = {}
    torch.manual_seed(0)
    for code in code_blocks("docs/targets.md"):
        code = code.replace("DeepEnsemble(3)", "DeepEnsemble(2, epochs=1)").replace(
            "SWAG()", "SWAG(epochs=6)"
        )
        code = code.replace("MCDropout()", "MCDropout(epochs=1)")
        exec(code.replace("likelihood=", "progress=False, likelihood="), names)
    assert names["prediction"]["class"].probabilities.shape == (5, 2)
    assert (names["low"] < names["high"]).all()


def test_custom_training_loop():
    code = next(code for code in code_blocks("docs/fitting.md") if "fb.ELBO" in code)
    assert len(code.strip().splitlines()) == 8
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(8, 4), torch.arange(8) % 3)
    model = fb.to_stochastic(torch.nn.Linear(4, 3), {"*": fb.noise.NormalPlanar()})
    before = {name: value.clone() for name, value in model.named_parameters()}
    names = {"fb": fb, "torch": torch, "model": model, "dataset": dataset, "loader": DataLoader(dataset, 4)}
    exec(code, names)
    assert all(not torch.equal(before[name], value) for name, value in model.named_parameters())


@pytest.mark.slow  # chains and modes
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # few epochs and short chains
def test_fitting_page(tmp_path, monkeypatch):
    """The blocks that no other test executes, in their order."""
    others = "fb.ELBO", "make_network", "likelihoods.Flow"
    codes = [c for c in code_blocks("docs/fitting.md") if not any(name in c for name in others)]
    assert len(codes) == 4
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network, loader = torch.nn.Sequential(torch.nn.Linear(4, 3)), small_loader()
    names = {
        "fb": fb,
        "network": network,
        "bayesian": fb.to_stochastic(network, {"*": fb.noise.NormalAffine()}),
    }
    names |= dict.fromkeys(("loader", "train_loader", "held_out", "train", "test"), loader)
    names |= {
        "inputs": torch.randn(2, 4),
        "any_posterior": fb.MAP(epochs=1).fit(network, loader, progress=False),
    }
    names["fit"] = lambda data: names["posterior"]
    monkeypatch.setattr(
        fb.diagnostics, "noise_chains", partial(fb.diagnostics.noise_chains, samples=20, warmup=20)
    )
    monkeypatch.setattr(fb.diagnostics, "simulation_ranks", lambda *_: SimpleNamespace(p_value=0.5))
    for code in codes:
        if "fb.diagnose(" in code:  # of noise, not of the calibrators before it
            names["posterior"] = fb.calibrate(network, loader, candidates=["noise"], folds=0, progress=False)
        code = code.replace("resume=True", "resume=True, epochs=1, progress=False")
        code = code.replace(
            "fb.calibrate(network, held_out", "fb.calibrate(network, held_out, candidates=['noise'], folds=0"
        )
        code = code.replace("MCDropout()", "MCDropout(epochs=1)").replace("MAP()", "MAP(epochs=1)")
        exec(code.replace("NUTS()", "NUTS(samples=2, warmup=2, chains=2, epochs=1)"), names)
    assert names["gap"].per_example is not None


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs, eight examples per fold
def test_cross_fitting():
    code = next(code for code in code_blocks("docs/fitting.md") if "make_network" in code)
    code = code.replace(
        "method=fb.MAP()", "method=fb.MAP(epochs=2), progress=False, candidates=['temperature']"
    )
    torch.manual_seed(0)
    names = {"fb": fb, "torch": torch, "inputs": torch.randn(40, 4), "targets": torch.arange(40) % 3}
    names |= {"make_network": lambda: torch.nn.Linear(4, 3), "test_inputs": torch.randn(6, 4)}
    exec(code, names)
    assert torch.allclose(names["probabilities"].sum(-1), torch.ones(6))
    assert [member.calibration.examples for member in names["posterior"].members] == [8] * 5


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch is too few
def test_noise_of_any_shape():
    code = next(code for code in code_blocks("docs/fitting.md") if "likelihoods.Flow" in code)
    loader = DataLoader(TensorDataset(torch.randn(8, 3), torch.randn(8)), 4)
    names = {"fb": fb, "nn": torch.nn, "loader": loader, "inputs": torch.zeros(2, 3)}
    exec(
        code.replace("epochs=50).fit(network, loader", "epochs=1).fit(network, loader, progress=False"), names
    )
    assert names["low"].shape[1:] == (2,)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
def test_novelty_page():
    (code,) = code_blocks("docs/novelty.md")
    names: dict = {}
    torch.manual_seed(0)
    exec(code, names)
    assert {"auroc_entropy", "auroc_mutual_information", "auroc_energy"} < names["report"].keys()
    torch.testing.assert_close(
        names["safe"].predict(torch.full((1, 2), 50.0)).probabilities[0], names["safe"].gate.fallback
    )


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
def test_conformal_page():
    names: dict = {}
    for code in code_blocks("docs/conformal.md"):
        exec(code, names)
    assert names["sets"].predict_set(names["inputs"]).shape == (900, 3)
    assert names["low"].shape == (300,)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
def test_active_learning_page():
    (code,) = code_blocks("docs/active-learning.md")
    names: dict = {}
    exec(code, names)
    assert len(names["labelled"].unique()) == 25


def random_images(name, partition):
    """Returns 30 images with the shape of a published set."""
    shape = (3, 32, 32) if name == "cifar10" else (1, 28, 28)
    images = torch.randint(256, (30, *shape), dtype=torch.uint8)
    return ImageSet(
        images,
        torch.arange(30) % 10,
        tuple("abcdefghij"),
        name,
        partition,
        (0.5,) * shape[0],
        (0.2,) * shape[0],
    )


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
def test_data_page(capsys, monkeypatch):
    codes = code_blocks("docs/data.md")
    assert len(codes) == 5
    torch.manual_seed(0)
    monkeypatch.setattr("flowbnn_studies.data.load_images", random_images)
    with warnings.catch_warnings():  # about functions of torch that other packages use
        warnings.simplefilter("ignore")
        for code in codes:
            assert len([line for line in code.splitlines() if line]) <= 18
            exec(code.replace("validation=5000", "validation=10"), {})
    assert "torch.Size([24, 2])" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch is too few
def test_scikit_learn_page():
    scope = {}
    for code in code_blocks("docs/scikit-learn.md"):
        exec(
            re.sub(
                r"epochs=30|random_state=0\).fit\(",
                lambda m: m[0].replace("30", "1").replace("0)", "0, epochs=1)"),
                code,
            ),
            scope,
        )


def test_prediction_page():
    (code,) = code_blocks("docs/prediction.md")
    names: dict = {}
    torch.manual_seed(0)
    exec(code, names)
    assert names["full"].probabilities.shape == (64, 10)
    assert 8 <= names["quick"].sample_counts.double().mean() <= 128


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs are too few
def test_outputs_page():
    for code in code_blocks("docs/outputs.md"):
        assert len([line for line in code.splitlines() if line]) <= 10
        torch.manual_seed(0)
        names: dict = {}
        exec(code, names)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # two epochs are too few
def test_export_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    torch.manual_seed(0)
    for code in code_blocks("docs/export.md"):
        assert len(code.strip().splitlines()) <= 10
        exec(code.replace("NSF(2)", SMALL_NSF), names)
    assert names["probabilities"].shape == (5, 10)
    assert names["log_prob"].shape == (3,)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch is too few
def test_methods_page():
    (loop,) = code_blocks("docs/methods.md")
    call = "posterior = method.fit(network, train_loader"
    short = "method = replace(method, epochs=1, **short_chains(method))\n    "
    code = loop.replace(f"{call})", f"{short}{call}, progress=False)")
    assert code != loop

    def short_chains(method):
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
        "short_chains": short_chains,
    }
    exec(code, names)
    assert len(names["report"]) == 10
    assert all(0.0 <= scores["accuracy"] <= 1.0 for scores in names["report"].values())


def small_loader():
    """Returns a loader of 24 examples of three classes."""
    generator = torch.Generator().manual_seed(0)
    return DataLoader(
        TensorDataset(torch.randn(24, 4, generator=generator), torch.arange(24) % 3), batch_size=3
    )


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch is too few
def test_skeletons_of_contributing(tmp_path):
    names: dict = {}
    try:
        for code in code_blocks("CONTRIBUTING.md"):
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
def test_linked_files_exist(name):
    text = (ROOT / name).read_text()
    for target in re.findall(r"\]\((?!http)([^)#]+)\)", text):
        assert (ROOT / target).exists(), f"{name} links to {target}, which does not exist"
    for target in re.findall(r"`((?:src|tests|docs|benchmarks)/[\w./-]+\.\w+)`", text):
        assert (ROOT / target).exists(), f"{name} names {target}, which does not exist"


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # a few epochs are too few
def test_progress_page(tmp_path, monkeypatch):
    """The page with a stand-in for wandb."""
    logged = []
    run = SimpleNamespace(log=lambda metrics, step: logged.append((step, metrics["elbo"])))
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=lambda project: run))
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    network = torch.nn.Linear(4, 3)
    names = {"fb": fb, "network": network, "loader": small_loader()}
    names["bayesian"] = fb.to_stochastic(network, {"*": fb.noise.NormalAffine()})
    for code in code_blocks("docs/progress.md"):
        code = code.replace(
            "fb.fit(bayesian, loader", "fb.fit(bayesian, loader, epochs=2, report=False, validation=loader"
        )
        exec(code.replace("epochs=40", "epochs=4"), names)
    assert (tmp_path / "runs" / "first.csv").read_text().count("\n") == 5
    assert [step for step, _ in logged][:2] == [1, 2]


def test_plots_page(tmp_path, monkeypatch):
    matplotlib.use("Agg")
    monkeypatch.chdir(tmp_path)
    posterior = fb.posterior.PointPosterior(torch.nn.Linear(2, 3), fb.likelihoods.Categorical())
    inputs = {"test_inputs": torch.randn(30, 2), "test_targets": torch.arange(30) % 3}
    names: dict = {"posterior": posterior, **inputs}
    for code in code_blocks("docs/plots.md"):
        exec(code, names)
    assert (tmp_path / "reliability.png").stat().st_size > 1000
    assert len(names["right"].lines) == 4
    matplotlib.pyplot.close("all")
    page = (ROOT / "docs/plots.md").read_text()
    methods = {"plot_density": "density.plot(", "plot_comparison": "comparison.plot("}
    for name in fb.plots.__all__:
        assert not name.startswith("plot_") or methods.get(name, name) in page, name


def text_data(rows=24):
    """Returns examples of a text classifier, as data sets of Hugging Face return them."""
    words = torch.arange(rows * 5).view(rows, 5) % 20
    return [{"input_ids": words[index], "labels": torch.tensor(index % 2)} for index in range(rows)]


class TextData(torch.utils.data.Dataset):
    """Data set of :func:`text_data`."""

    def __init__(self):
        self.rows = text_data()

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return self.rows[index]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of other libraries, and of short fits
def test_integrations_page(tmp_path, monkeypatch):
    import lightning
    from torch_geometric.data import Data

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 3)

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, index):
            return torch.nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters())

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    graphs = [Data(x=torch.randn(3, 3), edge_index=edges, y=torch.tensor([i % 2])) for i in range(24)]
    graph = Data(x=torch.randn(3, 3), edge_index=edges, y=torch.tensor([0, 1, 1]))
    names = {"fb": fb, "torch": torch, "train_texts": TextData(), "held_out_texts": TextData()}
    names |= {"graphs": graphs, "graph": graph, "Classifier": Classifier, "data_module": small_loader()}
    for code in code_blocks("docs/integrations.md"):
        code = re.sub(
            r"fb\.fit\((.*)\)(?=\s|$)",
            r"fb.fit(\1, epochs=1, report=False, progress=False)",
            code,
            flags=re.M,
        )
        code = code.replace(
            "held_out)\nprint", "held_out, candidates=['temperature'], progress=False)\nprint"
        )
        code = code.replace(
            "report_to=[]", "report_to=[], use_cpu=True, num_train_epochs=1, disable_tqdm=True"
        )
        code = code.replace("logger=False", "logger=False, enable_progress_bar=False, accelerator='cpu'")
        exec(code, names)
        if "model" in names and "base_model" not in names:
            names["base_model"] = fb.networks.copy_network(names["model"])
    assert not any("lora" in name for name, _ in names["merged"].named_modules())
    assert names["posterior"].predict(graphs, 2).probabilities.shape == (24, 2)
