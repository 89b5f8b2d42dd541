"""Tests of what networks take and return: flags, dictionaries, lists, graphs, sequences, several outputs."""

import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, Dataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.data.formats import as_inputs, as_loader
from flowbnn.likelihoods import Categorical
from flowbnn.posterior import PointPosterior
from row_problem import GENERATOR, Net, X, Y, posterior
from slow_cases import mark_slow

with warnings.catch_warnings():  # about functions of torch that these packages use
    warnings.simplefilter("ignore")
    from torch_geometric.data import Batch as GraphBatch
    from torch_geometric.data import Data as Graph
    from torch_geometric.loader import DataLoader as GraphLoader
    from torch_geometric.nn import GCN, GCNConv, global_mean_pool
    from transformers import BertConfig, BertForSequenceClassification, BertModel


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
