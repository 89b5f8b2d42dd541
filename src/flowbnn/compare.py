"""All methods on a network and data of your own: one table of how good each is and what it costs.

:func:`compare` fits every :class:`~flowbnn.candidates.Candidate` with every seed and returns a :class:`Comparison`, which prints as a
table, has its rows as plain values, and can be written as ``results.json`` for the report of ``flowbnn_studies``.
"""

import math
import platform
import re
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flowbnn.batches import device_of
from flowbnn.candidates import (
    CANDIDATES,
    PLAIN,
    Candidate,
    best_first,
    find_candidates,
    listed,
    measure,
    warm_up,
)
from flowbnn.errors import FlowBNNError, FlowBNNWarning
from flowbnn.methods import Method
from flowbnn.methods.base import LikelihoodName
from flowbnn.options import Count, File, Positive, Seed, checked
from flowbnn.results import (
    CLASSIFICATION,
    Metric,
    Parts,
    digest,
    figure,
    fingerprint,
    plain,
    read_json,
    recorded_warnings,
    reliability_figure,
    summary,
    write_json,
)
from flowbnn.training import check_writable, track

__all__ = ["Comparison", "compare"]

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
    seeds: Count | Sequence[int] = 1,
    likelihood: LikelihoodName = "auto",
    folder: File | None = None,
    resume: bool = False,
    progress: bool = True,
    **options: Any,
) -> "Comparison":
    """Fit methods on a network and data of your own; say which is best and what each costs.

    Args:
        network: any module; every method works on a copy. The plain network (maximum likelihood) is always among the methods.
        train_loader, test_loader: batches of ``(inputs, targets)`` that can be iterated over repeatedly.
        novel: inputs unlike the training data, or a loader of them; adds the novelty AUROC.
        validation: held-out batches for methods that learn from them, as temperature scaling does; without it they take a part of
            the training data.
        methods: keys of :data:`CANDIDATES`, globs of keys, methods, or methods by label; None for all.
        epochs, lr: of methods that are given by key; a method that so few epochs do not suit is left out with a warning.
        samples: networks averaged in a prediction.
        seed, seeds: ``seed``, ``seed + 1``, ... for a number of seeds, or the seeds themselves; the network starts from the given
            weights with each of them.
        likelihood: as in :meth:`~flowbnn.methods.Method.fit`.
        folder: write each method's numbers there as soon as it is done, and ``results.json``.
        resume: reuse what an earlier call finished in ``folder`` with the same network, weights and data. Of the training data,
            which may be augmented at random, only the targets are compared.
        progress: show a bar over the methods, on a terminal.
        options: of every fit, such as ``accelerator``.

    >>> from flowbnn.data import TensorLoader, clusters
    >>> loaders = [TensorLoader(*clusters(100, 1.0), batch_size=50) for _ in range(2)]
    >>> result = compare(nn.Linear(2, 2), *loaders, methods=["map", "mc-dropout"], epochs=1, samples=4)
    >>> sorted(row["key"] for row in result.rows)
    ['map', 'mc-dropout', 'mle']
    """
    for name, loader in (("train_loader", train_loader), ("test_loader", test_loader)):
        if iter(loader) is loader:
            raise FlowBNNError(
                f"{name} is read once for every method: give a loader or a list", argument=name
            )
    if folder is not None:
        check_writable(Path(folder) / "results.json")
    elif resume:
        raise FlowBNNError("resume needs the folder that an earlier call wrote to", argument="resume")
    numbers = [seed + more for more in range(seeds)] if isinstance(seeds, int) else list(seeds)
    if not numbers or len(set(numbers)) < len(numbers) or min(numbers) < 0:
        raise FlowBNNError(f"seeds must be different integers of at least 0, got {seeds}", argument="seeds")
    batches = len(train_loader) if hasattr(train_loader, "__len__") else None  # type: ignore[arg-type]
    chosen, reasons = _choose(methods, epochs=epochs, lr=lr, batches=batches)
    weights = sum(parameter.numel() for parameter in network.parameters())
    data: dict[str, Any] = {}
    identity: dict[str, Any] = {"samples": samples, "flowbnn": version("flowbnn")}
    if folder is not None:
        tensors = (*network.named_parameters(), *network.named_buffers())
        identity["weights"] = {name: digest(value).hex()[:16] for name, value in tensors}
        data = {"train": fingerprint(train_loader, inputs=False), "test": fingerprint(test_loader)}
        data |= {"novel": fingerprint(novel), "validation": fingerprint(validation)}
    content: dict[tuple[str, int], dict[str, Any]] = {}
    stale: dict[str, list[str]] = {}
    warm = False
    fits = [(candidate, method, number) for candidate, method in chosen for number in numbers]
    for candidate, method, number in track(fits, "comparing", progress):
        seen = {**data, "validation": data.get("validation") if candidate.held_out else None}
        own = plain({**identity, "seed": number, "method": repr(method), "data": seen})
        path = Path(folder or ".") / "parts" / f"{candidate.key}-seed{number}.json"
        stored = read_json(path) if resume else None
        if stored is not None and stored.get("identity") == own:
            content[candidate.key, number] = stored["content"]
            continue
        if stored is not None:
            differs = [name for name in own if stored.get("identity", {}).get(name) != own[name]]
            stale.setdefault(candidate.key, []).extend(differs)
        part: dict[str, Any] = {"values": {}}
        started = time.monotonic()
        if methods is None and weights > (candidate.most_weights or math.inf):
            part["refused"] = f"with {weights:,} weights it would take hours; name it in methods to run it"
        else:
            if not warm:
                warm_up(network, train_loader, likelihood)
                warm = True
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
                part["warnings"] = caught
            except FlowBNNError as error:
                _leave_out(candidate, error, reasons)
                part["refused"] = str(error)
        part["seconds"] = time.monotonic() - started
        content[candidate.key, number] = part
        if folder is not None:
            write_json(path, {"identity": own, "content": part})
    if stale:
        differing = ", ".join(dict.fromkeys(name for names in stale.values() for name in names))
        warnings.warn(
            FlowBNNWarning(
                f"what {folder} has of {', '.join(stale)} was made with other settings (different: {differing}), so it was done anew",
                kind="stale",
                different=differing.split(", "),
            ),
            stacklevel=3,
        )
    for (key, _), part in content.items():
        if part.get("refused"):
            reasons.setdefault(key, part["refused"])
    settings: dict[str, Any] = {"epochs": epochs, "lr": lr, "samples": samples, "seeds": numbers, **options}
    given = "".join(f", {name}={value!r}" for name, value in settings.items())
    call = f"flowbnn.compare(network, train_loader, test_loader, methods={methods!r}{given})"
    settings |= {"network": type(network).__name__, "weights": weights, "device": device_of(network).type}
    settings |= {"methods": {one.key: repr(method) for one, method in chosen}}
    result = Comparison([one for one, _ in chosen], Parts(numbers, content), reasons, settings, call)
    if folder is not None:
        result.save(folder)
    return result


