"""Tests of the process of a page: fits, predictions, scripts, and the loop over commands."""

import io
import json
import queue
import time

import numpy as np
import pytest
import torch

from flowbnn.errors import FlowBNNError
from flowbnn_studies.playground.methods import ENTRIES
from flowbnn_studies.playground.presets import make_preset
from flowbnn_studies.playground.script import CLASS_GRID, CURVE_GRID
from flowbnn_studies.playground.worker import MAX_SAMPLES, Process, Workbench

SMALL = {"epochs": 10, "width": 8}
SHORT = {"hmc": {"draws": 10, "chains": 1}, "ensemble": {"members": 2}}


def fit(workbench=None, preset="two-moons", method="map", report=lambda progress: None, number=40, **changes):
    """Returns the result of a short fit."""
    settings = {"method": method, "values": {**SMALL, **SHORT.get(method, {}), **changes.pop("values", {})}}
    points = make_preset(preset, number=number)
    command = {"command": "fit", "slot": "a", "points": points, "settings": settings, "samples": 6, **changes}
    return (workbench or Workbench()).run(command, report)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")  # ten epochs are too few
@pytest.mark.parametrize(
    ("preset", "method"),
    [
        *[("two-moons", name) for name in ENTRIES],
        ("gap", "noise"),
        ("gap", "laplace"),
        ("three-clusters", "dropout"),
    ],
)
def test_the_script_repeats_the_fit(preset, method, capsys):
    """The Python of the page runs as it is, and its prediction is the one that the page shows."""
    result = fit(preset=preset, method=method)
    names: dict = {}
    exec(result["code"], names)
    prediction = names["prediction"]
    if preset == "gap":
        shown, expected = result["mean"], prediction.mean[:, 0]
    else:
        shown, expected = result["probabilities"], prediction.probabilities.T
    assert np.abs(np.array(shown) - expected.numpy()).max() <= 1e-3
    scores = names["held_out"].evaluate(names["held_out_y"])
    assert result["scores"] == pytest.approx(scores, abs=1e-4)
    assert str(scores) in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
@pytest.mark.parametrize("preset", ["ring", "wave"])
def test_other_samples_and_temperatures_need_no_fit(preset):
    workbench = Workbench()
    first = fit(workbench, preset, "noise")
    changed = workbench.run(
        {"command": "predict", "slot": "a", "samples": 20, "temperature": 3.0}, lambda progress: None
    )
    assert changed["samples"] == 20
    names: dict = {}
    exec(changed["code"], names)
    if preset == "ring":
        assert np.mean(changed["entropy"]) > np.mean(first["entropy"])
        assert np.allclose(changed["probabilities"], names["prediction"].probabilities.T, atol=1e-3)
    else:
        assert np.mean(changed["aleatoric_std"]) == pytest.approx(
            3 * np.mean(first["aleatoric_std"]), rel=0.05
        )
        assert np.allclose(changed["mean"], names["prediction"].mean[:, 0], atol=1e-3)


def test_results_have_the_numbers_of_the_figures():
    reports: list = []
    result = fit(preset="three-clusters", method="ensemble", report=reports.append)
    size = CLASS_GRID**2
    assert result["size"] == CLASS_GRID
    assert [len(values) for values in result["probabilities"]] == [size] * 3
    assert np.allclose(np.sum(result["probabilities"], 0), 1.0, atol=2e-3)
    assert len(result["entropy"]) == len(result["mutual_information"]) == size
    assert max(result["entropy"]) <= np.log(3) + 1e-3
    assert np.shape(result["networks"]) == (6, 2, size)
    assert result["num_held_out"] == 300
    points = result["reliability"]["points"]
    assert sum(point["fraction"] for point in points) == pytest.approx(1.0, abs=1e-3)
    assert all(0 <= point["low"] <= point["high"] <= 1 for point in points)
    assert sum(len(report["values"]) for report in reports) == 2 * SMALL["epochs"]
    assert reports[-1]["epoch"] == reports[-1]["epochs"] == 20
    assert result["pair"]["prior"] == (0.0, 1.0)
    json.dumps(result, allow_nan=False)
    curve = fit(preset="gap")
    assert len(curve["x"]) == len(curve["mean"]) == CURVE_GRID
    low, high = (np.array(curve["intervals"][1][end]) for end in ("low", "high"))
    assert (low < curve["mean"]).all()
    assert (high > curve["mean"]).all()
    assert curve["reliability"]["points"][-1]["observed"] == 1.0
    assert curve["epistemic_std"] == [0.0] * CURVE_GRID  # a single network
    json.dumps(curve, allow_nan=False)


