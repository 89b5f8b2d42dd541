"""All methods on a network and data of your own: one table of how good each is and what it costs.

:func:`compare` fits every :class:`Candidate` with every seed and returns a :class:`Comparison`, which prints as a table, has its rows
as plain values, and can be written as ``results.json`` for the report of ``flowbnn_studies``.
"""

import platform
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowbnn.batches import device_of, fingerprint
from flowbnn.compare.candidates import CANDIDATES, PLAIN, Candidate, find_candidates, measure, warm_up
from flowbnn.compare.results import (
    CLASSIFICATION,
    KeptParts,
    Metric,
    Parts,
    best_first,
    figure,
    listed,
    recorded_warnings,
    reliability_figure,
    summary,
    write_json,
)
from flowbnn.errors import FlowBNNError, pluralize, warn
from flowbnn.methods import Method, Temperature
from flowbnn.methods.fitting import FitOptions, LikelihoodName
from flowbnn.options import Count, File, Positive, Seed, checked
from flowbnn.training import track
from flowbnn.training.options import Accelerator, Precision, length_of

# fmt: off
METRICS = (
    *CLASSIFICATION,
    Metric("rmse", "RMSE", "lower", ".4f", "Root mean squared error of the predictive mean."),
    Metric("coverage_90", "Coverage", "none", ".3f", "Share of targets inside their 90 % interval."),
    Metric("auroc", "Novelty AUROC", "higher", ".4f",
           "Probability that a novel input has a higher uncertainty than a test input; 0.5 is guessing."),
    Metric("training", "Training", "lower", ".2f", "Training time over that of the plain network (maximum likelihood)."),
    Metric("prediction", "Prediction", "lower", ".2f", "Time to predict the test set over that of the plain network's single pass."),
    Metric("parameters", "Parameters", "lower", ",.0f", "Real numbers that are kept in order to predict."),
    Metric("memory", "Memory, MB", "lower", ".0f", "Peak memory while training and predicting, beyond what was in use before."),
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
    methods: str | Method | Sequence[str | Method] | Mapping[str, Method] | None = None,
    epochs: Count = 20,
    lr: Positive = 1e-3,
    samples: Count = 128,
    seed: Seed = 0,
    seeds: Count | Sequence[Seed] = 1,
    likelihood: LikelihoodName = "auto",
    num_data: Count | None = None,
    clip_gradient: Positive | None = None,
    accelerator: Accelerator = "auto",
    precision: Precision = "32-true",
    folder: File | None = None,
    progress: bool = True,
) -> "Comparison":
    """Fit methods on a network and data of your own; say which is best and what each costs.

    Args:
        network: any module; every method works on a copy and trains it on from its weights, but for deep ensembles, whose members
            start anew. The plain network (maximum likelihood) is always among the methods.
        train_loader, test_loader: batches of ``(inputs, targets)`` that can be iterated over repeatedly.
        novel: inputs unlike the training data, or a loader of them; adds the novelty AUROC.
        validation: held-out batches for methods that learn from them, as temperature scaling does; without it they take a part of
            the training data.
        methods: keys of :data:`CANDIDATES`, globs of keys, methods, or methods by label; None for all.
        epochs, lr: of methods that are given by key; a method that so few epochs do not suit is left out with a warning.
        samples: networks averaged in a prediction.
        seed, seeds: ``seed``, ``seed + 1``, ... for a number of seeds, or the seeds themselves; the network starts from the given
            weights with each of them.
        likelihood, num_data, clip_gradient, accelerator, precision: of every fit, as in :class:`~flowbnn.methods.FitOptions`.
        folder: keeps every method and seed that is finished; a second call with the same folder goes on from there. What other
            settings, weights or test data made is measured again, with a warning.
        progress: show a bar over the methods, on a terminal.

    >>> from flowbnn.data import TensorLoader, clusters
    >>> loaders = [TensorLoader(*clusters(100, 1.0), batch_size=50) for _ in range(2)]
    >>> result = compare(nn.Linear(2, 2), *loaders, methods=["map", "mc-dropout"], epochs=1, samples=4)
    >>> sorted(row["key"] for row in result.rows)
    ['map', 'mc-dropout', 'mle']
    """
    numbers = list(range(seed, seed + seeds) if isinstance(seeds, int) else dict.fromkeys(seeds))
    once = [
        name
        for name, loader in (("train_loader", train_loader), ("test_loader", test_loader))
        if iter(loader) is loader
    ]
    if once or not numbers or methods in ([], (), {}):
        argument = once[0] if once else "methods" if numbers else "seeds"
        advice = "is read once for every method: give a loader or a list" if once else "must not be empty"
        raise FlowBNNError(f"{argument} {advice}", argument=argument)
    options: dict[str, Any] = {"num_data": num_data, "clip_gradient": clip_gradient}
    options |= {"accelerator": accelerator, "precision": precision}
    usual = FitOptions()
    options = {name: value for name, value in options.items() if value != getattr(usual, name)}
    batches = length_of(train_loader)
    reasons: dict[str, str] = {}
    chosen = _choose(methods, reasons, epochs=epochs, lr=lr, batches=batches)
    weights = sum(parameter.numel() for parameter in network.parameters())
    settings: dict[str, Any] = {"epochs": epochs, "lr": lr, "samples": samples, "seeds": numbers, **options}
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    call = f"flowbnn.compare(network, train_loader, test_loader, methods={methods!r}{given})"
    settings |= {"network": type(network).__name__, "weights": weights, "device": device_of(network).type}
    settings |= {"methods": {one.key: repr(method) for one, method in chosen}}
    parts = Parts(numbers, {})
    own: dict[str, Any] = {
        name: repr(value) for name, value in (*options.items(), ("likelihood", likelihood))
    }
    own |= {"samples": samples, "checksums": _checksums(network, () if folder is None else test_loader)}
    kept = KeptParts(folder, own)
    warm_up(network, train_loader, likelihood)
    fits = [(candidate, method, number) for candidate, method in chosen for number in numbers]
    for candidate, method, number in track(fits, "comparing", progress):
        if methods is None and weights > candidate.most_weights:
            reasons[candidate.key] = (
                f"with {weights:,} weights it would take hours; name it in methods to run it"
            )
            continue
        before = kept.get(candidate.key, number, repr(method))
        if before is not None:
            parts.content[candidate.key, number] = before
            continue
        started = time.monotonic()
        try:
            with recorded_warnings() as caught:
                part = measure(
                    method,
                    network,
                    train_loader,
                    test_loader,
                    novel=novel,
                    samples=samples,
                    likelihood=likelihood,
                    validation=validation if candidate.held_out else None,
                    seed=number,
                    **options,
                )
        except FlowBNNError as error:
            _leave_out(candidate, error, reasons)
            # a seed without numbers leaves the method out of the table
            part, caught = {"values": {"nll": None}}, []
        seconds = time.monotonic() - started
        parts.content[candidate.key, number] = {**part, "warnings": caught, "seconds": seconds}
        if part["values"]["nll"] is not None:
            kept.put(candidate.key, number, repr(method), parts.content[candidate.key, number])
    return Comparison([one for one, _ in chosen], parts, reasons, settings, call)


