"""Lightning Fabric and plain torch take the same steps; importing changes nothing."""

import subprocess
import sys
import warnings
from collections import namedtuple

import pytest
import torch
from torch import nn

from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, first_nonfinite_layer, train, unwrap
from flowbnn.training import device as engines

Pair = namedtuple("Pair", ["inputs", "targets"])


def step(model, batch, clock):
    loss = (model(batch.inputs) - batch.targets).square().mean()
    penalty = unwrap(model)[0].weight.square().sum()
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


@pytest.fixture
def always_fabric(monkeypatch):
    monkeypatch.setattr("flowbnn.training.loop.make_engine", engines.FabricEngine)


def test_importing_does_not_import_lightning_or_touch_warnings():
    code = (
        "import torch, warnings, logging, sys; before = list(warnings.filters); import flowbnn.training; "
        "assert warnings.filters == before; assert 'lightning' not in sys.modules; assert not logging.root.handlers"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_fabric_takes_the_same_steps_as_plain_torch(always_fabric, monkeypatch, tmp_path):
    with monkeypatch.context() as plainly:
        plainly.setattr("flowbnn.training.loop.make_engine", lambda options: engines.Engine())
        plain, history = fit(clip_gradient=0.5)
    filters = list(warnings.filters)
    wrapped, fabric_history = fit(clip_gradient=0.5, checkpoint=tmp_path)
    assert warnings.filters == filters
    assert fabric_history.records == history.records
    for left, right in zip(wrapped.parameters(), plain.parameters(), strict=True):
        assert torch.equal(left, right)
    monkeypatch.undo()
    # what Fabric wrote, plain torch reads, and finds complete
    resumed, again = fit(clip_gradient=0.5, checkpoint=tmp_path, resume=True)
    assert again == fabric_history
    assert torch.equal(resumed[0].weight, plain[0].weight)


def test_mixed_precision_and_a_layer_that_fails_inside_fabric():
    seen = []

    def watching(model, batch, clock):
        handle = unwrap(model)[2].register_forward_hook(
            lambda module, args, output: seen.append(output.dtype)
        )
        result = step(model, batch, clock)
        handle.remove()
        return result

    network, history = fit(watching, precision="bf16-mixed")
    assert set(seen) == {torch.bfloat16}
    assert network[0].weight.dtype == torch.float32
    assert history.epochs == 2

    def failing(model, batch, clock):
        with torch.no_grad():
            unwrap(model)[2].weight.fill_(3e38)
        return step(model, batch, clock)

    with pytest.raises(FlowBNNError, match=r"layer '2' \(Linear\) made it first"):
        fit(failing, precision="bf16-mixed")


def test_what_fabric_refuses_is_told_in_one_line():
    refused = "Lightning Fabric refuses"
    known = "precision '12-mixed' is not known; it is one of 32-true"
    for options, words in (
        ({"accelerator": "abacus"}, refused),
        ({"precision": "12-mixed"}, known),
        ({"devices": "many"}, refused),
    ):
        with pytest.raises(FlowBNNError, match=words) as caught:
            fit(**options)
        assert "\n" not in str(caught.value)


def test_unwrap_refuses_what_is_no_module():
    with pytest.raises(FlowBNNError, match="expected a torch module"):
        unwrap("network")
    assert first_nonfinite_layer(nn.Linear(1, 1), lambda: None) is None
