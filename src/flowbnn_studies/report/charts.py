"""Charts: lines over epochs or strengths, histograms, reliability diagrams, comparisons, bars, and quality against cost."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from textwrap import wrap
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.textpath import TextPath
from matplotlib.ticker import FuncFormatter, MaxNLocator

from flowbnn.compare.results import Metric
from flowbnn.plots import LIGHT, plot_comparison
from flowbnn.plots.reliability import draw_bins
from flowbnn_studies.report.canvas import (
    CLASSES,
    DASHED,
    METHOD_FAMILIES,
    Group,
    Key,
    Panel,
    Plot,
    Sheet,
    assign_colours,
    family_of,
    format_number,
    format_tick,
    light_colour,
    line_style,
    make_panels,
    set_ticks,
    to_floats,
    value_range,
)

JsonObject = dict[str, Any]
Style = tuple[str, str]  # colour and dashes
DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")  # of lines that share a colour; published lines have the second
LEVELS = ("1 3", "4 2 1 2", "8 3")  # of horizontal levels


def arrange(count: int, small: tuple[int, int] = (300, 225)) -> tuple[int, tuple[int, int]]:
    """Returns the number of columns and the size of one panel. No row has a single panel, unless there is only one panel.

    Args:
        count: Number of panels.
        small: Width and height of a panel if there are many.

    >>> [arrange(count)[0] for count in (1, 2, 3, 4, 5, 7, 8, 9, 10, 13, 18)]
    [1, 2, 3, 4, 3, 4, 4, 3, 4, 5, 3]
    """
    if count < 3:
        return (1, (420, 260)) if count == 1 else (2, (380, 240))
    columns = next((number for number in (4, 3) if count % number == 0), 0) if count > 3 else 3
    columns = columns or next((number for number in (4, 3, 5, 2) if count % number > 1), 3)
    return columns, small if columns < 4 else (min(245, small[0]), min(205, small[1]))


def _styles(panels: list[JsonObject], colours: Mapping[str, str]) -> dict[str, Style]:
    """Returns the colour and the dashes of each label.

    Lines of one colour differ in their dashes. Published lines are dashed, levels are dotted.
    """
    lines = [line for panel in panels for line in panel["lines"]]
    labels = list(dict.fromkeys(line["label"] for line in lines))
    line_colours = assign_colours({"label": label} for label in labels) | {
        label: colours[label] for label in labels if label in colours
    }
    like = {line["label"]: line["like"] for line in lines if line.get("like") in line_colours}
    dashed = {line["label"] for line in lines if line.get("style") == "dashed"}
    patterns = [dashes for dashes in DASHES if not dashed or dashes != DASHES[1]]
    counts: dict[str, int] = {}
    styles: dict[str, Style] = {}
    for label in labels:
        colour = line_colours[like.get(label, label)]
        if label in dashed:
            styles[label] = (colour, DASHES[1])
        else:
            counts[colour] = counts.get(colour, -1) + 1
            styles[label] = (colour, patterns[counts[colour] % len(patterns)])
    levels = dict.fromkeys(level["label"] for panel in panels for level in panel.get("levels") or [])
    return styles | {label: ("muted", LEVELS[index % len(LEVELS)]) for index, label in enumerate(levels)}


def _curve_panel(panel: JsonObject, data: JsonObject, styles: Mapping[str, Style]) -> Panel:
    """Returns a panel of curves with their spread and reference levels."""
    lines = {
        line["label"]: (to_floats(line["x"]), to_floats(line["mean"]), line.get("std"))
        for line in panel["lines"]
    }
    base = lines.get(data.get("baseline") or "")

    def draw(sheet: Sheet) -> None:
        axes = sheet.subplots()
        for level in panel.get("levels") or []:
            colour, dashes = styles[level["label"]]
            axes.axhline(
                level["value"], color=light_colour(colour), linestyle=line_style(dashes), linewidth=1.3
            )
        for label, (x, mean, std) in lines.items():
            colour, dashes = styles[label]
            if base is not None:
                mean = mean - base[1] if mean.shape == base[1].shape else np.full_like(mean, np.nan)
                std = std if label == data["baseline"] else None
            if std is not None:
                low, high = mean - to_floats(std), mean + to_floats(std)
                axes.fill_between(x, low, high, color=light_colour(colour), alpha=0.16, linewidth=0)
            marker = "o" if np.isfinite(mean).sum() < 3 or data.get("log") else ""
            axes.plot(
                x, mean, color=light_colour(colour), linestyle=line_style(dashes), marker=marker, markersize=4
            )
        if data.get("log"):
            axes.set_xscale("log")
        places = np.concatenate([np.zeros(0), *(x for x, _, _ in lines.values())])
        set_ticks(axes, 6, 5, integer=bool(np.all(np.isnan(places) | (places == np.round(places)))))
        axes.margins(x=0.02)
        axes.set_xlabel(data.get("x_label") or "")
        label = panel.get("y_label") or data.get("y_label") or ""
        if base is not None:
            axes.set_title("difference to the deterministic network")
        elif label.lower() != panel["title"].lower():
            axes.set_title(label)

    better = {"higher": "up is better", "lower": "down is better"}.get(panel.get("better") or "", "")
    return Panel(panel["title"], draw, better if base is not None else "")


def curves(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots the mean over seeds with a band of one standard deviation.

    With ``baseline``, differences of the means to that line are plotted. With ``log``, the horizontal axis is logarithmic and the
    points are marked.
    """
    styles = _styles(data["panels"], colours)
    columns, size = arrange(len(data["panels"]))
    keys = [Key(label, colour, "line", dashes) for label, (colour, dashes) in styles.items()]
    spread = any(line.get("std") for panel in data["panels"] for line in panel["lines"])
    if spread and data.get("baseline"):
        keys.append(
            Key("± 1 standard deviation of the deterministic network over seeds", "slate", "area", alpha=0.25)
        )
    elif spread:
        keys.append(Key("± 1 standard deviation over seeds", "faint", "area", alpha=0.5))
    return Plot([Group([_curve_panel(panel, data, styles) for panel in data["panels"]])], keys, columns, size)