@pytest.mark.filterwarnings("ignore::flowbnn.errors.FlowBNNWarning")
def test_pairs_of_variables():
    workbench = Workbench()
    result = fit(workbench, method="noise")
    pair = result["pair"]
    assert result["draws"] == "noise"
    assert pair["layers"] == {"fc1": 2, "fc2": 8, "fc3": 8}
    assert pair["prior"] == (1.0, 0.5)
    assert np.shape(pair["draws"]) == (400, 2)
    command = {"command": "pair", "slot": "a", "layer": "fc2"}
    chosen = workbench.run({**command, "units": [3, 5]}, lambda progress: None)["pair"]
    assert (chosen["layer"], chosen["units"]) == ("fc2", [3, 5])
    posterior = workbench.fits["a"].posterior
    assert np.allclose(chosen["draws"], posterior.draws(400, 0)["fc2"][:, [3, 5]], atol=1e-4)
    automatic = workbench.run({**command, "units": None}, lambda progress: None)["pair"]
    assert automatic["layer"] == "fc2"
    assert automatic["units"][0] == int(posterior.draws(400, 0)["fc2"].std(0).argmin())
    for changes, argument in [
        ({"units": [3, 8]}, "units"),
        ({"units": [-1, 0]}, "units"),
        ({"units": [0.5, 1]}, "units"),
        ({"units": "all"}, "units"),
        ({"layer": "fc9"}, "layer"),
        ({"layer": 1}, "layer"),
        ({"slot": "c"}, "slot"),
    ]:
        with pytest.raises(FlowBNNError) as caught:
            workbench.run({**command, **changes}, lambda progress: None)
        assert caught.value.argument == argument
    single = fit(method="map")["pair"]
    assert (single["distinct"], single["correlation"]) == (1, None)


@pytest.mark.parametrize(
    ("command", "argument"),
    [
        ({"command": "shutdown"}, "command"),
        ({"command": "predict", "slot": "a"}, "slot"),  # there is no fit
        ({"command": "fit", "slot": "c"}, "slot"),
        ({"command": "fit", "slot": ["a"]}, "slot"),
        ({"command": "fit", "slot": "a"}, "points"),
        ({"command": "fit", "slot": "a", "points": make_preset("gap", number=8), "settings": {}}, "settings"),
    ],
)
def test_invalid_commands_are_refused(command, argument):
    with pytest.raises(FlowBNNError) as caught:
        Workbench().run(command, lambda progress: None)
    assert caught.value.argument == argument


@pytest.mark.parametrize(
    "changes", [{"samples": 0}, {"samples": MAX_SAMPLES + 1}, {"samples": 2.5}, {"samples": True}]
)
def test_numbers_of_samples_have_limits(changes):
    with pytest.raises(FlowBNNError) as caught:
        fit(**changes)
    assert caught.value.argument == "samples"


@pytest.mark.parametrize("temperature", [0, -1, 1000, "hot", None, float("nan")])
def test_temperatures_have_limits(temperature):
    with pytest.raises(FlowBNNError) as caught:
        fit(temperature=temperature)
    assert caught.value.argument == "temperature"


