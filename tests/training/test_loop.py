"""Tests of the training loop: steps, records, schedules, early stopping, display, and refused arguments."""

import io

import pytest
import torch
from objectives import train
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, History, TrainingOptions
from flowbnn.training.progress import terminal


def squared(model, batch, clock):
    inputs, targets = batch
    loss = (model(inputs) - targets).square().mean()
    return loss, {"log_likelihood": -loss, "kl": torch.zeros(())}


def batches(sizes=(4, 4, 2)):
    source = torch.Generator().manual_seed(0)
    inputs = [torch.randn(size, 2, generator=source, dtype=torch.float64) for size in sizes]
    return [(rows, rows.sum(1, keepdim=True)) for rows in inputs]


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1, dtype=torch.float64)


def run(model=None, step=squared, loader=None, lr=0.1, arguments=None, **options):
    model = linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = TrainingOptions(**({"epochs": 2, "accelerator": "cpu"} | options))
    return train(
        model, step, optimizer, batches() if loader is None else loader, settings, **(arguments or {})
    )


def test_steps_equal_those_of_plain_torch():
    expected, data = linear(), batches()
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(3):
        for inputs, targets in data:
            optimizer.zero_grad()
            (expected(inputs) - targets).square().mean().backward()
            nn.utils.clip_grad_norm_(expected.parameters(), 0.5)
            optimizer.step()
    model = linear()
    history = run(model, loader=data, epochs=3, clip_gradient=0.5)
    assert torch.equal(model.weight, expected.weight)
    assert history.steps == 9
    assert history.epochs == len(history) == 3


def test_training_converges():
    model = linear()
    history = run(model, epochs=100)
    assert torch.allclose(model.weight, torch.ones(1, 2, dtype=torch.float64), atol=1e-6)
    assert history["loss"][-1] < 1e-9 < history["loss"][0]


def test_records_are_means_over_examples():
    def step(model, batch, clock):
        size = float(batch["x"].shape[0])
        extra = {"once": 7.0} if clock.step == 1 else {}
        return model.weight.sum() * 0 + size, {"size": torch.tensor(size), **extra}

    loader = [{"x": torch.ones(4, 2)}, {"x": torch.ones(4, 2)}, {"x": torch.ones(2, 2)}]
    history = run(nn.Linear(2, 1), step, loader, epochs=1)
    assert history.records == [{"loss": 3.6, "size": 3.6, "once": 7.0, "learning_rate": 0.1}]
    assert "size" in history
    assert history.names == ["loss", "size", "once", "learning_rate"]
    with pytest.raises(FlowBNNError) as caught:
        history["sise"]
    assert (caught.value.kind, caught.value.argument) == ("name", "sise")
    assert "'size'" in str(caught.value)
    assert History.from_dict(history.to_dict()) == history


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(2), torch.ones(1))] * 5)


def test_clock_counts_epochs_steps_and_progress():
    ticks = []

    def step(model, batch, clock):
        ticks.append(clock)
        return squared(model, batch, clock)

    run(step=step)
    assert [(tick.epoch, tick.step) for tick in ticks] == [(0, 0), (0, 1), (0, 2), (1, 3), (1, 4), (1, 5)]
    assert [tick.progress for tick in ticks] == [0, 1 / 6, 2 / 6, 3 / 6, 4 / 6, 5 / 6]
    ticks.clear()
    run(step=step, loader=DataLoader(Stream(), batch_size=2), model=nn.Linear(2, 1))  # without a length
    assert [tick.progress for tick in ticks] == [0, 0, 0, 0.5, 0.5, 0.5]


def test_schedules_step_per_step_or_per_epoch():
    def rates(every, make):
        observed = []

        def step(model, batch, clock):
            observed.append(optimizer.param_groups[0]["lr"])
            return squared(model, batch, clock)

        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options = TrainingOptions(epochs=2, schedule_every=every, accelerator="cpu")
        train(model, step, optimizer, batches(), options, schedule=make(optimizer))
        return [rate / 1e-3 for rate in observed]

    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    assert rates("step", halving) == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert rates("epoch", halving) == [1, 1, 1, 0.5, 0.5, 0.5]

    def plateau(optimizer):
        # no loss improves by a factor of 1e9, so every later epoch is a plateau
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)

    assert rates("epoch", plateau) == [1, 1, 1, 0.5, 0.5, 0.5]
    with pytest.raises(FlowBNNError) as caught:
        rates("step", plateau)
    assert caught.value.argument == "schedule_every"


def test_validation_runs_in_evaluation_mode_and_modes_are_restored():
    model = nn.Sequential(linear(), nn.Dropout(0.5), nn.BatchNorm1d(1, dtype=torch.float64))
    model.eval()
    model[1].train()
    modes = []

    def step(model, batch, clock):
        modes.append(("train", model.training, model[1].training))
        return squared(model, batch, clock)

    def validate(model):
        modes.append(("validate", model.training, model[1].training, torch.is_grad_enabled()))
        return {"nll": 1.5, "validation_accuracy": torch.tensor(0.5)}

    history = run(model, step, epochs=1, arguments={"validate": validate})
    assert modes == [("train", True, True)] * 3 + [("validate", False, False, False)]
    assert [module.training for module in model.modules()] == [False, False, True, False]
    assert history.last["validation_nll"] == 1.5
    assert history.last["validation_accuracy"] == 0.5