def _checksums(network: nn.Module, test_loader: Iterable[Any]) -> list[list[int]]:
    """Of the weights and, where the loader gives the same one twice, of the first test batch."""
    first, again = ([fingerprint(list(islice(test_loader, 1)))] for _ in range(2))
    return [fingerprint(network.state_dict()), *(first if first == again else [])]


def _leave_out(candidate: Candidate, error: FlowBNNError, reasons: dict[str, str]) -> None:
    """Warn, once, that a method cannot serve; what the plain network cannot do, no method can."""
    if candidate.key == PLAIN:
        raise error
    if candidate.key not in reasons:
        text = f"{candidate.label} ('{candidate.key}') is left out of the comparison: {error}"
        warn(text, kind="left out", method=candidate.key)
    reasons[candidate.key] = str(error)


def _choose(methods: Any, reasons: dict[str, str], **common: Any) -> list[tuple[Candidate, Method]]:
    """The methods, the plain network first; those that cannot be made go into ``reasons``."""
    if methods is None:
        methods = [one.key for one in CANDIDATES]
    elif isinstance(methods, str | Method):
        methods = [methods]
    chosen: dict[str, tuple[Candidate, Method]] = {}
    labelled = methods.items() if isinstance(methods, Mapping) else ((None, one) for one in methods)
    for label, one in ((None, PLAIN), *labelled):
        if isinstance(one, str):
            for candidate in find_candidates([one]):
                try:
                    chosen[candidate.key] = (candidate, candidate.make(**common))
                except FlowBNNError as error:
                    _leave_out(candidate, error, reasons)
            continue
        key = re.sub(r"[^a-z0-9]+", "-", (label or one.name).lower()).strip("-") or "method"
        while key in chosen:
            key += "-again"
        held_out = isinstance(one, Temperature)
        chosen[key] = Candidate(key, label or repr(one), type(one), vars(one), held_out=held_out), one
    return list(chosen.values())


