"""Tests of the names of columns: predictions from data frames and mappings with columns in another order, and with other columns."""

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import flowbnn as fb
from flowbnn.data import Columns
from flowbnn.data.formats import align_columns, as_loader, columns_of
from flowbnn.methods import METHODS
from flowbnn.posterior import PointPosterior
from slow_cases import mark_slow

NAMES = ["a", "b", "c"]
TABLE = pd.DataFrame(
    np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32) * [1.0, 5.0, 0.2], columns=NAMES
)
LABELS = pd.Series(np.arange(24) % 2, name="y")
SHUFFLED = TABLE[["c", "a", "b"]]


def network(outputs=2):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


def fitted(data=(TABLE, LABELS), model=None, **options):
    return fb.MLE(epochs=1).fit(model or network(), data, progress=False, seed=0, **options)


def probabilities(posterior, inputs):
    return posterior.predict(inputs, 4, seed=0, progress=False).probabilities


def kind_of_error(function):
    with pytest.raises(fb.FlowBNNError) as caught:
        function()
    assert "\n" not in str(caught.value)
    return caught.value.kind


CHEAP = {"epochs": 1}
SETTINGS = {
    "hmc": {"samples": 2, "warmup": 2, **CHEAP}, "nuts": {"samples": 2, "warmup": 2, **CHEAP}, "sgld": {"epochs": 40},
    "swag": {"epochs": 4}, "multi-swag": {"epochs": 4},
}  # fmt: skip


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize(
    "name", mark_slow(METHODS, ["mle", "deep-ensemble", "laplace", "node-noise", "temperature"])
)
def test_every_method_stores_names_with_the_posterior_and_in_files(name, tmp_path):
    method = METHODS[name]
    calibrates = issubclass(method, fb.methods.Calibrator)
    settings = {} if calibrates else SETTINGS.get(name, CHEAP)
    posterior = method(**settings).fit(network(), (TABLE, LABELS), progress=False, seed=0)
    assert posterior.columns == {"": NAMES}
    loaded = fb.load_posterior(posterior.save(tmp_path / "posterior.safetensors"), network())
    assert loaded.columns == {"": NAMES}
    expected = probabilities(posterior, TABLE)
    for each in (posterior, loaded):
        torch.testing.assert_close(probabilities(each, SHUFFLED), expected)


def test_noise_fits_store_names():
    noisy = fb.to_stochastic(network(), {"*": fb.noise.NormalAffine()})
    posterior = fb.fit(noisy, (TABLE, LABELS), epochs=1, validation=None, report=False, progress=False)
    assert torch.equal(probabilities(posterior, SHUFFLED), probabilities(posterior, TABLE))
    assert noisy.state_dict().keys() == posterior.model.state_dict().keys()


FUNCTIONS = {
    "predict": lambda posterior, table: probabilities(posterior, table),
    "evaluate": lambda posterior, table: fb.evaluate(posterior, (table, LABELS)),
    "novel": lambda posterior, table: fb.evaluate(posterior, (TABLE, LABELS), novel=table),
    "columns": lambda posterior, table: fb.evaluate(
        posterior, Columns(pd.concat([table, LABELS], axis=1), targets="y")
    ),
    "calibrator": lambda posterior, table: fb.Temperature().fit(posterior, (table, LABELS)).temperature,
    "calibrate": lambda posterior, table: probabilities(
        fb.calibrate(posterior.model, (table, LABELS), candidates=["temperature"], folds=0, progress=False),
        TABLE,
    ),
    "acquire": lambda posterior, table: fb.acquire(posterior, table, 2, seed=0),
    "conformalize": lambda posterior, table: fb.conformalize(posterior, (table, LABELS), coverage=0.7),
    "gated": lambda posterior, table: fb.gated(posterior, (table, LABELS), epochs=1).gate.held_out_scores,
}


@pytest.mark.filterwarnings("ignore::flowbnn.FlowBNNWarning")
@pytest.mark.parametrize("name", FUNCTIONS)
def test_columns_are_found_by_name_and_others_are_refused(name):
    posterior, function = fitted(), FUNCTIONS[name]
    expected, result = function(posterior, TABLE), function(posterior, SHUFFLED)
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(result, expected)
    else:
        assert str(result) == str(expected)
    extra = TABLE.assign(name="text" if name == "predict" else 0.0)
    for table in (TABLE[["a", "b"]], extra, TABLE.rename(columns={"a": "A"})):
        assert kind_of_error(lambda table=table: function(posterior, table)) == "columns"


def test_validation_data_have_the_columns_of_the_training_data():
    histories = [
        fitted(validation=(table, LABELS)).history.records[-1]["validation_nll"]
        for table in (TABLE, SHUFFLED)
    ]
    assert histories[0] == histories[1]
    assert kind_of_error(lambda: fitted(validation=(TABLE.assign(d=0.0), LABELS))) == "columns"


