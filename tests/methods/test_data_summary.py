"""One reading of the loader before training."""

import pytest
import torch
from problems import QUIET
from torch import nn
from torch.utils.data import DataLoader

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.methods.data_summary import DataSummary, count_examples


class CountingLoader:
    """Loader of 20 batches that counts how often it is opened and how many batches it gives."""

    num_data = 320

    def __init__(self, targets) -> None:
        generator = torch.Generator().manual_seed(0)
        self.batches = [(torch.randn(16, 4, generator=generator), targets(generator)) for _ in range(20)]
        self.opened = self.read = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        self.opened += 1
        for batch in self.batches:
            self.read += 1
            yield batch


class CountingNetwork(nn.Module):
    """Network that stores the counts of its passes and of a loader before its first training step."""

    def __init__(self, outputs: int, loader: CountingLoader) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, outputs))
        self.counts = {"passes": 0}
        self.loaders = [loader]

    def __deepcopy__(self, memo):
        network = type(self)(self.layers[2].out_features, self.loaders[0])
        network.load_state_dict(self.state_dict())
        network.counts = self.counts
        return network

    def forward(self, x):
        if self.training and "opened" not in self.counts:
            self.counts |= {"opened": self.loaders[0].opened, "read": self.loaders[0].read}
            self.counts["before"] = self.counts["passes"]
        self.counts["passes"] += 1
        return self.layers(x)


CASES = {
    "classes": (3, lambda generator: torch.randint(3, (16,), generator=generator), 1),
    "regression": (1, lambda generator: torch.randn(16, 1, generator=generator), 20),
}


# a short fit leaves the noise at its prior
@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("method", [fb.NodeNoise(epochs=1), fb.MCDropout(epochs=1), fb.MLE(epochs=1)])
def test_passes_and_readings_before_the_first_step(case, method):
    outputs, targets, batches = CASES[case]
    loader = CountingLoader(targets)
    network = CountingNetwork(outputs, loader)
    method.fit(network, loader, seed=0, **QUIET)
    assert network.counts["before"] == (1 if isinstance(method, fb.MLE) else 2)
    assert network.counts["opened"] == 1 + 1  # the second time by training
    assert network.counts["read"] == batches + 1


def test_statistics_are_those_of_all_targets():
    loader = CountingLoader(lambda generator: 1e6 + torch.randn(16, 1, generator=generator))
    data = DataSummary.read(loader)
    targets = torch.cat([targets for _, targets in loader.batches]).double()
    assert data.num_examples == 320
    assert data.statistics.count == 320
    torch.testing.assert_close(data.statistics.mean, targets.mean(0))
    torch.testing.assert_close(data.statistics.variance, targets.var(0, correction=0))
    assert data.sample[0] is data.inputs


def test_the_number_of_examples_of_a_loader_that_does_not_tell():
    class Stream:
        def __init__(self, targets) -> None:
            self.targets = targets

        def __iter__(self):
            yield from [(torch.ones(4, 2), self.targets)] * 3

    assert DataSummary.read(Stream(torch.zeros(4)), "gaussian").num_examples == 12  # all targets are read
    unknown = DataSummary.read(Stream(torch.zeros(4).long()))
    assert unknown.num_examples is None
    with pytest.raises(FlowBNNError) as error:
        unknown.require_num_examples()
    assert error.value.argument == "num_data"
    assert DataSummary.read(Stream(torch.zeros(4).long()), num_data=7).num_examples == 7


class SizedLoader:
    """Loader of labels that has a length but neither a dataset nor a sampler."""

    def __len__(self) -> int:
        return 3

    def __iter__(self):
        for rows in (4, 4, 2):
            yield torch.randn(rows, 2), torch.zeros(rows).long()


def test_the_examples_of_a_loader_with_a_length_are_counted():
    state = torch.get_rng_state()
    assert DataSummary.read(SizedLoader()).num_examples == count_examples(SizedLoader()) == 10
    assert torch.equal(torch.get_rng_state(), state)
    posterior = fb.MAP(epochs=1).fit(nn.Linear(2, 2), SizedLoader(), seed=0, **QUIET)
    assert len(posterior.predict(torch.zeros(3, 2)).probabilities) == 3
    with pytest.raises(FlowBNNError) as error:
        count_examples(DataLoader([]))
    assert error.value.kind == "loader"


@pytest.mark.parametrize(
    ("keys", "expected"),
    [(("ids", "y"), "inputs=['ids'], targets='y'"), (("x", "z"), "inputs=['x'], targets='z'")],
)
def test_the_advice_for_dictionaries_names_their_own_keys(keys, expected):
    batch = {key: torch.zeros(2) for key in keys}
    with pytest.raises(FlowBNNError) as error:
        fb.MLE(epochs=1).fit(nn.Linear(2, 2), [batch], **QUIET)
    assert error.value.kind == "loader"
    assert expected in str(error.value)


def test_reading_restores_all_generators():
    loader = fb.data.TensorLoader(torch.randn(20, 2), torch.randn(20, 1), batch_size=5, shuffle=True)
    state = torch.get_rng_state()
    first = DataSummary.read(loader, seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(DataSummary.read(loader, seed=3).inputs, first.inputs)
