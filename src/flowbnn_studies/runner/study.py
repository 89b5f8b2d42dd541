"""What a study is: one figure or table of the literature, as variants that are trained once for every seed.

To add one, subclass :class:`Study`: a class of settings, the list of variants, ``train`` for one variant and one seed, which is a
:class:`Job`, and ``findings``, which makes rows, figures and an answer from what ``train`` returned. Everything else (processes,
checkpoints, resuming, ``results.json``) is the same for all studies and lives in :mod:`flowbnn_studies.runner.run`.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from fnmatch import fnmatchcase
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from flowbnn.compare.results import Metric, Parts, plain, read_json, write_json
from flowbnn.convert import to_stochastic
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.methods import MLE, PointPosterior, Posterior, fit
from flowbnn.noise import Recipe

POSTERIOR = "posterior.safetensors"
GPUS = ("cuda", "gpu")
Made = TypeVar("Made")


def timed(work: Callable[..., Made], *given: Any, **options: Any) -> tuple[Made, float]:
    """What a function gives, and the seconds that it took; a GPU has done what was before it, and what it asked for."""

    def now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    started = now()
    made = work(*given, **options)
    return made, now() - started


@dataclass(frozen=True)
class Job:
    """A piece of a study's work, which a worker process can do on its own.

    Args:
        study: name of the study.
        variant, seed: what to train.
        settings: the study's settings.
        folder: of the study's results.
        after: key of the variant whose network this one starts from.
        resume: go on from the checkpoint of a run that was interrupted.
        accelerator, precision: where and how to compute, as in :class:`~flowbnn.training.TrainingOptions`.
        devices, num_nodes: on how many devices; the result does not depend on it.
        acceleration: how steps are taken on a GPU, which changes their time.
    """

    study: str
    variant: str
    seed: int
    settings: Any
    folder: Path
    after: str | None = None
    resume: bool = False
    accelerator: str = "cpu"
    precision: str = "32-true"
    devices: int | str = 1
    num_nodes: int = 1
    acceleration: str = "auto"

    @property
    def name(self) -> str:
        return f"{self.variant}-seed{self.seed}"

    @property
    def device(self) -> str:
        """Where it computes, as torch calls it."""
        return "cuda" if self.accelerator in GPUS else self.accelerator

    @property
    def part(self) -> Path:
        """Where the job's result is stored when it is done."""
        return self.folder / "parts" / f"{self.name}.json"

    @property
    def state(self) -> Path:
        """The folder of its checkpoint and of its trained network."""
        return self.folder / "checkpoints" / self.name

    @property
    def mark(self) -> Path:
        """What the state in that folder belongs to."""
        return self.state / "identity.json"

    @property
    def posterior(self) -> Path:
        """Its trained network."""
        return self.state / POSTERIOR

    @property
    def start(self) -> Path:
        """The trained network it starts from."""
        return self.folder / "checkpoints" / f"{self.after}-seed{self.seed}" / POSTERIOR

    def load_start(self, network: nn.Module) -> nn.Module:
        """The network it starts from, in the architecture of ``network``."""
        return PointPosterior.load(self.start, network).model

    def fit(
        self,
        network: nn.Module,
        loader: Any,
        rules: Mapping[Any, Recipe | None] | None = None,
        schedule: Any = None,
        **changes: Any,
    ) -> Any:
        """Train a network, by maximum likelihood or with noise where there are rules, and save it for those that start from it.

        The epochs, ``weight_lr`` and ``noise_lr`` are those of the settings but for ``changes``.
        """
        s = {**vars(self.settings), **changes}
        options = {**self.options(s["epochs"], len(loader)), "schedule": schedule}
        posterior: Posterior
        if rules:
            rates = {name: s[name] for name in ("weight_lr", "noise_lr")}
            posterior = fit(to_stochastic(network, rules), loader, **rates, **options)
        else:
            own = {name: options.pop(name) for name in ("epochs", "schedule")}
            posterior = MLE(lr=s["weight_lr"], **own).fit(network, loader, **options)
        posterior.save(self.posterior)
        return posterior

    def identity(self) -> dict[str, Any]:
        """Everything the result depends on: a stored part or checkpoint is used only if all of it is the same.

        Settings may say which of them a variant depends on, by a method ``relevant(variant)``.
        """
        relevant = getattr(self.settings, "relevant", None)
        names = ("study", "variant", "seed", "after", "accelerator", "precision")
        settings = relevant(self.variant) if relevant else asdict(self.settings)
        own = {name: getattr(self, name) for name in names}
        return plain({**own, "settings": settings, "flowbnn": version("flowbnn")})

    def stored(self, network: bool = False, anywhere: bool = False) -> dict[str, Any] | None:
        """The result of an earlier run of this very job, or None.

        Args:
            network: only if its trained network is there too.
            anywhere: whatever the device and the precision it was made with.
        """
        part = read_json(self.part) or {}
        identity, content = part.get("identity"), part.get("content")
        if not isinstance(identity, dict) or not isinstance(content, dict):
            return None
        free = {"accelerator": self.accelerator, "precision": self.precision} if anywhere else {}
        if {**identity, **free} != self.identity() or (network and not self.posterior.exists()):
            return None
        made = {name: identity[name] for name in ("accelerator", "precision", "flowbnn")}
        return {**content, "machine": {**content["machine"], **made}}

    def begin(self) -> None:
        """Make the state folder; a checkpoint that another kind of run left there is deleted."""
        if not self.resume or read_json(self.mark) != self.identity():
            shutil.rmtree(self.state, ignore_errors=True)
            write_json(self.mark, self.identity())

    def options(self, epochs: int, steps_per_epoch: int) -> dict[str, Any]:
        """Options for the fit functions; about ten checkpoints in a run, since each waits for the disk."""
        own = ("resume", "accelerator", "precision", "devices", "num_nodes", "acceleration")
        every = max(1, epochs // 10) * steps_per_epoch
        kept = {"checkpoint": self.state, "checkpoint_every": every}
        run = {"epochs": epochs, "seed": 1 + self.seed, "progress": False}
        return {**run, **kept, **{name: getattr(self, name) for name in own}}

    def brief(self, **more: Any) -> dict[str, Any]:
        """Options of a training of seconds, which needs no checkpoints."""
        names = ("seed", "accelerator", "precision", "acceleration", "progress")
        known = self.options(1, 1)
        return {name: known[name] for name in names} | more


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


def regrouped(parts: Parts, place: Callable[[str, str], tuple[str, str]]) -> Parts:
    """Parts by the rows of a table: ``place`` tells the row and the metric of a variant's value by its name."""
    content: dict[tuple[str, int], dict[str, Any]] = {}
    for (variant, seed), part in parts.content.items():
        for name, value in part["values"].items():
            row, metric = place(variant, name)
            content.setdefault((row, seed), {"values": {}})["values"][metric] = value
    return Parts(parts.seeds, content)


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
