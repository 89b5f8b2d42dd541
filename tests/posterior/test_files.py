"""Tests of saved posteriors: model cards, uploads, and loading in a process that has the architecture only."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Categorical, Gaussian
from flowbnn.posterior import MixturePosterior, NoisePosterior, PointPosterior, read_card


def mlp(outputs=3):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, outputs))


def add_noise(network, likelihood):
    rules = {"0": fb.noise.NormalPlanar(length=2), "*": fb.noise.NormalAffine()}
    return NoisePosterior(fb.to_stochastic(network, rules).eval(), likelihood)


def test_file_holds_a_model_card(tmp_path):
    posterior = add_noise(mlp(), Categorical())
    path = posterior.save(tmp_path / "posterior.safetensors", {"accuracy": 0.975, "nll": 0.0625})
    card = read_card(path)
    assert card == posterior.card({"accuracy": 0.975, "nll": 0.0625})
    for text in (
        "NoisePosterior",
        "Categorical",
        "| accuracy | 0.975 |",
        "fb.load_posterior",
        torch.__version__,
    ):
        assert text in card
    assert "Metrics" not in posterior.card()


def test_other_files_have_no_card(tmp_path):
    path = fb.training.storage.save_tensors(tmp_path / "other.safetensors", {"a": torch.ones(1)}, {})
    with pytest.raises(fb.FlowBNNError) as error:
        read_card(path)
    assert error.value.kind == "file"


class FakeHub:
    """Client that stores what is uploaded."""

    def __init__(self):
        self.calls, self.files = [], {}

    def create_repo(self, repo_id, private, exist_ok):
        self.calls.append((repo_id, private, exist_ok))
        return f"https://hub.invalid/{repo_id}"

    def upload_folder(self, repo_id, folder_path, commit_message):
        from pathlib import Path

        self.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}


def test_push_to_hub_uploads_posterior_and_card(tmp_path):
    posterior, hub = add_noise(mlp(), Categorical()), FakeHub()
    address = posterior.push_to_hub("user/model", {"nll": 0.5}, private=True, api=hub)
    assert address == "https://hub.invalid/user/model"
    assert hub.calls == [("user/model", True, True)]
    assert set(hub.files) == {"README.md", "posterior.safetensors"}
    assert "| nll | 0.5 |" in hub.files["README.md"].decode()
    path = tmp_path / "posterior.safetensors"
    path.write_bytes(hub.files["posterior.safetensors"])
    other, inputs = fb.load_posterior(path, mlp()), torch.ones(2, 4)
    assert torch.equal(other.predict(inputs, 4, seed=0).samples, posterior.predict(inputs, 4, seed=0).samples)


def test_push_to_hub_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(fb.FlowBNNError) as error:
        PointPosterior(mlp(), Categorical()).push_to_hub("user/model")
    assert error.value.kind == "missing package"


LOADER = """
import json, sys
import torch
from torch import nn
import flowbnn as fb

means = {}
for name in sys.argv[2:]:
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    posterior = fb.load_posterior(f"{sys.argv[1]}/{name}.safetensors", network)
    predictive = posterior.predict(torch.ones(2, 4), 4, seed=0)
    means[name] = (predictive.samples.double()).flatten().tolist()
print(json.dumps(means))
"""


@pytest.mark.filterwarnings("ignore")
def test_loading_needs_the_architecture_only(tmp_path):
    inputs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    data = (inputs, (inputs[:, 0] > 0).long())
    methods = [fb.DeepEnsemble(2, epochs=1), fb.SWAG(epochs=4), fb.Laplace(epochs=1), fb.MNF(epochs=1)]
    methods += [
        fb.BayesByBackprop(epochs=1),
        fb.HMC(warmup=2, samples=2, chains=1, epochs=0),
        fb.MCDropout(epochs=1),
    ]
    posteriors = {type(m).__name__: m.fit(mlp(2), data, progress=False) for m in methods}
    noisy = add_noise(mlp(2), Categorical())
    posteriors |= {"noise": noisy, "mixture": MixturePosterior([noisy, posteriors["Laplace"]])}
    posteriors["temperature"] = fb.Temperature().calibrate(noisy, data)
    posteriors["regression"] = add_noise(mlp(2), Gaussian(0.5, dim=2))
    for name, posterior in posteriors.items():
        posterior.save(tmp_path / f"{name}.safetensors")
    command = [sys.executable, "-c", textwrap.dedent(LOADER), str(tmp_path), *posteriors]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    means = json.loads(result.stdout)
    for name, posterior in posteriors.items():
        expected = posterior.predict(torch.ones(2, 4), 4, seed=0).samples.double().flatten()
        torch.testing.assert_close(
            torch.tensor(means[name], dtype=torch.float64), expected, rtol=1e-6, atol=1e-6
        )
