"""The numbers of a study, as strings laid out for the page."""

import math
from dataclasses import dataclass
from typing import Any

from flowbnn_studies.report.glossary import explain
from flowbnn_studies.report.style import decimal

__all__ = [
    "Cell",
    "Column",
    "Difference",
    "Row",
    "Table",
    "compare_table",
    "definitions",
    "flatten",
    "make_table",
    "make_tables",
    "row_name",
]

ARROWS = {"higher": ("↑", "higher is better"), "lower": ("↓", "lower is better")}


@dataclass(frozen=True)
class Column:
    """A metric: its name, the arrow of the better direction in sign and words, and what it means."""

    label: str
    arrow: str
    direction: str
    definition: str


@dataclass(frozen=True)
class Cell:
    """One mean with its spread; every field is ready to show, empty where there is nothing."""

    mean: str
    std: str
    published: str
    best: bool
    per_seed: list[str]


@dataclass(frozen=True)
class Row:
    """A model and its cells, in the order of the columns."""

    label: str
    colour: str
    cells: list[Cell]


@dataclass(frozen=True)
class Table:
    """The whole table; ``spread`` and ``published`` say whether any cell has a ± and a published value."""

    columns: list[Column]
    rows: list[Row]
    spread: bool
    published: bool


def row_name(row: dict[str, Any]) -> str:
    """What a table calls a row: its label, and how far it is where seeds are missing that the others have.

    >>> row_name({"label": "Flow noise"}), row_name({"label": "Flow noise", "unfinished": "1 of 5 seeds"})
    ('Flow noise', 'Flow noise (1 of 5 seeds)')
    """
    return f"{row['label']} ({row['unfinished']})" if row.get("unfinished") else row["label"]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _best(means: list[Any], better: str, form: str) -> set[str]:
    """The text of the best mean: rows that read the same share the mark."""
    finite = [mean for mean in means if _finite(mean)]
    texts = {format(mean, form) for mean in finite}
    if better not in ARROWS or len(texts) < 2:
        return set()
    return {format(max(finite) if better == "higher" else min(finite), form)}


@dataclass(frozen=True)
class Difference:
    """One paired comparison: the difference, its interval and p-value, and whether the interval leaves out nought."""

    mean: str
    span: str
    p: str
    clear: bool


def make_tables(results: dict[str, Any], colours: dict[str, str]) -> list[tuple[str, Table]]:
    """One table for each group of metrics, under its name; rows that have none of a group's values are left out there."""
    groups = dict.fromkeys(metric.get("group") or "" for metric in results["metrics"])
    found = []
    for group in groups:
        metrics = [metric for metric in results["metrics"] if (metric.get("group") or "") == group]
        keys = {metric["key"] for metric in metrics}
        rows = results["rows"]
        if len(groups) > 1:
            rows = [row for row in rows if any(row["values"].get(key) for key in keys)]
        found.append((group, make_table({**results, "metrics": metrics, "rows": rows}, colours)))
    return found


def definitions(columns: list[Column]) -> list[tuple[list[Column], str]]:
    """What the columns mean, after the terms that they use; those that share their words stand together.

    >>> some = [Column("NLL", "", "", "Of both."), Column("ECE", "", "", "Of both."), Column("Time", "", "", "")]
    >>> [([column.label for column in found], text) for found, text in definitions(some)]
    [(['NLL', 'ECE'], 'Of both.')]
    """
    found: dict[str, list[Column]] = {}
    for column in columns:
        if column.definition:
            found.setdefault(column.definition, []).append(column)
    words = [word for column in columns for word in (column.label, column.definition)]
    terms = [([Column(term, "", "", meaning)], meaning) for term, meaning in explain(words)]
    return [*terms, *((some, text) for text, some in found.items())]


