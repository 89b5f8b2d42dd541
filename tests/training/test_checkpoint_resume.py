"""Tests that interrupted and resumed runs end like uninterrupted ones."""

import os
import signal
import warnings
from contextlib import nullcontext

import pytest
import torch
from killed_runs import CASES, MORE_CASES, compare_killed_runs, kill_inside_a_write
from objectives import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training import EarlyStop, TrainingOptions, load_tensors

needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


@needs_fork
@pytest.mark.parametrize(
    "cases", [CASES, pytest.param(MORE_CASES, marks=pytest.mark.slow)], ids=["few", "more"]
)
def test_killed_runs_resume_bitwise_equal(cases, tmp_path):
    results = list(compare_killed_runs(cases, tmp_path))
    for result in results:
        assert result["killed"], result
        assert result["equal"], result
        assert result["leftovers"] == [], result
    assert any(result["stopped_early"] for result in results)


@needs_fork
def test_files_of_a_killed_write_are_removed_by_the_next_write(tmp_path):
    assert kill_inside_a_write(tmp_path / "write") == {
        "killed": True,
        "files": 2,
        "values": [0.0, 0.0],
        "files_after": ["a.safetensors"],
    }


def make(width=3, dtype=torch.float32, momentum=0.9, schedule=False):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.3), nn.Linear(width, 1)).to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=momentum)
    return network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2) if schedule else None


def loader(rows=12, generator=None):
    inputs = torch.randn(rows, 2, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=3, shuffle=True, generator=generator)


def step(model, batch, clock):
    loss = (model(batch[0]) - batch[1]).square().mean()
    return loss, {"log_likelihood": -loss}


def options(folder, **changes):
    defaults = {"epochs": 3, "checkpoint": folder, "accelerator": "cpu", "seed": 4}
    return TrainingOptions(**(defaults | changes))


