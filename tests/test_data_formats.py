"""Tests of the one rule for data: every public function takes every format."""

import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flowbnn as fb
from flowbnn.data import Columns, TensorLoader
from flowbnn.data.formats import as_inputs, as_loader
from flowbnn.likelihoods import Categorical
from flowbnn.posterior import PointPosterior
from slow_cases import mark_slow

with warnings.catch_warnings():  # about functions of torch that these packages use
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningDataModule
    from torch_geometric.data import Batch as GraphBatch
    from torch_geometric.data import Data as Graph
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCN, GCNConv, global_mean_pool
    from transformers import BertConfig, BertForSequenceClassification, BertModel

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 3, generator=GENERATOR)
Y = torch.arange(24) % 2


class Net(nn.Module):
    def __init__(self, outputs=2):
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, outputs)

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


def network(outputs=2):
    torch.manual_seed(0)
    return Net(outputs)


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


SMALL = ["numpy float64", "pandas", "dataset of dictionaries", "list of examples", "data module"]


def posterior():
    return PointPosterior(network(), Categorical())


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


# -------------------- inputs of networks


class Flags(nn.Module):
    """Network with a mask that may be None, a flag and a string."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x, mask=None, scaled=False, mode="sum"):
        assert isinstance(scaled, bool)
        assert mode == "sum"
        return self.layer(x if mask is None else x * mask) * (2.0 if scaled else 1.0)


class Whole(nn.Module):
    """Network that takes the dictionary as one argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch):
        return self.layer(batch["a"] + batch["b"])


class Heads(Net):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        features = torch.tanh(self.first(x))
        logits = self.last(features)
        if self.kind == "tuple":
            return logits, features
        return {"features": features, "scores" if self.kind == "other" else "logits": logits}


class Squeezed(Net):
    def __init__(self):
        super().__init__(1)

    def forward(self, x):
        return super().forward(x).squeeze(-1)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4), nn.Linear(4, 2)

    def forward(self, sequences):
        return self.head(self.lstm(sequences)[1][0][0])


