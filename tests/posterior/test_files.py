"""Tests of saved posteriors: model cards and uploads. test_fresh_process.py loads posteriors in another process."""

import sys

import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Categorical
from flowbnn.posterior import NoisePosterior, PointPosterior, read_card


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


class Annotated(nn.Linear):
    """Layer with a state of its own beside its tensors."""

    def __init__(self, extra):
        super().__init__(3, 2)
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def test_extra_states_of_layers_are_saved_if_they_are_tensors(tmp_path):
    path = PointPosterior(Annotated(torch.ones(3)), Categorical()).save(tmp_path / "saved.safetensors")
    assert fb.load_posterior(path, Annotated(torch.zeros(3))).model.extra.tolist() == [1.0, 1.0, 1.0]
    with pytest.raises(fb.FlowBNNError) as error:
        PointPosterior(Annotated({"note": "x"}), Categorical()).save(tmp_path / "other.safetensors")
    assert error.value.kind == "file"
    assert not (tmp_path / "other.safetensors").exists()


@pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
def test_lazy_networks_must_be_called_before_loading(tmp_path):
    path = PointPosterior(nn.Sequential(nn.Linear(3, 2)), Categorical()).save(tmp_path / "saved.safetensors")
    network = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(fb.FlowBNNError) as error:
        fb.load_posterior(path, network)
    assert (error.value.kind, error.value.argument) == ("network", "network")
    network(torch.zeros(1, 3))
    assert fb.load_posterior(path, network).predict(torch.zeros(1, 3)).probabilities.shape == (1, 2)
