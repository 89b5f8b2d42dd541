"""What a study is: one figure or table of the literature, as variants that are trained once for every seed.

To add one, subclass :class:`Study`: a class of settings, the list of variants, ``train`` for one variant and one seed, and
``findings``, which makes rows, figures and an answer from what ``train`` returned. Everything else (processes, checkpoints, resuming,
``results.json``) is the same for all studies and lives in :mod:`flowbnn_studies.runner.run`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from flowbnn.errors import FlowBNNError, nearest
from flowbnn.results import Metric, Parts
from flowbnn_studies.runner.job import Job


@dataclass(frozen=True)
class Variant:
    """One way of doing it.

    Args:
        key: short name, used in files.
        label: name in the table and the figures.
        method: its kebab-case name, from which its colour follows: ``mle``, ``mc-dropout``, ``node-noise-planar``.
        after: key of the variant whose trained network it starts from, or None.
        shown: whether it has a row of its own.
        cost: of one training against the others; the expensive ones are started first, so that all processes end together.
        seeds: how many it is trained with; None takes the study's own number.
        alone: started when all others are done, with nothing beside it, because it measures time.
    """

    key: str
    label: str
    method: str = ""
    after: str | None = None
    shown: bool = True
    cost: float = 1.0
    seeds: int | None = None
    alone: bool = False


@dataclass
class Findings:
    """What a study makes of its parts. A figure may have ``published``: a sentence of its caption that trial runs leave out."""

    answer: str
    metrics: Sequence[Metric]
    rows: list[dict[str, Any]]
    figures: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)


def metrics_of(
    numbers: Mapping[str, tuple[str, str, str, str]], cases: Mapping[Any, str], heads: str = "{0}, {1}"
) -> tuple[Metric, ...]:
    """A column ``key_case`` for every number of every case, in a table for each number.

    Args:
        numbers: by key, as a :class:`Metric` has them: label, better, format, and the definition, in which ``{}`` is the case.
        cases: in words.
        heads: of the columns, from the label and the case.

    >>> one, other = metrics_of({"nll": ("NLL", "lower", ".2f", "On {}.")}, {"a": "blobs", "b": "digits"})
    >>> one.key, one.label, one.definition, one.group, other.key
    ('nll_a', 'NLL, blobs', 'On blobs.', 'NLL', 'nll_b')
    """
    return tuple(
        Metric(f"{key}_{case}", heads.format(label, words), better, form, meaning.format(words), label)
        for key, (label, better, form, meaning) in numbers.items()
        for case, words in cases.items()
    )


def by_rows(
    seeds: Sequence[int], tables: Iterable[tuple[int, str, Mapping[str, Mapping[str, Any]]]]
) -> Parts:
    """Parts by the rows of tables, each of a seed and a case, whose numbers are then called ``name_case``.

    >>> by_rows([0], [(0, "a", {"plain": {"nll": 1.0}}), (0, "b", {"plain": {"nll": 2.0}})]).of("plain")
    [{'values': {'nll_a': 1.0, 'nll_b': 2.0}}]
    """
    content: dict[tuple[str, int], dict[str, Any]] = {}
    for seed, case, table in tables:
        for row, numbers in table.items():
            values = content.setdefault((row, seed), {"values": {}})["values"]
            values |= {f"{name}_{case}": value for name, value in numbers.items()}
    return Parts(seeds, content)


class Study:
    """One figure or table. Subclasses fill in the class attributes and the three methods.

    ``headline`` names the metrics of the console's table (none: accuracy, NLL, ECE); ``quick`` the settings of a trial run;
    ``accelerator`` what "auto" means (small networks are fastest on a CPU; "auto" prefers a GPU); ``partial`` whether findings can be
    made while variants are missing; ``keeps_networks`` whether trained networks stay when no training needs them any more.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    description: ClassVar[str]
    question: ClassVar[str]
    source: ClassVar[str]
    settings: ClassVar[type[Any]]
    headline: ClassVar[tuple[str, ...]] = ()
    seeds: ClassVar[int] = 5
    quick: ClassVar[dict[str, Any]] = {}
    accelerator: ClassVar[str] = "cpu"
    partial: ClassVar[bool] = True
    keeps_networks: ClassVar[bool] = False

    def folder(self, settings: Any) -> str:
        """The name of the results' folder."""
        return self.name

    def heading(self, settings: Any) -> str:
        """The title of the results."""
        return self.title

    def variants(self, settings: Any) -> tuple[Variant, ...]:
        """What is trained, in the order of the table; a variant comes after the one it starts from."""
        raise NotImplementedError

    def train(self, job: Job) -> dict[str, Any]:
        """Train and evaluate one variant with one seed; plain values, the metrics under ``values``."""
        raise NotImplementedError

    def findings(self, settings: Any, parts: Parts) -> Findings:
        """Rows, figures and the answer, from the numbers alone."""
        raise NotImplementedError

    def shortfalls(self, settings: Any, parts: Parts) -> list[str]:
        """What the fits warned about, which stands after the notes of the findings."""
        return parts.warnings({variant.key: variant.label for variant in self.variants(settings)})

    def check(self, settings: Any, jobs: Sequence[Job]) -> None:
        """Raise one line if the jobs cannot be run, before the results of an earlier run are cleared for them."""

    def rows(
        self,
        settings: Any,
        parts: Parts,
        metrics: Sequence[Metric],
        published: Mapping[str, Mapping[str, float]] | None = None,
    ) -> list[dict[str, Any]]:
        """A row for each variant that is shown and has numbers, with published values by its key."""
        chosen = [
            one
            for one in self.variants(settings)
            if one.shown and any(p["values"] for p in parts.of(one.key))
        ]
        given = published or {}
        return [parts.row(one.key, one.label, metrics, given.get(one.key), one.method) for one in chosen]

    def shown(self, settings: Any) -> dict[str, str]:
        """Keys and labels of the variants that have a row."""
        return {variant.key: variant.label for variant in self.variants(settings) if variant.shown}

    def of_first_seed(self, settings: Any, parts: Parts, name: str) -> dict[str, dict[str, Any]]:
        """By label, the parts of seed 0 that have something to draw under ``name``."""
        first = {label: parts.content.get((key, 0), {}) for key, label in self.shown(settings).items()}
        return {label: part for label, part in first.items() if name in part}

    def make_settings(self, *, quick: bool = False, **changes: Any) -> Any:
        """The settings, with changes by name; ``quick`` gives a trial run whose numbers mean nothing.

        A setting inside a group is named ``group.name``, and the group may be a glob: ``{"flow_*.noise_lr": 0.01}``.
        """
        settings = self.settings(**(self.quick if quick else {}))
        for name, value in changes.items():
            glob, _, inner = name.partition(".")
            known: dict[str, Any] = {one: part for one, part in vars(settings).items() if is_dataclass(part)}
            groups = {group: part for group, part in known.items() if inner and fnmatchcase(group, glob)}
            if inner and not groups:
                raise FlowBNNError(f"there is no setting '{name}'{nearest(glob, known)}", argument=name)
            parts = {group: replace(part, **{inner: value}) for group, part in groups.items()}
            settings = replace(settings, **(parts or {name: value}))
        return settings


STUDIES: dict[str, Study] = {}


def studies() -> list[Study]:
    """Every study there is."""
    return list(STUDIES.values())


def get_study(name: str) -> Study:
    """A study by its name.

    >>> import flowbnn_studies
    >>> get_study("two-cluster")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: there is no study 'two-cluster'; did you mean 'two-clusters' or 'clusters-2d'?
    """
    if name not in STUDIES:
        raise FlowBNNError(f"there is no study '{name}'{nearest(name, STUDIES)}", argument="study")
    return STUDIES[name]


def register_study(study: Study) -> None:
    """Add a study of your own; with several processes the module that registers it must be imported by each."""
    STUDIES[study.name] = study