def weights(network):
    return [parameter.detach().clone() for parameter in network.parameters()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def uninterrupted(tmp_path):
    """Weights and history of a complete run."""
    network, optimizer, _ = make()
    history = train(network, step, optimizer, loader(), options(tmp_path / "uninterrupted"))
    return weights(network), history


def test_complete_runs_return_at_once(tmp_path, uninterrupted):
    def never(model, batch, clock):
        raise AssertionError("a step was taken")

    network, optimizer, _ = make()
    torch.nn.init.zeros_(network[0].weight)
    history = train(network, never, optimizer, loader(), options(tmp_path / "uninterrupted", resume=True))
    assert history == uninterrupted[1]
    assert equal(weights(network), uninterrupted[0])


def test_more_epochs_continue_a_complete_run(tmp_path, uninterrupted):
    network, optimizer, _ = make()
    history = train(
        network, step, optimizer, loader(), options(tmp_path / "uninterrupted", resume=True, epochs=5)
    )
    expected_network, expected_optimizer, _ = make()
    expected = train(expected_network, step, expected_optimizer, loader(), options(None, epochs=5))
    assert history.records == expected.records
    assert equal(weights(network), weights(expected_network))


def test_resume_without_a_file_starts_a_run(tmp_path, uninterrupted):
    network, optimizer, _ = make()
    history = train(
        network, step, optimizer, loader(), options(tmp_path / "new" / "a.safetensors", resume=True)
    )
    assert history.records == uninterrupted[1].records
    assert (tmp_path / "new" / "a.safetensors").exists()


@pytest.fixture
def default_sigint():
    """Restores the handler of Ctrl-C, which shells switch off for background jobs."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("source", ["raised in the step", "signal in the step", "signal in validation"])
def test_interrupted_runs_are_saved_and_resumed(tmp_path, capsys, source, default_sigint):
    calls = {"steps": 0, "validations": 0}

    def interrupted(model, batch, clock):
        calls["steps"] += 1
        torch.rand(3)
        result = step(model, batch, clock)
        if calls["steps"] == 6 and source == "raised in the step":
            raise KeyboardInterrupt
        if calls["steps"] == 6 and source == "signal in the step":
            os.kill(os.getpid(), signal.SIGINT)
        return result

    def validate(model):
        calls["validations"] += 1
        value = torch.rand(()).item()
        if calls["validations"] == 2 and source == "signal in validation":
            os.kill(os.getpid(), signal.SIGINT)
        return {"nll": value}

    before = signal.getsignal(signal.SIGINT)
    network, optimizer, _ = make()
    with pytest.raises(KeyboardInterrupt):
        train(network, interrupted, optimizer, loader(), options(tmp_path), validate=validate)
    assert signal.getsignal(signal.SIGINT) is before
    assert "last.safetensors" in capsys.readouterr().err
    stored = load_tensors(tmp_path / "last.safetensors")[1]["position"]
    assert (
        stored["step"]
        == {"raised in the step": 5, "signal in the step": 6, "signal in validation": 8}[source]
    )

    network, optimizer, _ = make()
    resumed = train(
        network, interrupted, optimizer, loader(), options(tmp_path, resume=True), validate=validate
    )
    calls.update(steps=-100, validations=-100)
    expected_network, expected_optimizer, _ = make()
    expected = train(
        expected_network, interrupted, expected_optimizer, loader(), options(None), validate=validate
    )
    assert resumed.records == expected.records
    assert equal(weights(network), weights(expected_network))


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"width": 4}, "architecture"),
        ({"dtype": torch.float64}, "architecture"),
        ({"schedule": True}, "checkpoint"),
    ],
)
def test_checkpoints_that_do_not_fit_change_nothing(tmp_path, uninterrupted, change, kind):
    network, optimizer, schedule = make(**change)
    before = weights(network)
    with pytest.raises(FlowBNNError) as caught:
        train(
            network,
            step,
            optimizer,
            loader(),
            options(tmp_path / "uninterrupted", resume=True),
            schedule=schedule,
        )
    assert "\n" not in str(caught.value)
    assert caught.value.kind == kind
    assert equal(weights(network), before)
    assert not optimizer.state


def test_changed_layers_groups_and_generators_are_refused(tmp_path, uninterrupted):
    other = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), *(nn.Linear(1, 1) for _ in range(4)))
    for network, differences in (
        (other, {f"{index}.{name}" for index in range(3, 7) for name in ("weight", "bias")}),
        (nn.Sequential(nn.Linear(2, 3)), {"2.weight", "2.bias"}),
    ):
        before, optimizer = weights(network), torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(FlowBNNError) as caught:
            train(network, step, optimizer, loader(), options(tmp_path / "uninterrupted", resume=True))
        assert caught.value.kind == "architecture"
        assert set(caught.value.fields["differences"]) == differences
        assert equal(weights(network), before)

    network, _, _ = make()
    optimizer = torch.optim.SGD([{"params": p} for p in network.parameters()], lr=0.1, momentum=0.9)
    with pytest.raises(FlowBNNError) as caught:
        train(network, step, optimizer, loader(), options(tmp_path / "uninterrupted", resume=True))
    assert set(caught.value.fields["changed"]) == {"parameter groups"}
    network, optimizer, _ = make()
    resume = options(tmp_path / "uninterrupted", resume=True, epochs=9)
    with pytest.raises(FlowBNNError) as caught:
        train(network, step, optimizer, loader(generator=torch.Generator()), resume)
    assert caught.value.fields["changed"] == {"random generators": (0, 1)}


def test_shorter_loaders_are_refused(tmp_path):
    def stop(model, batch, clock):
        if clock.step == 3:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    network, optimizer, _ = make()
    with pytest.raises(KeyboardInterrupt):
        train(network, stop, optimizer, loader(), options(tmp_path))
    with pytest.raises(FlowBNNError) as caught:
        train(network, step, optimizer, loader(rows=6), options(tmp_path, resume=True))
    assert caught.value.fields["changed"] == {"batches per epoch": (4, 2)}

    class WithoutLength:
        def __iter__(self):
            return iter(loader(rows=6))

    with pytest.warns(FlowBNNWarning) as warned, pytest.raises(FlowBNNError) as caught:
        train(network, step, optimizer, WithoutLength(), options(tmp_path, resume=True))
    assert [entry.message.kind for entry in warned] == ["changed data"]
    assert (caught.value.kind, caught.value.argument) == ("checkpoint", "loader")


def test_best_weights_are_restored(tmp_path):
    scores = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    snapshots = []

    def validate(model):
        snapshots.append(weights(model))
        return {"nll": next(scores)}

    network, optimizer, schedule = make(schedule=True)
    rule = EarlyStop(patience=2)
    run = options(tmp_path, epochs=9, early_stop=rule, schedule_every="epoch")
    history = train(
        network, step, optimizer, loader(), run, schedule=schedule, validate=validate, settings={"note": 1}
    )
    assert (history.epochs, history.best_epoch, history.stopped_early) == (4, 1, True)
    assert equal(weights(network), snapshots[1])
    assert not equal(snapshots[1], snapshots[3])
    fresh, fresh_optimizer, fresh_schedule = make(schedule=True)
    resume = options(tmp_path, epochs=9, early_stop=rule, schedule_every="epoch", resume=True)
    resumed = train(
        fresh, step, fresh_optimizer, loader(), resume, schedule=fresh_schedule, validate=validate
    )
    assert resumed == history
    assert equal(weights(fresh), snapshots[1])
    assert load_tensors(tmp_path / "last.safetensors")[1]["settings"] == {"note": 1}


def test_channels_last_networks_resume_bitwise_equal(tmp_path):
    """Files store momenta in the plain layout, but fused updates require the layout of the parameter."""
    import flowbnn as fb
    from flowbnn.data import TensorLoader
    from flowbnn.models import LeNet

    source = torch.Generator().manual_seed(0)
    images, labels = torch.randn(24, 3, 28, 28, generator=source), torch.randint(10, (24,), generator=source)

    def fitted(epochs, **options):
        torch.manual_seed(1)
        network = LeNet(3).to(memory_format=torch.channels_last)
        loader = TensorLoader(images, labels, batch_size=8)
        options = {"accelerator": "cpu", "progress": False, "seed": 2, **options}
        return fb.MLE(epochs=epochs).fit(network, loader, **options).model

    uninterrupted = fitted(3)
    fitted(1, checkpoint=tmp_path)
    resumed = fitted(3, checkpoint=tmp_path, resume=True)
    for (name, a), b in zip(uninterrupted.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_resumed_runs_warn_about_changed_settings(tmp_path):
    network, optimizer, _ = make()
    train(network, step, optimizer, loader(), options(tmp_path), settings={"beta": 1.0, "gamma": 0.0})
    network, _, _ = make()
    other = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    with pytest.warns(FlowBNNWarning) as caught:
        train(
            network,
            step,
            other,
            loader(),
            options(tmp_path, resume=True, epochs=4),
            settings={"beta": 2.0, "gamma": 0.0},
        )
    (warning,) = [entry.message for entry in caught]
    assert warning.kind == "changed settings"
    assert warning.fields["changed"] == {"beta": (1.0, 2.0)}
    assert warning.fields["ignored"] == {"lr": (0.05, 0.5)}
    assert other.param_groups[0]["lr"] == 0.05


def test_rates_changed_by_a_schedule_raise_no_warning(tmp_path):
    network, optimizer, schedule = make(schedule=True)
    train(network, step, optimizer, loader(), options(tmp_path, schedule_every="epoch"), schedule=schedule)
    assert optimizer.param_groups[0]["lr"] < 0.05
    network, optimizer, schedule = make(schedule=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(
            network,
            step,
            optimizer,
            loader(),
            options(tmp_path, schedule_every="epoch", resume=True, epochs=4),
            schedule=schedule,
        )


@pytest.mark.parametrize("stop", [2, 4, None])  # inside an epoch, between two, and not at all
def test_resumed_runs_warn_about_changed_data(tmp_path, stop):
    def stopping(model, batch, clock):
        if clock.step == stop:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    def data(seed):
        inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(seed))
        dataset = TensorDataset(inputs, inputs[:, :1])
        return DataLoader(dataset, batch_size=3, shuffle=True, generator=torch.Generator())

    def run(loader, step=step, **changes):
        network, optimizer, _ = make()
        settings = {"epochs": 2, "checkpoint": tmp_path, "accelerator": "cpu", "seed": 3, **changes}
        train(network, step, optimizer, loader, TrainingOptions(**settings))
        return network

    expected = run(data(2), checkpoint=None)
    with nullcontext() if stop is None else pytest.raises(KeyboardInterrupt):
        run(data(2), step=stopping)
    content = (tmp_path / "last.safetensors").read_bytes()
    with pytest.warns(FlowBNNWarning) as caught:
        run(data(5), resume=True)
    assert [entry.message.kind for entry in caught] == ["changed data"]
    (tmp_path / "last.safetensors").write_bytes(content)
    resumed = run(data(2), resume=True)  # no warning for the same data
    assert equal(weights(resumed), weights(expected))


def test_augmented_loaders_raise_no_warning_about_changed_data(tmp_path):
    class Augmented(list):
        def __iter__(self):
            for x, y in super().__iter__():
                yield x + int.from_bytes(os.urandom(2)) / 2**20, y

    network, optimizer, _ = make()
    batches = Augmented(loader())
    for epochs in (1, 2):
        run = TrainingOptions(epochs=epochs, checkpoint=tmp_path, accelerator="cpu", resume=epochs == 2)
        train(network, step, optimizer, batches, run)
