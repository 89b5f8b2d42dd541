"""Tests that need a new process. One start serves all of them, because its imports take most of the time."""

import importlib
import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Categorical, Gaussian
from flowbnn.posterior import MixturePosterior, NoisePosterior

ROOT = Path(__file__).parents[1]
INPUTS = torch.ones(2, 4)  # of the predictions in both processes
resource = pytest.importorskip("resource")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))


def add_noise(likelihood):
    rules = {"0": fb.noise.NormalPlanar(length=2), "*": fb.noise.NormalAffine()}
    return NoisePosterior(fb.to_stochastic(mlp(), rules).eval(), likelihood)


def save_posteriors(folder):
    """Saves a posterior of every kind, and returns samples of their predictions."""
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    data = (inputs, (inputs[:, 0] > 0).long())
    methods = [fb.DeepEnsemble(2, epochs=1), fb.SWAG(epochs=4), fb.Laplace(epochs=1), fb.MNF(epochs=1)]
    methods += [fb.BayesByBackprop(epochs=1), fb.MCDropout(epochs=1)]
    methods += [fb.HMC(warmup=2, samples=2, chains=1, epochs=0)]
    posteriors = {type(method).__name__: method.fit(mlp(), data, progress=False) for method in methods}
    noisy = add_noise(Categorical())
    posteriors |= {"noise": noisy, "mixture": MixturePosterior([noisy, posteriors["Laplace"]])}
    posteriors["temperature"] = fb.Temperature().calibrate(noisy, data)
    posteriors["regression"] = add_noise(Gaussian(0.5, dim=2))
    for name, posterior in posteriors.items():
        posterior.save(folder / f"{name}.safetensors")
    return {name: posterior.predict(INPUTS, 4, seed=0).samples for name, posterior in posteriors.items()}


def save_likelihood_of_contributing(folder, monkeypatch):
    """Saves a posterior with a likelihood that only a file of the user has, and returns its mean prediction."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(), re.DOTALL)
    (code,) = (block for block in blocks if "class LaplaceNoise" in block)
    (folder / "laplace_noise.py").write_text(code)
    monkeypatch.syspath_prepend(folder)
    likelihood = importlib.import_module("laplace_noise").LaplaceNoise(0.3)
    inputs = torch.randn(40, 4)
    method, loader = fb.MLE(epochs=1), [(inputs, inputs.sum(1))]
    posterior = method.fit(nn.Linear(4, 1), loader, likelihood=likelihood, progress=False)
    posterior.save(folder / "own" / "posterior.safetensors")
    return posterior.predict(INPUTS).mean.flatten().tolist()


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # one epoch is too few
def test_imports_memory_loading_and_command_line_in_a_new_process(tmp_path, monkeypatch):
    expected, mean = save_posteriors(tmp_path), save_likelihood_of_contributing(tmp_path, monkeypatch)
    script = str(Path(__file__).with_name("fresh_process.py"))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error", script, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("flowbnn: ")
    assert result.stderr.count("\n") == 1
    assert "'digits'" in result.stderr
    report = json.loads(result.stdout)
    assert report["value"] == 1.0
    assert report["peak"] is None or 110 <= report["peak"] < 400
    assert len(report["faults"]) == 3
    if platform.libc_ver()[0] == "glibc":  # almost no page is faulted in again
        assert max(report["faults"]) < 0.02 * 20 * 48 * 2**20 / resource.getpagesize()
    missing = report["missing"]
    assert (
        missing["matplotlib"] == "missing package: flowbnn.plots needs matplotlib: pip install flowbnn[plots]"
    )
    assert "pip install flowbnn[sklearn]" in missing["sklearn"]
    assert set(report["loaded"]) == set(expected)
    for name, samples in expected.items():
        loaded = torch.tensor(report["loaded"][name], dtype=torch.float64)
        torch.testing.assert_close(loaded, samples.double().flatten(), rtol=1e-6, atol=1e-6)
    own = report["own"]
    assert own["errors"] == [["file", None, 0], ["file", "likelihood", 0]]
    assert (own["scale"], own["mean"]) == (0.3, pytest.approx(mean))
