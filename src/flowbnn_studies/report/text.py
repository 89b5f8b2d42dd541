"""The results as text: one Markdown file for a repository, and a table for the terminal."""

import os
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report.reading import Source, load_results
from flowbnn_studies.report.style import duration
from flowbnn_studies.report.tables import (
    SOURCES,
    Cell,
    best_numbers,
    compare_table,
    definitions,
    headline_metrics,
    make_tables,
    uneven,
)

Data = dict[str, Any]
WIDTH = 110


def write_file(path: Path, content: bytes) -> None:
    """Write all or nothing: a reader never sees half a file, and an old one survives a failure."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_bytes(content)
        os.replace(scratch, path)
    except OSError as error:
        raise FlowBNNError(f"cannot write {path}: {error.strerror or error}", kind="file") from None
    finally:
        if scratch.is_file():
            scratch.unlink()


def _escape(text: object) -> str:
    """Text as Markdown that shows it as it is: no table cell, emphasis, link or HTML begins in it."""
    return re.sub(r"([\\|*\[\]<`])", r"\\\1", " ".join(str(text).splitlines()))


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:], ""]


def _folded(title: str, lines: list[str]) -> list[str]:
    return (
        [f"<details><summary>{escape(' '.join(title.split()))}</summary>", "", *lines, "", "</details>", ""]
        if lines
        else []
    )


def _cell(cell: Cell, best: str = "**", brackets: str = "()") -> str:
    text = f"{cell.mean} ± {cell.std}" if cell.std else cell.mean
    text = f"{best}{text}{best}" if cell.best else text
    return f"{text} {brackets[0]}{cell.published}{brackets[1]}" if cell.published else text


def _differences(results: Data) -> list[str]:
    compared = compare_table(results)
    if compared is None:
        return []
    heads, rows = compared
    lines = []
    for title, cells in rows:
        texts = []
        for cell in cells:
            mean = "–" if cell is None else f"**{cell.mean}**" if cell.clear else cell.mean
            texts.append(mean if cell is None else f"{mean} ({', '.join(filter(None, (cell.span, cell.p)))})")
        lines.append([_escape(title), *texts])
    return _table(["", *map(_escape, heads)], lines)


def _study(results: Data) -> list[str]:
    first, *others = results["answer"].splitlines() or [""]
    lines = [
        f"## {_escape(results['title'])}",
        "",
        f"*{_escape(results['question'])}*",
        "",
        f"**{_escape(first)}**",
        "",
    ]
    lines += [*(f"- {_escape(line)}" for line in others), ""] if others else []
    tables = make_tables(results)
    for table in tables:
        heads = [_escape(f"{column.label} {column.arrow}".strip()) for column in table.columns]
        rows = [[_escape(row.label), *map(_cell, row.cells)] for row in table.rows]
        body = _table(["", *heads], rows)
        lines += _folded(table.group, body) if table.group else body
    words = [f"Seeds {_escape(', '.join(map(str, results['seeds'])))}"]
    words[0] += ", or as many as a row has" if uneven(results) else ""
    words += ["mean ± standard deviation over seeds"] if any(table.spread for table in tables) else []
    published = any(table.published for table in tables)
    words += (
        [f"in brackets the value of {_escape(results.get('source') or 'the source')}"] if published else []
    )
    lines += ["; ".join(words) + ".", ""]
    title = "Differences, seed by seed (mean, 95 % interval, p of the exact sign-flip test; bold: the interval excludes zero)"
    lines += _folded(title, _differences(results))
    lines += _folded("Notes and shortfalls", [f"- {_escape(note)}" for note in results.get("notes") or []])
    versions = ", ".join(
        _escape(f"{name} {value}") for name, value in (results.get("versions") or {}).items()
    )
    time = duration(results["seconds"]) if results.get("seconds") is not None else ""
    facts = [
        f"`{' '.join(results['command'].replace('`', chr(39)).split())}`" if results.get("command") else "",
        _escape(results.get("device") or ""),
        versions,
        time,
    ]
    return [*lines, "Reproduce: " + "; ".join(fact for fact in facts if fact) + ".", ""]


def write_markdown(results: Sequence[Source], out: Path | str) -> Path:
    """Write the question, answer and tables of each study to one Markdown file, atomically."""
    checked = [load_results(source) for source in results]
    lines = [
        "# Results",
        "",
        "Written by `flowbnn report --markdown` from the stored results. Figures, settings and every seed are in the page that "
        "`flowbnn report` makes of the same folder.",
        "",
    ]
    rows = []
    for one in checked:
        best = "; ".join(
            f"{_escape(label)} {mean} ({_escape(row)})" for label, mean, row in best_numbers(one)
        )
        rows.append([_escape(one["study"]), _escape((one["answer"].splitlines() or [""])[0]), best or "–"])
    lines += _table(["study", "answer", "best means"], rows)
    for one in checked:
        lines += _study(one)
    columns = [column for one in checked for table in make_tables(one) for column in table.columns]
    if meanings := definitions(columns):
        lines += ["## What the columns mean", ""]
        lines += [
            f"- **{'; '.join(_escape(column.label) for column in named)}**: {_escape(text)}"
            for named, text in meanings
        ]
        lines += [""]
    lines += ["## Sources", ""]
    for source in SOURCES:
        title = f"[{source.title}]({source.link})" if source.link else f"*{source.title}*"
        lines.append(f"- **{source.name}**: {source.author}, {title}")
    write_file(Path(out), ("\n".join(lines).rstrip() + "\n").encode())
    return Path(out)


def _note(name: str, text: str) -> list[str]:
    return wrap(
        f"{name}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
    )


def console_lines(results: Data, every: bool = False) -> list[str]:
    """A study's rows with mean and spread over seeds and what is published in brackets, what the columns mean, and the answer.

    Args:
        results: of one study.
        every: show all metrics; else those of :func:`~flowbnn_studies.report.tables.headline_metrics`.
    """
    metrics = results["metrics"] if every else headline_metrics(results)
    if len({metric["label"] for metric in metrics}) == len(metrics):  # labels that tell without their groups
        metrics = [{**metric, "group": ""} for metric in metrics]
    tables = make_tables({**results, "metrics": metrics})
    count = len(results["seeds"])
    spread = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    published = " [published]" if any(table.published for table in tables) else ""
    lines = ["", f"{results['study']}: {results['title']}", f"  {spread}{published}"]
    for table in tables:
        cells = [["", *(column.label for column in table.columns)]]
        cells += [
            [row.label, *(_cell(cell, "", "[]") for cell in row.cells)]
            for row in table.rows
            if any(row.cells)
        ]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", f"  {table.group}"] if table.group else []
        lines += [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in cells
        ]
    told = (
        definitions(column for table in tables for column in table.columns) if results.get("headline") else []
    )
    lines += [""]
    for named, text in told:
        lines += _note("; ".join(column.label for column in named), text)
    lines += [""] if told else []
    lines += [f"  {line}" for line in results["answer"].splitlines()]
    if remarks := results.get("notes"):
        words = f"{len(remarks)} notes go" if len(remarks) > 1 else "One note goes"
        lines += [
            "",
            *_note(f"{words} with these numbers, in the file and on its page; the last", remarks[-1]),
        ]
    return [*lines, "", *_note("Source", results["source"])] if results.get("source") else lines
