"""Results of several methods and seeds, as ``results.json`` stores them: metrics, table rows, figures as plain data, and files."""

import json
import math
import os
import re
import statistics
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from flowbnn.errors import FlowBNNWarning, warn
from flowbnn.training.storage import atomic_write

Bins = list[dict[str, float | None]]


@dataclass(frozen=True)
class Metric:
    """A column of the table.

    Args:
        key: Name in the rows.
        label: Heading of the column.
        better: ``"higher"``, ``"lower"`` or ``"none"``.
        format: Format specification of a number, as in :func:`format`.
        definition: Definition in one sentence.
        group: Name of the table. Metrics of different groups have their own tables.
    """

    key: str
    label: str
    better: str
    format: str
    definition: str
    group: str = ""


# fmt: off
CLASSIFICATION = (
    Metric("accuracy", "Accuracy", "higher", ".4f", "Fraction of test inputs whose most probable class is correct."),
    Metric("nll", "NLL", "lower", ".4f", "Mean negative log-likelihood of the correct class, in nats."),
    Metric("ece", "ECE", "lower", ".4f",
           "Expected calibration error: difference of confidence and accuracy in 15 equal bins, weighted by their number of inputs."),
    Metric("brier", "Brier", "lower", ".4f", "Squared distance to the one-hot label, summed over classes."),
)
# fmt: on


def summary(values: Sequence[float | None], published: float | None = None) -> dict[str, Any]:
    """Returns the mean and the standard deviation (with ``n - 1``) of the values of all seeds.

    Args:
        values: One value for each seed. The mean is None if one is missing or not finite.
        published: Published value.

    >>> summary([1.0, 2.0, 3.0], published=2.5)
    {'mean': 2.0, 'std': 1.0, 'per_seed': [1.0, 2.0, 3.0], 'published': 2.5}
    """
    finite = [value for value in values if value is not None and math.isfinite(value)]
    complete = len(finite) == len(values) > 0
    return {
        "mean": statistics.fmean(finite) if complete else None,
        "std": statistics.stdev(finite) if complete and len(finite) > 1 else None,
        "per_seed": list(values),
        "published": published,
    }


class SeedResults:
    """Results by the key of a method (or of a variant of a study) and by seed.

    Each result is a dictionary of plain values: the metrics under ``values``, and the data of the figures.

    Args:
        seeds: Seeds in the order of the tables.
        content: Results by key and seed. A key may lack some seeds.
    """

    def __init__(self, seeds: Sequence[int], content: Mapping[tuple[str, int], dict[str, Any]]) -> None:
        self.seeds, self.content = list(seeds), dict(content)

    def of(self, key: str) -> list[dict[str, Any]]:
        """Returns the results of a key in the order of the seeds."""
        return [self.content[key, seed] for seed in self.seeds if (key, seed) in self.content]

    def values(self, key: str, metric: str) -> list[Any]:
        """Returns a metric of a key for each seed that has it."""
        return [result["values"][metric] for result in self.of(key) if metric in result["values"]]

    def mean(self, key: str, metric: str) -> float:
        """Returns the mean of a metric over seeds, or NaN if a seed has no value."""
        mean = summary(self.values(key, metric))["mean"]
        return math.nan if mean is None else mean

    def common(self, first: str, second: str, metric: str) -> tuple[list[float], list[float]]:
        """Returns a metric of two keys for the seeds that both have."""
        empty: dict[str, Any] = {"values": {}}
        pairs = []
        for seed in self.seeds:
            pair = [self.content.get((key, seed), empty)["values"].get(metric) for key in (first, second)]
            pairs += [pair] if None not in pair else []
        return [a for a, _ in pairs], [b for _, b in pairs]

    def row(
        self,
        key: str,
        label: str,
        metrics: Iterable[Metric],
        published: Mapping[str, float] | None = None,
        method: str = "",
    ) -> dict[str, Any]:
        """Returns a row of the table.

        Args:
            key: Key of the method.
            label: Name in the table.
            metrics: Columns. Columns without a value are left out.
            published: Published values by metric.
            method: Kebab-case name of the method.
        """
        cells = {
            metric.key: summary(self.values(key, metric.key), (published or {}).get(metric.key))
            for metric in metrics
            if any(value is not None for value in self.values(key, metric.key))
        }
        return {"key": key, "label": label, "method": method, "values": cells}

    def warnings(self, labels: Mapping[str, str]) -> list[str]:
        """Returns the warnings of all fits, one line for each key and text, with the number of seeds.

        Texts that differ in their numbers only, and layers with the same problem, share a line.

        Args:
            labels: Labels of the keys.
        """
        return [line for key, label in labels.items() for line in _warning_lines(label, self.of(key))]