def _leave_out(candidate: Candidate, error: FlowBNNError, reasons: dict[str, str]) -> None:
    """Warn, once, that a method cannot serve; what the plain network cannot do, no method can."""
    if candidate.key == PLAIN:
        raise FlowBNNError(f"{candidate.label} ('{PLAIN}'): {error}", **error.fields) from error
    if candidate.key not in reasons:
        text = f"{candidate.label} ('{candidate.key}') is left out of the comparison: {error}"
        warnings.warn(FlowBNNWarning(text, kind="left out", method=candidate.key), stacklevel=4)
    reasons[candidate.key] = str(error)


def _choose(methods: Any, **common: Any) -> tuple[list[tuple[Candidate, Method]], dict[str, str]]:
    """The methods, the plain network first, and why others are left out."""
    if methods is None:
        methods = [one.key for one in CANDIDATES]
    elif isinstance(methods, str | Method):
        methods = [methods]
    if not methods:
        raise FlowBNNError(
            "there is no method to compare: name some, or leave methods out for all", argument="methods"
        )
    chosen: dict[str, tuple[Candidate, Method]] = {}
    reasons: dict[str, str] = {}
    labelled = methods.items() if isinstance(methods, Mapping) else ((None, one) for one in methods)
    for label, one in ((None, PLAIN), *labelled):
        if isinstance(one, str):
            for candidate in find_candidates([one]):
                try:
                    chosen[candidate.key] = (candidate, candidate.make(**common))
                except FlowBNNError as error:
                    _leave_out(candidate, error, reasons)
        elif isinstance(one, Method):
            like = next((other for other in CANDIDATES if isinstance(one, other.method)), CANDIDATES[0])
            key = re.sub(r"[^a-z0-9]+", "-", (label or one.name).lower()).strip("-") or "method"
            while key in chosen:
                key += "-again"
            name = label or repr(one)
            candidate = Candidate(key, name, type(one), like.family, vars(one), held_out=like.held_out)
            chosen[key] = (candidate, one)
        else:
            raise FlowBNNError(
                f"methods are keys or methods, such as 'map' or fb.MAP(), got {one!r}", argument="methods"
            )
    return list(chosen.values()), reasons


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
        labels = {one.key: one.label for one in CANDIDATES} | {one.key: one.label for one in candidates}
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

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("", box=None, pad_edge=False)
        for metric in self.metrics:
            table.add_column(metric.label, justify="right")
        for row in self.table_rows():
            cells = [_cell(row["values"].get(metric.key), metric.format) for metric in self.metrics]
            table.add_row(row["label"], *cells)
        return table

    def __str__(self) -> str:
        from rich.console import Console

        text = StringIO()
        Console(file=text, width=1000).print(self)
        return "\n".join([text.getvalue(), self.answer, *(f"- {note}" for note in self.notes)])

    @property
    def answer(self) -> str:
        """Which method is best, and what it costs, in a few sentences."""
        parts, ranked = self.parts, self.ranked
        if not ranked:
            return "No method has numbers yet."
        best, seeds = ranked[0], len(parts.seeds)
        mean = f"{parts.mean(best.key, 'nll'):.4f}, {seeds} seed{'s' if seeds > 1 else ''}"
        text = f"By NLL {best.label} is best ({mean})"
        text += (
            f", then {listed(parts, ranked[1:3], 'nll', '.4f')}. {self._certainty()}" if ranked[1:] else "."
        )
        text += (
            f" It takes {parts.mean(best.key, 'training'):.1f} times the plain network's training time and "
            f"{parts.mean(best.key, 'prediction'):.0f} times its prediction time. No method is better in both training time and NLL "
            f"than, from cheap to expensive: {listed(parts, self.pareto('training', 'nll'), 'training', '.1f')} times."
        )
        calibrated = best_first(parts, ranked, "ece")
        if calibrated:
            text += f" Best calibrated: {listed(parts, calibrated[:1], 'ece', '.4f')} (ECE)."
        novelty = best_first(parts, ranked, "auroc", higher=True)
        if novelty and parts.mean(novelty[0].key, "auroc") > 0.5:
            text += f" Best at detecting novel inputs: {listed(parts, novelty[:1], 'auroc')} (AUROC)."
        elif novelty:
            text += f" No method detects novel inputs (best: {listed(parts, novelty[:1], 'auroc')} AUROC, where 0.5 is guessing)."
        return text

    def _certainty(self) -> str:
        """How far the first place can be trusted."""
        if len(self.parts.seeds) < 2:
            return "One seed cannot show that a lead is more than chance; several can."
        worst = max(self.parts.values(self.best, "nll"))
        near = [one.label for one in self.ranked[1:] if min(self.parts.values(one.key, "nll")) <= worst]
        if not near:
            return "No seed of another method comes near its worst seed."
        return f"Its worst seed is no better than the best seed of {len(near)} others: {'; '.join(near)}."

    def pareto(self, cost: str, loss: str) -> list[Candidate]:
        """The methods that no other beats in both, in the order of their cost."""

        known = best_first(self.parts, best_first(self.parts, self.ranked, loss), cost)
        at = {one.key: (self.parts.mean(one.key, cost), self.parts.mean(one.key, loss)) for one in known}

        def beaten(x: float, y: float) -> bool:
            return any(a <= x and b <= y and (a, b) != (x, y) for a, b in at.values())

        return [one for one in known if not beaten(*at[one.key])]

    def figures(self) -> list[dict[str, Any]]:
        """Quality against cost, and calibration, as plain data for the report."""
        if not self.ranked:
            return []

        def item(one: Candidate, **axes: str) -> dict[str, Any]:
            cells = {axis: summary(self.parts.values(one.key, name)) for axis, name in axes.items()}
            means = {axis: cell["mean"] for axis, cell in cells.items()}
            return {
                "label": one.label,
                "method": one.method_name,
                **means,
                **{f"{axis}_std": cell["std"] for axis, cell in cells.items()},
            }

        panels = [
            {
                "title": f"{loss.upper()} against {cost} time",
                "x_label": f"{cost} time, as a multiple of the plain network's",
                "y_label": loss.upper(),
                "items": [item(one, x=cost, y=loss) for one in known],
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
        binned = {
            one.key: one.label
            for one in self.ranked
            if all("bins" in part for part in self.parts.of(one.key))
        }
        return drawn + ([reliability_figure("Test set.", binned, self.parts)] if binned else [])

    def save(self, folder: File) -> Path:
        """Write ``folder/results.json``; ``flowbnn report FOLDER`` makes a page of it."""
        threads = torch.get_num_threads()
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
            "device": f"{self.settings.get('device', 'cpu')}, {threads} thread{'s' if threads > 1 else ''}",
            "versions": {
                "flowbnn": version("flowbnn"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
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