def test_arrays_and_numbered_columns_are_taken_as_they_are():
    posterior = fitted()
    expected = probabilities(posterior, TABLE)
    assert torch.equal(probabilities(posterior, TABLE.to_numpy()), expected)
    assert torch.equal(probabilities(posterior, pd.DataFrame(TABLE.to_numpy())), expected)
    assert fitted((TABLE.to_numpy(), LABELS)).columns == {}


class Sum(nn.Module):
    """Network of two inputs."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(2, 2), nn.Linear(1, 2)

    def forward(self, x, z):
        return self.first(x) + self.second(z)


def test_data_frames_among_several_inputs_have_their_own_names():
    parts = TABLE[["a", "b"]], TABLE[["c"]]
    posterior = fitted((*parts, LABELS), Sum())
    assert posterior.columns == {"0": ["a", "b"], "1": ["c"]}
    expected = probabilities(posterior, parts)
    assert torch.equal(probabilities(posterior, (TABLE[["b", "a"]], parts[1])), expected)
    named = fitted(({"x": parts[0], "z": parts[1]}, LABELS), Sum())
    assert torch.equal(probabilities(named, {"z": parts[1], "x": TABLE[["b", "a"]]}), expected)
    assert kind_of_error(lambda: probabilities(named, {"x": parts[1], "z": parts[1]})) == "columns"


class Stack(nn.Module):
    """Network that takes a dictionary of columns as one argument."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch):
        return self.layer(torch.stack(list(batch.values()), -1))


def test_dictionaries_of_columns_have_the_order_of_the_fit():
    columns = {name: TABLE[name].to_numpy() for name in NAMES}
    posterior = fitted((columns, LABELS), Stack())
    expected = probabilities(posterior, columns)
    assert torch.equal(probabilities(posterior, dict(reversed(columns.items()))), expected)
    for other in ({"a": columns["a"]}, columns | {"d": columns["a"]}):
        assert kind_of_error(lambda other=other: probabilities(posterior, other))


@pytest.mark.parametrize("shuffle", [False, True])
def test_loaders_of_data_frames_can_be_aligned(shuffle):
    for data in ((TABLE, LABELS), ({"x": TABLE}, LABELS)):
        loader = as_loader(data, shuffle=shuffle)
        path = "x" if isinstance(data[0], dict) else ""
        assert columns_of(loader)[path] == NAMES
        aligned = align_columns(loader, {path: ["b", "c", "a"]})
        assert columns_of(aligned)[path] == ["b", "c", "a"]
        inputs = torch.cat([torch.cat(fb.batches.tensors_of(batch[0])) for batch in aligned])
        expected = torch.tensor(TABLE[["b", "c", "a"]].to_numpy().copy()).to(inputs)
        torch.testing.assert_close(inputs.sort(0).values, expected.sort(0).values)


# -------------------- columns of a data frame


def test_columns_of_a_data_frame_are_inputs_targets_and_weights():
    table = TABLE.assign(y=LABELS, w=1.5, kind=np.arange(24) % 4)
    batch = next(iter(Columns(table, inputs=["c", "a"], targets="y", weights="w")))
    assert torch.equal(batch.inputs, torch.tensor(table[["c", "a"]].to_numpy().copy()))
    assert torch.equal(batch.targets, torch.tensor(LABELS.to_numpy()))
    assert batch.weights.unique().tolist() == [1.5]
    batch = next(iter(Columns(table, inputs=(["a", "b"], "kind"), targets=["a", "c"])))
    assert [tuple(tensor.shape) for tensor in (*batch.inputs, batch.targets)] == [(24, 2), (24,), (24, 2)]
    assert batch.inputs[1].dtype == torch.int64
    loader = Columns(table, targets="y", weights="w")
    assert columns_of(loader) == {"": ["a", "b", "c", "kind"]}
    assert Columns(table, inputs=["a"], targets=None).select(next(iter(loader.loader))[:1]).targets is None
    assert kind_of_error(lambda: Columns(table, inputs="z", targets="y")) == "columns"
    assert kind_of_error(lambda: Columns(table)) == "columns"


def test_fit_of_the_columns_of_a_data_frame_is_that_of_the_pair():
    table = TABLE.assign(y=LABELS)[["c", "y", "a", "b"]]
    pair = fitted((SHUFFLED, LABELS), batch_size=8)
    columns = fitted(Columns(table, targets="y", batch_size=8, shuffle=True))
    assert columns.columns == {"": ["c", "a", "b"]}
    assert torch.equal(probabilities(columns, TABLE), probabilities(pair, TABLE))
    weighted = fitted(Columns(table.assign(w=1.0), targets="y", weights="w", batch_size=8, shuffle=True))
    torch.testing.assert_close(probabilities(weighted, TABLE), probabilities(pair, TABLE))


def test_networks_of_the_user_keep_no_names():
    model = network()
    fitted(model=model)
    assert fb.networks.input_columns(model) == {}
    assert PointPosterior(model, fb.likelihoods.Categorical()).columns == {}
