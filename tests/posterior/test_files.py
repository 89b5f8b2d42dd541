"""Tests of saved files: forged contents, model cards and uploads. test_fresh_process.py loads posteriors in another process.

The files of every kind (posteriors, densities, autoencoders, checkpoints) are forged with a valid checksum. test_reading.py of the
studies does the same with results, test_peft.py with adapters.
"""

import copy
import pickle
import sys

import pytest
import torch
from tests.stress.cases import Fit, cached_fit, equal_bits, named_tensors, network
from torch import nn

import flowbnn as fb
from flowbnn.likelihoods import Categorical
from flowbnn.options import all_subclasses
from flowbnn.posterior import NoisePosterior, PointPosterior, read_card
from flowbnn.posterior.files import list_tensors
from flowbnn.training import load_tensors, save_tensors

FORGERIES = {
    "NaN": lambda tensor: torch.full_like(tensor, torch.nan),
    "infinity": lambda tensor: torch.full_like(tensor, torch.inf),
    "no numbers": lambda tensor: tensor.new_zeros(0),
    "one axis more": lambda tensor: tensor[None],
    "one number more": lambda tensor: tensor.new_ones(tensor.numel() + 1),
    "integers": lambda tensor: tensor.to(torch.int16),
    "other precision": lambda tensor: tensor.to(
        torch.float32 if tensor.dtype == torch.float64 else torch.float64
    ),
}
QUIET = {"progress": False, "seed": 0}
# kinds of posteriors that the methods do not return at their defaults
POSTERIORS = {
    "mixture": lambda: fb.posterior.MixturePosterior([cached_fit("mle"), cached_fit("swag")]),
    "members": lambda: fb.posterior.MemberPosterior.from_states(
        network(), Categorical(), [network().state_dict()] * 2
    ),
    "scaled": lambda: fb.MatrixScaling().fit(cached_fit("mle"), held_out(), progress=False),
    "tempered": lambda: fb.Temperature().fit(cached_fit("mle"), held_out(), progress=False),
    "noise-chains": lambda: fb.HMC(variables="noise", samples=2, warmup=2, chains=2, steps=2, epochs=1).fit(
        network(), held_out(), **QUIET
    ),
    "dropout": lambda: fb.MCDropout(epochs=1).fit(dropout_network(), held_out(), **QUIET),
}
FITS = ("mle", "node-noise", "ivon", "vbll", "laplace", "hmc", "sgld", "mode-ensemble", "swag", "mnf")
FITS += ("bayes-by-backprop", "deep-ensemble", "gated", "fit_density", "fit_autoencoder")
CHECKPOINTS = "mle", "hmc"


def dropout_network():
    return nn.Sequential(*network(), nn.Dropout(0.5))


def held_out():
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(40, 3, generator=generator)
    return inputs, (inputs[:, 0] + torch.randn(40, generator=generator) > 0).long()


def saved_file(kind, folder):
    """Returns the path of a file of a kind, a function that reads it, and what the function returns."""
    if kind in POSTERIORS:
        path = POSTERIORS[kind]().save(folder / "saved.safetensors")
        plain = dropout_network if kind == "dropout" else network
        read = lambda: fb.load_posterior(path, plain())  # noqa: E731
    elif kind.startswith("checkpoint of "):
        fit, run = Fit(kind.removeprefix("checkpoint of ")), folder / "run"
        fit(checkpoint=run)
        path = max(run.rglob("*.safetensors"), key=lambda path: path.name == "chains.safetensors")
        read = lambda: fit(checkpoint=run, resume=True)  # noqa: E731
    else:
        path = cached_fit(kind).save(folder / "saved.safetensors")
        read = lambda: Fit(kind).load(path)  # noqa: E731
    return path, read, read()


def is_refused(read, original):
    """Returns whether a file is refused in one line. Asserts that the content is the original one otherwise."""
    error = None
    try:
        result = read()
    except (fb.FlowBNNError, fb.FlowBNNWarning) as caught:
        error = str(caught)
    if error is None:
        assert equal_bits(named_tensors(result), named_tensors(original))
        return False
    assert "\n" not in error
    assert len(error) < 600
    return True


KINDS = [*FITS, *POSTERIORS, *(f"checkpoint of {name}" for name in CHECKPOINTS)]


def test_every_kind_of_posterior_is_forged():
    kinds = {cls.kind for cls in all_subclasses(fb.Posterior) if cls.__module__.startswith("flowbnn")}
    forged = {cached_fit(name).kind for name in FITS if isinstance(cached_fit(name), fb.Posterior)}
    abstract = {"posterior", "weights"}
    assert kinds - abstract == forged | {*POSTERIORS}