def histogram(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots fractions of inputs over a quantity, with the same axes for all panels.

    In the panel of a method, known inputs are grey and the others have the colour of the method.
    """
    panels = data["panels"]
    groups = [group for panel in panels for group in panel["groups"]]
    labels = list(dict.fromkeys(group["label"] for group in groups))
    by_method = all(panel["title"] in colours for panel in panels)
    span = value_range(*[to_floats(group["edges"]) for group in groups])
    top = (value_range(np.zeros(1), *[to_floats(group["fraction"]) for group in groups]) or (0.0, 1.0))[1]

    def colour_of(panel: JsonObject, place: int) -> str:
        if not by_method:
            return CLASSES[place % len(CLASSES)]
        return "faint" if place == 0 and len(labels) > 1 else colours[panel["title"]]

    def draw(axes: Axes, panel: JsonObject) -> None:
        for group in panel["groups"]:
            place = labels.index(group["label"])
            colour = light_colour(colour_of(panel, place))
            height, edges = np.nan_to_num(to_floats(group["fraction"])), to_floats(group["edges"])
            if len(height) and bool(np.isfinite(edges).all()):
                shade, width = (0.18, 1.5) if place else (0.6, 0.8)
                dashes = line_style(DASHES[max(0, place - 1) % 4])
                axes.stairs(height, edges, fill=True, color=colour, alpha=shade, linewidth=0)
                axes.stairs(height, edges, color=colour, linewidth=width, linestyle=dashes)
        if span is not None:
            axes.set_xlim(*span)
        axes.set_ylim(0, 1.05 * top if top > 0 else 1)
        set_ticks(axes, 5, 4)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
        axes.set_title("fraction of inputs")
        axes.set_xlabel(data.get("x_label") or "")

    keys = []
    for place, label in enumerate(labels if len(labels) > 1 else []):
        if by_method and place:
            keys.append(Key(f"{label}, in the colour of the method", "ink", "line", DASHES[(place - 1) % 4]))
        else:
            keys.append(Key(label, colour_of({}, place), "area", alpha=0.5))
    columns, size = arrange(len(panels))
    return Plot([Group(make_panels(data, draw))], keys, columns, size, True)


BIN_KEYS = [
    Key("perfect calibration", "muted", "line", "4 3"),
    Key("accuracy of a bin; larger dots have more inputs", "ink", "dot"),
]


def reliability(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots accuracy against confidence for each model. The area of a dot is the fraction of inputs in its bin."""
    models = data["models"]

    def make(model: JsonObject) -> Panel:
        colour = light_colour(colours.get(model["label"], "sky"))
        numbers = to_floats(
            [[entry.get(name) for name in ("confidence", "accuracy")] for entry in model["bins"]]
        )
        known = np.isfinite(numbers.reshape(-1, 2)).all(1)
        bins = [entry for entry, usable in zip(model["bins"], known, strict=True) if usable]

        def draw(sheet: Sheet) -> None:
            axes = sheet.subplots()
            draw_bins(axes, LIGHT, bins, colour)
            set_ticks(axes)

        note = f"ECE\N{NO-BREAK SPACE}{format_number(model['ece'])}" if model.get("ece") is not None else ""
        return Panel(model["label"], draw, note)

    columns, size = arrange(len(models), (235, 220))
    return Plot([Group([make(model) for model in models])], BIN_KEYS if models else [], columns, size, True)


@dataclass(frozen=True)
class _Comparison:
    """Rows of stored results, as :func:`flowbnn.plots.plot_comparison` reads them."""

    metrics: list[Metric]
    rows: list[JsonObject]

    def table_rows(self) -> list[JsonObject]:
        return self.rows


def comparison(results: JsonObject, metrics: Sequence[str], keys: Sequence[str] = ()) -> Plot:
    """Plots means, standard deviations and all seeds of some rows, one panel for each metric, the best row on top.

    Args:
        results: Content of ``results.json``.
        metrics: Keys of the metrics.
        keys: Keys of the rows. Empty: all measured rows.
    """
    chosen = {metric["key"]: metric for metric in results["metrics"] if metric["key"] in metrics}
    rows = [row for row in results["rows"] if not row.get("cited") and (not keys or row["key"] in keys)]
    rows = [{**row, "label": "\n".join(wrap(row["label"], 26))} for row in rows]
    columns = [
        Metric(key, metric["label"], metric.get("better") or "none", metric.get("format") or ".3f", "")
        for key, metric in chosen.items()
    ]

    def make(metric: str) -> Panel:
        def draw(sheet: Sheet) -> None:
            axes = sheet.subplots()
            plot_comparison(_Comparison(columns, rows), metric, ax=axes)
            if (legend := axes.get_legend()) is not None:
                legend.remove()
            axes.set_ylim(-0.7, len(axes.get_yticks()) - 0.3)
            better = chosen[metric].get("better")
            axes.set_xlabel(f"{better} is better" if better in ("higher", "lower") else "")
            axes.grid(True, axis="x")
            axes.grid(False, axis="y")
            axes.tick_params(axis="y", length=0)
            axes.xaxis.set_major_locator(MaxNLocator(4))
            axes.xaxis.set_major_formatter(FuncFormatter(format_tick))

        group, label = chosen[metric].get("group") or "", chosen[metric]["label"]
        return Panel(f"{group}: {label}" if group and group not in label else label, draw)

    several = len(results["seeds"]) > 1
    legend = [Key("mean ± 1 standard deviation over seeds" if several else "one seed", "blue", "cross")]
    legend += [Key("one seed", "muted", "dot", alpha=0.6)] if several else []
    lines = sum(1 + row["label"].count("\n") for row in rows)
    panels = [make(metric) for metric in metrics if metric in chosen]
    size = (430 if len(panels) < 3 else 370, 58 + 10 * len(rows) + 13 * lines)
    return Plot([Group(panels)], legend, min(3, max(1, len(panels))), size)


def bars(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots one number for each method, such as its cost relative to the deterministic network, with a line at the reference level."""

    def draw(axes: Axes, panel: JsonObject) -> None:
        items, level = panel["bars"], panel.get("level")
        values = np.nan_to_num(to_floats([item["value"] for item in items]))
        places = np.arange(len(items))[::-1]
        defaults = assign_colours(items)
        shades = [light_colour(colours.get(item["label"], defaults[item["label"]])) for item in items]
        axes.barh(places, values, 0.66, color=shades, alpha=0.75, linewidth=0)
        top = max([*values.tolist(), level or 0.0, 1e-9])
        for place, value in zip(places, values, strict=True):
            axes.text(
                value + 0.015 * top, place, format_number(float(value), ".3g"), va="center", fontsize=9.5
            )
        if level is not None:
            axes.axvline(level, color=light_colour("ink"), linestyle=DASHED, linewidth=1.1)
        axes.set_xlim(0, 1.14 * top)
        axes.grid(False)
        set_ticks(axes, 4)
        axes.set_yticks(places, [item["label"] for item in items])
        axes.set_xlabel(panel.get("x_label") or "")

    count = len(data["panels"])
    longest = max([len(panel["bars"]) for panel in data["panels"]], default=1)
    keys = (
        [Key("deterministic network", "ink", "line", "4 3")]
        if any(panel.get("level") for panel in data["panels"])
        else []
    )
    size = (320 if count > 2 else 400, 60 + 24 * longest)
    return Plot([Group(make_panels(data, draw))], keys, min(3, max(1, count)), size)


def pareto_front(costs: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Returns the indices of the points that no other point dominates, the cheapest first.

    A point dominates another if it is at most as expensive, at most as bad, and better in one of the two.

    >>> pareto_front([1.0, 2.0, 3.0, 2.5], [0.5, 0.3, 0.4, 0.3])
    [0, 1]
    """
    points = list(zip(costs, losses, strict=True))

    def dominated(x: float, y: float) -> bool:
        return any(a <= x and b <= y and (a, b) != (x, y) for a, b in points)

    front = [place for place, point in enumerate(points) if not dominated(*point)]
    return sorted(front, key=points.__getitem__)


# offsets of a label from its dot, in points, the nearest first
NEAR = ((8, 0), (-8, 0), (6, 9), (6, -9), (-6, 9), (-6, -9), (0, 12), (0, -12))
SPOTS = [(across * far, up * far) for far in (1.0, 1.7, 2.6, 3.6, 4.8) for across, up in NEAR]
# size of a panel, and approximate size of its axes
PARETO_SIZE, AXES_SIZE = (480, 380), np.array([430.0, 315.0])
Box = tuple[float, float, float, float]


def _overlaps(box: Box, boxes: Sequence[Box]) -> int:
    """Returns the number of boxes that overlap with a box."""
    return sum(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3] for other in boxes
    )


def _place_labels(
    dots: np.ndarray, edge: np.ndarray, widths: Sequence[float]
) -> dict[int, tuple[float, float]]:
    """Returns for each dot the offset of its label that covers no dot, no other label and no step of the front, if there is one."""
    dot_boxes: list[Box] = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    steps: list[Box] = []  # horizontal and vertical steps of the front
    for (x, y), (right, lower) in pairwise(edge):
        steps += [(x, y - 1, right, y + 1), (right - 1, min(y, lower), right + 1, max(y, lower))]
    label_boxes: dict[int, Box] = {}
    spots: dict[int, tuple[float, float]] = {}
    for index in np.argsort(-dots[:, 1], kind="stable").tolist():
        others = [*label_boxes.values(), *dot_boxes[:index], *dot_boxes[index + 1 :]]

        def box_at(spot: tuple[float, float], index: int = index) -> Box:
            x, y = dots[index] + spot
            left = x - widths[index] * (0.5 - 0.5 * np.sign(spot[0]))
            return (left - 1, y - 6, left + widths[index] + 1, y + 6)

        def score(spot: tuple[float, float], others: Sequence[Box] = others) -> float:
            box = box_at(spot)
            inside = box[0] >= 0 and box[1] >= 0 and box[2] <= AXES_SIZE[0] and box[3] <= AXES_SIZE[1]
            return _overlaps(box, others) + 0.5 * bool(_overlaps(box, steps)) + (0 if inside else 3)

        spots[index] = min(SPOTS, key=score)
        label_boxes[index] = box_at(spots[index])
    return spots


def _draw_labels(axes: Axes, labels: Sequence[str], places: np.ndarray, edge: np.ndarray) -> None:
    """Draws a name beside each dot on the page's colour. A thin line leads to distant names."""
    fractions = axes.transScale + axes.transLimits  # available before the layout
    widths = [TextPath((0, 0), label, size=9).get_extents().width for label in labels]
    spots = _place_labels(
        fractions.transform(places) * AXES_SIZE, fractions.transform(edge) * AXES_SIZE, widths
    )
    for index, (across, up) in spots.items():
        far = abs(across) > 9 or abs(up) > 13
        align = "left" if across > 0 else "right" if across < 0 else "center"
        style: Any = {"ha": align, "va": "center", "fontsize": 9, "color": light_colour("ink"), "zorder": 2.5}
        style["bbox"] = {"facecolor": light_colour("surface"), "linewidth": 0, "pad": 1}
        style["arrowprops"] = (
            {"arrowstyle": "-", "color": light_colour("faint"), "linewidth": 0.8} if far else None
        )
        move: Any = (across, up)
        text = axes.annotate(labels[index], places[index], move, textcoords="offset points", **style)
        text.set_in_layout(False)


def _front_panel(panel: JsonObject, colours: Mapping[str, str]) -> Panel:
    """Returns a panel of quality against cost, with a line through the Pareto-optimal methods."""

    def usable(item: JsonObject) -> bool:
        x, y = item.get("x"), item.get("y")
        return x is not None and y is not None and bool(np.isfinite([x, y]).all()) and x > 0

    items = [item for item in panel["items"] if usable(item)]
    places = to_floats([[item["x"], item["y"]] for item in items]).reshape(-1, 2)
    # on a linear scale, one bad method would flatten all others
    steep = bool(items) and places[:, 1].min() > 0 and places[:, 1].max() > 5 * places[:, 1].min()

    def draw(sheet: Sheet) -> None:
        axes = sheet.subplots()
        axes.set_xscale("log")
        if items:
            (left, bottom), (right, top) = places.min(0), places.max(0)
            axes.set_xlim(left / 1.6, max(right * 1.6, left * 4))
            if steep:
                axes.set_yscale("log")
                axes.set_ylim(bottom / (top / bottom) ** 0.12, top * (top / bottom) ** 0.08)
            else:
                span = (top - bottom) or max(abs(top), 1e-3)
                axes.set_ylim(bottom - 0.12 * span, top + 0.1 * span)
            front = places[pareto_front(places[:, 0].tolist(), places[:, 1].tolist())]
            # the line extends up from the cheapest point and right from the best one
            edge = np.vstack([[front[0, 0], axes.get_ylim()[1]], front, [axes.get_xlim()[1], front[-1, 1]]])
            line: Any = {"color": light_colour("accent"), "linewidth": 1.3, "alpha": 0.7, "zorder": 1.5}
            axes.step(edge[:, 0], edge[:, 1], where="post", **line)
            _draw_labels(axes, [item["label"] for item in items], places, edge)
        for item in items:
            colour = light_colour(colours.get(item["label"], "sky"))
            style: Any = {"fmt": "none", "ecolor": colour, "elinewidth": 1.2, "alpha": 0.55, "zorder": 2.7}
            for axis in ("x", "y"):
                error = item.get(f"{axis}_std") or 0.0
                # on a logarithmic axis the lower end stays above zero
                style[f"{axis}err"] = [[min(error, 0.9 * abs(item[axis]))], [error]]
            axes.errorbar(item["x"], item["y"], **style)
            axes.plot(item["x"], item["y"], "o", color=colour, markersize=6.5, markeredgewidth=0, zorder=3)
        set_ticks(axes)
        axes.set_title(panel.get("y_label") or "")
        axes.set_xlabel(panel.get("x_label") or "")

    return Panel(panel["title"], draw, "log scales" if steep else "log scale of costs")


def pareto(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots a dot with error bars for each method and the Pareto front. Lower left is better."""
    items = [item for panel in data["panels"] for item in panel["items"]]
    families = [family_of(item.get("method")) for item in items]
    keys = [Key("Pareto front: no other method is both cheaper and better", "accent")]
    if any(item.get("x_std") or item.get("y_std") for item in items):
        keys.append(Key("± 1 standard deviation over seeds", "muted", "cross"))
    keys += [Key(family.name, family.colour, "dot") for family in METHOD_FAMILIES if family in families]
    panels = [_front_panel(panel, colours) for panel in data["panels"]]
    return Plot([Group(panels)], keys if panels else [], min(2, max(1, len(panels))), PARETO_SIZE)
