"""Layout of a study's numbers as tables, and the references that studies cite."""

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
    """A text that results cite.

    Args:
        name: Short name in the results.
        author: Authors.
        title: Title.
        link: Address; empty if none is known.
    """

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
    """A metric of a table.

    Args:
        label: Name of the metric.
        arrow: Arrow of the better direction.
        direction: Better direction in words.
        definition: Definition of the metric.
    """

    label: str
    arrow: str
    direction: str
    definition: str


@dataclass(frozen=True)
class Cell:
    """One mean with its standard deviation. All fields are formatted; empty means missing.

    Args:
        mean: Mean over seeds.
        std: Standard deviation over seeds.
        published: Published value.
        best: The mean is the best of its column.
        per_seed: Values of the seeds.
    """

    mean: str
    std: str
    published: str
    best: bool
    per_seed: list[str]

    def __bool__(self) -> bool:
        return self.mean != "–"


@dataclass(frozen=True)
class Row:
    """A model and its cells.

    Args:
        label: Name of the model.
        colour: Name of its colour.
        cells: Cells in the order of the columns.
    """

    label: str
    colour: str
    cells: list[Cell]


@dataclass(frozen=True)
class ResultTable:
    """Table of the metrics of one group.

    Args:
        group: Name of the group.
        columns: Metrics.
        rows: Models.
    """

    group: str
    columns: list[Column]
    rows: list[Row]

    @property
    def spread(self) -> bool:
        """True if any cell has a standard deviation."""
        return any(cell.std for row in self.rows for cell in row.cells)

    @property
    def published(self) -> bool:
        """True if any cell has a published value."""
        return any(cell.published for row in self.rows for cell in row.cells)


def row_label(row: JsonObject) -> str:
    """Returns the label of a row. If seeds are missing, their number follows.

    >>> row_label({"label": "Flow noise"}), row_label({"label": "Flow noise", "unfinished": "1 of 5 seeds"})
    ('Flow noise', 'Flow noise (1 of 5 seeds)')
    """
    return f"{row['label']} ({row['unfinished']})" if row.get("unfinished") else row["label"]


def _finite(value: object) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def _format(metric: JsonObject) -> str:
    return metric.get("format") or ".3f"


def _best(results: JsonObject, metric: JsonObject) -> list[JsonObject]:
    """Returns the rows with the best mean of a metric. Rows that read the same are all returned.

    Published rows, references such as the true probabilities, unfinished rows and trial runs do not compete.
    """
    if metric.get("better") not in ARROWS or results.get("trial"):
        return []
    means: dict[int, Any] = {}
    for place, row in enumerate(results["rows"]):
        mean = (row["values"].get(metric["key"]) or {}).get("mean")
        if _finite(mean) and not (row.get("cited") or row.get("reference") or row.get("unfinished")):
            means[place] = mean
    if len({format(mean, _format(metric)) for mean in means.values()}) < 2:
        return []
    best = format((max if metric["better"] == "higher" else min)(means.values()), _format(metric))
    return [results["rows"][place] for place, mean in means.items() if format(mean, _format(metric)) == best]


def make_tables(results: JsonObject, colours: Mapping[str, str] | None = None) -> list[ResultTable]:
    """Returns one table for each group of metrics, with rows by metrics: mean ± standard deviation, published value, best value.

    Rows that are ``cited`` have only published values, which take the place of the mean. A row without any value of a group is
    omitted from its table.

    Args:
        results: Content of ``results.json``.
        colours: Names of colours by label.

    >>> cell = {"mean": 0.0312, "std": 0.004, "per_seed": [0.028, 0.034], "published": 0.094}
    >>> (table,) = make_tables({"seeds": [0, 1], "metrics": [{"key": "ece", "label": "ECE", "better": "lower"}],
    ...                         "rows": [{"label": "Plain", "values": {"ece": cell}}]})
    >>> table.rows[0].cells[0]
    Cell(mean='0.031', std='0.004', published='0.094', best=False, per_seed=['0.028', '0.034'])
    """
    groups: dict[str, list[JsonObject]] = {}
    for metric in results["metrics"]:
        groups.setdefault(metric.get("group") or "", []).append(metric)
    for metrics in groups.values():  # a phone shows the first three columns, which include the ECE
        place = next((place for place, metric in enumerate(metrics) if metric["key"] == "ece"), 0)
        metrics.insert(min(place, 2), metrics.pop(place))
    tables = []
    for group, metrics in groups.items():
        columns = [
            Column(
                metric["label"],
                *ARROWS.get(metric.get("better") or "", ("", "")),
                metric.get("definition") or "",
            )
            for metric in metrics
        ]
        best = [_best(results, metric) for metric in metrics]
        rows = []
        for row in results["rows"]:
            values = [row["values"].get(metric["key"]) or {} for metric in metrics]
            if any(values) or len(groups) == 1:
                cells = [
                    _cell(value, metric, row, len(results["seeds"]), any(row is winner for winner in winners))
                    for value, metric, winners in zip(values, metrics, best, strict=True)
                ]
                rows.append(Row(row_label(row), (colours or {}).get(row["label"], ""), cells))
        tables.append(ResultTable(group, columns, rows))
    return tables


