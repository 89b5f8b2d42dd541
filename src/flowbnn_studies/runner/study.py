"""Base class of studies: a study reproduces one figure or table of the literature.

A study has variants, each of which is trained once for every seed. To add one, subclass :class:`Study`. It needs a class of
settings, the list of variants, and ``train`` for one variant and one seed (a :class:`Job`). ``findings`` makes rows, figures and an
answer from the results of ``train``. Processes, checkpoints, resuming and ``results.json`` are the same for all studies and live in
:mod:`flowbnn_studies.runner.run`.
"""

import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from flowbnn.compare.results import Metric, SeedResults, read_json, to_plain_values, write_json
from flowbnn.convert import to_stochastic
from flowbnn.errors import FlowBNNError, nearest
from flowbnn.fit import fit
from flowbnn.methods import MLE, PointPosterior, Posterior
from flowbnn.noise import Recipe
from flowbnn.version import __version__
from flowbnn_studies.runner.story import Numbers, Story

NETWORK_FILE = "posterior.safetensors"
GPUS = ("cuda", "gpu")  # names of the accelerators for which torch's device is "cuda"
Result = TypeVar("Result")


def time_call(function: Callable[..., Result], *arguments: Any, **options: Any) -> tuple[Result, float]:
    """Calls a function and measures its wall-clock time. Pending work on the GPU is synchronized before and after.

    Args:
        function: Function to call.
        arguments: Positional arguments of the function.
        options: Keyword arguments of the function.

    Returns:
        Result of the function, and the seconds that the call took.
    """

    def now() -> float:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return time.perf_counter()

    started = now()
    result = function(*arguments, **options)
    return result, now() - started


