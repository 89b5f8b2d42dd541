"""The page: one HTML file that needs nothing but itself."""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from flowbnn.errors import FlowBNNError
from flowbnn_studies.report.calibration import field, reliability
from flowbnn_studies.report.canvas import Plot, to_png, to_svg
from flowbnn_studies.report.charts import bars, curves, histogram, pareto
from flowbnn_studies.report.galleries import bands, density, draws, images, maps, shares
from flowbnn_studies.report.reading import Source, load_results
from flowbnn_studies.report.style import COLOURS, assign_colours, duration
from flowbnn_studies.report.tables import (
    SOURCES,
    best_numbers,
    compare_table,
    definitions,
    flatten,
    make_tables,
    uneven,
)
from flowbnn_studies.report.text import write_file

Data = dict[str, Any]
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


def write_report(results: Sequence[Source], out: Path | str) -> Path:
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
    html = template.render(studies=studies, colours=COLOURS, sources=SOURCES)
    path = Path(out)
    path = path / "report.html" if path.is_dir() else path
    write_file(path, html.encode("utf-8", errors="replace"))
    return path


def save_figures(results: Sequence[Source], folder: Path | str) -> list[Path]:
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
        "Time": duration(results["seconds"]) if results.get("seconds") is not None else "",
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
        "uneven": uneven(results),
        "unfinished": any(row.get("unfinished") for row in results["rows"]),
        "tables": tables,
        "meanings": definitions(column for table in tables for column in table.columns),
        "differences": compare_table(results),
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
