"""Process that fits and predicts for one page. It reads commands from its standard input and writes answers, one JSON document a line.

A command is ``{"id": 1, "command": "fit", ...}``. Its answers carry the same id: any number of ``"progress"``, then one ``"result"``,
``"error"`` or ``"stopped"``. ``{"cancel": 1}`` interrupts command 1 as Ctrl-C does. The process ends when its input ends.
"""

import _thread
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TextIO

import torch

from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import Posterior
from flowbnn.models import MLP
from flowbnn.training import Epoch
from flowbnn_studies.playground.methods import FitSettings
from flowbnn_studies.playground.points import Points
from flowbnn_studies.playground.presets import make_preset
from flowbnn_studies.playground.results import pair_of_variables, predict
from flowbnn_studies.playground.script import BATCH_SIZE, make_script

Report = Callable[[dict[str, Any]], None]
MAX_SAMPLES = 200
TEMPERATURES = (0.1, 10.0)
SLOTS = ("a", "b")
SECONDS_BETWEEN_REPORTS = 0.1


class Progress:
    """Progress of a fit, reported at most every 0.1 seconds.

    Args:
        report: Function that gets a report: the number of finished epochs, and the values of the epochs since the last report.
        total: Number of epochs of the fit.
    """

    def __init__(self, report: Report, total: int) -> None:
        self.report, self.total = report, total
        self.epochs, self.next_time = 0, 0.0
        self.label: Literal["elbo", "log_likelihood"] = "log_likelihood"
        self.values: list[float] = []

    def __call__(self, epoch: Epoch) -> None:
        """Adds the record of an epoch. This is a callback of the fit."""
        record = epoch.metrics
        if record.get("kl"):  # dropout has none
            self.label = "elbo"
        self.epochs += 1
        self.values.append(round(float(record.get("elbo", record["log_likelihood"])), 4))
        if time.monotonic() >= self.next_time or self.epochs == self.total:
            self.send()

    def send(self) -> None:
        """Reports the progress now."""
        self.report({"epoch": self.epochs, "epochs": self.total, "label": self.label, "values": self.values})
        self.values, self.next_time = [], time.monotonic() + SECONDS_BETWEEN_REPORTS


@dataclass
class Fit:
    """Finished fit of the page.

    Args:
        points: Points that the posterior was fitted to.
        settings: Settings of the fit.
        posterior: Fitted posterior.
    """

    points: Points
    settings: FitSettings
    posterior: Posterior


