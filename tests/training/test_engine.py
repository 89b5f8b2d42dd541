"""Precision."""

from collections import namedtuple

import pytest
import torch
from objectives import train
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions

Pair = namedtuple("Pair", ["inputs", "targets"])


def step(model, batch, clock):
    loss = (model(batch.inputs) - batch.targets).square().mean()
    penalty = model[0].weight.square().sum()
    return loss + 0.01 * penalty, {"log_likelihood": -loss, "kl": penalty}


def data():
    source = torch.Generator().manual_seed(0)
    parts = [torch.randn(4, 3, generator=source) for _ in range(3)]
    return [Pair(part, part[:, :1]) for part in parts]


def fit(step=step, **options):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    settings = TrainingOptions(**({"epochs": 2, "accelerator": "cpu", "seed": 3} | options))
    return network, train(network, step, optimizer, data(), settings, schedule=schedule)


def test_mixed_precision_and_a_layer_that_fails_in_it():
    seen = []

    def watching(model, batch, clock):
        handle = model[2].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        result = step(model, batch, clock)
        handle.remove()
        return result

    network, history = fit(watching, precision="bf16-mixed")
    assert set(seen) == {torch.bfloat16}
    assert network[0].weight.dtype == torch.float32
    assert history.epochs == 2

    def failing(model, batch, clock):
        with torch.no_grad():
            model[2].weight.fill_(3e38)
        return step(model, batch, clock)

    with pytest.raises(FlowBNNError, match=r"layer '2' \(Linear\) made it first"):
        fit(failing, precision="bf16-mixed")


def test_float16_needs_a_cuda_device():
    with pytest.raises(FlowBNNError, match="'16-mixed' needs a CUDA device"):
        fit(precision="16-mixed")
