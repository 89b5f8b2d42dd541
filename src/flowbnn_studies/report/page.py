"""Writes results as one self-contained HTML page, as one Markdown file, and as a table for the terminal."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report.canvas import COLOURS, Plot, assign_colours, format_duration, to_png, to_svg
from flowbnn_studies.report.charts import bars, curves, histogram, pareto, reliability
from flowbnn_studies.report.galleries import bands, density, draws, field, images, maps, shares
from flowbnn_studies.report.reading import ResultsSource, load_results
from flowbnn_studies.report.tables import (
    REFERENCES,
    Cell,
    ResultTable,
    best_numbers,
    comparison_table,
    flatten,
    group_definitions,
    has_uneven_seeds,
    headline_metrics,
    make_tables,
)

JsonObject = dict[str, Any]
WIDTH = 110  # characters of a line in the terminal
PLOTS: dict[str, Callable[[JsonObject, Mapping[str, str]], Plot]] = {
    **{plot.__name__: plot for plot in (bands, bars, curves, density, draws, field, histogram, images)},
    **{"map": maps, "pareto": pareto, "reliability": reliability, "shares": shares},
}


def make_plot(figure: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Returns the plot of one checked entry of ``figures``.

    Args:
        figure: Figure as plain data.
        colours: Names of colours by label.
    """
    return PLOTS[figure["kind"]](figure["data"], colours)


def page_colours(studies: Sequence[JsonObject]) -> dict[str, str]:
    """Assigns one colour to each label of a row, the same in all tables and figures of the page. Steps of a quantity have a ramp."""
    colours = assign_colours(row for study in studies for row in study["rows"])
    for study in studies:
        ramp = assign_colours(study["rows"])
        colours |= {label: colour for label, colour in ramp.items() if colour.startswith("step")}
    return colours


def write_report(results: Sequence[ResultsSource], out: Path | str) -> Path:
    """Writes the studies as one self-contained HTML page. The page is complete or not written at all.

    The page loads nothing from the network and runs no script. Figures are inline and follow the reader's colour scheme.

    Args:
        results: Files ``results.json``, folders that hold one, or their contents; one for each study.
        out: HTML file to write (``*.html``); in an existing folder, ``report.html``.

    Returns:
        Path of the page.
    """
    contents = [load_results(source) for source in results]
    if not contents:
        raise FlowBNNError("there are no results to report; run a study first", kind="file")
    colours = page_colours(contents)
    studies: list[JsonObject] = []
    for index, content in enumerate(contents):
        first = 1 + sum(len(study["figures"]) for study in studies)
        studies.append(_study_context(content, index, first, colours))
    loader = PackageLoader("flowbnn_studies", "report")
    style: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=loader, autoescape=True, **style).get_template("report.html.j2")
    html = template.render(studies=studies, colours=COLOURS, references=REFERENCES)
    path = Path(out)
    path = path / "report.html" if path.is_dir() else path
    check_suffix(path, (".html", ".htm"))
    write_file(path, html.encode("utf-8", errors="replace"))
    return path


def check_suffix(path: Path, suffixes: Sequence[str]) -> None:
    """Raises FlowBNNError unless a file has one of some suffixes, so that a page cannot replace ``results.json`` or a posterior."""
    if path.suffix.lower() not in suffixes:
        text = f"'{path}' must end in {' or '.join(suffixes)}; other files are never overwritten"
        raise FlowBNNError(text, kind="file", argument="out")


def write_file(path: Path, content: bytes) -> None:
    """Writes a file atomically: readers never see half a file, and an old file survives a failure."""
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


def save_figures(results: Sequence[ResultsSource], folder: Path | str) -> list[Path]:
    """Writes every figure of the studies as a PNG ``<study>-<number>-<kind>.png``.

    Args:
        results: Results of the studies, as in :func:`write_report`.
        folder: Folder of the images.

    Returns:
        Paths of the images.
    """
    contents = [load_results(source) for source in results]
    colours = page_colours(contents)
    paths: list[Path] = []
    for content in contents:
        for index, figure in enumerate(content["figures"], start=1):
            paths.append(Path(folder) / f"{_slug(content['study'])}-{index}-{figure['kind']}.png")
            write_file(paths[-1], to_png(make_plot(figure, colours), figure["title"]))
    return paths


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "study"


