"""What a study is: one figure or table of the literature, as variants that are trained once for every seed.

To add one, subclass :class:`Study`: a dataclass of settings, the list of variants, ``train`` for one variant and one seed,
and ``findings``, which makes rows, figures and an answer from what ``train`` returned. Everything else (processes, checkpoints,
resuming, ``results.json``) is the same for all studies and lives in :mod:`flowbnn_studies.runner.running`.
"""

import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar

from flowbnn.errors import FlowBNNError, nearest
from flowbnn_studies.runner.job import Job
from flowbnn_studies.runner.statistics import summary

__all__ = ["CLASSIFICATION", "Findings", "Metric", "Parts", "Study", "Variant", "warned"]


def warned(caught: Iterable[warnings.WarningMessage]) -> list[str]:
    """What warnings say, one about several layers as a line for each, so that :meth:`Parts.warnings` can count them."""
    return [text for one in caught for text in getattr(one.message, "each", ()) or (str(one.message),)]


@dataclass(frozen=True)
class Variant:
    """One way of doing it.

    Args:
        key: short name, used in files.
        label: what the table and the figures call it.
        after: key of the variant whose trained network it starts from, or None.
        shown: whether it has a row of its own.
        cost: of one training against the others; the dear ones are begun first, so that the processes end together.
        seeds: how many it is trained with; None takes the study's own number.
        alone: begun when all others are done, with nothing beside it, because it measures time.
    """

    key: str
    label: str
    after: str | None = None
    shown: bool = True
    cost: float = 1.0
    seeds: int | None = None
    alone: bool = False


@dataclass(frozen=True)
class Metric:
    """A column of the table; metrics of different groups stand in tables of their own."""

    key: str
    label: str
    better: str
    format: str
    definition: str
    group: str = ""


CLASSIFICATION = (
    Metric(
        "accuracy", "Accuracy", "higher", ".4f", "Share of unseen inputs whose most probable class is right."
    ),
    Metric("nll", "NLL", "lower", ".4f", "Mean negative log-likelihood of the right class, in nats."),
    Metric(
        "ece",
        "ECE",
        "lower",
        ".4f",
        "Expected calibration error: gap between confidence and accuracy in 15 equal bins, weighed by their share.",
    ),
    Metric("brier", "Brier", "lower", ".4f", "Squared distance to the one-hot label, summed over classes."),
)


@dataclass
class Findings:
    """What a study makes of its parts."""

    answer: str
    metrics: Sequence[Metric]
    rows: list[dict[str, Any]]
    figures: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)


class Parts:
    """What the finished jobs returned, by variant, in the order of the seeds; a variant has the seeds it was trained with."""

    def __init__(self, seeds: Sequence[int], content: dict[tuple[str, int], dict[str, Any]]) -> None:
        self.seeds, self.content = list(seeds), content

    def seeds_of(self, variant: str) -> list[int]:
        """The seeds a variant was trained with; none where it was left out."""
        return [seed for seed in self.seeds if (variant, seed) in self.content]

    def of(self, variant: str) -> list[dict[str, Any]]:
        """The contents of one variant, one for each of its seeds."""
        return [self.content[variant, seed] for seed in self.seeds_of(variant)]

    def common(self, first: str, second: str, metric: str) -> tuple[list[float], list[float]]:
        """One metric of two variants, at the seeds where both have it."""
        pairs = [
            (
                self.content[first, seed]["values"].get(metric),
                self.content[second, seed]["values"].get(metric),
            )
            for seed in self.seeds_of(first)
            if (second, seed) in self.content
        ]
        whole = [(a, b) for a, b in pairs if a is not None and b is not None]
        return [a for a, _ in whole], [b for _, b in whole]

    def values(self, variant: str, metric: str) -> list[float]:
        """One metric of one variant, one value for each seed."""
        return [part["values"].get(metric) for part in self.of(variant)]

    def mean(self, variant: str, metric: str) -> float:
        """Its mean over seeds; NaN where a seed has none."""
        mean = summary(self.values(variant, metric))["mean"]
        return float("nan") if mean is None else mean

    def row(
        self, variant: Variant, metrics: Sequence[Metric], published: dict[str, float] | None = None
    ) -> dict[str, Any]:
        """A row of the table."""
        cells = {
            metric.key: summary(self.values(variant.key, metric.key), (published or {}).get(metric.key))
            for metric in metrics
            if any(value is not None for value in self.values(variant.key, metric.key))
        }
        return {"key": variant.key, "label": variant.label, "values": cells}

    def warnings(self, variants: Sequence[Variant]) -> list[str]:
        """What the fits warned of, once each, with the number of seeds it happened in; layers of one fate in one line."""
        found: list[str] = []
        for variant in variants:
            parts = self.of(variant.key)
            fates: dict[str, Counter[str]] = {}
            others: Counter[str] = Counter()
            for part in parts:
                for message in dict.fromkeys(part.get("warnings", [])):
                    fate = re.match(
                        r"the noise of layer '([^']+)' has (collapsed to a point|fallen back onto its prior)",
                        message,
                    )
                    if fate:
                        fates.setdefault(fate[2], Counter())[fate[1]] += 1
                    else:
                        others[message] += 1
            for fate_name, layers in fates.items():
                places = ", ".join(
                    f"{layer} ({count} of {len(parts)} seeds)" for layer, count in layers.items()
                )
                found.append(f"{variant.label}: the noise has {fate_name} at {places}")
            found += [f"{variant.label}: {text} (in {n} of {len(parts)} seeds)" for text, n in others.items()]
        return found


