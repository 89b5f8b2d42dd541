"""The attack: what a hostile or careless world does to the library, tried at random, with seeds.

    python -m attack [--minutes 15] [--seed 0] [--part fuzz]

Each part is a module with one function, ``attack(seed, budget)``, which tries until the seconds of its budget are over and returns a
:class:`Tally`. A try survives if it ends as the documents say: the right answer, or one line that says what is wrong. A wrong answer, a
trace, a hang, a lost or left-over file, or code that ran out of a file fails it.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["Budget", "Tally", "short"]


class Budget:
    """Seconds to spend, or a number of tries, whichever is over first."""

    def __init__(self, seconds: float, tries: float = float("inf")) -> None:
        self.end, self.left = time.monotonic() + seconds, tries

    def __bool__(self) -> bool:
        self.left -= 1
        return self.left >= 0 and time.monotonic() < self.end


@dataclass
class Tally:
    """What became of the tries of one part; ``failures`` holds a line for each that failed, with what repeats it."""

    part: str
    seed: int
    tries: int = 0
    failures: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    notes: dict[str, float] = field(default_factory=dict)

    def add(self, outcome: str, failure: str = "") -> None:
        """One try, by a word for how it ended; with a ``failure`` it failed."""
        self.tries += 1
        self.counts[outcome] = self.counts.get(outcome, 0) + 1
        if failure:
            self.failures.append(failure)


Part = Callable[[int, Budget], Tally]


def short(text: object, most: int = 200) -> str:
    """The first line of a text, cut."""
    return (str(text).strip().splitlines() or [""])[0][:most]
