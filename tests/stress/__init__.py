"""Stress tests: what a hostile or careless world does to the library, try_call at random, with seeds.

    python -m tests.stress [--minutes 15] [--trials 5000] [--seed 0] [--part fuzz] [--jobs 1]

Each suite is a module with one function ``stress(seed, budget)``. It runs trials until the budget is spent and returns a
:class:`StressResult`. A trial passes if it returns the right answer or raises an error of one line. A wrong answer, another exception,
a hang, a lost or left-over file, or the execution of code inside a file is a failure.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Budget", "StressResult", "short"]


class Budget:
    """Seconds to spend, or a number of trials, whichever is over first; one try is made in any case."""

    def __init__(self, seconds: float, trials: float = float("inf")) -> None:
        self.end, self.trials = time.monotonic() + seconds, trials

    def allows(self, result: "StressResult") -> bool:
        """Whether there is more to try."""
        return not result.trials or (result.trials < self.trials and time.monotonic() < self.end)


@dataclass
class StressResult:
    """What became of the trials of one part.

    ``failures`` holds a line for each that failed, with what repeats it; ``counts`` how many ended how; ``most`` the largest of
    something.
    """

    suite: str
    seed: int
    trials: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: str, failure: str = "") -> None:
        """One try, by a word for how it ended; with a ``failure`` it failed."""
        self.trials += 1
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if failure:
            self.failures.append(failure)

    def __add__(self, other: "StressResult") -> "StressResult":
        """Both together."""
        counts = {
            word: self.counts.get(word, 0) + other.counts.get(word, 0) for word in self.counts | other.counts
        }
        most = {
            word: max(self.most.get(word, 0.0), other.most.get(word, 0.0)) for word in self.most | other.most
        }
        return StressResult(
            self.suite, self.seed, self.trials + other.trials, self.failures + other.failures, counts, most
        )


Part = Callable[[int, Budget], StressResult]


def short(text: object, most: int = 200) -> str:
    """The first line of a text, cut."""
    return (str(text).strip().splitlines() or [""])[0][:most]
