"""The numbers of a study, laid out for a table, and the sources that studies cite."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flowbnn_studies.report.canvas import format_number

JsonObject = dict[str, Any]
ARROWS = {"higher": ("↑", "higher is better"), "lower": ("↓", "lower is better")}
HEADLINE = ("accuracy", "nll", "ece", "auroc", "negative_elbo", "log_likelihood", "kl")


@dataclass(frozen=True)
class Reference:
    """A text that results cite: ``name`` is what they call it, ``link`` is empty where none is known."""

    name: str
    author: str
    title: str
    link: str = ""


# fmt: off
REFERENCES = (
    Reference("Xiong's report", "Weijiang Xiong (supervisor: Markus Heinonen)",
           "Normalizing Flows for Implicit Bayesian Neural Networks (project report)"),
    Reference("Ahn and Lee's lecture", "Sungsoo Ahn and Kimin Lee",
           "Bayesian Deep Learning (slides of lecture 8 of KAIST's EE807, Recent Advances in Deep Learning)"),
    Reference("Nielsen's lecture", "Didrik Nielsen", "Normalizing Flows (slides)"),
    Reference("Ravenda's report", "Federico Ravenda", "Probabilistic Deep Learning (report, Università degli Studi di Milano Bicocca)"),
    Reference("Trinh et al. 2020", "Trung Trinh, Samuel Kaski and Markus Heinonen",
           "Scalable Bayesian neural networks by layer-wise input augmentation (2020)", "https://arxiv.org/abs/2010.13498"),
    Reference("Blundell et al. 2015", "Charles Blundell, Julien Cornebise, Koray Kavukcuoglu and Daan Wierstra",
           "Weight Uncertainty in Neural Networks (2015)", "https://arxiv.org/abs/1505.05424"),
)
# fmt: on


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

    def __bool__(self) -> bool:
        return self.mean != "–"


@dataclass(frozen=True)
class Row:
    """A model and its cells, in the order of the columns."""

    label: str
    colour: str
    cells: list[Cell]


@dataclass(frozen=True)
class ResultTable:
    """The metrics of one group; ``spread`` and ``published`` say whether any cell has a ± and a published value."""

    group: str
    columns: list[Column]
    rows: list[Row]

    @property
    def spread(self) -> bool:
        return any(cell.std for row in self.rows for cell in row.cells)

    @property
    def published(self) -> bool:
        return any(cell.published for row in self.rows for cell in row.cells)


def row_label(row: JsonObject) -> str:
    """What a table calls a row: its label, and how far it is where seeds are missing that the others have.

    >>> row_label({"label": "Flow noise"}), row_label({"label": "Flow noise", "unfinished": "1 of 5 seeds"})
    ('Flow noise', 'Flow noise (1 of 5 seeds)')
    """
    return f"{row['label']} ({row['unfinished']})" if row.get("unfinished") else row["label"]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _form(metric: JsonObject) -> str:
    return metric.get("format") or ".3f"


def _best(results: JsonObject, metric: JsonObject) -> list[JsonObject]:
    """The rows with the best mean of a metric: all that read the same; none where nothing is better than another.

    Published rows, references such as the true probabilities, unfinished rows and trial runs do not compete.
    """
    if metric.get("better") not in ARROWS or results.get("trial"):
        return []
    means: dict[int, Any] = {}
    for place, row in enumerate(results["rows"]):
        mean = (row["values"].get(metric["key"]) or {}).get("mean")
        if _finite(mean) and not (row.get("cited") or row.get("reference") or row.get("unfinished")):
            means[place] = mean
    if len({format(mean, _form(metric)) for mean in means.values()}) < 2:
        return []
    best = format((max if metric["better"] == "higher" else min)(means.values()), _form(metric))
    return [results["rows"][place] for place, mean in means.items() if format(mean, _form(metric)) == best]


def make_tables(results: JsonObject, colours: Mapping[str, str] | None = None) -> list[ResultTable]:
    """Rows by metrics, one table for each group of metrics: mean ± standard deviation over seeds, the published value, the best.

    Rows that are ``cited`` have published values alone, which stand in the place of the mean. Rows without any value of a group are
    left out of its table.

    >>> cell = {"mean": 0.0312, "std": 0.004, "per_seed": [0.028, 0.034], "published": 0.094}
    >>> (table,) = make_tables({"seeds": [0, 1], "metrics": [{"key": "ece", "label": "ECE", "better": "lower"}],
    ...                         "rows": [{"label": "Plain", "values": {"ece": cell}}]})
    >>> table.rows[0].cells[0]
    Cell(mean='0.031', std='0.004', published='0.094', best=False, per_seed=['0.028', '0.034'])
    """
    groups: dict[str, list[JsonObject]] = {}
    for metric in results["metrics"]:
        groups.setdefault(metric.get("group") or "", []).append(metric)
    for metrics in groups.values():  # the ECE is among the first three, which a phone shows without scrolling
        place = next((place for place, metric in enumerate(metrics) if metric["key"] == "ece"), 0)
        metrics.insert(min(place, 2), metrics.pop(place))
    tables = []
    for group, metrics in groups.items():
        columns = [
            Column(one["label"], *ARROWS.get(one.get("better") or "", ("", "")), one.get("definition") or "")
            for one in metrics
        ]
        best = [_best(results, metric) for metric in metrics]
        rows = []
        for row in results["rows"]:
            values = [row["values"].get(metric["key"]) or {} for metric in metrics]
            if any(values) or len(groups) == 1:
                cells = [
                    _cell(value, metric, row, len(results["seeds"]), any(row is one for one in winners))
                    for value, metric, winners in zip(values, metrics, best, strict=True)
                ]
                rows.append(Row(row_label(row), (colours or {}).get(row["label"], ""), cells))
        tables.append(ResultTable(group, columns, rows))
    return tables


def _cell(value: JsonObject, metric: JsonObject, row: JsonObject, seeds: int, best: bool) -> Cell:
    form, per_seed = _form(metric), value.get("per_seed") or []
    if row.get("cited"):
        return Cell(format_number(value.get("published"), form), "", "", False, [])
    spread = _finite(value.get("std")) and _finite(value.get("mean")) and seeds > 1 and len(per_seed) != 1
    return Cell(
        format_number(value.get("mean"), form),
        format_number(value["std"], form.lstrip("+")) if spread else "",
        format_number(value["published"], form) if _finite(value.get("published")) else "",
        best,
        [format_number(item, form) for item in per_seed],
    )


def has_uneven_seeds(results: JsonObject) -> bool:
    """Whether rows have different numbers of seeds."""
    cells = [cell for row in results["rows"] for cell in row["values"].values() if cell]
    return len({len(cell.get("per_seed") or ()) for cell in cells} - {0}) > 1


def headline_metrics(results: JsonObject) -> list[JsonObject]:
    """The metrics to show first: those that the study names as its ``headline``, or the usual ones."""
    names = list(results.get("headline") or HEADLINE)
    chosen = [metric for metric in results["metrics"] if metric["key"] in names]
    return (
        sorted(chosen, key=lambda metric: names.index(metric["key"])) if results.get("headline") else chosen
    )


def best_numbers(results: JsonObject) -> list[tuple[str, str, str]]:
    """For the first four headline metrics that have one: name (and group, where others share it), the best mean, and whose it is."""
    metrics = headline_metrics(results)
    if not any(metric.get("better") in ARROWS for metric in metrics):
        metrics = results["metrics"]
    labels = [metric["label"] for metric in metrics]
    numbers = []
    for metric in metrics:
        if rows := _best(results, metric):
            shared = labels.count(metric["label"]) > 1 and metric.get("group")
            label = f"{metric['label']}, {metric['group']}" if shared else metric["label"]
            others = f" and {len(rows) - 1} more" if len(rows) > 1 else ""
            mean = format_number(rows[0]["values"][metric["key"]]["mean"], _form(metric))
            numbers.append((label, mean, rows[0]["label"] + others))
    return numbers[:4]


def group_definitions(columns: Iterable[Column]) -> list[tuple[list[Column], str]]:
    """What the columns mean; those that share their words stand together.

    >>> some = [Column("NLL", "", "", "Of both."), Column("ECE", "", "", "Of both."), Column("Time", "", "", "")]
    >>> [([column.label for column in named], text) for named, text in group_definitions(some)]
    [(['NLL', 'ECE'], 'Of both.')]
    """
    named: dict[str, list[Column]] = {}
    for column in columns:
        if column.definition and column not in named.setdefault(column.definition, []):
            named[column.definition].append(column)
    return [(group, text) for text, group in named.items()]


@dataclass(frozen=True)
class Difference:
    """One paired comparison: the difference, its interval and p-value, and whether the interval excludes zero."""

    mean: str
    span: str
    p: str
    significant: bool


def comparison_table(
    results: JsonObject,
) -> tuple[list[str], list[tuple[str, list[Difference | None]]]] | None:
    """Paired comparisons by metrics: heads, and rows of a title and its cells; None where there are none."""
    comparisons = results.get("comparisons") or []
    by_place = {(one["title"], one["metric"]): one for one in comparisons}
    metrics = [metric for metric in results["metrics"] if any(metric["key"] == key for _, key in by_place)]

    def cell(one: JsonObject | None, form: str) -> Difference | None:
        if one is None:
            return None
        low, high = one.get("low"), one.get("high")
        known = _finite(low) and _finite(high)
        return Difference(
            format_number(one["mean"], form),
            f"{format_number(low, form)} to {format_number(high, form)}" if known else "",
            f"p {one['p']:.2g}" if _finite(one.get("p")) else "",
            known and bool(low > 0 or high < 0),  # type: ignore[operator]
        )

    heads = [
        f"{metric['label']} {ARROWS.get(metric.get('better') or '', ('', ''))[0]}".strip()
        for metric in metrics
    ]
    rows = []
    for title in dict.fromkeys(title for title, _ in by_place):
        found = ((by_place.get((title, metric["key"])), _form(metric)) for metric in metrics)
        rows.append((title, [cell(one, "+" + form.lstrip("+")) for one, form in found]))
    return (heads, rows) if comparisons else None


def flatten(settings: JsonObject, prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as (dotted name, value) lines.

    >>> flatten({"train": {"epochs": 20, "rates": [0.1, 0.2]}, "site": None})
    [('train.epochs', '20'), ('train.rates', '0.1, 0.2'), ('site', '–')]
    """

    def plain(value: object) -> str:
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, list):
            return ", ".join(plain(item) for item in value) or "–"
        return (
            format_number(value, ".6g")
            if isinstance(value, float)
            else "–"
            if value in (None, {})
            else str(value)
        )

    lines = []
    for name, value in settings.items():
        nested = isinstance(value, dict) and value
        lines += flatten(value, f"{prefix}{name}.") if nested else [(f"{prefix}{name}", plain(value))]
    return lines
