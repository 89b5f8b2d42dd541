"""Small runs with checkpoints, for the tests that stop, damage and resume them."""

import pytest
import torch
from objectives import train
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions


def step(model, batch, clock):
    loss = (model(batch[0]) - batch[1]).square().mean()
    return loss, {"log_likelihood": -loss}


def batches(count=4):
    source = torch.Generator().manual_seed(2)
    inputs = [torch.randn(3, 2, generator=source) for _ in range(count)]
    return [(x, x[:, :1]) for x in inputs]


def make(kind=torch.optim.Adam, schedule=None, **settings):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.3), nn.Linear(3, 1))
    groups = [{"params": network[0].parameters()}, {"params": network[2].parameters(), "lr": 0.02}]
    optimizer = kind(groups, **({"lr": 0.01} | settings))
    return network, optimizer, None if schedule is None else schedule(optimizer)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def run(made, folder, loader=None, validate=None, step=step, **options):
    network, optimizer, schedule = made
    asked = {"epochs": 2, "checkpoint": folder, "accelerator": "cpu", "seed": 4} | options
    data = batches() if loader is None else loader
    settings = TrainingOptions(**asked)
    return train(network, step, optimizer, data, settings, schedule=schedule, validate=validate)


def snapshot(made):
    network, optimizer, schedule = made
    tensors = [
        parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]
    ]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return (
        tensors + [value.clone() for value in network.state_dict().values()],
        repr((groups, dict(optimizer.state), None if schedule is None else schedule.state_dict())),
    )


def refused(folder, made, *words, **options):
    """The one line that a resumed run gives; the model, the optimizer and the schedule stay as they are."""
    before = snapshot(made)
    random = torch.get_rng_state()
    with pytest.raises(FlowBNNError) as caught:
        run(made, folder, **({"resume": True, "epochs": 3} | options))
    text, after = str(caught.value), snapshot(made)
    assert "\n" not in text
    assert len(text) < 500
    for word in (*words, "last.safetensors"):
        assert word in text, text
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert torch.equal(random, torch.get_rng_state())
    return text


def stop_at(number):
    def stopping(model, batch, clock):
        if clock.step == number:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    return stopping
