"""Tests of devices, precision and processes; those of the memory allocator are in test_fresh_process.py."""

import warnings
from collections import namedtuple

import pytest
import torch
from objectives import train
from torch import nn

import flowbnn as fb
from flowbnn.errors import FlowBNNError
from flowbnn.training import TrainingOptions, connect
from flowbnn.training.device import device_kind, quiet_compiler, resolve_devices


def test_compiler_warnings_are_ignored_even_as_errors():
    warning = {"message": "Online softmax", "category": UserWarning, "filename": "x.py", "lineno": 1}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with quiet_compiler():
            warnings.warn_explicit(**warning, module="torch._inductor.lowering")
            with pytest.raises(UserWarning):
                warnings.warn_explicit(**warning, module="flowbnn.noise")
        with pytest.raises(UserWarning):
            warnings.warn_explicit(**warning, module="torch._inductor.lowering")


@pytest.mark.parametrize(
    ("gpus", "options", "argument"),
    [
        (0, {"accelerator": "cuda"}, "accelerator"),
        (0, {"accelerator": "gpu", "devices": 2}, "accelerator"),
        (0, {"accelerator": "mps"}, "accelerator"),
        (1, {"devices": 2}, "devices"),
        (2, {"devices": 4, "accelerator": "cuda"}, "devices"),
        (1, {"devices": 0}, "devices"),
        (1, {"devices": 10**6, "accelerator": "cpu"}, "devices"),
        (0, {"num_nodes": 2, "accelerator": "cpu"}, "num_nodes"),
        (0, {"precision": "16-mixed", "accelerator": "cpu"}, "precision"),
    ],
)
def test_unavailable_devices_are_refused(monkeypatch, gpus, options, argument):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpus > 0)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    with pytest.raises(FlowBNNError) as caught:
        connect(TrainingOptions(**options))
    assert caught.value.argument == argument
    assert "\n" not in str(caught.value)
    if caught.value.kind == "devices" and argument == "devices":
        assert f"devices={options['devices']}" in str(caught.value)


def test_torchrun_decides_the_number_of_processes(monkeypatch):
    for name, value in (("TORCHELASTIC_RUN_ID", "x"), ("WORLD_SIZE", "4"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert resolve_devices(TrainingOptions(accelerator="cpu")) == ("cpu", 2, 2)
    assert resolve_devices(TrainingOptions(accelerator="cpu", devices="auto", num_nodes=2)) == ("cpu", 2, 2)
    with pytest.raises(FlowBNNError) as caught:
        resolve_devices(TrainingOptions(accelerator="cpu", devices=3))
    assert (caught.value.kind, caught.value.argument) == ("devices", "devices")
    assert device_kind("cpu") == "cpu"


def test_devices_that_torch_does_not_have_are_refused_by_fits_and_calibrators(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    network, data = torch.nn.Linear(2, 2), (torch.randn(40, 2), torch.arange(40) % 2)
    calls = [
        lambda: device_kind("cuda"),
        lambda: resolve_devices(TrainingOptions(accelerator="cuda")),
        lambda: fb.Temperature().fit(network, data, accelerator="cuda", progress=False),
        lambda: fb.calibrate(network, data, accelerator="cuda", progress=False),
    ]
    for call in calls:
        with pytest.raises(FlowBNNError) as caught:
            call()
        assert (caught.value.kind, caught.value.argument) == ("devices", "accelerator")


def test_several_devices_without_torchrun_are_refused_with_its_command(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with pytest.raises(FlowBNNError) as caught:
        connect(TrainingOptions(devices=2, accelerator="cpu"))
    assert (caught.value.kind, caught.value.argument) == ("devices", "devices")
    assert "torchrun --nproc-per-node 2 script.py" in str(caught.value)


Pair = namedtuple("Pair", ["inputs", "targets"])


def penalized_loss(model, batch, clock):
    loss = (model(batch.inputs) - batch.targets).square().mean()
    penalty = model[0].weight.square().sum()
    return loss + 0.01 * penalty, {"log_likelihood": -loss, "kl": penalty}


def fit(loss=penalized_loss, **options):
    """Trains a small network on named tuples and returns it with its history."""
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(4, 3, generator=source) for _ in range(3)]
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    settings = TrainingOptions(**({"epochs": 2, "accelerator": "cpu", "seed": 3} | options))
    batches = [Pair(rows, rows[:, :1]) for rows in inputs]
    return network, train(network, loss, optimizer, batches, settings, schedule=schedule)


def test_mixed_precision_keeps_float32_weights():
    dtypes = []

    def recording_loss(model, batch, clock):
        handle = model[2].register_forward_hook(lambda module, args, output: dtypes.append(output.dtype))
        result = penalized_loss(model, batch, clock)
        handle.remove()
        return result

    network, history = fit(recording_loss, precision="bf16-mixed")
    assert set(dtypes) == {torch.bfloat16}
    assert network[0].weight.dtype == torch.float32
    assert history.epochs == 2


def test_overflow_in_mixed_precision_names_the_layer():
    def overflowing_loss(model, batch, clock):
        with torch.no_grad():
            model[2].weight.fill_(3e38)
        return penalized_loss(model, batch, clock)

    with pytest.raises(FlowBNNError) as caught:
        fit(overflowing_loss, precision="bf16-mixed")
    assert (caught.value.kind, caught.value.layer) == ("not finite", "2")


def test_float16_needs_a_cuda_device():
    with pytest.raises(FlowBNNError) as caught:
        fit(precision="16-mixed")
    assert (caught.value.kind, caught.value.argument) == ("devices", "precision")
