"""What a comparison gives: its rows, a table, and files."""

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from flowbnn.errors import FlowBNNError
from flowbnn_studies.runner.base import Findings, Metric, Parts
from flowbnn_studies.runner.store import write_json

__all__ = ["Comparison", "text_table"]


@dataclass(frozen=True)
class Comparison:
    """The table of a comparison; printing it shows it, :meth:`save` stores it.

    Args:
        findings: rows sorted by NLL, metrics, figures, the answer.
        parts: what was measured for each method.
        seconds: of all fits and predictions, those that an earlier call has done included.
        settings: of the comparison, as plain values.
        device: the machine, in words.
        command: the call that makes it again.
    """

    findings: Findings
    parts: Parts
    seconds: float
    settings: dict[str, Any]
    device: str
    command: str = "flowbnn.compare(network, train_loader, test_loader)"

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One dictionary for each method, the best NLL first: its ``key``, its ``label`` and its numbers by name."""
        return [
            {
                "key": row["key"],
                "label": row["label"],
                **{name: cell["mean"] for name, cell in row["values"].items()},
            }
            for row in self.findings.rows
        ]

    @property
    def best(self) -> str:
        """The key of the method with the lowest NLL."""
        if not self.findings.rows:
            raise FlowBNNError("no method of this comparison has numbers; its notes say why")
        return self.findings.rows[0]["key"]

    def table(self) -> str:
        """The numbers as text, sorted by NLL."""
        return text_table(self.findings.metrics, self.findings.rows)

    def __str__(self) -> str:
        notes = "".join(f"\n- {note}" for note in self.findings.notes)
        return f"{self.table()}\n\n{self.findings.answer}{notes}"

    def save(self, folder: str | Path) -> Path:
        """Write ``folder/results.json``, of which ``flowbnn report FOLDER`` makes a page with figures."""
        found = self.findings
        results = {
            "schema": 1,
            "study": "compare",
            "title": "Which method should I use?",
            "question": "On this network and this data, which method should one use, and what does it cost?",
            "answer": found.answer,
            "source": "",
            "command": self.command,
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "seconds": round(self.seconds, 1),
            "device": self.device,
            "versions": {
                "flowbnn": version("flowbnn"),
                "torch": torch.__version__,
                "python": platform.python_version(),
            },
            "seeds": self.parts.seeds,
            "settings": self.settings,
            "metrics": [asdict(metric) for metric in found.metrics],
            "rows": found.rows,
            "figures": found.figures,
            "notes": found.notes,
        }
        return write_json(Path(folder) / "results.json", results)


def text_table(metrics: Sequence[Metric], rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows and metrics in columns of one width, with the spread where there are several seeds."""

    def cell(row: Mapping[str, Any], metric: Metric) -> str:
        found = row["values"].get(metric.key)
        if found is None or found["mean"] is None:
            return "-"
        text = format(found["mean"], metric.format)
        return text if found["std"] is None else f"{text} ± {found['std']:{metric.format}}"

    lines = [["", *(metric.label for metric in metrics)]]
    lines += [[row["label"], *(cell(row, metric) for metric in metrics)] for row in rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if column == 0 else text.rjust(width)
            for column, (text, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in lines
    )
