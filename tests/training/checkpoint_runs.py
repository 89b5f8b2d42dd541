"""Small runs with checkpoints, for the tests that interrupt, damage and resume them."""

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


def run(parts, folder, loader=None, validate=None, step=step, **options):
    """Trains the network, optimizer and schedule that :func:`make` returned."""
    network, optimizer, schedule = parts
    defaults = {"epochs": 2, "checkpoint": folder, "accelerator": "cpu", "seed": 4}
    data = batches() if loader is None else loader
    settings = TrainingOptions(**(defaults | options))
    return train(network, step, optimizer, data, settings, schedule=schedule, validate=validate)


def snapshot(parts):
    """Returns all tensors and settings of a network, its optimizer and its schedule."""
    network, optimizer, schedule = parts
    tensors = [
        parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]
    ]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return (
        tensors + [value.clone() for value in network.state_dict().values()],
        repr((groups, dict(optimizer.state), None if schedule is None else schedule.state_dict())),
    )


def refusal(folder, parts, **options):
    """Returns the error of a run that cannot be resumed, and checks that it has one line and changed nothing."""
    before = snapshot(parts)
    random = torch.get_rng_state()
    with pytest.raises(FlowBNNError) as caught:
        run(parts, folder, **({"resume": True, "epochs": 3} | options))
    message, after = str(caught.value), snapshot(parts)
    assert "\n" not in message
    assert len(message) < 500
    assert "last.safetensors" in message
    assert all(torch.equal(a, b) for a, b in zip(before[0], after[0], strict=True))
    assert before[1] == after[1]
    assert torch.equal(random, torch.get_rng_state())
    return caught.value


def equal_snapshots(left, right):
    """Returns True if two networks with their optimizers are bitwise equal."""
    (left_tensors, left_settings), (right_tensors, right_settings) = snapshot(left), snapshot(right)
    tensors_equal = all(torch.equal(a, b) for a, b in zip(left_tensors, right_tensors, strict=True))
    return tensors_equal and left_settings == right_settings


def stop_at(number):
    """Returns a loss function that raises KeyboardInterrupt at a step."""

    def stopping(model, batch, clock):
        if clock.step == number:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    return stopping
