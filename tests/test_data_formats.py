"""Tests of the one rule for data: every public function takes every format."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flowbnn as fb
from flowbnn.data import Columns
from flowbnn.data.formats import as_loader
from flowbnn.likelihoods import Categorical
from row_problem import GENERATOR, X, Y, network, posterior

with warnings.catch_warnings():  # about functions of torch that these packages use
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningDataModule


class Rows(Dataset):
    """Map-style dataset of (x, y), or of dictionaries with labels."""

    def __init__(self, as_dict=False, size=24):
        self.as_dict, self.size = as_dict, size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return {"x": X[index], "labels": Y[index]} if self.as_dict else (X[index], int(Y[index]))


class HuggingFace:
    """Stand-in for a dataset of Hugging Face, whose rows are dictionaries of lists until a format is set."""

    def __init__(self, formatted=False):
        self.formatted = formatted

    def with_format(self, kind):
        assert kind == "torch"
        return HuggingFace(True)

    def __len__(self):
        return 24

    def __getitem__(self, index):
        assert self.formatted or index == 0
        return {"x": X[index], "label": Y[index]}


class Module(LightningDataModule):
    def __init__(self):
        super().__init__()
        self.data = None

    def setup(self, stage):
        self.data = TensorDataset(X, Y)

    def train_dataloader(self):
        return DataLoader(self.data, 8, shuffle=True)

    def val_dataloader(self):
        return DataLoader(self.data, 8)


FORMATS = {
    "tensors": lambda: (X, Y),
    "numpy float64": lambda: (X.double().numpy(), Y.numpy()),
    "numpy big-endian": lambda: (X.double().numpy().astype(">f8"), Y.numpy().astype(np.uint16)),
    "numpy read-only": lambda: (np.broadcast_to(X.numpy(), (24, 3)), Y.numpy()[::-1][::-1]),
    "pandas": lambda: (
        pd.DataFrame(X.numpy(), columns=list("abc")),
        pd.Series(Y.numpy(), index=range(5, 29)),
    ),
    "pandas nullable": lambda: (pd.DataFrame(X.numpy()), pd.Series(Y.numpy()).astype("Int64")),
    "pandas booleans": lambda: (pd.DataFrame(X.numpy()), pd.Series(Y.numpy() == 1)),
    "pandas column": lambda: (pd.DataFrame(X.numpy()), pd.DataFrame({"y": Y.numpy()})),
    "lists": lambda: (X.tolist(), Y.tolist()),
    "dictionary": lambda: {"x": X.numpy(), "labels": Y.tolist()},
    "pair of dictionary": lambda: ({"x": X}, Y),
    "dataset": Rows,
    "dataset of dictionaries": lambda: Rows(as_dict=True),
    "list of examples": lambda: [{"x": x, "labels": y} for x, y in zip(X, Y.tolist(), strict=True)],
    "list of pairs": lambda: list(zip(X.numpy(), Y, strict=True)),
    "list of pairs of lists": lambda: [(x.tolist(), int(y)) for x, y in zip(X, Y, strict=True)],
    "list of lists": lambda: [{"x": x.tolist(), "label": int(y)} for x, y in zip(X, Y, strict=True)],
    "TensorDataset": lambda: TensorDataset(X, Y),
    "Hugging Face": HuggingFace,
    "DataLoader": lambda: DataLoader(TensorDataset(X, Y), 8),
    "batches of arrays": lambda: [(X[:12].numpy(), Y[:12].numpy()), (X[12:].numpy(), Y[12:].tolist())],
    "batches of dictionaries": lambda: [{"x": X, "label": Y}],
    "columns": lambda: Columns([(X, Y, torch.arange(24))], inputs=0, targets=1),
    "data module": Module,
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_has_the_same_examples(name, shuffle):
    loader = as_loader(FORMATS[name](), shuffle=shuffle, stage="train")
    batches = [fb.data.formats.split_weighted_batch(batch) for batch in loader]
    inputs = torch.cat([b.inputs["x"] if isinstance(b.inputs, dict) else b.inputs for b in batches]).float()
    targets = torch.cat([batch.targets for batch in batches])
    assert not targets.is_floating_point()
    order = (inputs[:, None] == X).all(-1).nonzero()[:, 1]
    assert sorted(order.tolist()) == list(range(24))
    assert torch.equal(targets, Y[order])


SMALL = [
    "numpy float64",
    "pandas",
    "dataset of dictionaries",
    "list of examples",
    "list of pairs of lists",
    "data module",
]


def compare(data):
    return fb.compare(network(), data, data, methods=["map"], epochs=1, samples=2, progress=False).best


def density(data):
    return fb.fit_density(fb.flows.RealNVP(3, length=1), data, epochs=1, progress=False).score(data)


def noisy():
    return fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})


ENTRY_POINTS = {
    "fit": lambda data: fb.fit(noisy(), data, epochs=1, batch_size=None, report=False, progress=False),
    "mle": lambda data: fb.MLE(epochs=1).fit(network(), data, validation=data, progress=False),
    "ensemble": lambda data: fb.DeepEnsemble(epochs=1, members=2).fit(network(), data, progress=False),
    "laplace": lambda data: fb.Laplace(epochs=1).fit(network(), data, progress=False),
    "swag": lambda data: fb.SWAG(epochs=4).fit(network(), data, progress=False),
    "temperature": lambda data: fb.Temperature().fit(network(), data, progress=False),
    "temperature of a fit": lambda data: fb.Temperature(fb.MLE(epochs=1)).fit(
        network(), data, progress=False
    ),
    "calibrate": lambda data: fb.calibrate(network(), data, candidates=["temperature"], progress=False),
    "evaluate": lambda data: fb.evaluate(posterior(), data, novel=X + 9),
    "predict": lambda data: posterior().predict(data[0] if isinstance(data, tuple) else data),
    "compare": compare,
    "density": lambda data: density(data[0] if isinstance(data, tuple) else data),
    "gated": lambda data: fb.gated(posterior(), data, epochs=1, features="first", false_alarm=0.4),
}


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("entry_point", ENTRY_POINTS)
def test_every_entry_point_takes_every_format(entry_point, name):
    assert ENTRY_POINTS[entry_point](FORMATS[name]()) is not None


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
def test_cross_calibration_and_diagnosis_take_arrays():
    data = (X.double().numpy(), Y.numpy())
    options = {"candidates": ["temperature"], "method": fb.MAP(epochs=1), "progress": False}
    assert len(fb.cross_calibrate(network, data, folds=2, **options).members) == 2
    posterior = fb.fit(noisy(), data, epochs=1, report=False, progress=False, validation=None)
    assert fb.diagnose(posterior, data, seconds=0, samples=100, progress=False).examples == 24


def test_arrays_and_tensors_give_the_same_fit():
    options = {"seed": 0, "progress": False, "batch_size": 8}
    first, second = (
        fb.MLE(epochs=2).fit(network(), data, **options)
        for data in (FORMATS["tensors"](), FORMATS["pandas"]())
    )
    assert torch.equal(first.predict(X).probabilities, second.predict(pd.DataFrame(X.numpy())).probabilities)
    assert first.predict(X.tolist()).probabilities.shape == (24, 2)


def test_batch_size_of_arrays_is_used_and_that_of_a_loader_is_not_replaced():
    posterior = fb.MLE(epochs=1).fit(network(), (X, Y), batch_size=6, validation=None, progress=False)
    assert posterior.history.epochs == 1
    loader = fb.methods.FitOptions(batch_size=6).training_loader((X, Y))
    assert [len(targets) for _, targets in loader] == [6] * 4
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network(), DataLoader(TensorDataset(X, Y), 8), batch_size=6, progress=False)
    assert caught.value.argument == "batch_size"


def test_densities_of_arrays_are_values():
    density = fb.fit_density(fb.flows.RealNVP(3), X.double().numpy(), epochs=1, progress=False)
    assert density.log_prob(pd.DataFrame(X.numpy())).numpy().shape == (24,)
    assert density.log_prob(X).requires_grad
    assert torch.allclose(density.log_prob(X.tolist()), density.score(X), atol=1e-5)


def test_autoencoders_take_arrays():
    model = fb.vae.VAE((3,), 2, decoder="gaussian")
    model = fb.vae.fit_autoencoder(model, pd.DataFrame(X.double().numpy()), epochs=1, progress=False)
    array = X.double().numpy()
    for method in (model.encode, model.log_prob, model.reconstruct, model.log_likelihood):
        assert len(method(array).numpy()) == 24
    assert torch.allclose(model.encode(array), model.encode(X))
    assert model.encode(X).requires_grad


# -------------------- columns and weights


def test_columns_name_inputs_targets_and_weights():
    batches = [{"a": X[:, :1], "b": X[:, 1:], "y": Y.numpy(), "w": torch.ones(24)}]
    batch = next(iter(Columns(batches, inputs=["a", "b"], targets="y", weights="w")))
    assert set(batch.inputs) == {"a", "b"}
    assert torch.equal(batch.targets, Y)
    assert torch.equal(batch.weights, torch.ones(24))
    (inputs, _, weights) = next(iter(Columns([(X, Y, X)], inputs=(0, 2), targets=lambda batch: batch[1])))
    assert len(inputs) == 2
    assert weights is None
    with pytest.raises(fb.FlowBNNError) as caught:
        list(Columns(batches, inputs="a", targets="z"))
    assert caught.value.kind == "columns"


def test_columns_of_a_loader_can_be_split_and_counted():
    rows = TensorDataset(X, Y, torch.arange(24))
    loader = Columns(rows, inputs=0, targets=1, batch_size=8, shuffle=True)
    assert (len(loader), loader.num_data) == (3, 24)
    training, held_out = fb.methods.loader_split.split_loader(loader, 0.25)
    assert [len(batch.targets) for batch in held_out] == [6]
    assert sum(len(batch.targets) for batch in training) == 18


@pytest.mark.parametrize("names", [(0, 1, 2), ("a", "label", "w")])
def test_columns_of_data_in_memory(names):
    values = (X.numpy(), Y, torch.arange(24.0))
    data = values if names[0] == 0 else dict(zip(names, values, strict=True))
    inputs, targets, weights = names
    loader = Columns(data, inputs=inputs, targets=targets, weights=weights, batch_size=8)
    batches = list(loader)
    assert (len(batches), loader.num_data) == (3, 24)
    assert torch.equal(torch.cat([batch.inputs for batch in batches]), X)
    assert torch.equal(torch.cat([batch.targets for batch in batches]), Y)
    assert torch.equal(torch.cat([batch.weights for batch in batches]), values[2])


def test_batch_with_weights_is_data():
    weights = torch.tensor([1.0, 0.0]).repeat(12)
    for batch in fb.data.formats.as_loader(fb.batches.Batch(X, Y, weights), batch_size=5, shuffle=True):
        rows = (X[:, None] == batch.inputs).all(-1).float().argmax(0)
        assert torch.equal(batch.targets, Y[rows])
        assert torch.equal(batch.weights, weights[rows])


def test_three_tensors_are_two_inputs_and_targets():
    inputs, targets = fb.batches.split_batch((X, X, Y))
    assert len(inputs) == 2
    assert targets is Y


@pytest.mark.parametrize("method", [fb.MLE, fb.BayesByBackprop, fb.MCDropout])
def test_weights_act_as_copies_of_examples(method):
    weights = torch.tensor([2.0, 0.0]).repeat(12)
    options = {"seed": 0, "progress": False, "validation": None}
    weighted = method(epochs=3).fit(network(), Columns([(X, Y, weights)], weights=2), **options)
    # an example of weight 0 changes nothing
    changed = X + 5.0 * (weights == 0)[:, None]
    same = method(epochs=3).fit(network(), Columns([(changed, Y, weights)], weights=2), **options)
    assert torch.allclose(
        weighted.predict(X, 4, seed=0).probabilities, same.predict(X, 4, seed=0).probabilities, atol=1e-5
    )


def test_weights_of_the_elbo():
    model, weights = noisy(), torch.rand(24, generator=GENERATOR)
    objective = fb.ELBO(Categorical(), num_data=24)
    with fb.noise_mode(model, "off"):
        terms = objective(model, X, Y, weights=weights)
        expected = (weights * Categorical().log_prob(model(X), Y)).mean()
    assert torch.allclose(terms.log_likelihood, expected)


@pytest.mark.parametrize("method", [fb.HMC(samples=2), fb.Laplace(), fb.ModeEnsemble()])
def test_methods_without_weights_refuse_them(method):
    with pytest.raises(fb.FlowBNNError) as caught:
        method.fit(network(), Columns([(X, Y, torch.ones(24))], weights=2), progress=False)
    assert caught.value.kind == "weights"


# -------------------- bad data


def frame(**columns):
    return pd.DataFrame({"a": np.zeros(4), **columns}), pd.Series([0, 1, 0, 1])


BAD = {
    "column of strings": (lambda: frame(city=["x", "y", "x", "y"]), "strings", "column", "city"),
    "missing value": (lambda: frame(age=[1.0, np.nan, 2.0, 3.0]), "missing", "row", 1),
    "missing column": (lambda: frame(age=[1.0, np.nan, 2.0, 3.0]), "missing", "column", "age"),
    "nullable column": (lambda: frame(n=pd.array([1, None, 2, 3], dtype="Int64")), "missing", "column", "n"),
    "dates": (lambda: frame(t=pd.date_range("2020", periods=4)), "dtype", "column", "t"),
    "object array": (
        lambda: (np.array([[1, {}], [2, 3]], object), np.array([0, 1])),
        "dtype",
        "argument",
        "inputs",
    ),
    "place in an object array": (
        lambda: (np.array([[1, 2], [2, None]], object), np.array([0, 1])),
        "dtype",
        "row",
        1,
    ),
    "list instead of a tuple": (lambda: [X, Y], "loader", "argument", "loader"),
    "ignored labels": (lambda: (X, torch.full((24,), -100)), "targets", "kind", "targets"),
    "missing in an array": (
        lambda: (np.array([[0, 1], [2, np.nan]]), np.array([0, 1])),
        "missing",
        "column",
        1,
    ),
    "labels as strings": (lambda: (np.zeros((2, 3)), np.array(["a", "b"])), "strings", "argument", "targets"),
    "missing labels": (lambda: (np.zeros((2, 3)), pd.Series([1, None], dtype="Int64")), "missing", "row", 1),
    "missing targets": (lambda: (np.zeros((2, 3)), np.array([0.0, np.nan])), "missing", "row", 1),
    "one class": (lambda: (np.zeros((4, 3)), np.zeros(4, int)), "classes", "argument", "loader"),
    "lengths": (lambda: (np.zeros((4, 3)), np.arange(5)), "length", "argument", "loader"),
    "empty dataset": (lambda: Rows(size=0), "empty", "argument", "loader"),
    "empty array": (lambda: (np.zeros((0, 3)), np.arange(0)), "empty", "argument", "loader"),
    "inputs alone": (lambda: np.zeros((4, 3)), "loader", "argument", "loader"),
    "examples of other lengths": (
        lambda: [{"x": X[0, :n], "label": 0} for n in (2, 3)],
        "examples",
        "kind",
        "examples",
    ),
    "examples of other keys": (
        lambda: [{name: X[0], "label": 0} for name in "xz"],
        "examples",
        "kind",
        "examples",
    ),
    "dictionary without labels": (lambda: {"x": X, "y": Y}, "loader", "argument", "loader"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_data_are_refused_with_their_place(name):
    make, kind, field, value = BAD[name]
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network(), make(), progress=False)
    assert caught.value.kind == kind
    assert caught.value.fields[field] == value


@pytest.mark.parametrize(("values", "kind"), [([0, 1], "int"), ([0.5, 1], "float")])
def test_advice_for_object_targets_keeps_their_kind(values, kind):
    """Targets of integers are classes, and those of real numbers a regression."""
    with pytest.raises(fb.FlowBNNError, match=rf"targets.astype\({kind}\)"):
        fb.MLE(epochs=1).fit(network(), (X[:2], np.array(values, object)), progress=False)


@pytest.mark.parametrize("convert", [torch.tensor, np.array, list])
def test_lists_of_token_rows_are_examples(convert):
    """The labels of the tokens of one example are not a batch of labels."""
    row = {"input_ids": convert([3, 1, 4, 1]), "labels": convert([-100, 0, 1, -100])}
    (batch,) = as_loader([row, row, row])
    assert batch["input_ids"].shape == batch["labels"].shape == (3, 4)
    batches = [{"input_ids": torch.zeros(2, 4).long(), "labels": torch.zeros(2, 4).long()}]
    assert as_loader(batches) is batches


def test_a_list_of_inputs_and_targets_is_refused_by_densities():
    data = [X, Y]  # read as two batches
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.fit_density(fb.flows.RealNVP(3, length=1), data, epochs=1, progress=False)
    assert caught.value.argument == "data"
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.gated(posterior(), data, progress=False)
    assert caught.value.argument == "loader"


def test_labels_as_strings_in_a_loader_are_refused():
    names = [(row, "cat") for row in X]
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network(), DataLoader(names, 4), progress=False)
    assert caught.value.kind == "strings"


def test_unexpected_keys_are_refused_with_advice():
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(network(), {"x": X, "row": Y, "labels": Y}, progress=False)
    assert caught.value.kind == "network"
    assert "Columns" in str(caught.value)


def test_other_columns_than_at_fit_are_refused():
    with pytest.raises(fb.FlowBNNError) as caught:
        posterior().predict(np.zeros((5, 4)))
    assert caught.value.kind == "network"
    assert "3 columns, got 4" in str(caught.value)
