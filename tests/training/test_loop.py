"""What the loop does with a step function, and what it refuses."""

import io
import warnings

import pytest
import torch
from objectives import train
from rich.console import Console
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from flowbnn.errors import FlowBNNError
from flowbnn.training import EarlyStop, History, TrainingOptions
from flowbnn.training.progress import Display, terminal


def squared(model, batch, clock):
    inputs, targets = batch
    loss = (model(inputs) - targets).square().mean()
    return loss, {"log_likelihood": -loss, "kl": torch.zeros(())}


def batches(sizes=(4, 4, 2)):
    source = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, 2, generator=source, dtype=torch.float64) for size in sizes]
    return [(part, part.sum(1, keepdim=True)) for part in parts]


def linear():
    torch.manual_seed(0)
    return nn.Linear(2, 1, dtype=torch.float64)


def run(model=None, step=squared, loader=None, lr=0.1, more=None, **options):
    model = linear() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    settings = TrainingOptions(**({"epochs": 2, "accelerator": "cpu"} | options))
    return train(model, step, optimizer, batches() if loader is None else loader, settings, **(more or {}))


def test_the_steps_are_those_of_plain_torch():
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


def test_it_learns():
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
    with pytest.raises(FlowBNNError, match="did you mean 'size'"):
        history["sise"]
    assert History.from_dict(history.to_dict()) == history


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(torch.ones(2), torch.ones(1))] * 5)


def test_the_clock():
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


def test_schedules_go_by_step_or_by_epoch():
    def rates(every, make):
        seen = []

        def step(model, batch, clock):
            seen.append(optimizer.param_groups[0]["lr"])
            return squared(model, batch, clock)

        model = linear()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options = TrainingOptions(epochs=2, schedule_every=every, accelerator="cpu")
        train(model, step, optimizer, batches(), options, schedule=make(optimizer))
        return [rate / 1e-3 for rate in seen]

    def halving(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    assert rates("step", halving) == [1, 0.5, 0.25, 0.125, 0.0625, 0.03125]
    assert rates("epoch", halving) == [1, 1, 1, 0.5, 0.5, 0.5]

    def plateau(optimizer):
        # no loss falls below minus 1e9 times the first: every later epoch is a plateau
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=1e9)

    assert rates("epoch", plateau) == [1, 1, 1, 0.5, 0.5, 0.5]
    with pytest.raises(FlowBNNError, match="schedule_every='epoch'"):
        rates("step", plateau)


def test_validation_sees_an_evaluating_model_and_modes_come_back():
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

    history = run(model, step, epochs=1, more={"validate": validate})
    assert modes == [("train", True, True)] * 3 + [("validate", False, False, False)]
    assert [module.training for module in model.modules()] == [False, False, True, False]
    assert history.last["validation_nll"] == 1.5
    assert history.last["validation_accuracy"] == 0.5


@pytest.mark.parametrize("mode", ["min", "max"])
def test_early_stopping(mode):
    sign = 1 if mode == "min" else -1
    scores = iter([sign * s for s in (5.0, 4.0, 3.95, float("nan"), 3.99, 0.0)])
    rule = EarlyStop("validation_score", patience=3, mode=mode, min_delta=0.1, restore_best=False)
    model = linear()
    history = run(model, epochs=20, early_stop=rule, more={"validate": lambda model: {"score": next(scores)}})
    assert history.epochs == 5
    assert history.stopped_early
    assert history.best_epoch == 1


def test_early_stopping_on_nothing():
    with pytest.raises(
        FlowBNNError, match="'log_likelyhood', which no epoch logs; did you mean 'log_likelihood'"
    ):
        run(early_stop=EarlyStop("log_likelyhood"))


def test_a_seed_makes_runs_equal_and_is_not_needed():
    def noisy(model, batch, clock):
        inputs, targets = batch
        return squared(model, (inputs * torch.randn_like(inputs), targets), clock)

    histories = [run(step=noisy, seed=seed).records for seed in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]