@dataclass(frozen=True)
class Job:
    """One training of a study: a variant with a seed. A worker process can run it on its own.

    Args:
        study: Name of the study.
        variant, seed: Variant to train, and its seed.
        settings: Settings of the study.
        folder: Folder of the study's results.
        start_from: Key of the variant whose trained network is the starting point, or None.
        resume: Continue from the checkpoint of an interrupted run.
        accelerator, precision: Device and precision, as in :class:`~flowbnn.training.TrainingOptions`.
        devices, num_nodes: Number of devices and of machines. The result does not depend on them.
        acceleration: Execution of training steps on a GPU. It affects the time, not the result.
    """

    study: str
    variant: str
    seed: int
    settings: Any
    folder: Path
    start_from: str | None = None
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
        """Device of the computation, by torch's name."""
        return "cuda" if self.accelerator in GPUS else self.accelerator

    @property
    def result_path(self) -> Path:
        """Path of the finished result."""
        return self.folder / "parts" / f"{self.name}.json"

    @property
    def checkpoint_folder(self) -> Path:
        """Folder of the checkpoint and of the trained network."""
        return self.folder / "checkpoints" / self.name

    @property
    def identity_path(self) -> Path:
        """Path of the file that identifies the job of the checkpoint folder."""
        return self.checkpoint_folder / "identity.json"

    @property
    def network_path(self) -> Path:
        """Path of the trained network."""
        return self.checkpoint_folder / NETWORK_FILE

    @property
    def start_path(self) -> Path:
        """Path of the trained network that this job starts from."""
        return self.folder / "checkpoints" / f"{self.start_from}-seed{self.seed}" / NETWORK_FILE

    def load_start_network(self, network: nn.Module) -> nn.Module:
        """Loads the network that this job starts from, in the architecture of ``network``."""
        return PointPosterior.load(self.start_path, network).model

    def fit(
        self,
        network: nn.Module,
        loader: Any,
        rules: Mapping[Any, Recipe | None] | None = None,
        schedule: Any = None,
        **changes: Any,
    ) -> Any:
        """Trains a network and saves it for the jobs that start from it.

        A network without rules is trained by maximum likelihood. The epochs, ``weight_lr`` and ``noise_lr`` are taken from the
        settings unless ``changes`` overrides them.

        Args:
            network: Network to train.
            loader: Batches of the training data.
            rules: Noise of the layers, as in :func:`~flowbnn.to_stochastic`; None for no noise.
            schedule: Learning-rate schedule.
            changes: Settings that differ from those of the study.
        """
        s = {**vars(self.settings), **changes}
        options = {**self.options(s["epochs"], len(loader)), "schedule": schedule}
        posterior: Posterior
        if rules:
            rates = {name: s[name] for name in ("weight_lr", "noise_lr")}
            posterior = fit(to_stochastic(network, rules), loader, **{"validation": None, **rates, **options})
        else:
            method_options = {name: options.pop(name) for name in ("epochs", "schedule")}
            posterior = MLE(lr=s["weight_lr"], **method_options).fit(network, loader, **options)
        posterior.save(self.network_path)
        return posterior

    def identity(self) -> dict[str, Any]:
        """Returns everything that the result depends on. A stored result or checkpoint is used only if all of it is equal.

        Settings may restrict the list by a method ``relevant(variant)``.
        """
        relevant = getattr(self.settings, "relevant", None)
        names = ("study", "variant", "seed", "start_from", "accelerator", "precision")
        settings = relevant(self.variant) if relevant else asdict(self.settings)
        fields = {name: getattr(self, name) for name in names}
        return to_plain_values({**fields, "settings": settings, "flowbnn": __version__})

    def load_result(self, network: bool = False, anywhere: bool = False) -> dict[str, Any] | None:
        """Returns the result of an earlier run of the same job, or None.

        Args:
            network: Require that the trained network is stored as well.
            anywhere: Accept results of any device and precision.
        """
        stored = read_json(self.result_path) or {}
        identity, content = stored.get("identity"), stored.get("content")
        if not isinstance(identity, dict) or not isinstance(content, dict):
            return None
        ignored = {"accelerator": self.accelerator, "precision": self.precision} if anywhere else {}
        if {**identity, **ignored} != self.identity() or (network and not self.network_path.exists()):
            return None
        machine = {name: identity[name] for name in ("accelerator", "precision", "flowbnn")}
        return {**content, "machine": {**content["machine"], **machine}}

    def prepare_folder(self) -> None:
        """Creates the checkpoint folder. A checkpoint of another job is deleted."""
        if not self.resume or read_json(self.identity_path) != self.identity():
            shutil.rmtree(self.checkpoint_folder, ignore_errors=True)
            write_json(self.identity_path, self.identity())

    def options(self, epochs: int, steps_per_epoch: int) -> dict[str, Any]:
        """Returns the options of a fit. There are about ten checkpoints in a run because each waits for the disk.

        Args:
            epochs: Number of epochs.
            steps_per_epoch: Number of steps in an epoch.
        """
        names = ("resume", "accelerator", "precision", "devices", "num_nodes", "acceleration")
        interval = max(1, epochs // 10) * steps_per_epoch
        checkpoints = {"checkpoint": self.checkpoint_folder, "checkpoint_every": interval}
        options = {"epochs": epochs, "seed": 1 + self.seed, "progress": False}
        return {**options, **checkpoints, **{name: getattr(self, name) for name in names}}

    def short_options(self, **changes: Any) -> dict[str, Any]:
        """Returns the options of a training of seconds, which needs no checkpoints.

        Args:
            changes: Options that are added or replaced.
        """
        names = ("seed", "accelerator", "precision", "acceleration", "progress")
        options = self.options(1, 1)
        return {name: options[name] for name in names} | changes


@dataclass(frozen=True)
class Variant:
    """One configuration of a study that is trained and evaluated.

    Args:
        key: Short name, used in file names.
        label: Name in the table and the figures.
        method: Name of the method in kebab case, which determines the colour: ``mle``, ``mc-dropout``, ``node-noise-planar``.
        start_from: Key of the variant whose trained network is the starting point, or None.
        in_table: Show the variant as a row of the table.
        cost: Relative cost of one training. Expensive trainings start first, so that all processes end together.
        seeds: Number of seeds; None for the number of the study.
        exclusive: Run after all other trainings and one at a time, because the training measures time.
    """

    key: str
    label: str
    method: str = ""
    start_from: str | None = None
    in_table: bool = True
    cost: float = 1.0
    seeds: int | None = None
    exclusive: bool = False


@dataclass
class Findings:
    """Conclusions of a study: the answer, the table and the figures.

    A figure may have a field ``published``, a sentence of its caption that trial runs leave out.

    Args:
        answer: Answer to the question of the study. The first line is the short answer.
        metrics: Columns of the table.
        rows: Rows of the table.
        figures: Figures as plain data.
        notes: Remarks on the conditions of the run.
        comparisons: Paired comparisons of rows.
    """

    answer: str
    metrics: Sequence[Metric]
    rows: list[dict[str, Any]]
    figures: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)
    comparisons: list[dict[str, Any]] = field(default_factory=list)


