"""Tests of progress bars: what they show at any width, nested tasks, and the estimated time."""

import io

import pytest
import torch
from rich.console import Console

import flowbnn as fb
from flowbnn.training import EarlyStop, ProgressBar, TrainingOptions, progress, track
from flowbnn.training.progress import SCREEN, TrainingDisplay

WIDTHS = (10, 20, 30, 40, 60, 80, 100, 150)


@pytest.fixture
def clock(monkeypatch):
    """Clock that moves only when it is told to."""
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


@pytest.fixture
def console(monkeypatch):
    result = Console(file=io.StringIO(), force_terminal=True, width=80)
    monkeypatch.setattr("rich.get_console", lambda: result)
    return result


def make_display(**options):
    console = Console(file=io.StringIO(), force_terminal=True, width=150)
    defaults = {"epochs": 7, "description": "LeNet", "early_stop": EarlyStop("validation_nll")}
    return TrainingDisplay(TrainingOptions(**defaults | options), steps=10, console=console)


def test_training_shows_epoch_values_and_times(clock):
    display = make_display()
    with display:
        assert display.is_due()
        clock(10.0)
        display.update(1, 10, {"elbo": -2.0, "validation_accuracy": 0.5, "validation_nll": 0.25}, 7)
        assert "epoch 2/7" in display.bar.render(150).plain
        display.update(2, 25, {"loss": 9.0, "elbo": -1.5, "log_likelihood": -1.25, "kl": 12.5}, 5)
        assert not display.is_due()
        text = display.bar.render(150).plain
        values = "ELBO -1.5  validation NLL 0.25  validation accuracy 0.5  log-lik -1.25  KL 12.5"
        assert text.startswith("LeNet  epoch 3/5  ━")
        assert text.endswith(f"{values}  0:10, 0:10 left")
    assert display.bar.render(150).plain.endswith(f"{values}  0:10")


@pytest.mark.parametrize("label", ["training", "calibrating: noise+temperature", "a" * 200])
def test_no_line_is_wider_than_the_terminal(label, clock):
    bar = ProgressBar(label, 1_000_000, unit="batch")
    for completed in (0, 1, 500_000, 1_000_000):
        clock(3600.0)
        bar.update(completed, values=["ELBO -123.456", "validation NLL 0.25", "KL 12.5"])
        for width in WIDTHS:
            for indent in (0, 2, 4):
                line = bar.render(width, indent).plain
                assert len(line) <= width
                assert "\n" not in line


def test_narrow_terminals_keep_the_label_the_counter_and_the_time(clock):
    bar = ProgressBar("training", 20, unit="epoch")
    clock(30.0)
    bar.update(10, values=["ELBO -1.5", "KL 12.5"])
    assert [bar.render(width).plain for width in (24, 40, 60, 80)] == [
        "train…  11/20  0:30 left",
        "training  epoch 11/20  0:30 left",
        "training  epoch 11/20  ━━━━────  ELBO -1.5  0:30, 0:30 left",
        "training  epoch 11/20  ━━━━━━━━────────  ELBO -1.5  KL 12.5  0:30, 0:30 left",
    ]


def test_remaining_time_counts_from_the_step_at_which_a_task_was_resumed(clock):
    bar = ProgressBar("sampling", 100, start=60)
    assert bar.seconds_left is None
    clock(10.0)
    bar.update(70)
    assert bar.seconds_left == pytest.approx(30.0)
    clock(4.0)  # within a step
    assert bar.seconds_left == pytest.approx(26.0)
    uneven = ProgressBar("calibrating", 3, equal_steps=False)
    clock(1.0)
    uneven.update(1)
    assert uneven.seconds_left is None


def test_tasks_within_a_task_appear_below_it(console, clock):
    with ProgressBar("ensemble", 2, unit="member", keep=True):
        clock(1.0)
        for _ in track([1, 2], "training"):
            assert [bar.label for bar in SCREEN.bars] == ["ensemble", "training"]
        assert [bar.label for bar in SCREEN.bars] == ["ensemble"]
    assert SCREEN.live is None
    text = console.file.getvalue()
    assert "  \x1b[1mtraining\x1b[0m" in text
    assert text.rstrip().splitlines()[-1].endswith("0:01")  # the kept line


def test_an_error_within_a_task_removes_all_lines(console):
    with pytest.raises(ZeroDivisionError), ProgressBar("outer", 2), ProgressBar("inner", 2):
        raise ZeroDivisionError
    assert SCREEN.bars == []
    assert SCREEN.live is None


INPUTS, TARGETS = fb.data.clusters(40, 1.0, torch.Generator().manual_seed(0))
DATA = [(INPUTS, TARGETS)]


def diagnose():
    method = fb.NodeNoise(fb.noise.NormalAffine(), epochs=1)
    posterior = method.fit(fb.models.MLP(2, (3,), 2), DATA, seed=0, progress=False)
    fb.diagnose(posterior, DATA, samples=40, seconds=0)


TASKS = {
    "ensemble": (
        lambda network: fb.DeepEnsemble(2, epochs=1).fit(network, DATA, validation=None, seed=0),
        ["ensemble", "member 1/2", "member 2/2"],
    ),
    "evaluate": (
        lambda network: fb.evaluate(fb.posterior.PointPosterior(network, fb.likelihoods.Categorical()), DATA),
        ["predicting"],
    ),
    "calibrate": (
        lambda network: fb.calibrate(network, DATA, candidates=["noise"], folds=2, prior="fixed", samples=2),
        ["calibrating", "noise", "noise, all data"],
    ),
    "cross_calibrate": (
        lambda network: fb.cross_calibrate(
            lambda: fb.models.MLP(2, (3,), 2),
            (INPUTS, TARGETS),
            folds=2,
            method=fb.MAP(epochs=1),
            candidates=["temperature"],
        ),
        ["cross-fitting", "training of fold 1", "training of fold 2"],
    ),
    "chains": (
        lambda network: fb.HMC(samples=2, warmup=2, chains=1, epochs=1).fit(network, DATA, seed=0),
        ["HMC training", "sampling with HMC"],
    ),
    "sgld": (
        lambda network: fb.SGLD(epochs=2, samples=1, cycles=1).fit(network, DATA, seed=0),
        ["sampling with SGLD"],
    ),
    "compare": (
        lambda network: fb.compare(network, DATA, DATA, methods=["map"], epochs=1, samples=2),
        ["comparing"],
    ),
    "diagnose": (lambda network: diagnose(), ["diagnosing"]),
}
QUICK = ("ensemble", "evaluate", "chains")


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # tiny fits
@pytest.mark.parametrize(
    "task", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in TASKS]
)
def test_long_tasks_show_their_progress(task, console, monkeypatch):
    labels = []
    original = SCREEN.open

    def record(bar, console):
        labels.append(bar.label)
        original(bar, console)

    monkeypatch.setattr(SCREEN, "open", record)
    run, expected = TASKS[task]
    torch.manual_seed(0)  # weights that noise improves, so that fb.calibrate fits it to all data
    run(fb.models.MLP(2, (3,), 2))
    assert list(dict.fromkeys(labels)) == expected
    assert SCREEN.bars == []