class Study:
    """One figure or table. Subclasses fill in the class attributes and the three methods."""

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    question: ClassVar[str]
    source: ClassVar[str]
    headline: ClassVar[
        tuple[str, ...]
    ] = ()  # metrics of the console's table; none: accuracy, NLL, ECE and their like
    seeds: ClassVar[int] = 5
    settings: ClassVar[type[Any]]
    quick: ClassVar[dict[str, Any]] = {}
    accelerator: ClassVar[str] = (
        "cpu"  # what "auto" means: networks this small are quickest there; "auto" prefers a GPU
    )
    partial: ClassVar[bool] = False  # whether findings can be made while some variants are missing
    keeps_networks: ClassVar[bool] = (
        True  # False: a trained network is deleted when no training needs it any more
    )

    def folder(self, settings: Any) -> str:
        """The name of the results' folder."""
        return self.name

    def heading(self, settings: Any) -> str:
        """The title of the results."""
        return self.title

    def variants(self, settings: Any) -> tuple[Variant, ...]:
        """What is trained, in the order of the table; a variant comes after the one it starts from."""
        raise NotImplementedError(f"{type(self).__name__} must define variants(settings)")

    def train(self, job: Job) -> dict[str, Any]:
        """Train and judge one variant with one seed; plain values, the metrics under ``values``."""
        raise NotImplementedError(f"{type(self).__name__} must define train(job)")

    def findings(self, settings: Any, parts: Parts) -> Findings:
        """Rows, figures and the answer, from the numbers alone."""
        raise NotImplementedError(f"{type(self).__name__} must define findings(settings, parts)")

    def check(self, settings: Any, jobs: Sequence[Any]) -> None:
        """Refuse what cannot be run, in one line, before the results of an earlier run are cleared for it."""

    def make_settings(self, *, quick: bool = False, **changes: Any) -> Any:
        """The settings, with changes by name; ``quick`` gives a smoke run whose numbers mean nothing.

        A setting inside a group is named ``group.name``, and the group may be a glob: ``{"flow_*.noise_lr": 0.01}``.
        """
        known = {name: found.default for name, found in self.settings.__dataclass_fields__.items()}
        settings = self.settings(**(self.quick if quick else {}))
        for name, value in changes.items():
            group, _, field_name = name.partition(".")
            groups = [g for g, default in known.items() if is_dataclass(default) and fnmatchcase(g, group)]
            if field_name and groups:
                for one in groups:
                    part = getattr(settings, one)
                    settings = replace(settings, **{one: self._changed(part, field_name, value, f"{one}.")})
            else:
                settings = self._changed(settings, name, value)
        return settings

    def _changed(self, settings: Any, name: str, value: Any, where: str = "") -> Any:
        """A copy of some settings, or of a group of them, with one value changed."""
        known = {found.name: getattr(settings, found.name) for found in fields(settings)}
        if name not in known:
            meant = nearest(where + name, [where + one for one in known])
            raise FlowBNNError(f"study '{self.name}' has no setting '{where}{name}'{meant}")
        kind = type(known[name])
        fits = isinstance(value, kind) or (kind is float and isinstance(value, int))
        if not fits or (isinstance(value, bool) and kind is not bool):
            raise FlowBNNError(
                f"setting '{where}{name}' of study '{self.name}' is like {known[name]!r}, not {value!r}"
            )
        return replace(settings, **{name: float(value) if kind is float else value})

    def variant(self, settings: Any, key: str) -> Variant:
        """One variant by its key."""
        return next(variant for variant in self.variants(settings) if variant.key == key)

    def run(
        self,
        settings: Any = None,
        seeds: int | Sequence[int] | None = None,
        out: str | Path = "results",
        **options: Any,
    ) -> dict[str, Any]:
        """Run the study and write ``out/<folder>/results.json``; see :func:`flowbnn_studies.run_study`."""
        from flowbnn_studies.runner.running import run_study

        return run_study(self, settings=settings, seeds=seeds, out=out, **options)

    def describe_settings(self, settings: Any) -> dict[str, Any]:
        """The settings as plain values."""
        return asdict(settings)
