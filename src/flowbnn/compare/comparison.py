"""Comparison of methods on a user's own network and data.

:func:`compare` fits every :class:`Candidate` with every seed. It returns a :class:`Comparison`, which prints as a table, has its
rows as plain values, and can be saved as ``results.json`` for the report of ``flowbnn_studies``.
"""

import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import nn

from flowbnn.batches import check_repeatable, device_of, fingerprint
from flowbnn.compare.candidates import BASELINE, CANDIDATES, Candidate, find_candidates
from flowbnn.compare.measurement import measure, warm_up
from flowbnn.compare.results import (
    CLASSIFICATION,
    Metric,
    ResultCache,
    SeedResults,
    best_first,
    figure,
    format_means,
    record_warnings,
    reliability_figure,
    summary,
    write_json,
)
from flowbnn.errors import FlowBNNError, pluralize, warn
from flowbnn.methods import Method, Temperature
from flowbnn.methods.fitting import FitOptions, LikelihoodName
from flowbnn.options import Count, File, NonEmpty, Positive, Seed, checked
from flowbnn.training import track
from flowbnn.training.options import Accelerator, Precision, length_of

Methods = Annotated[Sequence[str | Method], NonEmpty()]
MethodsByLabel = Annotated[Mapping[str, Method], NonEmpty()]

# fmt: off
METRICS = (
    *CLASSIFICATION,
    Metric("rmse", "RMSE", "lower", ".4f", "Root mean squared error of the predictive mean."),
    Metric("coverage_90", "Coverage", "none", ".3f", "Fraction of targets inside their 90 % interval."),
    Metric("auroc", "Novelty AUROC", "higher", ".4f",
           "Probability that a novel input has a higher uncertainty than a test input; 0.5 is chance level. The uncertainty is the "
           "entropy of classes, or the standard deviation of real values."),
    Metric("auroc_mi", "AUROC by MI", "higher", ".4f",
           "Novelty AUROC by the mutual information of label and network; a single network has none."),
    Metric("auroc_energy", "AUROC by energy", "higher", ".4f",
           "Novelty AUROC by the energy, minus the logarithm of the sum of the exponentials of the logits."),
    Metric("training", "Training", "lower", ".2f", "Training time, as a multiple of the training time of the baseline."),
    Metric("prediction", "Prediction", "lower", ".2f", "Prediction time, as a multiple of the prediction time of the baseline."),
    Metric("parameters", "Parameters", "lower", ",.0f", "Number of real numbers stored for prediction."),
    Metric("memory", "Memory, MB", "lower", ".0f", "Peak memory of training and prediction, beyond the memory in use before."),
)
# fmt: on