def _warning_lines(label: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns one line for each kind of warning of a method."""

    def pattern(text: str) -> str:
        return re.sub(r"\d+(\.\d+)?", "0", text)

    first_text: dict[str, str] = {}
    by_seed: list[set[tuple[str, str]]] = []
    for result in results:
        records = result.get("warnings", [])
        by_seed.append({(pattern(record["text"]), record["layer"]) for record in records})
        for record in records:
            first_text.setdefault(pattern(record["text"]), record["text"])
    lines = []
    for key, text in first_text.items():
        layers = sorted({layer for entries in by_seed for other, layer in entries if other == key})
        counts = {layer: sum((key, layer) in entries for entries in by_seed) for layer in layers}
        total = len(results)
        places = [
            f"{layer} ({count} of {total} seeds)" if layer else f"(in {count} of {total} seeds)"
            for layer, count in counts.items()
        ]
        lines.append(f"{label}: {text} {'at ' if layers[0] else ''}{', '.join(places)}")
    return lines


@contextmanager
def record_warnings() -> Iterator[list[dict[str, str]]]:
    """Context manager that collects the library's own warnings as plain values, one for each layer. Others pass through."""
    collapsed = {"point": "a point", "prior": "its prior"}
    records: list[dict[str, str]] = []
    with warnings.catch_warnings(record=True) as warning_messages:
        warnings.simplefilter("always", FlowBNNWarning)
        yield records
    for entry in warning_messages:
        if not isinstance(entry.message, FlowBNNWarning):
            warnings.warn_explicit(entry.message, entry.category, entry.filename, entry.lineno)
            continue
        fields = entry.message.fields
        text = str(entry.message)
        if (limit := collapsed.get(fields.get("kind", ""))) is not None:
            text = f"the noise has collapsed to {limit}"  # without numbers, so that seeds share a line
        records += [{"text": text, "layer": layer} for layer in fields.get("layers") or [""]]


def best_first(parts: SeedResults, candidates: Iterable[Any], metric: str, higher: bool = False) -> list[Any]:
    """Returns the candidates that have a metric, the best first.

    Args:
        parts: Results.
        candidates: Objects with a ``key`` and a ``label``.
        metric: Key of the metric.
        higher: If True, higher values are better.
    """
    measured = [candidate for candidate in candidates if not math.isnan(parts.mean(candidate.key, metric))]
    return sorted(measured, key=lambda candidate: parts.mean(candidate.key, metric), reverse=higher)


def format_means(parts: SeedResults, candidates: Iterable[Any], metric: str, form: str = ".3f") -> str:
    """Returns the labels of candidates with their means, separated by commas.

    Args:
        parts: Results.
        candidates: Objects with a ``key`` and a ``label``.
        metric: Key of the metric.
        form: Format specification of the means.
    """
    return ", ".join(
        f"{candidate.label} {parts.mean(candidate.key, metric):{form}}" for candidate in candidates
    )


def figure(kind: str, title: str, caption: str, data: dict[str, Any]) -> dict[str, Any]:
    """Returns a figure as plain data that the report draws."""
    return {"kind": kind, "title": title, "caption": caption, "data": data}


def pooled_bins(bins_per_seed: Sequence[Bins]) -> Bins:
    """Returns the reliability bins of all seeds together.

    Fractions are averaged. Confidence and accuracy are averaged with the fractions as weights.

    >>> first = {"low": 0.5, "high": 1.0, "confidence": 0.9, "accuracy": 1.0, "fraction": 1.0}
    >>> second = {"low": 0.5, "high": 1.0, "confidence": 0.6, "accuracy": 0.5, "fraction": 0.5}
    >>> pooled = pooled_bins([[first], [second]])[0]
    >>> pooled["fraction"], round(pooled["confidence"], 3), round(pooled["accuracy"], 3)
    (0.75, 0.8, 0.833)
    """
    pooled: Bins = []
    for bins in zip(*bins_per_seed, strict=True):
        weight = sum(entry["fraction"] or 0.0 for entry in bins)
        means: dict[str, float | None] = {"confidence": None, "accuracy": None}
        if weight:
            for name in means:
                total = sum((entry["fraction"] or 0.0) * (entry[name] or 0.0) for entry in bins)
                means[name] = total / weight
        edges = {"low": bins[0]["low"], "high": bins[0]["high"]}
        pooled.append({**edges, **means, "fraction": weight / len(bins)})
    return pooled


def reliability_figure(
    caption: str, labels: Mapping[str, str], parts: SeedResults, title: str = "Accuracy against confidence"
) -> dict[str, Any]:
    """Returns a reliability diagram of several methods.

    Args:
        caption: First sentence of the caption.
        labels: Labels of the methods by key.
        parts: Results with reliability bins.
        title: Title of the figure.
    """
    models = [
        {
            "label": label,
            "ece": parts.mean(key, "ece"),
            "bins": pooled_bins([result["bins"] for result in parts.of(key) if "bins" in result]),
        }
        for key, label in labels.items()
    ]
    caption += " Bins of all seeds together; the ECE is the mean over seeds."
    return figure("reliability", title, caption.strip(), {"models": models})


def to_plain_values(value: Any) -> Any:
    """Returns a value that JSON can store. Tensors and tuples become lists, NaN and infinity become None.

    >>> import torch
    >>> to_plain_values({"a": torch.tensor([1.0, float("nan")]), "b": (1, 2.5)})
    {'a': [1.0, None], 'b': [1, 2.5]}
    """
    if isinstance(value, Tensor):
        return to_plain_values(value.tolist())
    if isinstance(value, dict):
        return {str(name): to_plain_values(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain_values(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Writes plain values to a file. An interrupted write leaves the previous file.

    Args:
        path: Path of the file.
        content: Values to write.

    Returns:
        The path.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(to_plain_values(content), allow_nan=False), encoding="utf-8")
    return path


def read_json(path: Path) -> dict[str, Any] | None:
    """Returns the object in a JSON file, or None if the file is missing or is not valid JSON."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class ResultCache:
    """Finished results in a folder, each with the settings that it was computed with.

    Results with other settings are ignored. The first one raises a warning.

    Args:
        folder: Folder of the results, or None to store nothing.
        settings: Settings of all results.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, settings: dict[str, Any]) -> None:
        self.folder, self.settings = None if folder is None else Path(folder) / "parts", settings
        self.warned = False

    def get(self, key: str, seed: int, method: str) -> dict[str, Any] | None:
        """Returns a result that was stored before, or None.

        Args:
            key: Key of the method.
            seed: Seed of the fit.
            method: Representation of the method with its settings.
        """
        stored = self.folder and read_json(self.folder / f"{key}-seed{seed}.json")
        if not stored or not all(isinstance(stored.get(name), dict) for name in ("settings", "part")):
            return None
        now = to_plain_values({**self.settings, "method": method})
        before = stored["settings"]
        changed = sorted(name for name in now | before if now.get(name) != before.get(name))
        if changed and not self.warned:
            text = f"recomputing results in '{self.folder}', whose settings differ: {', '.join(changed)}"
            warn(text, kind="changed settings", changed=changed)
            self.warned = True
        return None if changed else stored["part"]

    def put(self, key: str, seed: int, method: str, result: dict[str, Any]) -> None:
        """Stores a result."""
        if self.folder is not None:
            settings = {**self.settings, "method": method}
            write_json(self.folder / f"{key}-seed{seed}.json", {"settings": settings, "part": result})
