"""Numbers over seeds, as ``results.json`` has them: columns, rows, figures as plain data, and files that appear whole or not at all."""

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
        key: name in the rows.
        label: head of the column.
        better: ``"higher"``, ``"lower"`` or ``"none"``.
        format: how a number is written, as in :func:`format`.
        definition: one sentence.
        group: metrics of different groups stand in tables of their own.
    """

    key: str
    label: str
    better: str
    format: str
    definition: str
    group: str = ""


# fmt: off
CLASSIFICATION = (
    Metric("accuracy", "Accuracy", "higher", ".4f", "Share of unseen inputs whose most probable class is right."),
    Metric("nll", "NLL", "lower", ".4f", "Mean negative log-likelihood of the right class, in nats."),
    Metric("ece", "ECE", "lower", ".4f",
           "Expected calibration error: gap between confidence and accuracy in 15 equal bins, weighted by their share."),
    Metric("brier", "Brier", "lower", ".4f", "Squared distance to the one-hot label, summed over classes."),
)
# fmt: on


def summary(values: Sequence[float | None], published: float | None = None) -> dict[str, Any]:
    """Mean and standard deviation (over ``n - 1``) with the value of every seed.

    >>> summary([1.0, 2.0, 3.0], published=2.5)
    {'mean': 2.0, 'std': 1.0, 'per_seed': [1.0, 2.0, 3.0], 'published': 2.5}
    """
    known = [value for value in values if value is not None and math.isfinite(value)]
    complete = len(known) == len(values) > 0
    return {
        "mean": statistics.fmean(known) if complete else None,
        "std": statistics.stdev(known) if complete and len(known) > 1 else None,
        "per_seed": list(values),
        "published": published,
    }


class Parts:
    """What was measured, by the key of a method (or of a variant of a study) and the seed; a key has the seeds it was trained with.

    A part is a dictionary of plain values: the metrics under ``values``, and whatever the figures need.
    """

    def __init__(self, seeds: Sequence[int], content: Mapping[tuple[str, int], dict[str, Any]]) -> None:
        self.seeds, self.content = list(seeds), dict(content)

    def of(self, key: str) -> list[dict[str, Any]]:
        """The parts of one key, in the order of the seeds."""
        return [self.content[key, seed] for seed in self.seeds if (key, seed) in self.content]

    def values(self, key: str, metric: str) -> list[Any]:
        """One metric of one key, a value (or None) for each seed that was measured by it."""
        return [part["values"][metric] for part in self.of(key) if metric in part["values"]]

    def mean(self, key: str, metric: str) -> float:
        """The mean over seeds; NaN where a seed has no value."""
        mean = summary(self.values(key, metric))["mean"]
        return math.nan if mean is None else mean

    def common(self, first: str, second: str, metric: str) -> tuple[list[float], list[float]]:
        """One metric of two keys, at the seeds where both have it."""
        empty: dict[str, Any] = {"values": {}}
        both = []
        for seed in self.seeds:
            pair = [self.content.get((key, seed), empty)["values"].get(metric) for key in (first, second)]
            both += [pair] if None not in pair else []
        return [a for a, _ in both], [b for _, b in both]

    def row(
        self,
        key: str,
        label: str,
        metrics: Iterable[Metric],
        published: Mapping[str, float] | None = None,
        method: str = "",
    ) -> dict[str, Any]:
        """A row of the table: the method by its kebab-case name, and published values beside ours."""
        cells = {
            metric.key: summary(self.values(key, metric.key), (published or {}).get(metric.key))
            for metric in metrics
            if any(value is not None for value in self.values(key, metric.key))
        }
        return {"key": key, "label": label, "method": method, "values": cells}

    def warnings(self, labels: Mapping[str, str]) -> list[str]:
        """What the fits warned about, by key, with the number of seeds.

        Layers with the same problem share a line, and so do texts that differ in their numbers alone; the numbers are the first's.
        """

        def kind(text: str) -> str:
            return re.sub(r"\d+(\.\d+)?", "0", text)

        lines = []
        for key, label in labels.items():
            parts = self.of(key)
            told = [{(kind(one["text"]), one["layer"]) for one in part.get("warnings", [])} for part in parts]
            texts: dict[str, str] = {}
            for part in parts:
                for one in part.get("warnings", []):
                    texts.setdefault(kind(one["text"]), one["text"])
            for same, text in texts.items():
                layers = sorted({layer for some in told for what, layer in some if what == same})
                counts = {
                    one: f"{sum((same, one) in some for some in told)} of {len(parts)}" for one in layers
                }
                where = [f"{one} ({n} seeds)" if one else f"(in {n} seeds)" for one, n in counts.items()]
                lines.append(f"{label}: {text} {'at ' if layers[0] else ''}{', '.join(where)}")
        return lines


HEALTH = {"point": "the noise has collapsed to a point", "prior": "the noise has fallen back onto its prior"}


@contextmanager
def recorded_warnings() -> Iterator[list[dict[str, str]]]:
    """Collect the library's own warnings as plain values, one for each layer they name; all others pass."""
    ours: list[dict[str, str]] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlowBNNWarning)
        yield ours
    for one in caught:
        if not isinstance(one.message, FlowBNNWarning):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
            continue
        fields = one.message.fields
        text = HEALTH.get(fields.get("kind", ""), str(one.message))
        ours += [{"text": text, "layer": layer} for layer in fields.get("layers") or [""]]


