"""Writes results as Markdown."""

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from flowbnn_studies.report.canvas import format_duration
from flowbnn_studies.report.page import check_suffix, write_file
from flowbnn_studies.report.reading import ResultsSource, load_results
from flowbnn_studies.report.story import story_of
from flowbnn_studies.report.tables import (
    REFERENCES,
    Cell,
    best_numbers,
    comparison_table,
    group_definitions,
    has_uneven_seeds,
    make_tables,
)

JsonObject = dict[str, Any]


def _escape(text: object) -> str:
    """Escapes text for Markdown, so that it starts no table cell, emphasis, link or HTML."""
    return re.sub(r"([\\|*\[\]<`])", r"\\\1", " ".join(str(text).splitlines()))


def _table(heads: list[str], rows: list[list[str]]) -> list[str]:
    """Returns the lines of a Markdown table."""
    lines = [f"| {' | '.join(cells)} |" for cells in (heads, *rows)]
    return [lines[0], "|---" * len(heads) + "|", *lines[1:], ""]


def _details(title: str, lines: list[str]) -> list[str]:
    """Returns lines that are folded under a title; nothing if there are no lines."""
    return (
        [f"<details><summary>{escape(' '.join(title.split()))}</summary>", "", *lines, "", "</details>", ""]
        if lines
        else []
    )


def format_cell(cell: Cell, best: str = "**", brackets: str = "()") -> str:
    """Formats a cell: mean, standard deviation and published value."""
    text = f"{cell.mean} ± {cell.std}" if cell.std else cell.mean
    text = f"{best}{text}{best}" if cell.best else text
    return f"{text} {brackets[0]}{cell.published}{brackets[1]}" if cell.published else text


def _differences(results: JsonObject) -> list[str]:
    """Returns the paired comparisons as a Markdown table."""
    table = comparison_table(results)
    if table is None:
        return []
    heads, rows = table
    lines = []
    for title, cells in rows:
        texts = []
        for cell in cells:
            mean = "–" if cell is None else f"**{cell.mean}**" if cell.significant else cell.mean
            texts.append(mean if cell is None else f"{mean} ({', '.join(filter(None, (cell.span, cell.p)))})")
        lines.append([_escape(title), *texts])
    return _table(["", *map(_escape, heads)], lines)


def study_markdown(results: JsonObject) -> list[str]:
    """Returns the lines of the Markdown of one study: question, answer, tables, differences, notes and command.

    Args:
        results: Content of ``results.json``.
    """
    story = story_of(results)
    lines = [
        f"## {_escape(results['title'])}",
        "",
        f"*{_escape(story.question)}*",
        "",
        f"**{_escape(story.answer)}**",
        "",
    ]
    answer = [f"- {_escape(line)}" for line in results["answer"].splitlines() if line != story.answer]
    lines += _details(
        "The answer in detail", [f"*{_escape(results['question'])}*", "", *answer] if answer else []
    )
    tables = make_tables(results)
    for table in tables:
        heads = [_escape(f"{column.label} {column.arrow}".strip()) for column in table.columns]
        rows = [[_escape(row.label), *map(format_cell, row.cells)] for row in table.rows]
        body = _table(["", *heads], rows)
        lines += _details(table.group, body) if table.group else body
    words = [f"Seeds {_escape(', '.join(map(str, results['seeds'])))}"]
    words[0] += " (fewer for some rows)" if has_uneven_seeds(results) else ""
    words += ["mean ± standard deviation over seeds"] if any(table.spread for table in tables) else []
    published = any(table.published for table in tables)
    words += (
        [f"published values of {_escape(results.get('source') or 'the source')} in parentheses"]
        if published
        else []
    )
    lines += ["; ".join(words) + ".", ""]
    title = "Paired differences over seeds (mean, 95 % CI, p-value of the exact sign-flip test; bold: the interval excludes zero)"
    lines += _details(title, _differences(results))
    lines += _details("Notes and limitations", [f"- {_escape(note)}" for note in results.get("notes") or []])
    versions = ", ".join(
        _escape(f"{name} {value}") for name, value in (results.get("versions") or {}).items()
    )
    time = format_duration(results["seconds"]) if results.get("seconds") is not None else ""
    facts = [
        f"`{' '.join(results['command'].replace('`', chr(39)).split())}`" if results.get("command") else "",
        _escape(results.get("device") or ""),
        versions,
        time,
    ]
    return [*lines, "Reproduce: " + "; ".join(fact for fact in facts if fact) + ".", ""]


def write_markdown(results: Sequence[ResultsSource], out: Path | str) -> Path:
    """Writes the question, answer and tables of each study to one Markdown file, atomically.

    Args:
        results: Results of the studies, as in :func:`write_report`.
        out: File to write (``*.md``).

    Returns:
        Path of the file.
    """
    contents = [load_results(source) for source in results]
    lines = [
        "# Results",
        "",
        "Written by `flowbnn report --markdown` from the stored results. `flowbnn report` writes a page with figures, settings and the "
        "values of every seed.",
        "",
    ]
    rows = []
    for content in contents:
        best = "; ".join(
            f"{_escape(label)} {mean} ({_escape(row)})" for label, mean, row in best_numbers(content)
        )
        rows.append([_escape(content["study"]), _escape(story_of(content).answer), best or "–"])
    lines += _table(["study", "answer", "best mean values"], rows)
    for content in contents:
        lines += study_markdown(content)
    columns = [column for content in contents for table in make_tables(content) for column in table.columns]
    if definitions := group_definitions(columns):
        lines += ["## Definitions of the columns", ""]
        lines += [
            f"- **{'; '.join(_escape(column.label) for column in group)}**: {_escape(text)}"
            for group, text in definitions
        ]
        lines += [""]
    lines += ["## References", ""]
    for reference in REFERENCES:
        title = f"[{reference.title}]({reference.link})" if reference.link else f"*{reference.title}*"
        lines.append(f"- **{reference.name}**: {reference.author}, {title}")
    check_suffix(Path(out), (".md", ".markdown", ".txt"))
    write_file(Path(out), ("\n".join(lines).rstrip() + "\n").encode())
    return Path(out)
