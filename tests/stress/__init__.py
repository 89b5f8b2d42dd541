"""Stress tests of the library with random input, reproducible by their seeds.

    python -m tests.stress [--minutes 15] [--trials 5000] [--seed 0] [--suite fuzz] [--jobs 1]

Each suite is a module with one function ``stress(seed, budget)``. It runs trials until the budget is spent and returns a
:class:`StressResult`. A trial passes if it returns the right answer or raises an error of one line. A wrong answer, another exception,
a hang, a lost or left-over file, or the execution of code inside a file is a failure.
"""

import time
from dataclasses import dataclass, field

__all__ = ["Budget", "StressResult", "first_line"]


class Budget:
    """Limit of a suite, in seconds and in trials. At least one trial is run.

    Args:
        seconds: Seconds to spend.
        trials: Number of trials to run.
    """

    def __init__(self, seconds: float, trials: float = float("inf")) -> None:
        self.end, self.trials = time.monotonic() + seconds, trials

    def allows(self, result: "StressResult") -> bool:
        """Returns whether another trial may run."""
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
    """

    suite: str
    seed: int
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

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
        return StressResult(self.suite, self.seed, trials, failures, counts, maxima)


def first_line(text: object, limit: int = 200) -> str:
    """Returns the first line of a text, cut to a number of characters."""
    return (str(text).strip().splitlines() or [""])[0][:limit]