@checked
def compare(
    network: nn.Module,
    train_loader: Iterable[Any],
    test_loader: Iterable[Any],
    *,
    novel: Any = None,
    validation: Iterable[Any] | None = None,
    methods: str | Method | Methods | MethodsByLabel | None = None,
    epochs: Count = 20,
    lr: Positive = 1e-3,
    samples: Count = 128,
    seed: Seed = 0,
    seeds: Count | Annotated[Sequence[Seed], NonEmpty()] = 1,
    likelihood: LikelihoodName = "auto",
    num_data: Count | None = None,
    clip_gradient: Positive | None = None,
    accelerator: Accelerator = "auto",
    precision: Precision = "32-true",
    folder: File | None = None,
    progress: bool = True,
) -> "Comparison":
    """Fits several methods to a network and data, and compares their quality and cost.

    Args:
        network: Any module. Every method trains a copy from the given weights, except for deep ensembles, whose members are
            reinitialized. The deterministic baseline (maximum likelihood) is always included.
        train_loader: Training batches of ``(inputs, targets)``. The loader is read repeatedly.
        test_loader: Test batches of ``(inputs, targets)``. The loader is read repeatedly.
        novel: Inputs unlike the training data, or a loader of them. They add the novelty AUROC.
        validation: Held-out batches for methods that need them, such as temperature scaling. By default, these methods hold out some
            training data.
        methods: Keys of :data:`CANDIDATES`, glob patterns of keys, methods, or methods by label. None compares all candidates.
        epochs: Number of epochs of methods that are selected by key. A method that needs more is left out with a warning.
        lr: Learning rate of methods that are selected by key.
        samples: Number of networks averaged in a prediction.
        seed: First seed if ``seeds`` is a number.
        seeds: Number of seeds, or the seeds. Every seed starts from the given weights.
        likelihood: Observation model of every fit, as in :class:`~flowbnn.methods.FitOptions`.
        num_data: Number of training examples.
        clip_gradient: Largest norm of the gradient.
        accelerator: Device type of every fit.
        precision: Precision of every fit.
        folder: Folder that stores finished results. A second call continues from them. Results with other settings, weights or test
            data are computed again with a warning.
        progress: If True, shows a progress bar in a terminal.

    Raises:
        FlowBNNError: If a loader can be read only once, if there are no methods or seeds, or if the baseline fails.

    >>> from flowbnn.data import TensorLoader, clusters
    >>> loaders = [TensorLoader(*clusters(100, 1.0), batch_size=50) for _ in range(2)]
    >>> result = compare(nn.Linear(2, 2), *loaders, methods=["map", "mc-dropout"], epochs=1, samples=4)
    >>> sorted(row["key"] for row in result.rows)
    ['map', 'mc-dropout', 'mle']
    """
    all_seeds = list(range(seed, seed + seeds) if isinstance(seeds, int) else dict.fromkeys(seeds))
    check_repeatable(train_loader, "train_loader")
    check_repeatable(test_loader, "test_loader")
    options: dict[str, Any] = {"num_data": num_data, "clip_gradient": clip_gradient}
    options |= {"accelerator": accelerator, "precision": precision}
    experiment = _Experiment(
        network, train_loader, test_loader, novel, validation, samples, likelihood, _changed_options(options)
    )
    failures: dict[str, str] = {}
    selection = _choose_methods(methods, failures, epochs=epochs, lr=lr, batches=length_of(train_loader))
    if methods is None:
        selection = _drop_slow_methods(selection, network, failures)
    settings = {"epochs": epochs, "lr": lr, "samples": samples, "seeds": all_seeds, **experiment.options}
    cache = ResultCache(folder, experiment.fingerprint(with_data=folder is not None))
    warm_up(network, train_loader, likelihood)
    parts = SeedResults(all_seeds, {})
    runs = [(candidate, method, number) for candidate, method in selection for number in all_seeds]
    for candidate, method, number in track(runs, "comparing", progress):
        parts.content[candidate.key, number] = experiment.run(candidate, method, number, cache, failures)
    return Comparison(
        [candidate for candidate, _ in selection],
        parts,
        failures,
        settings | _describe_network(network, selection),
        _describe_call(methods, settings),
    )


@dataclass(frozen=True)
class _Experiment:
    """The network, the data and the options that all methods share.

    Args:
        network: Network. Every fit copies it.
        train_loader: Training batches.
        test_loader: Test batches.
        novel: Inputs unlike the training data, or None.
        validation: Held-out batches, or None.
        samples: Number of networks averaged in a prediction.
        likelihood: Observation model.
        options: Options of every fit that differ from the defaults.
    """

    network: nn.Module
    train_loader: Iterable[Any]
    test_loader: Iterable[Any]
    novel: Any
    validation: Iterable[Any] | None
    samples: int
    likelihood: Any
    options: dict[str, Any]

    def fingerprint(self, with_data: bool) -> dict[str, Any]:
        """Returns the options and checksums that decide if a stored result can be used.

        Args:
            with_data: If True, includes the first test batch, provided that the loader yields the same one twice.
        """
        values = {**self.options, "likelihood": self.likelihood}
        test_loader = self.test_loader if with_data else ()
        first, second = ([fingerprint(list(islice(test_loader, 1)))] for _ in range(2))
        checksums = [fingerprint(self.network.state_dict()), *(first if first == second else [])]
        return {name: repr(value) for name, value in values.items()} | {
            "samples": self.samples,
            "checksums": checksums,
        }

    def run(
        self, candidate: Candidate, method: Method, seed: int, cache: ResultCache, failures: dict[str, str]
    ) -> dict[str, Any]:
        """Returns the result of a method and a seed, from the cache or by a fit.

        Args:
            candidate: Candidate of the method.
            method: Method to fit.
            seed: Seed of the fit.
            cache: Stored results.
            failures: Reasons why methods failed, by key. A failed fit adds one and has no metrics.
        """
        stored = cache.get(candidate.key, seed, repr(method))
        if stored is not None:
            return stored
        start = time.monotonic()
        try:
            with record_warnings() as warning_records:
                result = measure(
                    method,
                    self.network,
                    self.train_loader,
                    self.test_loader,
                    novel=self.novel,
                    samples=self.samples,
                    likelihood=self.likelihood,
                    validation=self.validation if candidate.held_out else None,
                    seed=seed,
                    **self.options,
                )
        except FlowBNNError as error:
            _record_failure(candidate, error, failures)
            return {"values": {"nll": None}, "warnings": [], "seconds": time.monotonic() - start}
        result |= {"warnings": warning_records, "seconds": time.monotonic() - start}
        cache.put(candidate.key, seed, repr(method), result)
        return result


