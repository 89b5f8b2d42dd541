"""Split of loaders into training data and held-out data."""

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.methods.loader_split import RowSplit, split_loader

INPUTS, LABELS = torch.arange(40.0).unsqueeze(1), torch.arange(40)


def labels_of(batches) -> list[int]:
    return [int(label) for batch in batches for label in batch[-1]]


def sources():
    data = TensorDataset(INPUTS, LABELS)
    return {
        "data loader": DataLoader(data, batch_size=8, shuffle=True),
        "ordered": DataLoader(data, batch_size=8),
        "tensors": TensorLoader(INPUTS, LABELS, batch_size=8, shuffle=True),
        "batches": [(INPUTS[i : i + 4], LABELS[i : i + 4]) for i in range(0, 40, 4)],
        "one batch": [(INPUTS, LABELS)],
        "several inputs": [(INPUTS, INPUTS, LABELS)],
    }


@pytest.mark.parametrize("name", sources())
def test_every_loader_holds_out_the_same_rows(name):
    training, held_out = map(labels_of, split_loader(sources()[name], 0.25))
    assert sorted(held_out) == RowSplit(40, 0.25).held_out_rows.tolist()
    assert sorted(training + held_out) == list(range(40))


def test_folds_are_disjoint_and_cover_the_data():
    folds = [labels_of(split_loader(sources()["tensors"], 0.25, fold=fold)[1]) for fold in range(4)]
    assert sorted(label for fold in folds for label in fold) == list(range(40))


def test_a_batch_that_occurs_twice_loses_the_same_rows():
    batch = (INPUTS, LABELS)
    training, held_out = split_loader([batch, batch], 0.25)
    assert len(training) == 2
    assert len(held_out) == 1
    assert not set(labels_of(training)) & set(labels_of(held_out))


def test_a_data_loader_keeps_its_habits():
    class Loader(DataLoader):
        pass

    def collate(examples):
        return torch.stack([x for x, _ in examples]), torch.stack([y for _, y in examples])

    generator = torch.Generator().manual_seed(0)
    options = {"collate_fn": collate, "drop_last": True, "num_workers": 0, "generator": generator}
    loader = Loader(TensorDataset(INPUTS, LABELS), batch_size=7, shuffle=True, **options)
    training, held_out = split_loader(loader, 0.2)
    assert type(training) is type(held_out) is Loader
    assert training.collate_fn is collate
    assert (len(training), len(held_out)) == (32 // 7, 2)
    assert training.sampler.generator is generator
    assert labels_of(training) != labels_of(training)  # shuffled again in every pass
    assert labels_of(held_out) == labels_of(held_out) == sorted(labels_of(held_out))
    assert len(loader) == 40 // 7  # the loader itself does not change


def test_loaders_that_cannot_be_split_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([(torch.zeros(4), 0)] * 30)

    data = TensorDataset(INPUTS, LABELS)
    batch_sampler = BatchSampler(SequentialSampler(data), 4, False)
    weighted = torch.utils.data.WeightedRandomSampler([1.0] * 40, 40)
    edges = [((torch.zeros(5, 2), torch.zeros(9, 2)), torch.zeros(5))]  # a graph with nine edges
    for loader in (
        DataLoader(Stream(), batch_size=2),
        DataLoader(data, batch_size=8, sampler=weighted),
        DataLoader(data, batch_sampler=type("Own", (BatchSampler,), {})(batch_sampler.sampler, 4, False)),
        edges,
        [(INPUTS[:1], LABELS[:1])],
        object(),
    ):
        with pytest.raises(FlowBNNError) as caught:
            split_loader(loader, 0.1)
        assert caught.value.kind == "split"


def test_a_batch_sampler_is_split_by_its_own_sampler():
    data = TensorDataset(INPUTS, LABELS)
    generator = torch.Generator().manual_seed(0)
    shuffled = BatchSampler(RandomSampler(data, generator=generator), 8, True)
    train, held_out = split_loader(DataLoader(data, batch_sampler=shuffled), 0.1)
    assert sorted(labels_of(held_out)) == RowSplit(40, 0.1).held_out_rows.tolist()
    labels = labels_of(train)
    assert len(labels) == 32
    assert labels != sorted(labels)
    half = BatchSampler(SubsetRandomSampler(range(20)), 8, False)
    with pytest.raises(FlowBNNError) as caught:  # its other rows must not become training data
        split_loader(DataLoader(data, batch_sampler=half), 0.1)
    assert caught.value.kind == "split"
