"""Figures of a page as inline SVG. Many figures are drawn by several processes."""

import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from markupsafe import Markup
from matplotlib.transforms import Bbox

from flowbnn_studies.report.canvas import Plot, to_svg
from flowbnn_studies.report.charts import bars, comparison, curves, histogram, pareto, reliability
from flowbnn_studies.report.galleries import bands, density, draws, images, maps, shares
from flowbnn_studies.report.galleries import field as fields
from flowbnn_studies.runner.run import block_interrupts, init_worker

JsonObject = dict[str, Any]
PLOTS: dict[str, Callable[[JsonObject, Mapping[str, str]], Plot]] = {
    **{plot.__name__: plot for plot in (bands, bars, curves, density, draws, histogram, images)},
    **{"field": fields, "map": maps, "pareto": pareto, "reliability": reliability, "shares": shares},
}
FEW = 60  # panels that one process draws before others would have started


def make_plot(figure: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Returns the plot of one checked entry of ``figures``.

    Args:
        figure: Figure as plain data.
        colours: Names of colours by label.
    """
    if figure["kind"] == "comparison":  # of the rows of the table, which no study stores
        return comparison(figure["data"]["results"], figure["data"]["metrics"], figure["data"]["rows"])
    return PLOTS[figure["kind"]](figure["data"], colours)


def split_figure(figure: JsonObject, titles: Sequence[str]) -> tuple[JsonObject, JsonObject | None]:
    """Splits a figure into the panels with given titles, in this order, and all others, with the same scale of colours.

    Args:
        figure: Figure as plain data.
        titles: Titles of panels. Empty: all panels.
    """
    data = figure["data"]
    title = "label" if "models" in data else "title"
    fields = ("models", "panels", "pairs")
    field_name = next(
        (name for name in fields if any(panel[title] in titles for panel in data.get(name) or [])), ""
    )
    if not field_name:
        return figure, None
    chosen = [panel for name in titles for panel in data[field_name] if panel[title] == name]
    others = [panel for panel in data[field_name] if panel[title] not in titles]
    if not chosen or not others:
        return figure, None
    if figure["kind"] == "map" and not data.get("top"):
        values = [value for panel in data["panels"] for row in panel.get("values") or [] for value in row]
        data = {**data, "top": max((value for value in values if value is not None), default=0.0)}
    rest = {**figure, "data": {**data, field_name: others}, "title": f"{figure['title']}: further panels"}
    return {**figure, "data": {**data, field_name: chosen}}, rest


@dataclass(frozen=True)
class Drawing:
    """One figure to draw.

    Args:
        figure: Figure as plain data.
        name: Prefix of the identifiers of the SVG elements.
        number: Number of the figure on the page.
    """

    figure: JsonObject
    name: str
    number: int


def draw(drawing: Drawing, colours: Mapping[str, str]) -> JsonObject:
    """Returns what the page shows of a figure: title, caption, legend, and the panels as SVG."""
    figure, plot = drawing.figure, make_plot(drawing.figure, colours)
    groups = []
    for index, group in enumerate(plot.groups):
        panels: list[JsonObject] = []
        layouts: dict[Any, list[Bbox]] = {}
        for place, panel in enumerate(group.panels):
            title = ", ".join(filter(None, (f"Figure {drawing.number}", figure["title"])))
            words = (title, group.heading, panel.title, panel.note)
            name = f"{drawing.name}-{index}-{place}"
            layouts = layouts if plot.same_axes else {}
            svg = to_svg(panel, plot.size, name, ". ".join(filter(None, words)), layouts)
            panels.append({"title": panel.title, "note": panel.note, "svg": Markup(svg)})
        groups.append({"heading": group.heading, "panels": panels})
    caption = " ".join(filter(None, (figure.get("caption") or figure["title"], figure.get("published"))))
    content = {"number": drawing.number, "title": figure["title"], "caption": caption, "groups": groups}
    total = sum(len(group["panels"]) for group in groups)
    return content | {"keys": plot.keys, "columns": plot.columns, "width": plot.size[0], "panels": total}


def count_panels(figure: JsonObject, colours: Mapping[str, str]) -> int:
    """Returns the number of panels of a figure."""
    return sum(len(group.panels) for group in make_plot(figure, colours).groups)


def draw_all(drawings: Sequence[Drawing], colours: Mapping[str, str], jobs: int = 1) -> Iterator[JsonObject]:
    """Yields the drawn figures in their order.

    Args:
        drawings: Figures to draw.
        colours: Names of colours by label.
        jobs: Number of processes. Few panels are drawn by this one.
    """
    one = partial(draw, colours=colours)
    if jobs == 1 or sum(count_panels(drawing.figure, colours) for drawing in drawings) <= FEW:
        yield from map(one, drawings)
        return
    with block_interrupts():
        pool = ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"), initializer=init_worker)
        futures = [pool.submit(one, drawing) for drawing in drawings]
    try:
        for future in futures:
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
