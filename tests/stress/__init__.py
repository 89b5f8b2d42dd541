"""Stress tests of the library with random input, reproducible by their seeds.

    python -m tests.stress [--minutes 15] [--trials 5000] [--seed 0] [--suite fuzz] [--jobs 1]

Each suite is a module with one function ``stress(seed, budget)``. It runs trials until the budget is spent and returns a
:class:`StressResult`. A trial passes if it returns the right answer or raises an error of one line. A wrong answer, another exception,
a hang, a lost or left-over file, or the execution of code inside a file is a failure.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Budget", "StressResult", "first_line"]

REPORT_INTERVAL = 5.0  # seconds between two reports of a running suite


class Budget:
    """Limit of a suite, in seconds and in trials. At least one trial is run.

    Args:
        seconds: Seconds to spend.
        trials: Number of trials to run.
        report: Function that gets the result every few seconds, so that the counts of a killed run are kept.
    """

    def __init__(
        self,
        seconds: float,
        trials: float = float("inf"),
        report: "Callable[[StressResult], object] | None" = None,
    ) -> None:
        self.start, self.trials, self.report = time.monotonic(), trials, report
        self.end, self.last_report = self.start + seconds, self.start

    def allows(self, result: "StressResult") -> bool:
        """Returns whether another trial may run."""
        if self.report is not None and time.monotonic() > self.last_report + REPORT_INTERVAL:
            self.last_report = time.monotonic()
            result.seconds = round(self.last_report - self.start, 1)
            self.report(result)
        return not result.trials or (result.trials < self.trials and time.monotonic() < self.end)


@dataclass
class StressResult:
    """Outcomes of the trials of one suite.

    Args:
        suite: Name of the suite.
        seed: Seed of the suite.
        trials: Number of trials.
        failures: Description of each failure, with the input that reproduces it.
        counts: Number of trials by outcome.
        maxima: Largest values that were measured, by name.
        seconds: Time since the start of the suite.
        complete: True if the suite has ended, False if it is running or was killed.
    """

    suite: str
    seed: int
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    complete: bool = False

    def add(self, outcome: str, failure: str = "") -> None:
        """Adds one trial.

        Args:
            outcome: One word for the outcome.
            failure: Description of the failure, empty if the trial passed.
        """
        self.trials += 1
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if failure:
            self.failures.append(failure)

    def __add__(self, other: "StressResult") -> "StressResult":
        """Returns the results of two runs of a suite together."""
        counts = {
            word: self.counts.get(word, 0) + other.counts.get(word, 0) for word in self.counts | other.counts
        }
        maxima = {
            word: max(self.maxima.get(word, 0.0), other.maxima.get(word, 0.0))
            for word in self.maxima | other.maxima
        }
        trials, failures = self.trials + other.trials, self.failures + other.failures
        return StressResult(
            self.suite,
            self.seed,
            trials,
            failures,
            counts,
            maxima,
            max(self.seconds, other.seconds),
            self.complete and other.complete,
        )


def first_line(text: object, limit: int = 200) -> str:
    """Returns the first line of a text, cut to a number of characters."""
    return (str(text).strip().splitlines() or [""])[0][:limit]