class Comparison:
    """The result of :func:`compare`: printing it shows the table, ``rows`` has plain values, :meth:`save` writes it for the report.

    Args:
        candidates: the methods.
        parts: what :func:`measure` returned for each of them and each seed.
        reasons: why methods are not in the table, by key.
        settings, call: what was compared, and how to do it again.
    """

    def __init__(
        self,
        candidates: Sequence[Candidate],
        parts: Parts,
        reasons: Mapping[str, str] | None = None,
        settings: dict[str, Any] | None = None,
        call: str = "",
    ) -> None:
        self.parts, self.settings, self.call = _with_ratios(parts), settings or {}, call
        self.ranked = best_first(self.parts, candidates, "nll")
        labels = {one.key: one.label for one in (*CANDIDATES, *candidates)}
        self.notes = [
            f"{labels[key]} is not in the table: {reason.rstrip('.')}."
            for key, reason in (reasons or {}).items()
        ]
        self.notes += parts.warnings({one.key: one.label for one in candidates})
        known = {name for one in self.ranked for name in self.parts.row(one.key, "", METRICS)["values"]}
        self.metrics = [metric for metric in METRICS if metric.key in known]

    @property
    def best(self) -> str:
        """The key of the method with the lowest NLL."""
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
        """The rows of ``results.json``."""
        return [
            self.parts.row(one.key, one.label, self.metrics, method=one.method_name) for one in self.ranked
        ]

    def __str__(self) -> str:
        from rich.console import Console
        from rich.table import Table

        table = Table("", box=None, pad_edge=False)
        for metric in self.metrics:
            table.add_column(metric.label, justify="right")
        for row in self.table_rows():
            cells = [_cell(row["values"].get(metric.key), metric.format) for metric in self.metrics]
            table.add_row(row["label"], *cells)
        text = StringIO()
        Console(file=text, width=1000).print(table)
        return "\n".join([text.getvalue(), self.answer, *(f"- {note}" for note in self.notes)])

    @property
    def answer(self) -> str:
        """Which method is best, and what it costs, in a few sentences."""
        parts, ranked = self.parts, self.ranked
        if not ranked:
            return "No method has numbers yet."
        best, seeds = ranked[0], len(parts.seeds)
        mean = f"{parts.mean(best.key, 'nll'):.4f}, {pluralize(seeds, 'seed')}"
        text = f"By NLL {best.label} is best ({mean})"
        text += (
            f", then {listed(parts, ranked[1:3], 'nll', '.4f')}.\n{self._certainty()}" if ranked[1:] else "."
        )
        text += (
            f"\nIt takes {parts.mean(best.key, 'training'):.1f} times the plain network's training time and "
            f"{parts.mean(best.key, 'prediction'):.0f} times its prediction time."
        )
        calibrated = best_first(parts, ranked, "ece")[:1]
        if calibrated:
            text += f"\nBest calibrated: {listed(parts, calibrated, 'ece', '.4f')} (ECE)."
        novelty = best_first(parts, ranked, "auroc", higher=True)[:1]
        if novelty and parts.mean(novelty[0].key, "auroc") > 0.5:
            text += f"\nBest at detecting novel inputs: {listed(parts, novelty, 'auroc')} (AUROC)."
        elif novelty:
            text += f"\nNo method detects novel inputs (best: {listed(parts, novelty, 'auroc')} AUROC, where 0.5 is guessing)."
        return text

    def _certainty(self) -> str:
        """How far the first place can be trusted."""
        if len(self.parts.seeds) < 2:
            return "One seed has no spread, so the order is not settled; several show it."
        worst = max(self.parts.values(self.best, "nll"))
        near = [one.label for one in self.ranked[1:] if min(self.parts.values(one.key, "nll")) <= worst]
        if not near:
            return "No seed of another method comes near its worst seed."
        return f"Its worst seed is no better than the best seed of {len(near)} others: {'; '.join(near)}."

    def figures(self) -> list[dict[str, Any]]:
        """Quality against cost, and calibration, as plain data for the report."""
        if not self.ranked:
            return []

        def item(one: Candidate, cost: str, loss: str) -> dict[str, Any]:
            x, y = (summary(self.parts.values(one.key, name)) for name in (cost, loss))
            names = {"label": one.label, "method": one.method_name}
            return {**names, "x": x["mean"], "y": y["mean"], "x_std": x["std"], "y_std": y["std"]}

        panels = [
            {
                "title": f"{loss.upper()} against {cost} time",
                "x_label": f"{cost} time, as a multiple of the plain network's",
                "y_label": loss.upper(),
                "items": [item(one, cost, loss) for one in known],
            }
            for loss in ("nll", "ece")
            for cost in ("training", "prediction")
            if (known := best_first(self.parts, self.ranked, loss))
        ]
        caption = (
            "Means over seeds; low and left is better. The line joins the methods that no other beats in both: a method above it or to "
            "the right of it costs more than one on it and is no better."
        )
        drawn = [figure("pareto", "What a better answer costs", caption, {"panels": panels})]
        binned = [one for one in self.ranked if all("bins" in part for part in self.parts.of(one.key))]
        labels = {one.key: one.label for one in binned}
        return drawn + ([reliability_figure("Test set.", labels, self.parts)] if labels else [])

    def save(self, folder: File) -> Path:
        """Write ``folder/results.json``; ``flowbnn report FOLDER`` makes a page of it."""
        threads = torch.get_num_threads()
        versions = {"flowbnn": version("flowbnn"), "torch": torch.__version__}
        results = {
            "schema": 1,
            "study": "compare",
            "title": "Which method should I use?",
            "question": "On this network and this data, which method should one use, and what does it cost?",
            "answer": self.answer,
            "source": "",
            "command": self.call,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(sum(part.get("seconds", 0.0) for part in self.parts.content.values()), 1),
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


def _cell(cell: Mapping[str, Any] | None, form: str) -> str:
    if cell is None or cell["mean"] is None:
        return "-"
    return f"{cell['mean']:{form}}" + ("" if cell["std"] is None else f" ± {cell['std']:{form}}")


def _with_ratios(parts: Parts) -> Parts:
    """The parts with times as multiples of the plain network's of the same seed."""
    content = {}
    for (key, seed), part in parts.content.items():
        values, base = dict(part["values"]), parts.content.get((PLAIN, seed), {}).get("values", {})
        for name, seconds in (("training", "train_seconds"), ("prediction", "predict_seconds")):
            if values.get(seconds) is not None and base.get(seconds):
                values[name] = values[seconds] / base[seconds]
        content[key, seed] = {**part, "values": values}
    return Parts(parts.seeds, content)