class Workbench:
    """Fits of one page, one for each of the two methods that are compared."""

    def __init__(self) -> None:
        self.fits: dict[str, Fit] = {}

    def run(self, command: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """Runs a command and returns its result.

        Args:
            command: Name of the command as ``"command"``, and its arguments.
            report: Function that gets the progress of a fit.

        Raises:
            FlowBNNError: If an argument is invalid, or if the fit fails.
        """
        name = command.get("command")
        if name == "fit":
            return self.fit(command, report)
        if name == "predict":
            return self.predict(command)
        if name == "pair":
            return self.pair(command)
        if name == "forget":
            self.fits.clear()
            return {}
        raise FlowBNNError(f"unknown command {name!r:.40}", argument="command")

    def fit(self, command: Mapping[str, Any], report: Report) -> dict[str, Any]:
        """Fits a method, and returns its prediction, a pair of its variables and the notes of the library."""
        slot = _slot(command)
        points, settings = Points.parse(command.get("points")), FitSettings.parse(command.get("settings"))
        samples, temperature = _prediction_options(command)
        seed, method = settings.values["seed"], settings.method()
        progress = Progress(report, settings.values["epochs"] * settings.values.get("members", 1))
        torch.manual_seed(seed)
        network = MLP(points.num_inputs, settings.hidden, points.num_outputs)
        data = points.inputs(points.train), points.targets(points.train)
        start = time.perf_counter()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            posterior = method.fit(
                network,
                data,
                batch_size=BATCH_SIZE,
                seed=seed,
                callbacks=[progress],
                progress=False,
            )
        seconds = time.perf_counter() - start
        progress.send()
        fit = Fit(points, settings, posterior)
        result = {
            "seconds": round(seconds, 2),
            "notes": [str(each.message) for each in caught if issubclass(each.category, FlowBNNWarning)],
            "draws": settings.entry.draws,
            "pair": pair_of_variables(posterior, prior=settings.prior, seed=seed),
            **self._prediction(fit, samples, temperature),
        }
        self.fits[slot] = fit
        return result

    def predict(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Predicts with another number of samples or temperature, without a fit."""
        return self._prediction(self._fit_of(command), *_prediction_options(command))

    def pair(self, command: Mapping[str, Any]) -> dict[str, Any]:
        """Returns draws of another pair of variables."""
        fit = self._fit_of(command)
        layer, units = command.get("layer"), command.get("units")
        if not isinstance(layer, str):
            raise FlowBNNError("layer must be the name of a layer", argument="layer")
        valid = isinstance(units, list) and len(units) == 2 and all(type(unit) is int for unit in units)
        if units is not None and not valid:
            raise FlowBNNError("units must be two integers", argument="units")
        pair = None if units is None else (units[0], units[1])
        prior, seed = fit.settings.prior, fit.settings.values["seed"]
        return {"pair": pair_of_variables(fit.posterior, layer, pair, prior, seed)}

    def _fit_of(self, command: Mapping[str, Any]) -> Fit:
        fit = self.fits.get(_slot(command))
        if fit is None:
            raise FlowBNNError("there is no fit yet; press Fit", kind="no fit", argument="slot")
        return fit

    def _prediction(self, fit: Fit, samples: int, temperature: float) -> dict[str, Any]:
        """Returns the prediction of a fit and the Python that repeats it."""
        seed = fit.settings.values["seed"]
        result = predict(fit.posterior, fit.points, samples, temperature, seed)
        return {**result, "code": make_script(fit.points, fit.settings, samples, temperature)}


def _slot(command: Mapping[str, Any]) -> str:
    """Returns the checked slot of a command."""
    slot = command.get("slot")
    if not isinstance(slot, str) or slot not in SLOTS:
        raise FlowBNNError("slot must be 'a' or 'b'", argument="slot")
    return slot


def _prediction_options(command: Mapping[str, Any]) -> tuple[int, float]:
    """Returns the checked number of samples and temperature of a command."""
    samples, temperature = command.get("samples", 64), command.get("temperature", 1.0)
    if type(samples) is not int or not 1 <= samples <= MAX_SAMPLES:
        text = f"samples must be an integer from 1 to {MAX_SAMPLES}, got {samples!r:.40}"
        raise FlowBNNError(text, argument="samples")
    low, high = TEMPERATURES
    if type(temperature) not in (int, float) or not low <= temperature <= high:
        text = f"temperature must be a number from {low:g} to {high:g}, got {temperature!r:.40}"
        raise FlowBNNError(text, argument="temperature")
    return samples, float(temperature)


class Process:
    """Loop over the commands of the standard input.

    Commands run in the main thread, where Ctrl-C ends them. Another thread reads the input, and interrupts the main thread when a
    command is cancelled. An interrupt that arrives when its command has ended is ignored.

    Args:
        source: Stream of commands.
        sink: Stream of answers.
    """

    def __init__(self, source: TextIO, sink: TextIO) -> None:
        self.source, self.sink = source, sink
        self.workbench = Workbench()
        self.commands: queue.Queue[dict[str, Any]] = queue.Queue()
        self.lock = threading.Lock()
        self.current: int | None = None  # id of the running command
        self.cancelled: set[int] = set()  # ids of commands that were cancelled before they ended

    def run(self) -> None:
        """Reads and runs commands until the input ends."""
        handler = signal.signal(signal.SIGINT, self.interrupt)
        threading.Thread(target=self.read, daemon=True).start()
        try:
            self.send({"ready": True})
            while True:
                self.run_command(self.commands.get())
        finally:
            signal.signal(signal.SIGINT, handler)

    def interrupt(self, number: int, frame: Any) -> None:
        """Handles an interrupt of the main thread, which ends the running command."""
        if self.current is not None:
            raise KeyboardInterrupt

    def read(self) -> None:
        """Reads commands, and ends the process with the input."""
        for line in self.source:
            message = json.loads(line)
            if "cancel" not in message:
                self.commands.put(message)
                continue
            number = message["cancel"]
            with self.lock:
                # at most one interrupt of a command
                if number == self.current and number not in self.cancelled:
                    _thread.interrupt_main()
                self.cancelled.add(number)
        os._exit(0)

    def run_command(self, command: dict[str, Any]) -> None:
        """Runs one command and sends its answers."""
        try:
            answer = self.answer(command)
        except KeyboardInterrupt:
            self.current, answer = None, {"stopped": True}
        self.send({"id": command["id"], **answer})

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Returns the last answer to a command."""
        number = command["id"]

        def report(progress: dict[str, Any]) -> None:
            self.send({"id": number, "progress": progress})

        try:
            with self.lock:
                if number in self.cancelled:
                    return {"stopped": True}
                self.current = number
            return {"result": self.workbench.run(command, report)}
        except FlowBNNError as error:
            return {"error": str(error)}
        except Exception as error:  # the page shows one line, the terminal the rest
            traceback.print_exc()
            return {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}
        finally:
            self.current = None

    def send(self, message: dict[str, Any]) -> None:
        """Writes one answer."""
        self.sink.write(json.dumps(message, allow_nan=False) + "\n")
        self.sink.flush()


def warm_up() -> None:
    """Runs a tiny fit, so that torch has loaded everything before the first fit of a user."""
    points = make_preset("two-moons", number=20)
    command = {"command": "fit", "slot": "a", "points": points, "settings": {"method": "noise"}}
    command["settings"]["values"] = {"epochs": 10, "width": 4}
    Workbench().run(command, lambda progress: None)


def main() -> None:
    """Entry point of the process."""
    sink = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not mix with the answers
    torch.set_num_threads(1)  # networks this small are slower on several
    warm_up()
    Process(sys.stdin, sink).run()


if __name__ == "__main__":
    main()