class Bag(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag, self.head = nn.EmbeddingBag(10, 4), nn.Linear(4, 2)

    def forward(self, words, offsets):
        return self.head(self.bag(words, offsets))


class GraphNet(nn.Module):
    """Graph network with a class for every graph."""

    def __init__(self):
        super().__init__()
        self.conv, self.head = GCNConv(3, 4), nn.Linear(4, 2)

    def forward(self, data):
        hidden = self.conv(data.x, data.edge_index).relu()
        return self.head(global_mean_pool(hidden, data.batch))


def sequences():
    return pack_sequence([X[i : i + 2 + i % 3] for i in range(8)], enforce_sorted=False)


def graphs():
    edges = torch.tensor([[0, 1, 2], [1, 2, 0]])
    return [Graph(x=X[i : i + 3], edge_index=edges, y=Y[i : i + 1]) for i in range(12)]


def nodes():
    return Graph(x=X, edge_index=torch.stack([torch.arange(23), torch.arange(1, 24)]), y=Y)


def tiny_bert(kind=BertForSequenceClassification):
    torch.manual_seed(0)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    return kind(BertConfig(vocab_size=20, max_position_embeddings=8, **sizes))


def tokens():
    ids = torch.randint(20, (12, 5), generator=GENERATOR)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": Y[:12]}


NETWORKS = {
    "none and flags": (Flags, lambda: [((X, None, True, "sum"), Y)]),
    "keywords": (Flags, lambda: [({"x": X, "mask": None, "scaled": True}, Y)]),
    "dictionary as one argument": (Whole, lambda: [({"a": X, "b": X}, Y)]),
    "tuple of outputs": (lambda: Heads("tuple"), lambda: (X, Y)),
    "logits in a dictionary": (lambda: Heads("logits"), lambda: (X, Y)),
    "one logit without axis": (Squeezed, lambda: (X, Y)),
    "regression without axis": (Squeezed, lambda: (X, X.sum(1))),
    "packed sequences": (Packed, lambda: [(sequences(), Y[:8])]),
    "bags of words": (Bag, lambda: [((torch.arange(9), torch.tensor([0, 2, 5, 7])), Y[:4])]),
    "graphs": (GraphNet, lambda: GraphLoader(graphs(), batch_size=4)),
    "list of graphs": (GraphNet, graphs),
    "nodes": (lambda: GCN(3, 4, 1, 2), nodes),
    "bert": (tiny_bert, lambda: DataLoader(RowsOf(tokens()), 4)),
    "bert in memory": (tiny_bert, tokens),
}


RELATIVES = ("keywords", "logits in a dictionary", "list of graphs", "bert")  # networks like others


class RowsOf(Dataset):
    def __init__(self, columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index):
        return {name: values[index] for name, values in self.columns.items()}


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("name", mark_slow(NETWORKS, [name for name in NETWORKS if name not in RELATIVES]))
def test_networks_of_all_inputs_and_outputs_are_fitted_and_evaluated(name):
    make_network, make_data = NETWORKS[name]
    torch.manual_seed(0)
    model, data = make_network().train(), make_data()
    stochastic = fb.to_stochastic(model, {"*": fb.noise.NormalAffine()})
    options = {"epochs": 1, "progress": False, "seed": 0}
    posterior = fb.fit(stochastic, data, report=False, **options)
    metrics = fb.evaluate(posterior, data, samples=3)
    assert np.isfinite(metrics["nll"])
    # predictions are those of the networks sampled one at a time
    inputs = fb.batches.split_batch(next(iter(as_loader(data))))[0]
    samples = posterior.predict(inputs, 3, seed=1).samples
    with torch.no_grad():
        single = [fb.batches.call(sampled, inputs) for sampled in posterior.networks(3, seed=1)]
    expected = posterior.likelihood.predictive(torch.stack(single)).samples
    assert torch.allclose(samples, expected, atol=1e-5)
    assert len(fb.MLE(epochs=1).fit(make_network(), data, progress=False).predict(inputs)) == len(single[0])


def test_labels_do_not_reach_the_network():
    model = tiny_bert()
    losses = []
    model.register_forward_hook(lambda module, args, output: losses.append(output.loss))
    fb.evaluate(PointPosterior(model, Categorical()), tokens())
    assert losses
    assert all(loss is None for loss in losses)
    assert "labels" not in as_inputs(tokens())


def test_noise_is_shared_by_the_nodes_of_a_graph():
    model = fb.to_stochastic(GraphNet(), {"head": fb.noise.NormalAffine()})
    posterior = fb.MLE(epochs=0).fit(GraphNet(), GraphLoader(graphs(), 4), progress=False)
    assert posterior.predict(GraphBatch.from_data_list(graphs())).probabilities.shape == (12, 2)
    fitted = fb.fit(model, graphs(), epochs=1, report=False, progress=False, validation=None)
    assert fitted.predict(GraphLoader(graphs(), 5), 4).probabilities.shape == (12, 2)


@pytest.mark.parametrize("output", ["scores", lambda outputs: outputs["scores"]])
def test_outputs_are_selected_by_name_or_function(output, tmp_path):
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.MLE(epochs=1).fit(Heads("other"), (X, Y), progress=False)
    assert caught.value.kind == "network"
    posterior = fb.MLE(epochs=1).fit(Heads("other"), (X, Y), output=output, progress=False)
    assert posterior.predict(X).probabilities.shape == (24, 2)
    posterior.save(tmp_path / "posterior.safetensors")
    if not isinstance(output, str):
        with pytest.raises(fb.FlowBNNError) as caught:
            fb.load_posterior(tmp_path / "posterior.safetensors", Heads("other"))
        assert (caught.value.kind, caught.value.argument) == ("network", "network")
    fresh = Heads("other") if isinstance(output, str) else fb.select_output(Heads("other"), output)
    loaded = fb.load_posterior(tmp_path / "posterior.safetensors", fresh)
    assert torch.equal(loaded.predict(X).probabilities, posterior.predict(X).probabilities)
    calibrated = fb.calibrate(
        Heads("other"), (X, Y), output=output, candidates=["temperature"], progress=False
    )
    assert calibrated.predict(X).probabilities.shape == (24, 2)


def test_hidden_states_are_selected():
    model = fb.select_output(tiny_bert(BertModel), "pooler_output")
    posterior = PointPosterior(model, Categorical())
    inputs = {name: value for name, value in tokens().items() if name != "labels"}
    assert posterior.predict(inputs).probabilities.shape == (12, 8)
    with pytest.raises(fb.FlowBNNError) as caught:
        fb.select_output(Heads("logits"), "scores")(X)
    assert caught.value.argument == "output"


def test_tensor_loader_reads_dictionaries_in_memory_batch_by_batch():
    loader = as_loader(tokens(), batch_size=5, shuffle=True)
    sizes = [len(batch.targets) for batch in loader]
    assert sizes == [5, 5, 2]
    assert isinstance(loader.loader, TensorLoader)


class SumOfList(nn.Module):
    """Network that takes a list of tensors."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, tensors):
        return self.linear(tensors[0] + tensors[1])


class UnpackedList(SumOfList):
    def forward(self, tensors):
        first, second = tensors
        return self.linear(first + second)


class SumOfColumns(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(1, 2)

    def forward(self, age, income):
        return self.linear((age + income).float().unsqueeze(-1))


def test_a_list_of_tensors_in_a_tuple_is_one_argument():
    posterior, x = PointPosterior(SumOfList(), Categorical()), torch.randn(6, 3)
    expected = posterior.predict((x, x)).probabilities
    assert torch.equal(posterior.predict(([x, x],)).probabilities, expected)
    targets = torch.zeros(6).long()
    batches = ([[x, x], targets], [[x, x], targets])  # a tuple of batches remains a loader
    assert fb.evaluate(posterior, batches) == pytest.approx(fb.evaluate(posterior, [([x, x], targets)]))


def test_records_without_labels_are_examples():
    posterior = PointPosterior(SumOfColumns(), Categorical())
    expected = posterior.predict({"age": X[:, 0], "income": X[:, 1]}).probabilities
    records = [{"age": float(row[0]), "income": float(row[1])} for row in X]
    torch.testing.assert_close(posterior.predict(records).probabilities, expected)


class ListLengths(nn.Module):
    """Network that takes a list, and not a tuple."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch):
        assert type(batch["views"]) is list
        return self.linear(sum(batch["views"]))


def test_lists_inside_of_inputs_remain_lists(tmp_path):
    x, y = torch.randn(8, 3), torch.arange(8) % 2
    data = [({"views": [x, x]}, y), ({"views": [-x, x]}, y)]
    posterior = fb.MLE(epochs=1).fit(ListLengths(), data, progress=False)
    samples = posterior.predict(data).samples
    torch.testing.assert_close(samples[:, :8], posterior.predict(data[:1]).samples)
    file = fb.export(posterior, tmp_path / "model.pt2", {"views": [x, x]}, samples=1)
    assert list(file.inputs) == ["views.0", "views.1"]


def test_a_network_that_takes_a_list_is_exported(tmp_path):
    x = torch.randn(6, 3)
    file = fb.export(PointPosterior(SumOfList(), Categorical()), tmp_path / "model.pt2", ([x, x],), samples=1)
    outputs = torch.export.load(file.path).module()(x, x)
    expected = PointPosterior(SumOfList(), Categorical()).predict(([x, x],)).probabilities
    assert outputs["probabilities"].shape == expected.shape


@pytest.mark.parametrize(
    ("data", "advice"),
    [
        (lambda: [X, X], "([a, b],)"),
        (lambda: [[X, X]], "([a, b],)"),
        (lambda: list(X), "torch.stack"),
        (lambda: [{"tensors": x} for x in X], "DataLoader"),
    ],
)
@pytest.mark.filterwarnings("ignore:the outputs of the network depend on the other rows")
def test_misread_inputs_are_explained_in_one_line(data, advice):
    for likely in (SumOfList(), UnpackedList()):
        with pytest.raises(fb.FlowBNNError) as caught:
            PointPosterior(likely, Categorical()).predict(data())
        assert caught.value.kind in ("network", "shape")
        assert "\n" not in str(caught.value)
        assert advice in str(caught.value)


@pytest.mark.parametrize("call", [fb.acquire, lambda posterior, data: posterior.predict(data)])
def test_targets_among_inputs_are_explained(call):
    for data in ((X, Y), (X.numpy(), Y.numpy())):
        with pytest.raises(fb.FlowBNNError) as caught:
            call(posterior(), data)
        assert caught.value.kind == "network"
        assert str(caught.value).endswith("leave out targets")


def test_pairs_without_targets_are_inputs_alone():
    posterior, x = PointPosterior(nn.Linear(3, 2), Categorical()), torch.randn(30, 3)
    for function in (fb.evaluate, fb.conformalize):
        with pytest.raises(fb.FlowBNNError) as caught:
            function(posterior, (x, None))
        assert caught.value.kind == "loader"
