"""Result of a comparison, which prints as a table, has its rows as plain values, and is saved as ``results.json`` for the report."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from typing import Any

import torch

from flowbnn.compare.candidates import BASELINE, CANDIDATES, Candidate
from flowbnn.compare.results import (
    CLASSIFICATION,
    Metric,
    SeedResults,
    best_first,
    figure,
    format_means,
    reliability_figure,
    summary,
    write_json,
)
from flowbnn.errors import pluralize
from flowbnn.options import File
from flowbnn.plots import plot_comparison
from flowbnn.version import __version__

# fmt: off
METRICS = (
    *CLASSIFICATION,
    Metric("rmse", "RMSE", "lower", ".4f", "Root mean squared error of the predictive mean."),
    Metric("coverage_90", "Coverage", "none", ".3f", "Fraction of targets inside their 90 % interval."),
    Metric("concordance", "Concordance", "higher", ".4f",
           "Fraction of comparable pairs of times whose predicted medians have the same order."),
    Metric("auroc", "Novelty AUROC", "higher", ".4f",
           "Probability that a novel input has a higher uncertainty than a test input; 0.5 is chance level. The uncertainty is the "
           "entropy of classes, or the standard deviation of real values."),
    Metric("auroc_mi", "AUROC by MI", "higher", ".4f",
           "Novelty AUROC by the mutual information of label and network; a single network has none."),
    Metric("auroc_energy", "AUROC by energy", "higher", ".4f",
           "Novelty AUROC by the energy, minus the logarithm of the sum of the exponentials of the logits."),
    Metric("training", "Training, ×", "lower", ".2f", "Training time, as a multiple of the training time of the baseline."),
    Metric("prediction", "Prediction, ×", "lower", ".2f", "Prediction time, as a multiple of the prediction time of the baseline."),
    Metric("parameters", "Parameters", "lower", ",.0f", "Number of real numbers stored for prediction."),
    Metric("memory", "Memory, MB", "lower", ".0f", "Peak memory of training and prediction, beyond the memory in use before."),
)
# fmt: on


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
        mean = f"{parts.mean(best.key, 'nll'):.4f} nats, {pluralize(len(parts.seeds), 'seed')}"
        lines = [f"{best.label} has the lowest NLL ({mean})."]
        if len(ranked) == 1 and best.key == BASELINE:
            lines = [
                f"{best.label}, the deterministic baseline, has an NLL of {mean}. Add methods to compare."
            ]
        if len(ranked) > 1:
            lines = [
                f"{lines[0][:-1]}, followed by {format_means(parts, ranked[1:3], 'nll', '.4f')}.",
                self._describe_certainty(),
            ]
        if best.key != BASELINE:
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

    plot = plot_comparison

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
        versions = {"flowbnn": __version__, "torch": torch.__version__}
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
