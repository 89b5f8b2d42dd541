"""Stress tests: what a hostile or careless world does to the library, tried at random, with seeds.

    python -m tests.stress [--minutes 15] [--tries 5000] [--seed 0] [--part fuzz] [--jobs 1]

Each part is a module with one function, ``stress(seed, budget)``, which tries until its budget is over and returns a
:class:`Tally`. A try survives if it ends as the documents say: the right answer, or one line that says what is wrong. A wrong answer, a
trace, a hang, a lost or left-over file, or code that ran out of a file fails it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Budget", "Tally", "short"]


class Budget:
    """Seconds to spend, or a number of tries, whichever is over first; one try is made in any case."""

    def __init__(self, seconds: float, tries: float = float("inf")) -> None:
        self.end, self.tries = time.monotonic() + seconds, tries

    def allows(self, tally: "Tally") -> bool:
        """Whether there is more to try."""
        return not tally.tries or (tally.tries < self.tries and time.monotonic() < self.end)


@dataclass
class Tally:
    """What became of the tries of one part.

    ``failures`` holds a line for each that failed, with what repeats it; ``counts`` how many ended how; ``most`` the largest of
    something.
    """

    part: str
    seed: int
    tries: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    most: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: str, failure: str = "") -> None:
        """One try, by a word for how it ended; with a ``failure`` it failed."""
        self.tries += 1
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if failure:
            self.failures.append(failure)

    def __add__(self, other: "Tally") -> "Tally":
        """Both together."""
        counts = {
            word: self.counts.get(word, 0) + other.counts.get(word, 0) for word in self.counts | other.counts
        }
        most = {
            word: max(self.most.get(word, 0.0), other.most.get(word, 0.0)) for word in self.most | other.most
        }
        return Tally(
            self.part, self.seed, self.tries + other.tries, self.failures + other.failures, counts, most
        )


Part = Callable[[int, Budget], Tally]


def short(text: object, most: int = 200) -> str:
    """The first line of a text, cut."""
    return (str(text).strip().splitlines() or [""])[0][:most]