def compare_table(
    results: dict[str, Any],
) -> tuple[list[str], list[tuple[str, list[Difference | None]]]] | None:
    """Paired comparisons by metrics: heads, and rows of a title and its cells; None where there are none."""
    given = results.get("comparisons") or []
    if not given:
        return None
    metrics = [m for m in results["metrics"] if any(one["metric"] == m["key"] for one in given)]
    titles = dict.fromkeys(one["title"] for one in given)
    cells = {(one["title"], one["metric"]): one for one in given}

    def cell(title: str, metric: dict[str, Any]) -> Difference | None:
        one = cells.get((title, metric["key"]))
        if one is None:
            return None
        form = "+" + (metric.get("format") or ".3f").lstrip("+")
        low, high = one.get("low"), one.get("high")
        known = _finite(low) and _finite(high)
        return Difference(
            decimal(one["mean"], form),
            f"{decimal(low, form)} to {decimal(high, form)}" if known else "",
            f"p {one['p']:.2g}" if _finite(one.get("p")) else "",
            known and (low > 0 or high < 0),
        )

    heads = [f"{m['label']} {ARROWS.get(m.get('better') or '', ('', ''))[0]}".strip() for m in metrics]
    return heads, [(title, [cell(title, metric) for metric in metrics]) for title in titles]


def make_table(results: dict[str, Any], colours: dict[str, str]) -> Table:
    """Rows by metrics: mean ± standard deviation over seeds, the published value, and the best of each column.

    Rows that are ``cited`` have published values alone, which stand in the place of the mean; ones that are ``unfinished`` are the
    best of nothing.

    >>> cell = {"mean": 0.0312, "std": 0.004, "per_seed": [0.028, 0.034], "published": 0.094}
    >>> table = make_table({"seeds": [0, 1], "metrics": [{"key": "ece", "label": "ECE", "better": "lower"}],
    ...                     "rows": [{"label": "Plain", "values": {"ece": cell}}]}, {})
    >>> table.rows[0].cells[0]
    Cell(mean='0.031', std='0.004', published='0.094', best=False, per_seed=['0.028', '0.034'])
    """
    columns, by_row = [], [[] for _ in results["rows"]]  # type: ignore[var-annotated]
    for metric in results["metrics"]:
        form = metric.get("format") or ".3f"
        better = metric.get("better") or "none"
        arrow, direction = ARROWS.get(better, ("", ""))
        columns.append(Column(metric["label"], arrow, direction, metric.get("definition") or ""))
        values = [row["values"].get(metric["key"]) or {} for row in results["rows"]]
        # the best of numbers that mean nothing is nothing
        finished = [
            value for value, row in zip(values, results["rows"], strict=True) if not row.get("unfinished")
        ]
        best = (
            set() if results.get("trial") else _best([value.get("mean") for value in finished], better, form)
        )
        for cells, value, row in zip(by_row, values, results["rows"], strict=True):
            if row.get("cited"):
                cells.append(Cell(decimal(value.get("published"), form), "", "", False, []))
                continue
            mean, std, published = value.get("mean"), value.get("std"), value.get("published")
            seeds = value.get("per_seed") or []
            single = len(seeds) == 1 or len(results["seeds"]) == 1
            cells.append(
                Cell(
                    decimal(mean, form),
                    decimal(std, form.lstrip("+")) if _finite(std) and _finite(mean) and not single else "",
                    decimal(published, form) if _finite(published) else "",
                    _finite(mean) and format(mean, form) in best and not row.get("unfinished"),
                    [decimal(item, form) for item in seeds],
                )
            )
    rows = [
        Row(row_name(row), colours.get(row["label"], ""), cells)
        for row, cells in zip(results["rows"], by_row, strict=True)
    ]
    every = [cell for row in rows for cell in row.cells]
    return Table(columns, rows, any(cell.std for cell in every), any(cell.published for cell in every))


def flatten(settings: dict[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value) lines.

    >>> flatten({"train": {"epochs": 20, "rates": [0.1, 0.2]}, "site": None})
    [('train.epochs', '20'), ('train.rates', '0.1, 0.2'), ('site', '–')]
    """
    lines = []
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            lines += flatten(value, f"{prefix}{name}.")
        else:
            lines.append((f"{prefix}{name}", _plain(value)))
    return lines


def _plain(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(_plain(item) for item in value) or "–"
    if isinstance(value, float):
        return decimal(value, ".6g") if not value.is_integer() or abs(value) >= 1e15 else decimal(value, "g")
    return "–" if value is None or value == {} else str(value)