def _study_context(results: JsonObject, index: int, first: int, colours: Mapping[str, str]) -> JsonObject:
    """Returns the values that the template shows of one study. Its figures are numbered from ``first``."""
    tables = [table for table in make_tables(results, colours) if table.rows and table.columns]
    facts = {
        "Seeds": ", ".join(str(seed) for seed in results["seeds"]),
        "Time": format_duration(results["seconds"]) if results.get("seconds") is not None else "",
        "Device": results.get("device") or "",
        "Versions": ", ".join(
            f"{name} {version}" for name, version in (results.get("versions") or {}).items()
        ),
        "Run on": (results.get("created") or "")[:16].replace("T", " "),
    }
    optional = {name: results.get(name) or "" for name in ("source", "command", "trial")}
    return optional | {
        "anchor": f"study-{index + 1}-{_slug(results['study'])}",
        "name": results["study"],
        "title": results["title"],
        "question": results["question"],
        "answer": results["answer"].splitlines() or [""],
        "best": best_numbers(results),
        "facts": {name: value for name, value in facts.items() if value},
        "seeds": results["seeds"],
        "uneven": has_uneven_seeds(results),
        "unfinished": any(row.get("unfinished") for row in results["rows"]),
        "tables": tables,
        "definitions": group_definitions(column for table in tables for column in table.columns),
        "differences": comparison_table(results),
        "settings": flatten(results.get("settings") or {}),
        "notes": results.get("notes") or [],
        "figures": [
            _figure_context(figure, f"s{index}f{place}", first + place, colours)
            for place, figure in enumerate(results["figures"])
        ],
    }


def _figure_context(figure: JsonObject, name: str, number: int, colours: Mapping[str, str]) -> JsonObject:
    """Returns the values that the template shows of one figure."""
    plot = make_plot(figure, colours)
    groups = []
    for index, group in enumerate(plot.groups):
        panels = []
        for place, panel in enumerate(group.panels):
            alt = ". ".join(
                filter(None, (f"Figure {number}, {figure['title']}", group.heading, panel.title, panel.note))
            )
            svg = Markup(to_svg(panel, plot.size, f"{name}-{index}-{place}", alt))
            panels.append({"title": panel.title, "note": panel.note, "svg": svg})
        groups.append({"heading": group.heading, "panels": panels})
    caption = " ".join(filter(None, (figure.get("caption") or figure["title"], figure.get("published"))))
    return {"number": number, "title": figure["title"], "caption": caption, "groups": groups, "plot": plot}


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


def _cell(cell: Cell, best: str = "**", brackets: str = "()") -> str:
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
    first, *details = results["answer"].splitlines() or [""]
    lines = [
        f"## {_escape(results['title'])}",
        "",
        f"*{_escape(results['question'])}*",
        "",
        f"**{_escape(first)}**",
        "",
    ]
    lines += [*(f"- {_escape(line)}" for line in details), ""] if details else []
    tables = make_tables(results)
    for table in tables:
        heads = [_escape(f"{column.label} {column.arrow}".strip()) for column in table.columns]
        rows = [[_escape(row.label), *map(_cell, row.cells)] for row in table.rows]
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
        answer = (content["answer"].splitlines() or [""])[0]
        rows.append([_escape(content["study"]), _escape(answer), best or "–"])
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


def _note(name: str, text: str) -> list[str]:
    """Returns a remark wrapped to the width of the terminal."""
    return wrap(
        f"{name}: {text}", WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False
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
    lines += [f"  {line}" for line in results["answer"].splitlines()]
    if remarks := results.get("notes"):
        number = f"{len(remarks)} notes" if len(remarks) > 1 else "1 note"
        lines += ["", *_note(f"{number} in the results file and the report; the last", remarks[-1])]
    return [*lines, "", *_note("Source", results["source"])] if results.get("source") else lines


def _console_table(table: ResultTable) -> list[str]:
    """Returns the lines of a table with aligned columns."""
    cells = [["", *(column.label for column in table.columns)]]
    cells += [
        [row.label, *(_cell(cell, "", "[]") for cell in row.cells)] for row in table.rows if any(row.cells)
    ]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    aligned = [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    ]
    return ["", f"  {table.group}", *aligned] if table.group else aligned
