"""The figures of a study, each drawn from the ``data`` of its ``results.json`` entry and nothing else."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from flowbnn_studies.report.canvas import Group, Key, Panel, Plot, nice_ticks
from flowbnn_studies.report.figures_bars import bars
from flowbnn_studies.report.figures_calibration import field, reliability
from flowbnn_studies.report.figures_density import density, images
from flowbnn_studies.report.figures_draws import draws
from flowbnn_studies.report.figures_gallery import bands, maps
from flowbnn_studies.report.figures_pareto import pareto
from flowbnn_studies.report.methods import method_of
from flowbnn_studies.report.schema import extent, numbers
from flowbnn_studies.report.style import assign_colours, light, tick

__all__ = ["make_plot", "study_colours"]

Data = dict[str, Any]
DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
LEVELS = ("1 3", "4 2 1 2", "8 3")


def study_colours(results: Data) -> dict[str, str]:
    """One colour for each model of a study, the same in its table and in all of its figures.

    A method has its colour of :mod:`~flowbnn_studies.report.methods`, so that all studies of a page agree; others that of their row.
    """
    labels = [row["label"] for row in results["rows"]]
    labels += [model["label"] for figure in results["figures"] for model in figure["data"].get("models", [])]
    for figure in results["figures"]:
        lines = [
            line["label"] for panel in figure["data"].get("panels", []) for line in panel.get("lines", [])
        ]
        # Curves of other things than the models keep colours of their own.
        if set(lines) & set(labels):
            labels += lines
    return {
        **assign_colours(labels),
        **{
            row["label"]: row["colour"]
            for row in results["rows"]
            if row.get("colour") and method_of(row["label"]) is None
        },
    }


def panel_size(count: int) -> tuple[int, tuple[int, int]]:
    """Columns and the size of one panel: few panels are drawn larger, four make a square.

    >>> panel_size(1), panel_size(4), panel_size(5)
    ((1, (420, 260)), (2, (380, 240)), (3, (300, 225)))
    """
    if count == 1:
        return 1, (420, 260)
    if count in (2, 4):
        return 2, (380, 240)
    return 3, (300, 225)


def _y_axis(axes: Axes, label: str, log: bool) -> None:
    if log:
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=8))
        axes.yaxis.set_minor_locator(NullLocator())
    else:
        axes.yaxis.set_major_locator(nice_ticks(5))
    axes.yaxis.set_major_formatter(FuncFormatter(tick))
    if label:
        axes.set_title(label, loc="left", color=light("muted"), fontsize=10, pad=5)


def _pattern(dashes: str) -> tuple[float, ...]:
    return tuple(float(part) for part in dashes.split())


def _line_styles(panels: list[Data], colours: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Colour and dashes of each label: lines of one colour differ in their dashes, levels are dotted."""
    lines = [line for panel in panels for line in panel["lines"]]
    labels = list(dict.fromkeys(line["label"] for line in lines))
    own = {**assign_colours(labels), **{label: colours[label] for label in labels if label in colours}}
    like = {line["label"]: line["like"] for line in lines if line.get("like") in own}
    dashed = {line["label"] for line in lines if line.get("style") == "dashed"}
    seen: dict[str, int] = {}
    styles = {}
    for label in labels:
        colour = own[like.get(label, label)]
        if label in dashed:
            styles[label] = (colour, DASHES[1])
            continue
        seen[colour] = seen.get(colour, -1) + 1
        # a pattern that means another's line is not given to ours
        patterns = [pattern for pattern in DASHES if not dashed or pattern != DASHES[1]]
        styles[label] = (colour, patterns[seen[colour] % len(patterns)])
    levels = dict.fromkeys(level["label"] for panel in panels for level in panel.get("levels") or [])
    return styles | {label: ("muted", LEVELS[index % len(LEVELS)]) for index, label in enumerate(levels)}