def make_metrics(
    numbers: Mapping[str, tuple[str, str, str, str]], cases: Mapping[Any, str], heads: str = "{0}, {1}"
) -> tuple[Metric, ...]:
    """Returns a column ``key_case`` for every number and every case, with one table for each number.

    Args:
        numbers: Fields of a :class:`Metric` by key: label, better, format, and the definition, in which ``{}`` stands for the case.
        cases: Names of the cases in words, by key.
        heads: Format of the column heads, given the label and the case.

    >>> first, second = make_metrics({"nll": ("NLL", "lower", ".2f", "On {}.")}, {"a": "blobs", "b": "digits"})
    >>> first.key, first.label, first.definition, first.group, second.key
    ('nll_a', 'NLL, blobs', 'On blobs.', 'NLL', 'nll_b')
    """
    return tuple(
        Metric(
            f"{key}_{case}",
            heads.format(label, case_label),
            better,
            format_,
            definition.format(case_label),
            label,
        )
        for key, (label, better, format_, definition) in numbers.items()
        for case, case_label in cases.items()
    )


def parts_by_row(
    seeds: Sequence[int], tables: Iterable[tuple[int, str, Mapping[str, Mapping[str, Any]]]]
) -> SeedResults:
    """Returns parts by the rows of several tables. The numbers are renamed to ``name_case``.

    Args:
        seeds: Seeds of the study.
        tables: Seed, case and table of each; a table has the numbers of each row.

    >>> parts_by_row([0], [(0, "a", {"plain": {"nll": 1.0}}), (0, "b", {"plain": {"nll": 2.0}})]).of("plain")
    [{'values': {'nll_a': 1.0, 'nll_b': 2.0}}]
    """
    content: dict[tuple[str, int], dict[str, Any]] = {}
    for seed, case, table in tables:
        for row, numbers in table.items():
            values = content.setdefault((row, seed), {"values": {}})["values"]
            values |= {f"{name}_{case}": value for name, value in numbers.items()}
    return SeedResults(seeds, content)


def regroup_parts(parts: SeedResults, place: Callable[[str, str], tuple[str, str]]) -> SeedResults:
    """Returns parts by the rows of a table.

    Args:
        parts: Results by variant and seed.
        place: Function that maps a variant and the name of a value to a row and a metric.
    """
    content: dict[tuple[str, int], dict[str, Any]] = {}
    for (variant, seed), part in parts.content.items():
        for name, value in part["values"].items():
            row, metric = place(variant, name)
            content.setdefault((row, seed), {"values": {}})["values"][metric] = value
    return SeedResults(parts.seeds, content)


