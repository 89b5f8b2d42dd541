"""A run that was stopped goes on as if it had not been."""

import os
import signal
import warnings
from contextlib import nullcontext

import pytest
import torch
from killed_run import disturbed_runs, kill_inside_a_write
from objectives import train
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.training import EarlyStop, TrainingOptions, load_tensors

forks = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and SIGKILL")


@forks
def test_after_kill_9_the_weights_are_identical_to_the_bit(tmp_path):
    answers = list(disturbed_runs(tmp_path))
    assert len(answers) == 8
    for answer in answers:
        assert answer["killed"], answer
        assert answer["equal"], answer
        assert answer["leftovers"] == [], answer
    assert any(answer["stopped_early"] for answer in answers)


@forks
def test_a_kill_inside_a_write_leaves_nothing_that_the_next_write_does_not_clear(tmp_path):
    assert kill_inside_a_write(tmp_path / "write") == {
        "killed": True,
        "files": 2,
        "held": [0.0, 0.0],
        "after": ["a.safetensors"],
    }


def make(width=3, dtype=torch.float32, momentum=0.9, schedule=False):
    torch.manual_seed(1)
    network = nn.Sequential(nn.Linear(2, width), nn.Dropout(0.3), nn.Linear(width, 1)).to(dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=momentum)
    return network, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2) if schedule else None


def loader(rows=12, own=None):
    inputs = torch.randn(rows, 2, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=3, shuffle=True, generator=own)


def step(model, batch, clock):
    loss = (model(batch[0]) - batch[1]).square().mean()
    return loss, {"log_likelihood": -loss}


def options(folder, **more):
    return TrainingOptions(**({"epochs": 3, "checkpoint": folder, "accelerator": "cpu", "seed": 4} | more))


def weights(network):
    return [parameter.detach().clone() for parameter in network.parameters()]


def equal(left, right):
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.fixture
def peaceful(tmp_path):
    network, optimizer, _ = make()
    history = train(network, step, optimizer, loader(), options(tmp_path / "peaceful"))
    return weights(network), history


def test_a_complete_run_returns_at_once(tmp_path, peaceful):
    def never(model, batch, clock):
        raise AssertionError("no step is left to take")

    network, optimizer, _ = make()
    torch.nn.init.zeros_(network[0].weight)
    history = train(network, never, optimizer, loader(), options(tmp_path / "peaceful", resume=True))
    assert history == peaceful[1]
    assert equal(weights(network), peaceful[0])


def test_more_epochs_continue_a_complete_run(tmp_path, peaceful):
    network, optimizer, _ = make()
    history = train(network, step, optimizer, loader(), options(tmp_path / "peaceful", resume=True, epochs=5))
    straight, straight_optimizer, _ = make()
    expected = train(straight, step, straight_optimizer, loader(), options(None, epochs=5))
    assert history.records == expected.records
    assert equal(weights(network), weights(straight))


def test_resume_without_a_file_begins(tmp_path, peaceful):
    network, optimizer, _ = make()
    history = train(
        network, step, optimizer, loader(), options(tmp_path / "new" / "a.safetensors", resume=True)
    )
    assert history.records == peaceful[1].records
    assert (tmp_path / "new" / "a.safetensors").exists()


