"""The headline table of a study as lines for a terminal."""

from textwrap import wrap
from typing import Any

from flowbnn_studies.report.glossary import explain, sources_of
from flowbnn_studies.report.tables import row_name

__all__ = ["console_lines"]

HEADLINE = ("accuracy", "nll", "ece", "auroc", "negative_elbo", "log_likelihood", "kl")
WIDTH = 110


def _cell(value: dict[str, Any] | None, metric: dict[str, Any]) -> str:
    mean, std, published = (value or {}).get("mean"), (value or {}).get("std"), (value or {}).get("published")
    if mean is None:
        return "-" if published is None else f"[{published:g}]"
    text = format(mean, metric["format"])
    if std is not None:
        text += f" ± {std:{metric['format']}}"
    return text if published is None else f"{text} [{published:g}]"


def _note(name: str, text: str) -> list[str]:
    return wrap(
        f"{name}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def console_lines(results: dict[str, Any], every: bool = False) -> list[str]:
    """A study's rows with mean and spread over seeds and what is published in brackets, what the columns mean, and the answer.

    Args:
        results: of one study.
        every: show all metrics; else those that the study names as its ``headline``, or the usual ones.
    """
    headline = results.get("headline") or HEADLINE
    metrics = [metric for metric in results["metrics"] if every or metric["key"] in headline]
    if not every and results.get("headline"):
        metrics.sort(key=lambda metric: list(headline).index(metric["key"]))
    table = [["", *(metric["label"] for metric in metrics)]]
    published = False
    for row in results["rows"]:
        values = [row["values"].get(metric["key"]) for metric in metrics]
        if not any(values):
            continue
        published = published or any((value or {}).get("published") is not None for value in values)
        table.append(
            [row_name(row), *(_cell(value, metric) for value, metric in zip(values, metrics, strict=True))]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    number = len(results["seeds"])
    spread = f"mean ± standard deviation over {number} seeds" if number > 1 else "one seed"
    lines = [
        "",
        f"{results['study']}: {results['title']}",
        f"  {spread}{' [published]' if published else ''}",
    ]
    lines += [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in table
    ]
    lines.append("")
    if results.get("headline"):
        for metric in metrics:
            lines += (
                _note(metric["label"], metric.get("definition") or "") if metric.get("definition") else []
            )
    for term, meaning in explain([metric["label"] for metric in metrics] + [results["answer"]]):
        lines += _note(term, meaning)
    lines += [""] if lines[-1] else []
    lines += [f"  {line}" for line in results["answer"].splitlines()]
    if results.get("notes"):
        number = len(results["notes"])
        told = f"{number} notes go" if number > 1 else "One note goes"
        lines += [
            "",
            *_note(f"{told} with these numbers, in the file and on its page; the last", results["notes"][-1]),
        ]
    words = {name: results.get(name) or "" for name in ("source", "title", "answer")}
    named = sources_of([words])
    if named and words["source"]:
        lines += ["", *_note("Source", words["source"])]
    for source in named:
        link = f", {source.link}" if source.link else ""
        lines += _note(source.name, f"{source.author}, {source.title}{link}.")
    return lines
