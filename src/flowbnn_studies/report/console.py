"""Shows results of a study on the terminal."""

from textwrap import wrap
from typing import Any

from flowbnn_studies.report.markdown import format_cell
from flowbnn_studies.report.story import story_of
from flowbnn_studies.report.tables import ResultTable, group_definitions, headline_metrics, make_tables

JsonObject = dict[str, Any]
WIDTH = 110  # characters of a line in the terminal


def _note(name: str, text: str) -> list[str]:
    """Returns a remark wrapped to the width of the terminal."""
    return wrap(
        f"{name}{'' if name.endswith('?') else ':'} {text}",
        WIDTH,
        initial_indent="  ",
        subsequent_indent="    ",
        break_on_hyphens=False,
    )


def console_lines(results: JsonObject, all_metrics: bool = False) -> list[str]:
    """Returns the lines that the terminal shows of a study: the table, the definitions of the columns, and the answer.

    Args:
        results: Results of one study.
        all_metrics: Show all metrics instead of :func:`~flowbnn_studies.report.tables.headline_metrics`.
    """
    metrics = results["metrics"] if all_metrics else headline_metrics(results)
    if len({metric["label"] for metric in metrics}) == len(metrics):  # labels are unique without their groups
        metrics = [{**metric, "group": ""} for metric in metrics]
    tables = make_tables({**results, "metrics": metrics})
    count = len(results["seeds"])
    spread = f"mean ± standard deviation over {count} seeds" if count > 1 else "one seed"
    published = " [published]" if any(table.published for table in tables) else ""
    lines = ["", f"{results['study']}: {results['title']}", f"  {spread}{published}"]
    for table in tables:
        lines += _console_table(table)
    definitions = group_definitions(column for table in tables for column in table.columns)
    lines += [""]
    if results.get("headline") and definitions:
        for group, text in definitions:
            lines += _note("; ".join(column.label for column in group), text)
        lines += [""]
    story = story_of(results)
    lines += [*_note(story.question, story.answer), ""] if story.answer not in results["answer"] else []
    lines += [f"  {line}" for line in results["answer"].splitlines()]
    if remarks := results.get("notes"):
        number = f"{len(remarks)} notes" if len(remarks) > 1 else "1 note"
        lines += ["", *_note(f"{number} in the results file and the report; the last", remarks[-1])]
    return [*lines, "", *_note("Source", results["source"])] if results.get("source") else lines


def _console_table(table: ResultTable) -> list[str]:
    """Returns the lines of a table with aligned columns."""
    cells = [["", *(column.label for column in table.columns)]]
    cells += [
        [row.label, *(format_cell(cell, "", "[]") for cell in row.cells)]
        for row in table.rows
        if any(row.cells)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return ["", f"  {table.group}", *aligned] if table.group else aligned