@pytest.fixture
def heeded():
    """Ctrl-C counts: a shell has its background jobs ignore it, and a run of these tests may be one."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("how", ["raised in the step", "signal in the step", "signal in validation"])
def test_interruption_saves_and_says_where(tmp_path, capsys, how, heeded):
    calls = {"steps": 0, "validations": 0}

    def interrupted(model, batch, clock):
        calls["steps"] += 1
        torch.rand(3)
        result = step(model, batch, clock)
        if calls["steps"] == 6 and how == "raised in the step":
            raise KeyboardInterrupt
        if calls["steps"] == 6 and how == "signal in the step":
            os.kill(os.getpid(), signal.SIGINT)
        return result

    def validate(model):
        calls["validations"] += 1
        value = torch.rand(()).item()
        if calls["validations"] == 2 and how == "signal in validation":
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
        stored["step"] == {"raised in the step": 5, "signal in the step": 6, "signal in validation": 8}[how]
    )

    network, optimizer, _ = make()
    resumed = train(
        network, interrupted, optimizer, loader(), options(tmp_path, resume=True), validate=validate
    )
    calls.update(steps=-100, validations=-100)
    straight, straight_optimizer, _ = make()
    expected = train(straight, interrupted, straight_optimizer, loader(), options(None), validate=validate)
    assert resumed.records == expected.records
    assert equal(weights(network), weights(straight))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"width": 4}, ["another architecture", "0.weight ((3, 2) there, (4, 2) here)"]),
        ({"dtype": torch.float64}, ["another architecture", "float32 there, float64 here"]),
        ({"schedule": True}, ["schedule none", "has StepLR"]),
    ],
)
def test_a_checkpoint_that_does_not_fit_changes_nothing(tmp_path, peaceful, change, words):
    network, optimizer, schedule = make(**change)
    before = weights(network)
    with pytest.raises(FlowBNNError) as caught:
        train(
            network, step, optimizer, loader(), options(tmp_path / "peaceful", resume=True), schedule=schedule
        )
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)
    assert equal(weights(network), before)
    assert not optimizer.state


def test_other_networks_other_groups_and_other_data(tmp_path, peaceful):
    other = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1), *(nn.Linear(1, 1) for _ in range(4)))
    for network, words in (
        (other, r"it lacks 3.weight, 3.bias, 4.weight and 5 more$"),
        (nn.Sequential(nn.Linear(2, 3)), r"it has besides 2.weight, 2.bias$"),
    ):
        before, optimizer = weights(network), torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
        with pytest.raises(FlowBNNError, match=words):
            train(network, step, optimizer, loader(), options(tmp_path / "peaceful", resume=True))
        assert equal(weights(network), before)

    network, _, _ = make()
    optimizer = torch.optim.SGD([{"params": p} for p in network.parameters()], lr=0.1, momentum=0.9)
    with pytest.raises(FlowBNNError, match="with parameter groups"):
        train(network, step, optimizer, loader(), options(tmp_path / "peaceful", resume=True))
    network, optimizer, _ = make()
    resume = options(tmp_path / "peaceful", resume=True, epochs=9)
    with pytest.raises(FlowBNNError, match="random generators"):
        train(network, step, optimizer, loader(own=torch.Generator()), resume)


def test_a_shorter_loader_is_noticed(tmp_path):
    def stop(model, batch, clock):
        if clock.step == 3:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    network, optimizer, _ = make()
    with pytest.raises(KeyboardInterrupt):
        train(network, stop, optimizer, loader(), options(tmp_path))
    with pytest.raises(FlowBNNError, match="written with batches per epoch 4 and this run has 2"):
        train(network, step, optimizer, loader(rows=6), options(tmp_path, resume=True))

    class Unmeasured:
        def __iter__(self):
            return iter(loader(rows=6))

    with (
        pytest.warns(FlowBNNWarning, match="other data"),
        pytest.raises(FlowBNNError, match="had done 3 batches of epoch 1, but this loader has only 2"),
    ):
        train(network, step, optimizer, Unmeasured(), options(tmp_path, resume=True))


def test_the_best_weights_are_kept(tmp_path):
    scores = iter([3.0, 1.0, 2.0, 2.0, 2.0])
    seen = []

    def validate(model):
        seen.append(weights(model))
        return {"nll": next(scores)}

    network, optimizer, schedule = make(schedule=True)
    rule = EarlyStop(patience=2)
    run = options(tmp_path, epochs=9, early_stop=rule, schedule_every="epoch")
    history = train(
        network, step, optimizer, loader(), run, schedule=schedule, validate=validate, settings={"note": 1}
    )
    assert (history.epochs, history.best_epoch, history.stopped_early) == (4, 1, True)
    assert equal(weights(network), seen[1])
    assert not equal(seen[1], seen[3])
    fresh, fresh_optimizer, fresh_schedule = make(schedule=True)
    again = options(tmp_path, epochs=9, early_stop=rule, schedule_every="epoch", resume=True)
    done = train(fresh, step, fresh_optimizer, loader(), again, schedule=fresh_schedule, validate=validate)
    assert done == history
    assert equal(weights(fresh), seen[1])
    assert load_tensors(tmp_path / "last.safetensors")[1]["settings"] == {"note": 1}


def test_a_channels_last_network_resumes_to_the_same_bits(tmp_path):
    """Momenta are stored in the plain layout; fused updates walk raw memory."""
    import flowbnn as fb
    from flowbnn.data import TensorLoader
    from flowbnn.models import LeNet

    source = torch.Generator().manual_seed(0)
    images, labels = torch.randn(24, 3, 28, 28, generator=source), torch.randint(10, (24,), generator=source)

    def fitted(epochs, **options):
        torch.manual_seed(1)
        network = LeNet(3).to(memory_format=torch.channels_last)
        loader = TensorLoader(images, labels, batch_size=8)
        given = {"accelerator": "cpu", "progress": False, "seed": 2, **options}
        return fb.MLE(epochs=epochs).fit(network, loader, **given).model

    whole = fitted(3)
    fitted(1, checkpoint=tmp_path)
    resumed = fitted(3, checkpoint=tmp_path, resume=True)
    for (name, a), b in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_resumed_run_warns_of_what_has_changed(tmp_path):
    network, optimizer, _ = make()
    train(network, step, optimizer, loader(), options(tmp_path), settings={"beta": 1.0, "gamma": 0.0})
    network, _, _ = make()
    other = torch.optim.SGD(network.parameters(), lr=0.5, momentum=0.9)
    with pytest.warns(FlowBNNWarning, match=r"beta was 1.0 and is now 2.0; lr stays 0.05, not 0.5") as caught:
        train(
            network,
            step,
            other,
            loader(),
            options(tmp_path, resume=True, epochs=4),
            settings={"beta": 2.0, "gamma": 0.0},
        )
    (warning,) = [one.message for one in caught]
    assert warning.fields["changed"] == {"beta": (1.0, 2.0)}
    assert warning.fields["kept"] == {"lr": (0.05, 0.5)}
    assert other.param_groups[0]["lr"] == 0.05


def test_a_schedule_that_has_moved_the_rate_is_no_change(tmp_path):
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
def test_other_data_of_the_same_shape_are_told(tmp_path, stop):
    def stopping(model, batch, clock):
        if clock.step == stop:
            raise KeyboardInterrupt
        return step(model, batch, clock)

    def data(seed, noise=None):
        inputs = torch.randn(12, 2, generator=torch.Generator().manual_seed(seed))
        source = torch.Generator() if noise is None else noise
        return DataLoader(TensorDataset(inputs, inputs[:, :1]), batch_size=3, shuffle=True, generator=source)

    def run(loader, **more):
        network, optimizer, _ = make()
        asked = {"epochs": 2, "checkpoint": tmp_path, "accelerator": "cpu", "seed": 3, **more}
        train(network, asked.pop("step", step), optimizer, loader, TrainingOptions(**asked))
        return network

    straight = run(data(2), checkpoint=None)
    with nullcontext() if stop is None else pytest.raises(KeyboardInterrupt):
        run(data(2), step=stopping)
    kept = (tmp_path / "last.safetensors").read_bytes()
    with pytest.warns(FlowBNNWarning, match="other data") as caught:
        run(data(5), resume=True)
    assert [one.message.fields["kind"] for one in caught] == ["changed data"]
    (tmp_path / "last.safetensors").write_bytes(kept)
    resumed = run(data(2), resume=True)  # and says nothing of the same data
    for one, other in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_loader_that_never_gives_a_batch_twice_is_not_taken_for_other_data(tmp_path):
    class Augmented(list):
        def __iter__(self):
            for x, y in super().__iter__():
                yield x + int.from_bytes(os.urandom(2)) / 2**20, y

    network, optimizer, _ = make()
    batches = Augmented(loader())
    for epochs in (1, 2):
        asked = TrainingOptions(epochs=epochs, checkpoint=tmp_path, accelerator="cpu", resume=epochs == 2)
        train(network, step, optimizer, batches, asked)
