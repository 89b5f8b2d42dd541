"""The results as one HTML page that needs nothing but itself, as one Markdown file, and as a table for the terminal."""

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
    best_numbers,
    comparison_table,
    flatten,
    group_definitions,
    has_uneven_seeds,
    headline_metrics,
    make_tables,
)

Data = dict[str, Any]
WIDTH = 110  # of the terminal
PLOTS: dict[str, Callable[[Data, Mapping[str, str]], Plot]] = {
    **{plot.__name__: plot for plot in (bands, bars, curves, density, draws, field, histogram, images)},
    **{"map": maps, "pareto": pareto, "reliability": reliability, "shares": shares},
}


def make_plot(figure: Data, colours: Mapping[str, str]) -> Plot:
    """The plot of one checked entry of ``figures``, in the colours of its labels."""
    return PLOTS[figure["kind"]](figure["data"], colours)


def page_colours(studies: Sequence[Data]) -> dict[str, str]:
    """One colour for each label of a row, the same in all tables and figures of the page; steps of a quantity have a ramp."""
    colours = assign_colours(row for study in studies for row in study["rows"])
    for study in studies:
        own = assign_colours(study["rows"])
        colours |= {label: colour for label, colour in own.items() if colour.startswith("step")}
    return colours


def write_report(results: Sequence[ResultsSource], out: Path | str) -> Path:
    """Write the studies as one self-contained HTML page, whole or not at all.

    The page asks the network for nothing and runs no script; figures are inline and follow the reader's colour scheme.

    Args:
        results: ``results.json`` files, folders that hold one, or their dictionaries; one study each.
        out: the HTML file to write; in an existing folder, ``report.html``.

    Returns:
        The path of the page.
    """
    checked = [load_results(source) for source in results]
    if not checked:
        raise FlowBNNError("there are no results to report; run a study first", kind="file")
    colours = page_colours(checked)
    studies: list[Data] = []
    for index, one in enumerate(checked):
        first = 1 + sum(len(study["figures"]) for study in studies)
        studies.append(_study(one, index, first, colours))
    loader = PackageLoader("flowbnn_studies", "report")
    style: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=loader, autoescape=True, **style).get_template("report.html.j2")
    html = template.render(studies=studies, colours=COLOURS, sources=REFERENCES)
    path = Path(out)
    path = path / "report.html" if path.is_dir() else path
    write_file(path, html.encode("utf-8", errors="replace"))
    return path


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


def save_figures(results: Sequence[ResultsSource], folder: Path | str) -> list[Path]:
    """Write every figure of the studies as a PNG of its own, ``<study>-<number>-<kind>.png``, for a README or a paper."""
    checked = [load_results(source) for source in results]
    colours = page_colours(checked)
    paths: list[Path] = []
    for one in checked:
        for index, figure in enumerate(one["figures"], start=1):
            paths.append(Path(folder) / f"{_slug(one['study'])}-{index}-{figure['kind']}.png")
            write_file(paths[-1], to_png(make_plot(figure, colours), figure["title"]))
    return paths


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "study"


def _study(results: Data, index: int, first: int, colours: Mapping[str, str]) -> Data:
    """What the template shows of one study; its figures are numbered from ``first``."""
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
        "meanings": group_definitions(column for table in tables for column in table.columns),
        "differences": comparison_table(results),
        "settings": flatten(results.get("settings") or {}),
        "notes": results.get("notes") or [],
        "figures": [
            _figure(figure, f"s{index}f{place}", first + place, colours)
            for place, figure in enumerate(results["figures"])
        ],
    }


def _figure(figure: Data, name: str, number: int, colours: Mapping[str, str]) -> Data:
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
    compared = comparison_table(results)
    if compared is None:
        return []
    heads, rows = compared
    lines = []
    for title, cells in rows:
        texts = []
        for cell in cells:
            mean = "–" if cell is None else f"**{cell.mean}**" if cell.significant else cell.mean
            texts.append(mean if cell is None else f"{mean} ({', '.join(filter(None, (cell.span, cell.p)))})")
        lines.append([_escape(title), *texts])
    return _table(["", *map(_escape, heads)], lines)


def _markdown(results: Data) -> list[str]:
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
    words[0] += ", or as many as a row has" if has_uneven_seeds(results) else ""
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
    time = format_duration(results["seconds"]) if results.get("seconds") is not None else ""
    facts = [
        f"`{' '.join(results['command'].replace('`', chr(39)).split())}`" if results.get("command") else "",
        _escape(results.get("device") or ""),
        versions,
        time,
    ]
    return [*lines, "Reproduce: " + "; ".join(fact for fact in facts if fact) + ".", ""]


def write_markdown(results: Sequence[ResultsSource], out: Path | str) -> Path:
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
        lines += _markdown(one)
    columns = [column for one in checked for table in make_tables(one) for column in table.columns]
    if meanings := group_definitions(columns):
        lines += ["## What the columns mean", ""]
        lines += [
            f"- **{'; '.join(_escape(column.label) for column in named)}**: {_escape(text)}"
            for named, text in meanings
        ]
        lines += [""]
    lines += ["## Sources", ""]
    for source in REFERENCES:
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
        group_definitions(column for table in tables for column in table.columns)
        if results.get("headline")
        else []
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
