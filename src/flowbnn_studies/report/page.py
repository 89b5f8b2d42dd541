"""The page: one HTML file that needs nothing but itself."""

import datetime
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report.canvas import Plot, to_png, to_svg
from flowbnn_studies.report.figures import make_plot, study_colours
from flowbnn_studies.report.files import write_file
from flowbnn_studies.report.glossary import sources_of
from flowbnn_studies.report.reading import load_results
from flowbnn_studies.report.style import COLOURS, duration
from flowbnn_studies.report.tables import compare_table, definitions, flatten, make_tables

__all__ = ["save_figures", "write_report"]

Source = Path | str | dict[str, Any]


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "study"


def _figure(figure: dict[str, Any], plot: Plot, name: str, number: int) -> dict[str, Any]:
    caption = " ".join(filter(None, (figure.get("caption") or "", plot.remark)))
    groups = []
    for index, group in enumerate(plot.groups):
        panels = []
        for place, panel in enumerate(group.panels):
            words = [figure["title"], group.heading, panel.title, panel.note, caption]
            alt = ". ".join(word.rstrip(". ") for word in words if word)
            svg = to_svg(panel, plot.size, f"{name}-{index}-{place}", alt)
            panels.append({"title": panel.title, "note": panel.note, "svg": Markup(svg)})
        groups.append({"heading": group.heading, "note": group.note, "panels": panels})
    return {
        "number": number,
        "title": figure["title"],
        "caption": caption,
        "groups": groups,
        "keys": plot.keys,
        "columns": plot.columns,
        "width": plot.size[0],
    }


def _created(text: str) -> str:
    try:
        return datetime.datetime.fromisoformat(text).strftime("%d %B %Y, %H:%M").lstrip("0")
    except ValueError:
        return text


def _counts(results: dict[str, Any]) -> set[int]:
    """How many seeds the rows have."""
    cells = [cell for row in results["rows"] for cell in row["values"].values() if cell]
    return {len(cell["per_seed"]) for cell in cells if cell.get("per_seed")}


def _study(results: dict[str, Any], index: int, first: int) -> dict[str, Any]:
    colours = study_colours(results)
    figures = []
    drawn: set[str] = set()
    for place, figure in enumerate(results["figures"]):
        plot = make_plot(figure, colours)
        figures.append(_figure(figure, plot, f"s{index}f{place}", first + place))
        if figure["kind"] in ("curves", "reliability", "field"):
            drawn.update(item["label"] for item in figure["data"].get("models", []))
            for panel in figure["data"].get("panels", []):
                drawn.update(line["label"] for line in panel["lines"])
    versions = [f"{name} {version}" for name, version in (results.get("versions") or {}).items()]
    facts = [
        ("Seeds", ", ".join(str(seed) for seed in results["seeds"])),
        ("Time", duration(results["seconds"]) if results.get("seconds") is not None else ""),
        ("Device", results.get("device") or ""),
        ("Versions", ", ".join(versions)),
        ("Run on", _created(results.get("created") or "")),
    ]
    return {
        "anchor": f"study-{index + 1}-{_slug(results['study'])}",
        "name": results["study"],
        "title": results["title"],
        "question": results["question"],
        "answer": results["answer"].splitlines() or [""],
        "source": results.get("source") or "",
        "command": results.get("command") or "",
        "facts": [(name, value) for name, value in facts if value],
        "seeds": results["seeds"],
        "trial": bool(results.get("trial")),
        "uneven": len(_counts(results)) > 1,
        "unfinished": any(row.get("unfinished") for row in results["rows"]),
        "tables": make_tables(results, {label: name for label, name in colours.items() if label in drawn}),
        "differences": compare_table(results),
        "settings": flatten(results.get("settings") or {}),
        "notes": results.get("notes") or [],
        "figures": figures,
    }


def write_report(results: Sequence[Source], out: Path | str) -> Path:
    """Write the studies as one self-contained HTML page, whole or not at all.

    The page asks the network for nothing and runs no script; figures are inline and follow the reader's colour scheme.

    Args:
        results: ``results.json`` files, folders that hold one, or their dictionaries; one study each.
        out: the HTML file to write; in an existing folder, ``report.html``.

    Returns:
        The path of the page.

    Raises:
        FlowBNNError: in one line, where a file cannot be read, lacks a field, or the page cannot be written.
    """
    sources = [results] if isinstance(results, dict | str | Path) else list(results)
    if not sources:
        raise FlowBNNError("there are no results to report; run a study first")
    checked = [load_results(source) for source in sources]
    studies: list[dict[str, Any]] = []
    first = 1
    for index, one in enumerate(checked):
        studies.append(_study(one, index, first))
        first += len(one["figures"])
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = (
        resources.files("flowbnn_studies.report")
        .joinpath("templates/report.html.j2")
        .read_text(encoding="utf-8")
    )
    html = environment.from_string(template).render(
        studies=studies, colours=COLOURS, definitions=definitions, sources=sources_of(checked)
    )
    path = Path(out)
    if path.is_dir():
        path = path / "report.html"
    write_file(path, html.encode("utf-8", errors="replace"))
    return path


def save_figures(results: Sequence[Source], folder: Path | str) -> list[Path]:
    """Write every figure of the studies as a PNG of its own, for a README or a paper.

    Args:
        results: as for :func:`write_report`.
        folder: where to write ``<study>-<number>-<kind>.png``; made if it is not there.

    Returns:
        The paths, in the order of the figures.
    """
    sources = [results] if isinstance(results, dict | str | Path) else list(results)
    paths: list[Path] = []
    for one in [load_results(source) for source in sources]:
        colours = study_colours(one)
        for index, figure in enumerate(one["figures"], start=1):
            path = Path(folder) / f"{_slug(one['study'])}-{index}-{figure['kind']}.png"
            write_file(path, to_png(make_plot(figure, colours), figure["title"]))
            paths.append(path)
    return paths