def test_loaders_of_every_kind():
    model = nn.Linear(2, 1)
    assert run(model, loader=DataLoader(Stream(), batch_size=2)).steps == 6

    class Custom:
        def __iter__(self):
            yield from batches()

    assert run(loader=Custom()).steps == 6

    class Drained:
        def __init__(self):
            self.rest = batches()

        def __iter__(self):
            while self.rest:
                yield self.rest.pop()

    with pytest.raises(FlowBNNError, match="no batch in epoch 2"):
        run(loader=Drained())
    for empty in ([], DataLoader([], batch_size=2), DataLoader(range(3), batch_size=4, drop_last=True)):
        with pytest.raises(FlowBNNError, match="no batch in epoch 1: is it empty"):
            run(loader=empty)
    with pytest.raises(FlowBNNError, match="no batch in epoch 1"):
        run(loader=iter([]), epochs=1)
    with pytest.raises(FlowBNNError, match="iterator, which serves one epoch only"):
        run(loader=iter(batches()))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epochs": 0}, "epochs=...\\) must be an integer of at least 1, got 0"),
        ({"epochs": 2.5}, "epochs=...\\) must be an integer"),
        ({"checkpoint_every": 0, "checkpoint": "x"}, "checkpoint_every=...\\) must be"),
        ({"checkpoint_every": 5}, "checkpoint_every needs a file"),
        ({"resume": True}, "resume needs a file"),
        ({"clip_gradient": 0.0}, "clip_gradient=...\\) must be a number above 0"),
        ({"clip_gradient": float("nan")}, "clip_gradient=...\\) must be a number above 0"),
        ({"schedule_every": "day"}, "schedule_every=...\\) must be"),
        ({"seed": -1}, "seed=...\\) must be"),
        ({"precision": "12-mixed"}, "precision=.*'32-true'"),
        ({"accelerator": "abacus"}, "accelerator=.*'cpu'"),
        ({"devices": "many"}, "devices=.*integer"),
        ({"early_stop": 3}, "early_stop=.*EarlyStop"),
        ({"epoch": 3}, "no setting 'epoch'; did you mean 'epochs'"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(FlowBNNError, match=words) as caught:
        TrainingOptions(**options)
    assert caught.value.argument in options


@pytest.mark.parametrize("arguments", [{"patience": 0}, {"mode": "up"}, {"min_delta": -1.0}])
def test_rules_that_make_no_sense(arguments):
    with pytest.raises(FlowBNNError, match=next(iter(arguments))):
        EarlyStop(**arguments)


def test_steps_that_make_no_sense():
    def check(step, words):
        with pytest.raises(FlowBNNError, match=words):
            run(step=step)

    check(lambda model, batch, clock: model.weight.sum(), "two things")
    check(lambda model, batch, clock: None, "two things")
    check(lambda model, batch, clock: (model.weight, {}), "tensor of one number")
    check(lambda model, batch, clock: (torch.ones(()), {}), "no trainable parameter")
    check(lambda model, batch, clock: (model.weight.sum(), {"kl": torch.ones(2)}), "'kl' with 2 values")
    check(lambda model, batch, clock: (model.weight.sum(), 3), "dictionary")
    model = linear()
    with pytest.raises(FlowBNNError, match="LBFGS"):
        train(model, squared, torch.optim.LBFGS(model.parameters()), batches())


def test_an_unwritable_folder_is_found_before_the_first_step(tmp_path):
    (tmp_path / "file").write_text("")

    def never(model, batch, clock):
        raise AssertionError("training began")

    for where in ("checkpoint", "tensorboard"):
        with pytest.raises(FlowBNNError, match="cannot write in folder"):
            run(step=never, **{where: tmp_path / "file" / "run"})


def test_tensorboard_logs(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = run(tensorboard=tmp_path / "logs")
    events = accumulator.EventAccumulator(str(tmp_path / "logs")).Reload()
    points = [(event.step, event.value) for event in events.Scalars("loss")]
    assert points == [(1, pytest.approx(history["loss"][0])), (2, pytest.approx(history["loss"][1]))]


def test_the_bar_shows_epoch_and_numbers():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=150)
    options = TrainingOptions(epochs=7, description="LeNet", early_stop=EarlyStop("validation_nll"))
    with Display(options, steps=10, console=console) as display:
        assert display.due()
        display.update(1, 10, {"elbo": -2.0, "validation_accuracy": 0.5, "validation_nll": 0.25}, 7)
        display.update(2, 25, {"loss": 9.0, "elbo": -1.5, "log_likelihood": -1.25, "kl": 12.5}, 5)
        assert not display.due()
    text = screen.getvalue()
    for word in (
        "LeNet",
        "epoch 2/7",
        "epoch 3/5",
        "ELBO -1.5",
        "log-lik -1.25",
        "KL 12.5",
        "validation nll 0.25",
    ):
        assert word in text
    assert "loss" not in text


def test_nothing_is_printed_without_a_terminal(capfd):
    run()
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""
    assert terminal() is None


def test_a_run_is_shown_on_a_terminal_unless_it_is_asked_not_to(monkeypatch):
    screen = io.StringIO()
    for console, shown in ((Console(file=screen), False), (Console(file=screen, force_terminal=True), True)):
        monkeypatch.setattr("rich.get_console", lambda console=console: console)
        assert (terminal() is not None) == shown
    run(epochs=1, progress=False)
    assert screen.getvalue() == ""
    run(epochs=1)
    assert "epoch 1/1" in screen.getvalue()
