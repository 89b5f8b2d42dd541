"""Tests of a last batch of one row, on which BatchNorm cannot be trained."""

from typing import Any

import pytest
import torch
from objectives import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import flowbnn as fb
from flowbnn import FlowBNNError
from flowbnn.methods import Method
from flowbnn.training import TrainingOptions

QUIET: dict[str, Any] = {"progress": False, "accelerator": "cpu"}


def loader(batch_size: int = 8, **options: Any) -> DataLoader[Any]:
    inputs = torch.linspace(-1.0, 1.0, 68).reshape(17, 4)
    return DataLoader(TensorDataset(inputs, torch.arange(17) % 3), batch_size=batch_size, **options)


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


METHODS: list[Method] = [
    fb.MAP(epochs=1),
    fb.MCDropout(0.1, epochs=1),
    fb.DeepEnsemble(2, epochs=1),
    fb.SWAG(epochs=4, batch_norm_samples=2),
    fb.Temperature(fb.MLE(epochs=1), validation_fraction=0.01),
    fb.Laplace(epochs=1),
    fb.BayesByBackprop(epochs=1),
    fb.MNF(epochs=1),
    fb.SGLD(epochs=4, samples=2, cycles=1),
    fb.HMC(samples=4, warmup=2, chains=2, steps=2, epochs=1),
    fb.NodeNoise("gaussian", epochs=1),
]


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_every_method_explains_the_error(method: Method) -> None:
    with pytest.raises(FlowBNNError) as caught:
        method.fit(network(), loader(), validation=loader(), **QUIET)
    assert "Expected more than 1 value per channel" in str(caught.value.__cause__)
    assert caught.value.kind == "batch"
    assert "epoch 1, batch 3" in str(caught.value)
    assert "drop_last=True" in str(caught.value)


def test_drop_last_and_other_batch_sizes_avoid_the_error() -> None:
    for data in (loader(drop_last=True), loader(batch_size=5)):
        fb.MAP(epochs=1).fit(network(), data, **QUIET)


def test_other_errors_are_not_changed() -> None:
    def broken(model: nn.Module, batch: Any, clock: Any) -> Any:
        raise ValueError("Expected more than 1 value per channel" if len(batch[0]) > 1 else "something else")

    for rows in (1, 2):
        batches = [(torch.zeros(rows, 4), torch.zeros(rows))]
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError) as caught:
            train(model, broken, optimizer, batches, TrainingOptions(epochs=1, accelerator="cpu"))
        assert not isinstance(caught.value, FlowBNNError)