class Input(io.TextIOBase):
    """Stream that yields lines when they are put in, and never ends, because its end would end the process of the tests."""

    def __init__(self):
        self.lines = queue.SimpleQueue()  # an interrupt cannot leave it locked, as it can a condition

    def put(self, message):
        self.lines.put(json.dumps(message) + "\n")

    def __iter__(self):
        while True:
            yield self.lines.get()


class Output(io.StringIO):
    """Stream that calls a function with every message."""

    def __init__(self, receive):
        super().__init__()
        self.receive = receive

    def write(self, text):
        self.receive(json.loads(text))
        return len(text)


class Done(Exception):
    """Raised to leave the loop of the process."""


def run_process(first, react):
    """Runs the loop of a process in this thread, and returns its messages.

    Args:
        first: First command.
        react: Function from a message and the input to nothing, which may put in further commands or raise ``Done``.
    """
    source, messages = Input(), []

    def receive(message):
        messages.append(message)
        react(message, source)

    source.put(first)
    with pytest.raises(Done):
        Process(source, Output(receive)).run()
    return messages


def command(number, **changes):
    """Returns the command of a fit."""
    settings = {"method": "map", "values": {**SMALL, **changes}}
    return {
        "id": number,
        "command": "fit",
        "slot": "a",
        "points": make_preset("gap", number=20),
        "settings": settings,
    }


def test_a_cancelled_fit_stops_and_the_next_one_runs():
    def react(message, source):
        if message.get("id") == 1 and "progress" in message and message["progress"]["epoch"] < 500:
            source.put({"cancel": 1})
        if message.get("stopped"):
            source.put(command(2))
        if message.get("id") == 2 and "result" in message:
            raise Done

    start = time.monotonic()
    messages = run_process(command(1, epochs=3000), react)
    assert messages[0] == {"ready": True}
    assert {"id": 1, "stopped": True} in messages
    assert not any(message.get("id") == 1 and "result" in message for message in messages)
    assert messages[-1]["result"]["task"] == "curve"
    assert time.monotonic() - start < 120


def test_a_command_that_is_cancelled_before_its_turn_never_runs():
    def react(message, source):
        if message.get("id") == 1 and "progress" in message:
            source.put({"cancel": 2})
            source.put(command(2))
        if message.get("id") == 2:
            raise Done

    assert run_process(command(1, epochs=50), react)[-1] == {"id": 2, "stopped": True}


def test_errors_are_one_line(monkeypatch, capsys):
    def react(message, source):
        if message.get("id") == 1:
            source.put(command(2))
        if message.get("id") == 2:
            raise Done

    monkeypatch.setattr(torch, "manual_seed", lambda seed: [][seed])
    messages = run_process({"id": 1, "command": "fit", "slot": "z"}, react)
    assert messages[1] == {"id": 1, "error": "slot must be 'a' or 'b'"}
    assert messages[2]["error"].startswith("IndexError: ")
    assert "Traceback" in capsys.readouterr().err  # for the terminal


def test_every_command_has_one_answer_whenever_it_is_cancelled():
    """Each command is cancelled twice, at its first report, at its last one, or after its answer."""
    total = 12

    def react(message, source):
        number = message.get("id", 0)
        cancels = number % 3 == 0 or (number % 3 == 1 and message.get("progress", {}).get("epoch") == 30)
        if "progress" in message and cancels:
            source.put({"cancel": number})
            source.put({"cancel": number})
        if number and "progress" not in message:
            if number == total:
                raise Done
            source.put({"cancel": number})
            source.put(command(number + 1, epochs=30))

    messages = run_process(command(1, epochs=30), react)
    answers = [message for message in messages if "id" in message and "progress" not in message]
    assert [answer["id"] for answer in answers] == list(range(1, total + 1))
    assert all("result" in answer or answer.get("stopped") for answer in answers)
    assert all("result" in answer for answer in answers if answer["id"] % 3 == 2)
    assert any(answer.get("stopped") for answer in answers)