@pytest.mark.parametrize("kind", KINDS)
def test_files_with_other_tensors_are_refused(kind, tmp_path):
    path, read, original = saved_file(kind, tmp_path)
    tensors, document = load_tensors(path)
    changed = {"an additional tensor": {**tensors, "posterior.more": torch.ones(2)}}
    for number, name in enumerate(list(tensors)[:: 1 + len(tensors) // 12]):  # the stress suite forges all
        changed[f"no tensor {name}"] = {key: value for key, value in tensors.items() if key != name}
        names = list(FORGERIES) if tensors[name].is_floating_point() else list(FORGERIES)[2:5]
        for forgery in {names[number % len(names)], names[(number + 2) % len(names)]}:
            changed[f"{forgery} in {name}"] = {**tensors, name: FORGERIES[forgery](tensors[name])}
    for forgery, content in changed.items():
        save_tensors(path, content, document)
        assert is_refused(read, original), forgery
        if "tensors" in document and not forgery.startswith(("no tensor", "other precision")):
            # other tensors than the object has, although the document lists them
            save_tensors(path, content, {**document, "tensors": list_tensors(content)})
            assert is_refused(read, original), forgery


def branches(document, path=()):
    """Yields the paths to all values of a document, and to the first entry of each list."""
    entries = document.items() if isinstance(document, dict) else list(enumerate(document))[:1]
    for key, value in entries:
        yield (*path, key)
        if isinstance(value, dict | list) and path[:1] not in (("tensors",), ("card",)):
            yield from branches(value, (*path, key))


RECORDS = {"history", "report", "calibration", "card"}  # their numbers may be others


@pytest.mark.parametrize("kind", ["mle", "node-noise", "mnf", "scaled", "mixture", "gated", "fit_density"])
def test_documents_with_values_of_other_types_are_refused(kind, tmp_path):
    path, read, original = saved_file(kind, tmp_path)
    tensors, document = load_tensors(path)
    values, refused = ["x", None, [[1]], {"x": 1}], []
    for number, branch in enumerate(branches(document)):
        forged = copy.deepcopy(document)
        parent = forged
        for key in branch[:-1]:
            parent = parent[key]
        parent[branch[-1]] = values[number % len(values)]
        save_tensors(path, tensors, forged)
        if not RECORDS & {*branch}:
            refused += [branch] * is_refused(read, original)
        elif (
            len(branch) > 2 and branch[-3] == "records"
        ):  # that of a wrapper is the one of the inner posterior
            assert is_refused(read, original) or "inner" in document
    assert len(refused) > 4


@pytest.mark.parametrize(
    ("kind", "layer", "value"),
    [
        ("fit_density", "base", "Student(dim=3)"),
        ("fit_density", "more", "SplineMap(bound=9.0)"),
        ("fit_autoencoder", "encoder", "ReLU()"),
        ("mle", "1", "ReLU()"),
    ],
)
def test_files_of_other_layers_are_refused_or_warned_about(kind, layer, value, tmp_path):
    path, read, _ = saved_file(kind, tmp_path)
    tensors, document = load_tensors(path)
    document["layers"][layer] = value
    save_tensors(path, tensors, document)
    with pytest.raises((fb.FlowBNNError, fb.FlowBNNWarning)) as caught:
        read()
    fields = caught.value.fields
    assert list(fields.get("differences") or fields.get("changed")) == [layer]


class Executable:
    """Object whose pickle calls a function when it is loaded."""

    def __reduce__(self):
        return pytest.fail, ("code in a file was executed",)


@pytest.mark.parametrize("kind", ["mle", "fit_density", "fit_autoencoder"])
def test_truncated_files_and_pickles_are_refused(kind, tmp_path):
    path, read, original = saved_file(kind, tmp_path)
    raw = path.read_bytes()
    torch.save({"state": Executable()}, tmp_path / "pickle.pt")
    contents = [raw[: len(raw) * part // 8] for part in range(8)]
    contents += [raw + b"0", pickle.dumps(Executable()), (tmp_path / "pickle.pt").read_bytes()]
    for number, content in enumerate(contents):
        path.write_bytes(content)
        assert is_refused(read, original), number


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


class OwnCategorical(Categorical):
    """Likelihood that is not part of the library."""


def test_card_imports_a_likelihood_of_the_user():
    card = add_noise(mlp(), OwnCategorical()).card()
    assert f"from {__name__} import OwnCategorical" in card
    assert "network, likelihood=OwnCategorical)" in card


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