def _cell(value: JsonObject, metric: JsonObject, row: JsonObject, seeds: int, best: bool) -> Cell:
    """Returns a cell of a table as text."""
    format_, per_seed = _format(metric), value.get("per_seed") or []
    if row.get("cited"):
        return Cell(format_number(value.get("published"), format_), "", "", False, [])
    spread = _finite(value.get("std")) and _finite(value.get("mean")) and seeds > 1 and len(per_seed) != 1
    return Cell(
        format_number(value.get("mean"), format_),
        format_number(value["std"], format_.lstrip("+")) if spread else "",
        format_number(value["published"], format_) if _finite(value.get("published")) else "",
        best,
        [format_number(item, format_) for item in per_seed],
    )


def has_uneven_seeds(results: JsonObject) -> bool:
    """Returns True if rows have different numbers of seeds."""
    cells = [cell for row in results["rows"] for cell in row["values"].values() if cell]
    return len({len(cell.get("per_seed") or ()) for cell in cells} - {0}) > 1


def headline_metrics(results: JsonObject) -> list[JsonObject]:
    """Returns the metrics to show first: the ``headline`` of the study, or the usual ones."""
    names = list(results.get("headline") or HEADLINE)
    metrics = [metric for metric in results["metrics"] if metric["key"] in names]
    return (
        sorted(metrics, key=lambda metric: names.index(metric["key"])) if results.get("headline") else metrics
    )


def best_numbers(results: JsonObject) -> list[tuple[str, str, str]]:
    """Returns name, best mean and winner for the first four headline metrics. The group is added to names that occur twice."""
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
            mean = format_number(rows[0]["values"][metric["key"]]["mean"], _format(metric))
            numbers.append((label, mean, rows[0]["label"] + others))
    return numbers[:4]


def group_definitions(columns: Iterable[Column]) -> list[tuple[list[Column], str]]:
    """Groups the columns by their definitions.

    >>> columns = [Column("NLL", "", "", "Of both."), Column("ECE", "", "", "Of both."), Column("Time", "", "", "")]
    >>> [([column.label for column in group], text) for group, text in group_definitions(columns)]
    [(['NLL', 'ECE'], 'Of both.')]
    """
    groups: dict[str, list[Column]] = {}
    for column in columns:
        if column.definition and column not in groups.setdefault(column.definition, []):
            groups[column.definition].append(column)
    return [(group, text) for text, group in groups.items()]


@dataclass(frozen=True)
class Difference:
    """One paired comparison.

    Args:
        mean: Mean difference.
        span: 95 % confidence interval.
        p: Formatted p-value.
        significant: The confidence interval excludes zero.
    """

    mean: str
    span: str
    p: str
    significant: bool


def comparison_table(
    results: JsonObject,
) -> tuple[list[str], list[tuple[str, list[Difference | None]]]] | None:
    """Returns the paired comparisons as heads and rows, each with a title and cells; None without comparisons."""
    comparisons = results.get("comparisons") or []
    by_title = {(entry["title"], entry["metric"]): entry for entry in comparisons}
    metrics = [metric for metric in results["metrics"] if any(metric["key"] == key for _, key in by_title)]

    def cell(entry: JsonObject | None, format_: str) -> Difference | None:
        if entry is None:
            return None
        low, high = entry.get("low"), entry.get("high")
        has_interval = _finite(low) and _finite(high)
        return Difference(
            format_number(entry["mean"], format_),
            f"{format_number(low, format_)} to {format_number(high, format_)}" if has_interval else "",
            f"p {entry['p']:.2g}" if _finite(entry.get("p")) else "",
            has_interval and bool(low > 0 or high < 0),  # type: ignore[operator]
        )

    heads = [
        f"{metric['label']} {ARROWS.get(metric.get('better') or '', ('', ''))[0]}".strip()
        for metric in metrics
    ]
    rows = []
    for title in dict.fromkeys(title for title, _ in by_title):
        entries = ((by_title.get((title, metric["key"])), _format(metric)) for metric in metrics)
        rows.append((title, [cell(entry, "+" + format_.lstrip("+")) for entry, format_ in entries]))
    return (heads, rows) if comparisons else None


def flatten(settings: JsonObject, prefix: str = "") -> list[tuple[str, str]]:
    """Returns nested settings as pairs of dotted name and value.

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