def _curve_panel(panel: Data, x_label: str, styles: Mapping[str, tuple[str, str]]) -> Panel:
    y_label = panel.get("y_label") or ""
    if y_label.lower() == panel["title"].lower():
        y_label = ""
    means = [numbers(line["mean"]) for line in panel["lines"]]
    log = bool(panel.get("log")) and any(bool(np.any(mean > 0)) for mean in means)

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        whole = True
        for level in panel.get("levels") or []:
            colour, dashes = styles[level["label"]]
            axes.axhline(level["value"], color=light(colour), linestyle=(0, _pattern(dashes)), linewidth=1.3)
        for line, mean in zip(panel["lines"], means, strict=True):
            colour, dashes = styles[line["label"]]
            x = numbers(line["x"])
            whole = whole and bool(np.all(np.isnan(x) | (x == np.round(x))))
            mean = np.where(mean > 0, mean, np.nan) if log else mean
            if line.get("std") is not None:
                std = numbers(line["std"])
                low = np.maximum(mean - std, mean * 0.05) if log else mean - std
                axes.fill_between(x, low, mean + std, color=light(colour), alpha=0.16, linewidth=0)
            pattern = (0, _pattern(dashes)) if dashes else "-"
            marker = "o" if int(np.isfinite(mean).sum()) < 3 else ""
            axes.plot(x, mean, color=light(colour), linestyle=pattern, marker=marker, markersize=4)
        _y_axis(axes, y_label, log)
        axes.xaxis.set_major_locator(nice_ticks(6, whole))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.margins(x=0.02)
        axes.set_xlabel(x_label)

    return Panel(panel["title"], draw, note="log scale" if log else "")


def curves(data: Data, colours: Mapping[str, str]) -> Plot:
    """Lines of the mean over seeds, in a band of one standard deviation to either side."""
    styles = _line_styles(data["panels"], colours)
    columns, size = panel_size(len(data["panels"]))
    if data.get("columns") == 4:
        columns, size = 4, (245, 205)
    x_label = data.get("x_label") or ""
    panels = []
    for panel in data["panels"]:
        shared = {**panel, "y_label": panel.get("y_label") or data.get("y_label")}
        panels.append(_curve_panel(shared, x_label, styles))
    keys = [Key(label, colour, "line", dashes) for label, (colour, dashes) in styles.items()]
    return Plot([Group(panels)], keys, columns, size)


def histogram(data: Data, colours: Mapping[str, str]) -> Plot:
    """Shares of samples over a quantity, all panels on the same axes so that they can be compared."""
    panels = data["panels"]
    alone = all(len(panel["groups"]) == 1 and panel["title"] in colours for panel in panels)
    labels = list(dict.fromkeys(group["label"] for panel in panels for group in panel["groups"]))
    known = all(label in colours for label in labels)
    own = dict(colours) if known else assign_colours(labels, groups=True)
    groups = [group for panel in panels for group in panel["groups"]]
    span = extent(*[numbers(group["edges"]) for group in groups])
    top = max(0.0, *(extent(np.zeros(1), *[numbers(group["fraction"]) for group in groups]) or (0.0, 1.0)))

    def make(panel: Data) -> Panel:
        def draw(figure: Figure) -> None:
            axes = figure.subplots()
            for group in panel["groups"]:
                colour = light(colours[panel["title"]] if alone else own[group["label"]])
                height, place = np.nan_to_num(numbers(group["fraction"])), numbers(group["edges"])
                if len(height) and bool(np.isfinite(place).all()):
                    axes.stairs(height, place, fill=True, color=colour, alpha=0.30, linewidth=0)
                    axes.stairs(height, place, color=colour, linewidth=1.5)
            if span is not None:
                axes.set_xlim(*span)
            axes.set_ylim(0, 1.05 * top if top > 0 else 1)
            axes.yaxis.set_major_locator(nice_ticks(4))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axes.xaxis.set_major_locator(nice_ticks(5))
            axes.xaxis.set_major_formatter(FuncFormatter(tick))
            axes.set_title("share of inputs", loc="left", color=light("muted"), fontsize=10, pad=5)
            axes.set_xlabel(data.get("x_label") or "")

        return Panel(panel["title"], draw)

    columns, size = panel_size(len(panels))
    keys = [] if alone else [Key(label, own[label], "area") for label in labels]
    return Plot([Group([make(panel) for panel in panels])], keys, columns, size)


KINDS: dict[str, Callable[[Data, Mapping[str, str]], Plot]] = {
    "curves": curves,
    "bars": bars,
    "reliability": reliability,
    "histogram": histogram,
    "density": density,
    "field": field,
    "images": images,
    "bands": bands,
    "map": maps,
    "draws": draws,
    "pareto": pareto,
}


def make_plot(figure: Data, colours: Mapping[str, str]) -> Plot:
    """The plot of one checked entry of ``figures``.

    Args:
        figure: an entry with ``kind`` and ``data``.
        colours: from :func:`study_colours`.
    """
    return KINDS[figure["kind"]](figure["data"], colours)
