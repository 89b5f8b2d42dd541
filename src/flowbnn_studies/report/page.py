"""Writes results as one self-contained HTML page, and all figures as files."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from flowbnn.errors import FlowBNNError
from flowbnn.training import ProgressBar
from flowbnn_studies.report.canvas import COLOURS, assign_colours, format_duration, to_png
from flowbnn_studies.report.figures import Drawing, count_panels, draw_all, make_plot, split_figure
from flowbnn_studies.report.reading import ResultsSource, load_results
from flowbnn_studies.report.story import story_of
from flowbnn_studies.report.tables import (
    REFERENCES,
    ResultTable,
    comparison_table,
    flatten,
    group_definitions,
    has_uneven_seeds,
    make_tables,
)
from flowbnn_studies.report.terms import explain_terms
from flowbnn_studies.runner.story import Story

JsonObject = dict[str, Any]


def page_colours(studies: Sequence[JsonObject]) -> dict[str, str]:
    """Assigns one colour to each label of a row, the same in all tables and figures of the page. Steps of a quantity have a ramp."""
    colours = assign_colours(row for study in studies for row in study["rows"])
    for study in studies:
        ramp = assign_colours(study["rows"])
        colours |= {label: colour for label, colour in ramp.items() if colour.startswith("step")}
    return colours


def write_report(
    results: Sequence[ResultsSource], out: Path | str, *, jobs: int = 1, progress: bool = False
) -> Path:
    """Writes the studies as one self-contained HTML page. The page is complete or not written at all.

    A study opens with its question, the answer, one figure and one table. All other numbers and figures are folded. The page loads
    nothing from the network and runs no script. Figures are inline and follow the reader's colour scheme.

    Args:
        results: Files ``results.json``, folders that hold one, or their contents; one for each study.
        out: HTML file to write (``*.html``); in an existing folder, ``report.html``.
        jobs: Number of processes that draw figures. With more than one, a script needs ``if __name__ == "__main__":``.
        progress: Show a progress bar.

    Returns:
        Path of the page.
    """
    contents = [load_results(source) for source in results]
    if not contents:
        raise FlowBNNError("there are no results to report; run a study first", kind="file")
    path = Path(out)
    path = path / "report.html" if path.is_dir() else path
    check_suffix(path, (".html", ".htm"))
    colours = page_colours(contents)
    known: set[str] = set()
    studies = [_study_context(content, index, colours, known) for index, content in enumerate(contents)]
    _draw_figures(studies, colours, jobs, progress)
    loader = PackageLoader("flowbnn_studies", "report")
    style: Any = {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    template = Environment(loader=loader, autoescape=True, **style).get_template("report.html.j2")
    html = template.render(studies=studies, colours=COLOURS, references=REFERENCES)
    write_file(path, html.encode("utf-8", errors="replace"))
    return path


def _draw_figures(
    studies: Sequence[JsonObject], colours: Mapping[str, str], jobs: int, progress: bool
) -> None:
    """Replaces the figures of all studies by what the template shows of them."""
    drawings: list[Drawing] = []
    for index, study in enumerate(studies):
        for place, figure in enumerate(study["figures"]):
            drawings.append(Drawing(figure, f"s{index}f{place}", len(drawings) + 1))
    total = sum(count_panels(drawing.figure, colours) for drawing in drawings)
    drawn = []
    with ProgressBar("drawing the report", total, visible=progress) as bar:
        for figure in draw_all(drawings, colours, jobs):
            drawn.append(figure)
            bar.update(sum(each["panels"] for each in drawn), values=["panels"])
    numbered = iter(drawn)
    for study in studies:
        study["figures"] = [next(numbered) for _ in study["figures"]]


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


def story_figures(results: JsonObject, story: Story) -> tuple[list[JsonObject], list[JsonObject]]:
    """Returns the figure that shows the answer of a study, if there is one, and all other figures without its panels."""
    figures = list(results["figures"])
    places = [place for place, figure in enumerate(figures) if figure["kind"] == story.figure]
    if story.place < len(places):
        lead, rest = split_figure(figures.pop(places[story.place]), story.panels)
        return [lead], [rest, *figures] if rest else figures
    metrics = [key for key in story.charts or story.metrics[:1] if _is_measured(results, key)]
    if not metrics:
        return [], figures
    keys = story.rows or [row["key"] for row in results["rows"]]
    several = "dots are single seeds" if len(results["seeds"]) > 1 else "one seed"
    data = {"results": {**results, "figures": []}, "metrics": metrics, "rows": keys}
    caption = f"The best row is on top; {several}."
    return [{"kind": "comparison", "title": "", "caption": caption, "data": data}], figures


def _is_measured(results: JsonObject, metric: str) -> bool:
    """Returns True if at least two rows have a mean of a metric."""
    cells = [row["values"].get(metric) or {} for row in results["rows"] if not row.get("cited")]
    return sum(isinstance(cell.get("mean"), int | float) for cell in cells) > 1


def _story_table(results: JsonObject, story: Story, colours: Mapping[str, str]) -> ResultTable | None:
    """Returns the table that opens a study."""
    chosen = {metric["key"]: {**metric, "group": ""} for metric in results["metrics"]}
    metrics = [chosen[key] for key in story.metrics if key in chosen]
    labels = [metric["label"] for metric in metrics]
    for metric in metrics:  # the group tells columns of the same name apart
        group = next(
            entry.get("group") or "" for entry in results["metrics"] if entry["key"] == metric["key"]
        )
        metric["label"] = (
            f"{metric['label']}, {group}" if labels.count(metric["label"]) > 1 else metric["label"]
        )
    rows = [row for row in results["rows"] if not story.rows or row["key"] in story.rows]
    tables = make_tables({**results, "metrics": metrics, "rows": rows}, colours) if metrics else []
    return next((table for table in tables if table.rows and table.columns), None)


def _study_context(
    results: JsonObject, index: int, colours: Mapping[str, str], known: set[str]
) -> JsonObject:
    """Returns the values that the template shows of one study, with figures that are not drawn yet.

    Args:
        results: Content of ``results.json``.
        index: Place of the study on the page.
        colours: Names of colours by label.
        known: Names of the terms that were explained before.
    """
    tables = [table for table in make_tables(results, colours) if table.rows and table.columns]
    story = story_of(results)
    lead, others = story_figures(results, story)
    table = _story_table(results, story, colours)
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
    heads = [column.label for column in table.columns] if table else []
    labels = [row.label for row in table.rows] if table else []
    opening = [results["title"], optional["source"], story.question, story.answer, story.meaning]
    details = [results["answer"], *(results.get("notes") or [])]
    details += [text for figure in others for text in (figure["title"], figure.get("caption") or "")]
    return optional | {
        "anchor": f"study-{index + 1}-{_slug(results['study'])}",
        "name": results["study"],
        "title": results["title"],
        "question": results["question"],
        "answer": results["answer"].splitlines() or [""],
        "story": story,
        "story_table": table,
        "terms": explain_terms(opening, known),
        "table_terms": explain_terms([*heads, *labels], known),
        "detail_terms": explain_terms(details, known),
        "facts": {name: value for name, value in facts.items() if value},
        "seeds": results["seeds"],
        "uneven": has_uneven_seeds(results),
        "unfinished": any(row.get("unfinished") for row in results["rows"]),
        "tables": tables,
        "definitions": group_definitions(column for table in tables for column in table.columns),
        "differences": comparison_table(results),
        "settings": flatten(results.get("settings") or {}),
        "notes": results.get("notes") or [],
        "has_lead": bool(lead),
        "figures": [*lead, *others],
    }