def _changed_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of a fit that differ from the defaults."""
    defaults = FitOptions()
    return {name: value for name, value in options.items() if value != getattr(defaults, name)}


def _choose_methods(methods: Any, failures: dict[str, str], **common: Any) -> list[tuple[Candidate, Method]]:
    """Returns the methods, the baseline first.

    Args:
        methods: Argument of :func:`compare`.
        failures: Reasons why methods failed, by key. A method whose settings are invalid adds one.
        common: Settings of methods that are selected by key.
    """
    if methods is None:
        methods = [candidate.key for candidate in CANDIDATES]
    elif isinstance(methods, str | Method):
        methods = [methods]
    selection: dict[str, tuple[Candidate, Method]] = {}
    labels_and_methods = (
        methods.items() if isinstance(methods, Mapping) else ((None, method) for method in methods)
    )
    for label, method in ((None, BASELINE), *labels_and_methods):
        if isinstance(method, str):
            for candidate in find_candidates([method]):
                try:
                    selection[candidate.key] = (candidate, candidate.make(**common))
                except FlowBNNError as error:
                    _record_failure(candidate, error, failures)
            continue
        key = re.sub(r"[^a-z0-9]+", "-", (label or method.name).lower()).strip("-") or "method"
        while key in selection:
            key += "-again"
        held_out = isinstance(method, Temperature)
        candidate = Candidate(key, label or repr(method), type(method), vars(method), held_out=held_out)
        selection[key] = candidate, method
    return list(selection.values())


def _drop_slow_methods(
    selection: Sequence[tuple[Candidate, Method]], network: nn.Module, failures: dict[str, str]
) -> list[tuple[Candidate, Method]]:
    """Returns the methods that do not take hours for a network of this size. Others are added to ``failures``."""
    weights = sum(parameter.numel() for parameter in network.parameters())
    for candidate, _ in selection:
        if weights > candidate.max_weights:
            failures[candidate.key] = f"too slow for {weights:,} weights; name it explicitly"
    return [(candidate, method) for candidate, method in selection if weights <= candidate.max_weights]


def _record_failure(candidate: Candidate, error: FlowBNNError, failures: dict[str, str]) -> None:
    """Adds the reason why a method failed, and warns once. An error of the baseline is raised, because no method can avoid it."""
    if candidate.key == BASELINE:
        raise error
    if candidate.key not in failures:
        text = f"{candidate.label} ('{candidate.key}') is left out: {error}"
        warn(text, kind="left out", method=candidate.key)
    failures[candidate.key] = str(error)


def _describe_network(network: nn.Module, selection: Sequence[tuple[Candidate, Method]]) -> dict[str, Any]:
    """Returns the network and the methods as plain settings."""
    return {
        "network": type(network).__name__,
        "weights": sum(parameter.numel() for parameter in network.parameters()),
        "device": device_of(network).type,
        "methods": {candidate.key: repr(method) for candidate, method in selection},
    }


def _describe_call(methods: Any, settings: Mapping[str, Any]) -> str:
    """Returns a call of :func:`compare` as text."""
    arguments = "".join(f", {name}={value!r}" for name, value in settings.items())
    return f"flowbnn.compare(network, train_loader, test_loader, methods={methods!r}{arguments})"


class Comparison:
    """Result of :func:`compare`. Printing it shows a table, ``rows`` has plain values, and :meth:`save` writes it for the report.

    Args:
        candidates: Compared methods.
        parts: Results of :func:`~flowbnn.compare.measurement.measure` by method and seed.
        failures: Reasons why methods are not in the table, by key.
        settings: Settings of the comparison.
        call: Call that repeats the comparison.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        parts: SeedResults,
        failures: Mapping[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        call: str = "",
    ) -> None:
        self.parts, self.settings, self.call = _add_relative_times(parts), settings or {}, call
        self.ranked = best_first(self.parts, candidates, "nll")
        labels = {candidate.key: candidate.label for candidate in (*CANDIDATES, *candidates)}
        self.notes = [
            f"{labels[key]} is left out: {reason.rstrip('.')}." for key, reason in (failures or {}).items()
        ]
        self.notes += parts.warnings({candidate.key: candidate.label for candidate in candidates})
        rows = [self.parts.row(candidate.key, "", METRICS)["values"] for candidate in self.ranked]
        measured = {name for row in rows for name in row}
        self.metrics = [metric for metric in METRICS if metric.key in measured]

    @property
    def best(self) -> str:
        """Key of the method with the lowest negative log-likelihood (NLL)."""
        return self.ranked[0].key

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each method, the lowest NLL first: ``key``, ``label``, ``method``, and the mean of every metric."""
        return [
            {name: row[name] for name in ("key", "label", "method")}
            | {name: cell["mean"] for name, cell in row["values"].items()}
            for row in self.table_rows()
        ]

    def table_rows(self) -> list[dict[str, Any]]:
        """Returns the rows of ``results.json``."""
        return [
            self.parts.row(candidate.key, candidate.label, self.metrics, method=candidate.method_name)
            for candidate in self.ranked
        ]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("", box=None, pad_edge=False)
        for metric in self.metrics:
            table.add_column(metric.label, justify="right")
        for row in self.table_rows():
            cells = [_format_cell(row["values"].get(metric.key), metric.format) for metric in self.metrics]
            table.add_row(row["label"], *cells)
        text = StringIO()
        Console(file=text, width=1000).print(table)
        return "\n".join([text.getvalue(), self.answer, *(f"- {note}" for note in self.notes)])

    @property
    def answer(self) -> str:
        """Best method and its cost, in a few sentences."""
        parts, ranked = self.parts, self.ranked
        if not ranked:
            return "No results yet."
        best = ranked[0]
        mean = f"{parts.mean(best.key, 'nll'):.4f}, {pluralize(len(parts.seeds), 'seed')}"
        lines = [f"{best.label} has the lowest NLL ({mean})."]
        if len(ranked) > 1:
            lines = [
                f"{lines[0][:-1]}, followed by {format_means(parts, ranked[1:3], 'nll', '.4f')}.",
                self._describe_certainty(),
            ]
        lines.append(
            f"It takes {parts.mean(best.key, 'training'):.1f} times the training time and "
            f"{parts.mean(best.key, 'prediction'):.0f} times the prediction time of the deterministic baseline."
        )
        if calibrated := best_first(parts, ranked, "ece")[:1]:
            lines.append(f"Best calibrated: {format_means(parts, calibrated, 'ece', '.4f')} (ECE).")
        if novelty := best_first(parts, ranked, "auroc", higher=True)[:1]:
            remark = "" if parts.mean(novelty[0].key, "auroc") > 0.5 else ", below chance level"
            lines.append(f"Best novelty detection: {format_means(parts, novelty, 'auroc')} (AUROC{remark}).")
        return "\n".join(lines)

    def _describe_certainty(self) -> str:
        """Returns a sentence on the reliability of the first place."""
        if len(self.parts.seeds) < 2:
            return "The ranking is based on one seed and may change; use several seeds."
        worst = max(self.parts.values(self.best, "nll"))
        overlapping_labels = [
            candidate.label
            for candidate in self.ranked[1:]
            if min(self.parts.values(candidate.key, "nll")) <= worst
        ]
        if not overlapping_labels:
            return "All its seeds are better than all seeds of the other methods."
        return f"Its worst seed is no better than the best seed of {len(overlapping_labels)} others: {'; '.join(overlapping_labels)}."

    def figures(self) -> list[dict[str, Any]]:
        """Returns figures of quality against cost and of calibration, as plain data for the report."""
        if not self.ranked:
            return []
        panels = [
            {
                "title": f"{loss.upper()} against {cost} time",
                "x_label": f"{cost} time (baseline = 1)",
                "y_label": loss.upper(),
                "items": [self._figure_item(candidate, cost, loss) for candidate in measured],
            }
            for loss in ("nll", "ece")
            for cost in ("training", "prediction")
            if (measured := best_first(self.parts, self.ranked, loss))
        ]
        caption = "Means over seeds; lower left is better. The line joins the Pareto-optimal methods."
        figures = [figure("pareto", "Quality against cost", caption, {"panels": panels})]
        binned = [
            candidate
            for candidate in self.ranked
            if all("bins" in result for result in self.parts.of(candidate.key))
        ]
        if binned:
            labels = {candidate.key: candidate.label for candidate in binned}
            figures.append(reliability_figure("Test set.", labels, self.parts))
        return figures

    def _figure_item(self, candidate: Candidate, cost: str, loss: str) -> dict[str, Any]:
        """Returns a point of a figure of quality against cost."""
        x, y = (summary(self.parts.values(candidate.key, name)) for name in (cost, loss))
        names = {"label": candidate.label, "method": candidate.method_name}
        return {**names, "x": x["mean"], "y": y["mean"], "x_std": x["std"], "y_std": y["std"]}

    def save(self, folder: File) -> Path:
        """Writes ``folder/results.json``. The command ``flowbnn report FOLDER`` makes a page from it.

        Args:
            folder: Folder of the file.

        Returns:
            The path of the file.
        """
        threads = torch.get_num_threads()
        versions = {"flowbnn": version("flowbnn"), "torch": torch.__version__}
        results = {
            "schema": 1,
            "study": "compare",
            "title": "Which method should I use?",
            "question": "Which method is best for this network and these data, and what does it cost?",
            "answer": self.answer,
            "source": "",
            "command": self.call,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(sum(result.get("seconds", 0.0) for result in self.parts.content.values()), 1),
            "device": f"{self.settings.get('device', 'cpu')}, {pluralize(threads, 'thread')}",
            "versions": {**versions, "python": platform.python_version()},
            "seeds": self.parts.seeds,
            "settings": self.settings,
            "metrics": [asdict(metric) for metric in self.metrics],
            "rows": self.table_rows(),
            "figures": self.figures(),
            "notes": self.notes,
        }
        return write_json(Path(folder) / "results.json", results)


def _format_cell(cell: Mapping[str, Any] | None, form: str) -> str:
    """Returns a cell of the table as text: mean and standard deviation, or a dash."""
    if cell is None or cell["mean"] is None:
        return "-"
    return f"{cell['mean']:{form}}" + ("" if cell["std"] is None else f" ± {cell['std']:{form}}")


def _add_relative_times(parts: SeedResults) -> SeedResults:
    """Returns results with times as multiples of the times of the baseline with the same seed."""
    content = {}
    for (key, seed), result in parts.content.items():
        values = dict(result["values"])
        baseline = parts.content.get((BASELINE, seed), {}).get("values", {})
        for name, seconds in (("training", "train_seconds"), ("prediction", "predict_seconds")):
            if values.get(seconds) is not None and baseline.get(seconds):
                values[name] = values[seconds] / baseline[seconds]
        content[key, seed] = {**result, "values": values}
    return SeedResults(parts.seeds, content)
