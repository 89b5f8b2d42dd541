"""Story of a study: a short question, the answer with its caveat in one sentence, one number, and what shows it.

A story is computed from the content of ``results.json`` alone, so that stored results of any age have the words of today.
"""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flowbnn_studies.runner.findings import PairedDifference, paired_difference

PROPER_NOUNS = ("Bayes", "Gaussian", "Glow", "Householder", "Laplace", "Markov", "Sylvester")
MAIN_METHODS = (  # rows of a story that compares all methods
    *("mle", "mc-dropout", "deep-ensemble", "bayes-by-backprop", "mnf", "laplace-all", "hmc"),
    *("node-noise-gaussian", "node-noise-planar"),
)
PLUS_MINUS = "\N{NO-BREAK SPACE}± "


@dataclass(frozen=True)
class Story:
    """Summary of a study for the beginning of its page.

    Args:
        question: Question in one short sentence.
        answer: Answer with its caveat, in one sentence.
        number: Number that carries the answer.
        meaning: Words for the number.
        metrics: Columns of the table of the story. Without a figure, the first ones are plotted.
        rows: Keys of the rows that are shown. Empty: all rows.
        figure: Kind of the stored figure that shows the answer. Empty: means of ``charts`` with their spread.
        place: Number of the figure among those of its kind.
        panels: Titles of the panels of the figure. Empty: all panels.
        charts: Metrics to plot without a figure. Empty: the first metric.
    """

    question: str
    answer: str
    number: str = ""
    meaning: str = ""
    metrics: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    figure: str = ""
    place: int = 0
    panels: tuple[str, ...] = ()
    charts: tuple[str, ...] = ()


class MissingNumber(LookupError):
    """A number of a story is not in the results, as after an interrupted run."""


class Numbers:
    """Numbers of stored results by row and metric.

    Args:
        results: Content of ``results.json``.

    >>> cells = {"a": [0.1, 0.2, 0.3], "b": [0.5, 0.7, 0.6]}
    >>> rows = [{"key": key, "label": key.upper(), "values": {"nll": {"mean": sum(cell) / 3, "per_seed": cell}}}
    ...         for key, cell in cells.items()]
    >>> numbers = Numbers({"seeds": [0, 1, 2], "metrics": [{"key": "nll", "better": "lower", "format": ".2f"}], "rows": rows})
    >>> numbers.text("a", "nll"), numbers.ranked("nll"), numbers.verdict("a", "b", "nll")
    ('0.20', ['a', 'b'], 'significantly better')
    """

    def __init__(self, results: dict[str, Any]) -> None:
        self.results = results
        self.rows = {row.get("key") or row["label"]: row for row in results["rows"]}
        self.metrics = {metric["key"]: metric for metric in results["metrics"]}
        self.seeds = len(results["seeds"])

    def label(self, key: str) -> str:
        """Returns the name of a row."""
        return str(self._row(key)["label"])

    def name(self, key: str) -> str:
        """Returns the name of a row within a sentence."""
        label = self.label(key)
        first = label.partition(" ")[0].rstrip(",")
        if first.isalpha() and first[1:].islower() and first not in PROPER_NOUNS:
            label = label[0].lower() + label[1:]
        return f"“{label}”" if "," in label else label

    def mean(self, key: str, metric: str) -> float:
        """Returns a mean over seeds.

        Raises:
            MissingNumber: If it was not measured.
        """
        mean = (self._row(key)["values"].get(metric) or {}).get("mean")
        if not isinstance(mean, int | float) or not math.isfinite(mean):
            raise MissingNumber(f"{key}, {metric}")
        return float(mean)

    def main_rows(self, *keys: str) -> tuple[str, ...]:
        """Returns one row of each kind of method and some others, in the order of the table."""
        return tuple(key for key in self.rows if key in (*MAIN_METHODS, *keys))

    def text(self, key: str, metric: str, form: str = "") -> str:
        """Returns a mean over seeds as text, in the format of its column or in another one."""
        return self.format(self.mean(key, metric), form or self._metric(metric).get("format") or ".3f")

    def spread(self, key: str, metric: str, form: str = ".2f") -> str:
        """Returns a mean and its standard deviation over seeds as text."""
        values = self.per_seed(key, metric)
        text = self.text(key, metric, form)
        return f"{text}{PLUS_MINUS}{self.format(statistics.stdev(values), form)}" if len(values) > 1 else text

    @staticmethod
    def format(value: float, form: str) -> str:
        """Returns a number as text, with a real minus sign."""
        return format(value, form).replace("-", "−")

    def per_seed(self, key: str, metric: str) -> list[float]:
        """Returns the values of all seeds."""
        self.mean(key, metric)
        return list(self._row(key)["values"][metric].get("per_seed") or [])

    def difference(self, first: str, second: str, metric: str) -> PairedDifference:
        """Compares two rows seed by seed. The difference is that of the first row to the second."""
        values = self.per_seed(first, metric), self.per_seed(second, metric)
        if not values[0] or len(values[0]) != len(values[1]):
            raise MissingNumber(f"{first} and {second}, {metric}: other seeds")
        return paired_difference(*values)

    def better(self, first: str, second: str, metric: str) -> int:
        """Returns 1 if the first row is significantly better than the second, -1 if it is significantly worse, else 0."""
        difference = self.difference(first, second, metric)
        if not difference.significant:
            return 0
        higher = self._metric(metric).get("better") == "higher"
        return 1 if (difference.mean > 0) == higher else -1

    def verdict(self, first: str, second: str, metric: str) -> str:
        """Returns the comparison of two rows in words."""
        words = {1: "significantly better", -1: "significantly worse", 0: "not significantly better"}
        return words[self.better(first, second, metric)]

    def ranked(self, metric: str, keys: Sequence[str] = ()) -> list[str]:
        """Returns the rows that were measured, the best first. Published rows and references are left out.

        Args:
            metric: Key of the metric.
            keys: Rows to rank. Empty: all rows.
        """
        measured = []
        for key, row in self.rows.items():
            mean = (row["values"].get(metric) or {}).get("mean")
            outside = row.get("cited") or row.get("reference") or row.get("unfinished")
            if isinstance(mean, int | float) and not outside and (not keys or key in keys):
                measured.append((float(mean), key))
        if not measured:
            raise MissingNumber(metric)
        higher = self._metric(metric).get("better") == "higher"
        return [key for _, key in sorted(measured, reverse=higher)]

    def _row(self, key: str) -> dict[str, Any]:
        if key not in self.rows:
            raise MissingNumber(key)
        return self.rows[key]

    def _metric(self, key: str) -> dict[str, Any]:
        if key not in self.metrics:
            raise MissingNumber(key)
        return self.metrics[key]
