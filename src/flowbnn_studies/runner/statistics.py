"""Numbers over seeds: their mean and spread, and whether two rows really differ."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowbnn.errors import FlowBNNError

__all__ = ["Paired", "paired", "sign_flip", "student_quantile", "summary"]


def summary(values: Sequence[float | None], published: float | None = None) -> dict[str, Any]:
    """Mean and standard deviation (over ``n - 1``) with every seed's value, as ``results.json`` holds them.

    >>> summary([1.0, 2.0, 3.0], published=2.5)
    {'mean': 2.0, 'std': 1.0, 'per_seed': [1.0, 2.0, 3.0], 'published': 2.5}
    >>> summary([1.0])["std"] is None
    True
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    whole = len(known) == len(values) and bool(known)
    return {
        "mean": statistics.fmean(known) if whole else None,
        "std": statistics.stdev(known) if whole and len(known) > 1 else None,
        "per_seed": list(values),
        "published": published,
    }


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
        """Whether the interval leaves out nought; never with a single seed."""
        return self.low > 0 or self.high < 0

    def words(self, digits: int = 4) -> str:
        """The difference with its interval, for a sentence."""
        if self.number < 2:
            return f"{self.mean:+.{digits}f} (one seed)"
        return f"{self.mean:+.{digits}f} (95 % interval {self.low:+.{digits}f} to {self.high:+.{digits}f})"


def student_quantile(freedom: int) -> float:
    """The 97.5 % point of Student's t: a table for few degrees of freedom, the expansion of Cornish and Fisher beyond.

    >>> student_quantile(4), round(student_quantile(30), 3)
    (2.7764, 2.042)
    """
    table = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622)
    if freedom <= len(table):
        return table[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    first, second = (z**3 + z) / 4, (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3


def paired(first: Sequence[float], second: Sequence[float]) -> Paired:
    r"""Compare two rows seed by seed: :math:`\bar d \pm t_{0.975, n-1} \, s_d / \sqrt n`.

    >>> result = paired([1.0, 2.0, 3.0], [0.5, 1.6, 2.4])
    >>> round(result.mean, 3), result.clear
    (0.5, True)
    """
    if len(first) != len(second) or not first:
        raise FlowBNNError(
            f"a paired comparison needs the same seeds on both sides, not {len(first)} and {len(second)}"
        )
    differences = [a - b for a, b in zip(first, second, strict=True)]
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Paired(mean, -math.inf, math.inf, len(differences))
    p = sign_flip(differences)
    reach = (
        student_quantile(len(differences) - 1) * statistics.stdev(differences) / math.sqrt(len(differences))
    )
    return Paired(mean, mean - reach, mean + reach, len(differences), p)


def sign_flip(differences: Sequence[float]) -> float:
    """The exact two-sided p-value of the sign-flip test: if neither side were better, every sign would be as likely as not.

    The share of all ``2 ** n`` choices of signs whose mean is at least as far from nought as the one seen (Fisher, 1935). It
    assumes nothing of the differences but their symmetry, and cannot fall below ``2 / 2 ** n``: 0.25 with three seeds. Above 16
    differences the choices are too many to count and 100,000 of them, always the same, stand for all.

    >>> sign_flip([1.0, 2.0, 3.0]), sign_flip([1.0, -2.0, 3.0])
    (0.25, 0.75)
    """
    if not differences:
        raise FlowBNNError("the sign-flip test takes at least one difference")
    seen = abs(sum(differences)) * (1 - 1e-12)
    if len(differences) > 16:
        signs = 2.0 * np.random.default_rng(0).integers(0, 2, (100_000, len(differences))) - 1.0
        found = np.abs(signs @ np.asarray(differences)) >= seen
        return float((found.sum() + 1) / (len(signs) + 1))  # the choice that was seen is one of them
    sums = [0.0]
    for difference in differences:
        sums = [total + sign * difference for total in sums for sign in (1, -1)]
    return sum(abs(total) >= seen for total in sums) / len(sums)