@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping_by_patience(mode):
    sign = 1 if mode == "min" else -1
    scores = iter([sign * s for s in (5.0, 4.0, 3.95, float("nan"), 3.99, 0.0)])
    rule = EarlyStop("validation_score", patience=3, mode=mode, min_delta=0.1, restore_best=False)
    model = linear()
    history = run(
        model, epochs=20, early_stop=rule, arguments={"validate": lambda model: {"score": next(scores)}}
    )
    assert history.epochs == 5
    assert history.stopped_early
    assert history.best_epoch == 1


def test_early_stopping_on_an_unknown_value_is_refused():
    with pytest.raises(FlowBNNError) as caught:
        run(early_stop=EarlyStop("log_likelyhood"))
    assert (caught.value.kind, caught.value.argument) == ("monitor", "early_stop")
    assert "'log_likelihood'" in str(caught.value)


def test_equal_seeds_give_equal_runs():
    def noisy(model, batch, clock):
        inputs, targets = batch
        return squared(model, (inputs * torch.randn_like(inputs), targets), clock)

    histories = [run(step=noisy, seed=seed).records for seed in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]


def test_any_iterable_is_a_loader():
    model = nn.Linear(2, 1)
    assert run(model, loader=DataLoader(Stream(), batch_size=2)).steps == 6

    class Custom:
        def __iter__(self):
            yield from batches()

    assert run(loader=Custom()).steps == 6


def test_empty_epochs_are_refused():
    class OneEpoch:
        def __init__(self):
            self.remaining = batches()

        def __iter__(self):
            while self.remaining:
                yield self.remaining.pop()

    empty = [], DataLoader([], batch_size=2), DataLoader(range(3), batch_size=4, drop_last=True), iter([])
    for epoch, loaders in ((1, empty), (2, (OneEpoch(), iter(batches())))):
        for loader in loaders:
            with pytest.raises(FlowBNNError) as caught:
                run(loader=loader)
            assert (caught.value.kind, caught.value.argument) == ("loader", "loader")
            assert f"epoch {epoch}" in str(caught.value)


@pytest.mark.parametrize(
    ("argument", "options"),
    [
        ("epochs", {"epochs": 0}),
        ("epochs", {"epochs": 2.5}),
        ("checkpoint_every", {"checkpoint_every": 0, "checkpoint": "x"}),
        ("checkpoint_every", {"checkpoint_every": 5}),
        ("resume", {"resume": True}),
        ("clip_gradient", {"clip_gradient": 0.0}),
        ("clip_gradient", {"clip_gradient": float("nan")}),
        ("schedule_every", {"schedule_every": "day"}),
        ("seed", {"seed": -1}),
        ("precision", {"precision": "12-mixed"}),
        ("accelerator", {"accelerator": "abacus"}),
        ("devices", {"devices": "many"}),
        ("early_stop", {"early_stop": 3}),
        ("acceleration", {"acceleration": "graf"}),
    ],
)
def test_invalid_options_are_refused(argument, options):
    with pytest.raises(FlowBNNError) as caught:
        TrainingOptions(**options)
    assert (caught.value.kind, caught.value.argument) == ("value", argument)


def test_unknown_options_are_refused_with_a_suggestion():
    with pytest.raises(FlowBNNError) as caught:
        TrainingOptions(epoch=3)
    assert (caught.value.kind, caught.value.argument) == ("unknown setting", "epoch")
    assert "'epochs'" in str(caught.value)


@pytest.mark.parametrize("arguments", [{"patience": 0}, {"mode": "up"}, {"min_delta": -1.0}])
def test_invalid_rules_for_early_stopping_are_refused(arguments):
    with pytest.raises(FlowBNNError) as caught:
        EarlyStop(**arguments)
    assert caught.value.argument in arguments


@pytest.mark.parametrize(
    "result",
    [
        lambda model: model.weight.sum(),
        lambda model: None,
        lambda model: (model.weight, {}),
        lambda model: (torch.ones(()), {}),
        lambda model: (model.weight.sum(), {"kl": torch.ones(2)}),
        lambda model: (model.weight.sum(), 3),
    ],
)
def test_invalid_results_of_an_objective_are_refused(result):
    with pytest.raises(FlowBNNError) as caught:
        run(step=lambda model, batch, clock: result(model))
    assert (caught.value.kind, caught.value.argument) == ("objective", "objective")


def test_optimizers_that_need_a_closure_are_refused():
    model = linear()
    with pytest.raises(FlowBNNError) as caught:
        train(model, squared, torch.optim.LBFGS(model.parameters()), batches())
    assert caught.value.argument == "optimizer"


def test_unwritable_folders_are_refused_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")

    def never(model, batch, clock):
        raise AssertionError("training began")

    for option in ("checkpoint", "log"):
        with pytest.raises(FlowBNNError) as caught:
            run(step=never, **{option: tmp_path / "file" / "run"})
        assert caught.value.kind == "file"


def test_nothing_is_printed_without_a_terminal(capfd):
    run()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert terminal() is None


def test_progress_bar_appears_on_terminals_unless_switched_off(monkeypatch):
    screen = io.StringIO()
    for console, visible in (
        (Console(file=screen), False),
        (Console(file=screen, force_terminal=True), True),
    ):
        monkeypatch.setattr("rich.get_console", lambda console=console: console)
        assert (terminal() is not None) == visible
    run(epochs=1, progress=False)
    assert screen.getvalue() == ""
    run(epochs=1)
    assert "epoch 1/1" in screen.getvalue()
