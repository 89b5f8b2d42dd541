"""Whether two rows really differ, over seeds; and whether chains are a truth to compare with."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowbnn.errors import FlowBNNError
from flowbnn.quality.chains import RHAT

AGAINST = ("gap", "per_example", "variation", "agreement", "excess")  # numbers that take chains for the truth


def counted(number: int, noun: str = "seed") -> str:
    """A number with its noun.

    >>> counted(1), counted(3, "split")
    ('1 seed', '3 splits')
    """
    return f"{number} {noun}{'s' if number != 1 else ''}"


@dataclass(frozen=True)
class Paired:
    """The mean of ``first - second`` over seeds, its 95 % interval by Student's t, and the p-value of :func:`sign_flip`."""

    mean: float
    low: float
    high: float
    number: int
    p: float = 1.0

    @property
    def clear(self) -> bool:
        """Whether the interval excludes zero; never with a single seed."""
        return self.low > 0 or self.high < 0

    @property
    def even(self) -> str:
        """How two rows stand that are not clearly apart; one seed has no spread to measure chance by."""
        return "within chance" if self.number > 1 else "undecided with one seed"

    def words(self, digits: int = 4) -> str:
        """The difference with its interval, for a sentence."""
        if self.number < 2:
            return f"{self.mean:+.{digits}f} (one seed)"
        return f"{self.mean:+.{digits}f} (95 % interval {self.low:+.{digits}f} to {self.high:+.{digits}f})"


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    r"""Compare two rows seed by seed: :math:`\bar d \pm t_{0.975, n-1} \, s_d / \sqrt n`.

    >>> result = paired([1.0, 2.0, 3.0], [0.5, 1.6, 2.4])
    >>> round(result.mean, 3), result.clear
    (0.5, True)
    """
    if len(first) != len(second):
        raise FlowBNNError(f"a paired comparison needs the same seeds, got {len(first)} and {len(second)}")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean, number = statistics.fmean(differences), len(differences)
    if number < 2:
        return Paired(mean, -math.inf, math.inf, number)
    from scipy.special import stdtrit  # not above: every command would wait for it

    reach = float(stdtrit(number - 1, 0.975)) * statistics.stdev(differences) / math.sqrt(number)
    return Paired(mean, mean - reach, mean + reach, number, sign_flip(differences))


def sign_flip(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of the sign-flip test: if neither side were better, every sign would be as likely as not.

    The share of all ``2 ** n`` choices of signs whose mean is at least as far from zero as the one seen (Fisher, 1935). It
    assumes nothing of the differences but their symmetry, and cannot fall below ``2 / 2 ** n``: 0.25 with three seeds. Above 16
    differences, 100,000 choices of signs (always the same) stand for all.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -2.0, 3.0])
    (0.25, 0.75)
    """
    seen = abs(sum(differences)) * (1 - 1e-12)
    if len(differences) > 16:
        signs = 2.0 * np.random.default_rng(0).integers(0, 2, (100_000, len(differences))) - 1.0
        extreme = np.abs(signs @ np.asarray(differences)) >= seen
        return float((extreme.sum() + 1) / (len(signs) + 1))  # the choice that was seen is one of them
    sums = [0.0]
    for difference in differences:
        sums = [total + sign * difference for total in sums for sign in (1, -1)]
    return sum(abs(total) >= seen for total in sums) / len(sums)


def certified(rhat: float | None) -> bool:
    """Whether chains may be taken for the truth; an infinite R-hat is stored as None."""
    return rhat is not None and rhat <= RHAT


def gated(numbers: Mapping[str, Any]) -> dict[str, Any]:
    """The numbers that may be told: none that was measured against chains which have not mixed.

    >>> gated({"gap": 1.0, "k": 0.3, "rhat": None}), gated({"gap": 1.0, "k": 0.3, "rhat": 1.002})
    ({'k': 0.3, 'rhat': None}, {'gap': 1.0, 'k': 0.3, 'rhat': 1.002})
    """
    trusted = certified(numbers["rhat"])
    return {key: value for key, value in numbers.items() if trusted or not key.startswith(AGAINST)}


def uncertified(chains: Iterable[tuple[str, float | None]]) -> str:
    """A line on chains, by name and R-hat, that have not mixed."""
    wrong = [
        f"{name} ({'infinite' if rhat is None else f'{rhat:.3f}'})"
        for name, rhat in chains
        if not certified(rhat)
    ]
    text = f"Nothing is compared with chains whose R-hat is above {RHAT}: {', '.join(wrong)}."
    return text if wrong else f"All chains have an R-hat of at most {RHAT}."
