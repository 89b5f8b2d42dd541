"""Tests of sharded batches: noise, masks and examples equal those of one process, and bad requests are refused."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import flowbnn as fb
from flowbnn.data import TensorLoader
from flowbnn.errors import FlowBNNError
from flowbnn.noise import noise_layers
from flowbnn.noise.batched import divergences
from flowbnn.noise.contexts import RowShard, current_row_shard, set_row_shard
from flowbnn.training.distributed import (
    RowShardLoader,
    row_shard,
    select_rows,
    sharded_dropout,
    synchronized_batch_norm,
    take_rows,
)

RECIPES = {
    "affine": fb.noise.NormalAffine(),
    "mixture": fb.noise.NormalAffine(components=3),
    "planar": fb.noise.NormalPlanar(2),
    "planar, position": fb.noise.NormalPlanar(2, site="position"),
    "affine, position": fb.noise.NormalAffine(site="position"),
    "mixture, position": fb.noise.NormalInvConv(components=2, site="position"),
    "dropout": fb.noise.Dropout(0.4),
    "glow": fb.noise.NormalGlow(1),
    "actnorm": fb.noise.FlowNoise(lambda dim: fb.transforms.ActNorm(dim)),
    "batch norm": fb.noise.FlowNoise(lambda dim: fb.transforms.BatchNorm(dim)),
}


def noisy_outputs(model, images, shard=None):
    """Returns outputs, KL and a random number after the pass, with the noise of one shard of the batch."""
    torch.manual_seed(3)
    set_row_shard(shard)
    try:
        outputs = model(images)
        kl = sum(divergence.kl for divergence in divergences(noise_layers(model)).values())
    finally:
        set_row_shard(None)
    return outputs, kl, torch.rand(1)


@pytest.mark.parametrize("name", RECIPES)
def test_noise_is_independent_of_the_number_of_processes(name):
    """Three processes hold 2, 2 and 3 of 7 examples. Outputs, KL and random state are those of one process."""
    network = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Tanh(), nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(32, 4))
    torch.manual_seed(0)
    model = fb.to_stochastic(network, {"*": RECIPES[name]})
    images = torch.randn(7, 1, 8, 8)
    initial = {key: value.clone() for key, value in model.state_dict().items()}
    expected, kl, random_number = noisy_outputs(model, images)
    shards = []
    for rank in range(3):
        model.load_state_dict(initial)
        shard, _ = row_shard(7, rank, 3)
        outputs, shard_kl, shard_random = noisy_outputs(model, images[shard.start : shard.stop], shard)
        shards.append(outputs)
        assert torch.equal(torch.as_tensor(shard_kl), torch.as_tensor(kl))
        assert torch.equal(shard_random, random_number)
    assert (torch.cat(shards) - expected).abs().max() < 1e-5
    assert (shards[0] - shards[1]).abs().max() > 1e-3


def test_rows_that_are_no_multiple_of_the_examples_are_refused():
    class ExtraRow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x):
            return self.layer(torch.cat([x, x[:1]]))

    model = fb.to_stochastic(ExtraRow(), {"*": fb.noise.NormalAffine()})
    with pytest.raises(FlowBNNError) as error:
        noisy_outputs(model, torch.ones(4, 3), RowShard(0, 4, 8))
    assert (error.value.kind, error.value.fields["rows"]) == ("shape", 5)


def test_prediction_ignores_the_shard_and_restores_it():
    model = fb.to_stochastic(nn.Sequential(nn.Linear(3, 2)), {"*": fb.noise.NormalAffine()})
    set_row_shard(RowShard(0, 2, 4))
    try:
        prediction = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()).predict(
            torch.ones(5, 3), 2, shared=False, seed=0
        )
        assert current_row_shard() == RowShard(0, 2, 4)
    finally:
        set_row_shard(None)
    expected = fb.posterior.NoisePosterior(model, fb.likelihoods.Categorical()).predict(
        torch.ones(5, 3), 2, shared=False, seed=0
    )
    assert torch.equal(prediction.samples, expected.samples)


def test_dropout_masks_equal_those_of_one_process():
    network = nn.Sequential(nn.Dropout(0.5), nn.Dropout2d(0.5), nn.Dropout(0.3, inplace=True))
    images = torch.rand(7, 3, 4, 4) + 1
    torch.manual_seed(1)
    expected = network(images)
    shards = []
    for rank in range(3):
        shard, _ = row_shard(7, rank, 3)
        torch.manual_seed(1)
        with sharded_dropout(network, lambda shard=shard: shard):
            shards.append(network(images[shard.start : shard.stop]))
    assert torch.equal(torch.cat(shards), expected)
    with sharded_dropout(network.eval(), lambda: shard):
        assert torch.equal(network(images), images)
    assert not any("forward" in vars(layer) for layer in network)


def test_batch_norm_is_synchronized_and_put_back():
    """Inside the block the layer is a SyncBatchNorm with the same weights, statistics, hooks and names."""
    network = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    original, names = network[1], list(network.state_dict())
    calls = []
    original.register_forward_hook(lambda *args: calls.append(1))
    with synchronized_batch_norm(network, torch.device("cpu")) as synchronized:
        assert not synchronized
        assert network[1] is original
    with synchronized_batch_norm(network, torch.device("cuda")) as synchronized:
        assert synchronized
        assert type(network[1]) is nn.SyncBatchNorm
        assert network[1].weight is original.weight
        assert network[1].running_mean is original.running_mean
        assert list(network.state_dict()) == names
        network(torch.ones(4, 2))
    assert network[1] is original
    assert type(original) is nn.BatchNorm1d
    assert int(original.num_batches_tracked) == 1
    assert calls == [1]


def loaders():
    """Returns loaders of every kind, and the generator that they share."""
    inputs = torch.arange(23.0)
    data = TensorDataset(inputs, inputs.long())
    source = torch.Generator().manual_seed(4)

    class CustomLoader(DataLoader):
        pass

    class CustomSampler(torch.utils.data.BatchSampler):
        pass

    sampler = torch.utils.data.RandomSampler(data, generator=source)
    return {
        "data loader": DataLoader(data, batch_size=5, shuffle=True, generator=source),
        "workers": DataLoader(data, batch_size=5, shuffle=True, generator=source, num_workers=1),
        "batch sampler": DataLoader(data, batch_sampler=CustomSampler(sampler, 5, False)),
        "subclass": CustomLoader(data, batch_size=5, shuffle=True, generator=source),
        "tensor loader": TensorLoader(inputs, inputs.long(), batch_size=5, shuffle=True, generator=source),
        "list": [{"x": rows, "y": [rows.long()]} for rows in inputs.split(5)],
        "last batch of one": TensorLoader(inputs[:21], inputs[:21].long(), batch_size=5),
    }, source


def first_tensor(batch):
    return next(iter(batch.values() if isinstance(batch, dict) else batch))


@pytest.mark.parametrize("name", loaders()[0])
def test_shards_of_a_loader_add_up_to_its_batches(name):
    choices, source = loaders()
    loader = choices[name]
    state = source.get_state()
    expected = list(loader)
    batches, shards = [], []
    for rank in range(3):
        source.set_state(state)
        announced = []
        local = RowShardLoader(loader, rank, 3, lambda *shard, announced=announced: announced.append(shard))
        batches.append(list(local))
        shards.append(announced)
        assert len(local) == len(loader)
    for index, batch in enumerate(expected):
        announced = [shards[rank][index] for rank in range(3)]
        weighted = [
            (first_tensor(batches[rank][index]), shard)
            for rank, (shard, weight) in enumerate(announced)
            if weight > 0
        ]
        assert torch.equal(torch.cat([rows for rows, _ in weighted]), first_tensor(batch))
        assert [len(rows) for rows, _ in weighted] == [shard.stop - shard.start for _, shard in weighted]
        assert sum(weight for _, weight in announced) == pytest.approx(3)
        assert {shard.total for shard, _ in announced} == {len(first_tensor(batch))}


def test_loaders_with_a_distributed_sampler_are_refused():
    data = TensorDataset(torch.arange(8.0))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, 2, 1, shuffle=False))
    for split in (
        lambda: RowShardLoader(loader, 1, 2, lambda *shard: None),
        lambda: select_rows(loader, lambda index, rows: (0, rows), 1),
    ):
        with pytest.raises(FlowBNNError) as caught:
            split()
        assert (caught.value.kind, caught.value.argument) == ("loader", "loader")


def test_tensors_with_different_numbers_of_rows_are_refused():
    with pytest.raises(FlowBNNError) as caught:
        take_rows((torch.zeros(4, 2), torch.zeros(3, 2)), 0, 2)
    assert caught.value.kind == "shape"