class Study:
    """Base class of studies. Subclasses define the class attributes and the three methods below.

    ``headline`` names the metrics of the terminal's table (default: accuracy, NLL, ECE). ``quick`` has the settings of a trial run.
    ``accelerator`` is the meaning of "auto": small networks are fastest on a CPU, and "auto" prefers a GPU. ``partial`` allows
    findings while variants are missing. ``keep_networks`` keeps the trained networks after the run.
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
    keep_networks: ClassVar[bool] = False

    def folder(self, settings: Any) -> str:
        """Returns the name of the results folder."""
        return self.name

    def heading(self, settings: Any) -> str:
        """Returns the title of the results."""
        return self.title

    def variants(self, settings: Any) -> tuple[Variant, ...]:
        """Returns the variants in the order of the table. A variant follows the one that it starts from."""
        raise NotImplementedError

    def train(self, job: Job) -> dict[str, Any]:
        """Trains and evaluates one variant with one seed. Returns plain values, with the metrics under ``values``."""
        raise NotImplementedError

    def findings(self, settings: Any, parts: SeedResults) -> Findings:
        """Computes rows, figures and the answer from the numbers alone."""
        raise NotImplementedError

    def story(self, numbers: Numbers) -> Story | None:
        """Returns the question, the answer and the number that open the report, or None for the first line of the answer.

        Args:
            numbers: Numbers of the stored results.
        """
        return None

    def warning_notes(self, settings: Any, parts: SeedResults) -> list[str]:
        """Returns the warnings of the fits as notes."""
        return parts.warnings({variant.key: variant.label for variant in self.variants(settings)})

    def check(self, settings: Any, jobs: Sequence[Job]) -> None:
        """Raises an error if the jobs cannot be run. Called before the results of an earlier run are archived."""

    def rows(
        self,
        settings: Any,
        parts: SeedResults,
        metrics: Sequence[Metric],
        published: Mapping[str, Mapping[str, float]] | None = None,
    ) -> list[dict[str, Any]]:
        """Returns a row for each variant of the table that has numbers.

        Args:
            settings: Settings of the study.
            parts: Results by variant and seed.
            metrics: Columns of the table.
            published: Published values by the key of the variant.
        """
        variants = [
            variant
            for variant in self.variants(settings)
            if variant.in_table and any(part["values"] for part in parts.of(variant.key))
        ]
        published = published or {}
        return [
            parts.row(variant.key, variant.label, metrics, published.get(variant.key), variant.method)
            for variant in variants
        ]

    def row_labels(self, settings: Any) -> dict[str, str]:
        """Returns the labels of the variants of the table, by key."""
        return {variant.key: variant.label for variant in self.variants(settings) if variant.in_table}

    def first_seed_parts(self, settings: Any, parts: SeedResults, name: str) -> dict[str, dict[str, Any]]:
        """Returns the parts of seed 0 that have a field ``name``, by label."""
        first = {label: parts.content.get((key, 0), {}) for key, label in self.row_labels(settings).items()}
        return {label: part for label, part in first.items() if name in part}

    def make_settings(self, *, quick: bool = False, **changes: Any) -> Any:
        """Returns the settings of the study.

        A setting inside a group is named ``group.name``, and the group may be a glob: ``{"flow_*.noise_lr": 0.01}``.

        Args:
            quick: Use the settings of a trial run, whose numbers mean nothing.
            changes: Settings to change, by name.
        """
        settings = self.settings(**(self.quick if quick else {}))
        for name, value in changes.items():
            glob, _, inner = name.partition(".")
            nested: dict[str, Any] = {key: part for key, part in vars(settings).items() if is_dataclass(part)}
            groups = {key: part for key, part in nested.items() if inner and fnmatchcase(key, glob)}
            if inner and not groups:
                raise FlowBNNError(f"there is no setting '{name}'{nearest(glob, nested)}", argument=name)
            updates = {key: replace(part, **{inner: value}) for key, part in groups.items()}
            settings = replace(settings, **(updates or {name: value}))
        return settings


STUDIES: dict[str, Study] = {}


def studies() -> list[Study]:
    """Returns all registered studies."""
    return list(STUDIES.values())


def get_study(name: str) -> Study:
    """Returns a study by its name.

    >>> import flowbnn_studies
    >>> get_study("two-cluster")
    Traceback (most recent call last):
    flowbnn.errors.FlowBNNError: there is no study 'two-cluster'; did you mean 'two-clusters' or 'clusters-2d'?
    """
    if name not in STUDIES:
        raise FlowBNNError(f"there is no study '{name}'{nearest(name, STUDIES)}", argument="study")
    return STUDIES[name]


def register_study(study: Study) -> None:
    """Adds a study. With several processes, every process must import the module that registers it."""
    STUDIES[study.name] = study