def best_first(parts: Parts, candidates: Iterable[Any], metric: str, higher: bool = False) -> list[Any]:
    """The candidates (anything with a ``key`` and a ``label``) that have a metric, the best first."""
    known = [one for one in candidates if not math.isnan(parts.mean(one.key, metric))]
    return sorted(known, key=lambda one: parts.mean(one.key, metric), reverse=higher)


def listed(parts: Parts, candidates: Iterable[Any], metric: str, form: str = ".3f") -> str:
    """Candidates with their means, for a sentence."""
    return ", ".join(f"{one.label} {parts.mean(one.key, metric):{form}}" for one in candidates)


def figure(kind: str, title: str, caption: str, data: dict[str, Any]) -> dict[str, Any]:
    """One figure, in a form that the report draws."""
    return {"kind": kind, "title": title, "caption": caption, "data": data}


def pooled_bins(many: Sequence[Bins]) -> Bins:
    """Reliability bins of all seeds as one: shares averaged, confidence and accuracy weighted by them.

    >>> one = {"low": 0.5, "high": 1.0, "confidence": 0.9, "accuracy": 1.0, "fraction": 1.0}
    >>> two = {"low": 0.5, "high": 1.0, "confidence": 0.6, "accuracy": 0.5, "fraction": 0.5}
    >>> pooled = pooled_bins([[one], [two]])[0]
    >>> pooled["fraction"], round(pooled["confidence"], 3), round(pooled["accuracy"], 3)
    (0.75, 0.8, 0.833)
    """
    pooled: Bins = []
    for bins in zip(*many, strict=True):
        weight = sum(part["fraction"] or 0.0 for part in bins)
        means: dict[str, float | None] = {"confidence": None, "accuracy": None}
        if weight:
            for name in means:
                means[name] = sum((part["fraction"] or 0.0) * (part[name] or 0.0) for part in bins) / weight
        edges = {"low": bins[0]["low"], "high": bins[0]["high"]}
        pooled.append({**edges, **means, "fraction": weight / len(bins)})
    return pooled


def reliability_figure(
    caption: str, labels: Mapping[str, str], parts: Parts, title: str = "Accuracy against confidence"
) -> dict[str, Any]:
    """Accuracy against confidence for every key."""
    models = [
        {
            "label": label,
            "ece": parts.mean(key, "ece"),
            "bins": pooled_bins([part["bins"] for part in parts.of(key)]),
        }
        for key, label in labels.items()
    ]
    caption += " Bins of all seeds together; the ECE is the mean over seeds."
    return figure("reliability", title, caption.strip(), {"models": models})


def plain(value: Any) -> Any:
    """Plain values for JSON: tensors and tuples become lists, NaN and infinity become null.

    >>> import torch
    >>> plain({"a": torch.tensor([1.0, float("nan")]), "b": (1, 2.5)})
    {'a': [1.0, None], 'b': [1, 2.5]}
    """
    if isinstance(value, Tensor):
        return plain(value.tolist())
    if isinstance(value, dict):
        return {str(name): plain(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: Path, content: dict[str, Any]) -> Path:
    """Write plain values to a file that appears whole or not at all."""
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(plain(content), allow_nan=False), encoding="utf-8")
    return path


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is no file, a pipe or a device instead, or it cannot be read."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    except (OSError, ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


class KeptParts:
    """Finished parts in a folder, each with the settings that it was made with; without a folder nothing is kept.

    A part of other settings is not used, of which the first one warns.
    """

    def __init__(self, folder: str | os.PathLike[str] | None, settings: dict[str, Any]) -> None:
        self.folder, self.settings = None if folder is None else Path(folder) / "parts", settings
        self.warned = False

    def get(self, key: str, seed: int, method: str) -> dict[str, Any] | None:
        """A part that was finished before."""
        kept = self.folder and read_json(self.folder / f"{key}-seed{seed}.json")
        if not kept:
            return None
        now = plain({**self.settings, "method": method})
        before = kept.get("settings") or {}
        changed = sorted(name for name in now | before if now.get(name) != before.get(name))
        if changed and not self.warned:
            text = (
                f"'{self.folder}' has rows of other settings ({', '.join(changed)}), which are measured again"
            )
            warn(text, kind="changed settings", changed=changed)
            self.warned = True
        return None if changed else kept["part"]

    def put(self, key: str, seed: int, method: str, part: dict[str, Any]) -> None:
        """Keep a part."""
        if self.folder is not None:
            settings = {**self.settings, "method": method}
            write_json(self.folder / f"{key}-seed{seed}.json", {"settings": settings, "part": part})
