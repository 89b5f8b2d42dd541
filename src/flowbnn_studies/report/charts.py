"""Charts: lines over epochs or strengths, histograms, bars, and quality against cost."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter
from matplotlib.transforms import Bbox

from flowbnn_studies.report.canvas import DASHED, Group, Key, Panel, Plot, Sheet, extent, numbers, set_ticks
from flowbnn_studies.report.style import CLASSES, KINDS, assign_colours, decimal, kind_of, light

__all__ = ["bars", "curves", "front_of", "histogram", "pareto"]

Data = dict[str, Any]
Style = tuple[str, str]  # colour and dashes
DASHES = ("", "5 2", "1.5 1.5", "6 2 1.5 2")
LEVELS = ("1 3", "4 2 1 2", "8 3")


def _layout(count: int) -> tuple[int, tuple[int, int]]:
    """Columns and the size of one panel: few panels are drawn larger, four make a square."""
    return (1, (420, 260)) if count == 1 else (2, (380, 240)) if count in (2, 4) else (3, (300, 225))


def _styles(panels: list[Data], colours: Mapping[str, str]) -> dict[str, Style]:
    """Colour and dashes of each label: lines of one colour differ in their dashes, published ones are dashed, levels dotted."""
    lines = [line for panel in panels for line in panel["lines"]]
    labels = list(dict.fromkeys(line["label"] for line in lines))
    own = {**assign_colours(labels), **{label: colours[label] for label in labels if label in colours}}
    like = {line["label"]: line["like"] for line in lines if line.get("like") in own}
    dashed = {line["label"] for line in lines if line.get("style") == "dashed"}
    patterns = [pattern for pattern in DASHES if not dashed or pattern != DASHES[1]]
    seen: dict[str, int] = {}
    styles: dict[str, Style] = {}
    for label in labels:
        colour = own[like.get(label, label)]
        if label in dashed:
            styles[label] = (colour, DASHES[1])
        else:
            seen[colour] = seen.get(colour, -1) + 1
            styles[label] = (colour, patterns[seen[colour] % len(patterns)])
    levels = dict.fromkeys(level["label"] for panel in panels for level in panel.get("levels") or [])
    return styles | {label: ("muted", LEVELS[index % len(LEVELS)]) for index, label in enumerate(levels)}


def _pattern(dashes: str) -> Any:
    return (0, tuple(float(part) for part in dashes.split())) if dashes else "-"


def _curve_panel(panel: Data, data: Data, styles: Mapping[str, Style]) -> Panel:
    lines = {
        line["label"]: (numbers(line["x"]), numbers(line["mean"]), line.get("std")) for line in panel["lines"]
    }
    base = lines.get(data.get("baseline") or "")
    log = (
        bool(panel.get("log"))
        and base is None
        and any(bool(np.any(mean > 0)) for _, mean, _ in lines.values())
    )

    def draw(sheet: Sheet) -> None:
        axes = sheet.subplots()
        for level in panel.get("levels") or []:
            colour, dashes = styles[level["label"]]
            axes.axhline(level["value"], color=light(colour), linestyle=_pattern(dashes), linewidth=1.3)
        for label, (x, mean, std) in lines.items():
            colour, dashes = styles[label]
            if base is not None:
                mean = mean - base[1] if mean.shape == base[1].shape else np.full_like(mean, np.nan)
                std = std if label == data["baseline"] else None
            mean = np.where(mean > 0, mean, np.nan) if log else mean
            if std is not None:
                low = np.maximum(mean - numbers(std), mean * 0.05) if log else mean - numbers(std)
                axes.fill_between(x, low, mean + numbers(std), color=light(colour), alpha=0.16, linewidth=0)
            marker = "o" if np.isfinite(mean).sum() < 3 else ""
            axes.plot(x, mean, color=light(colour), linestyle=_pattern(dashes), marker=marker, markersize=4)
        if log:
            axes.set_yscale("log")
        places = np.concatenate([np.zeros(0), *(x for x, _, _ in lines.values())])
        set_ticks(axes, 6, 5, integer=bool(np.all(np.isnan(places) | (places == np.round(places)))))
        axes.margins(x=0.02)
        axes.set_xlabel(data.get("x_label") or "")
        label = panel.get("y_label") or data.get("y_label") or ""
        if base is not None:
            axes.set_title("difference to the plain network")
        elif label.lower() != panel["title"].lower():
            axes.set_title(label)

    better = {"higher": "up is better", "lower": "down is better"}.get(panel.get("better") or "", "")
    return Panel(panel["title"], draw, better if base is not None else "log scale" if log else "")


def curves(data: Data, colours: Mapping[str, str]) -> Plot:
    """The mean over seeds in a band of one standard deviation; with ``baseline``, the differences of the means to that line."""
    styles = _styles(data["panels"], colours)
    columns, size = (4, (245, 205)) if data.get("columns") == 4 else _layout(len(data["panels"]))
    keys = [Key(label, colour, "line", dashes) for label, (colour, dashes) in styles.items()]
    spread = any(line.get("std") for panel in data["panels"] for line in panel["lines"])
    if spread and data.get("baseline"):
        keys.append(
            Key("± 1 standard deviation of the plain network over seeds", "slate", "area", alpha=0.25)
        )
    elif spread:
        keys.append(Key("± 1 standard deviation over seeds", "faint", "area", alpha=0.5))
    return Plot([Group([_curve_panel(panel, data, styles) for panel in data["panels"]])], keys, columns, size)


def histogram(data: Data, colours: Mapping[str, str]) -> Plot:
    """Shares of inputs over a quantity, all panels on the same axes. In the panel of a method the known inputs are grey and the
    others have the colour of the method."""
    panels = data["panels"]
    groups = [group for panel in panels for group in panel["groups"]]
    labels = list(dict.fromkeys(group["label"] for group in groups))
    by_method = all(panel["title"] in colours for panel in panels)
    span = extent(*[numbers(group["edges"]) for group in groups])
    top = (extent(np.zeros(1), *[numbers(group["fraction"]) for group in groups]) or (0.0, 1.0))[1]

    def colour_of(panel: Data, place: int) -> str:
        if not by_method:
            return CLASSES[place % len(CLASSES)]
        return "faint" if place == 0 and len(labels) > 1 else colours[panel["title"]]

    def make(panel: Data) -> Panel:
        def draw(sheet: Sheet) -> None:
            axes = sheet.subplots()
            for group in panel["groups"]:
                place = labels.index(group["label"])
                colour = light(colour_of(panel, place))
                height, edges = np.nan_to_num(numbers(group["fraction"])), numbers(group["edges"])
                if len(height) and bool(np.isfinite(edges).all()):
                    axes.stairs(
                        height, edges, fill=True, color=colour, alpha=0.6 if place == 0 else 0.18, linewidth=0
                    )
                    axes.stairs(
                        height,
                        edges,
                        color=colour,
                        linewidth=1.5 if place else 0.8,
                        linestyle=_pattern(DASHES[max(0, place - 1) % 4]),
                    )
            if span is not None:
                axes.set_xlim(*span)
            axes.set_ylim(0, 1.05 * top if top > 0 else 1)
            set_ticks(axes, 5, 4)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g} %"))
            axes.set_title("share of inputs")
            axes.set_xlabel(data.get("x_label") or "")

        return Panel(panel["title"], draw)

    keys = []
    for place, label in enumerate(labels):
        if not by_method or place == 0:
            keys.append(
                Key(
                    label,
                    colour_of({}, place) if not by_method or len(labels) > 1 else "slate",
                    "area",
                    alpha=0.5,
                )
            )
        else:
            keys.append(Key(f"{label}, in the colour of the method", "ink", "line", DASHES[(place - 1) % 4]))
    columns, size = _layout(len(panels))
    return Plot([Group([make(panel) for panel in panels])], keys if len(labels) > 1 else [], columns, size)


def bars(data: Data, colours: Mapping[str, str]) -> Plot:
    """One number for each method, such as its cost over the plain network's, and a line at the level that it is measured against."""

    def make(panel: Data) -> Panel:
        items, level = panel["bars"], panel.get("level")
        values = np.nan_to_num(numbers([item["value"] for item in items]))

        def draw(sheet: Sheet) -> None:
            axes = sheet.subplots()
            places = np.arange(len(items))[::-1]
            shades = [
                light(colours.get(item["label"]) or assign_colours([item["label"]])[item["label"]])
                for item in items
            ]
            axes.barh(places, values, 0.66, color=shades, alpha=0.75, linewidth=0)
            top = max([*values.tolist(), level or 0.0, 1e-9])
            for place, value in zip(places, values, strict=True):
                axes.text(value + 0.015 * top, place, decimal(float(value), ".3g"), va="center", fontsize=9.5)
            if level is not None:
                axes.axvline(level, color=light("ink"), linestyle=DASHED, linewidth=1.1)
            axes.set_xlim(0, 1.14 * top)
            axes.grid(False)
            set_ticks(axes, 4)
            axes.set_yticks(places, [item["label"] for item in items])
            axes.set_xlabel(panel.get("x_label") or "")

        return Panel(panel["title"], draw)

    count = len(data["panels"])
    longest = max([len(panel["bars"]) for panel in data["panels"]], default=1)
    keys = (
        [Key("the plain network", "ink", "line", "4 3")]
        if any(panel.get("level") for panel in data["panels"])
        else []
    )
    size = (320 if count > 2 else 400, 60 + 24 * longest)
    return Plot([Group([make(panel) for panel in data["panels"]])], keys, min(3, max(1, count)), size)


def front_of(costs: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Places of the points that no other beats (at most as dear, at most as bad, and better in one of them), the cheapest first.

    >>> front_of([1.0, 2.0, 3.0, 2.5], [0.5, 0.3, 0.4, 0.3])
    [0, 1]
    """
    front: list[int] = []
    for place in sorted(range(len(costs)), key=lambda place: (costs[place], losses[place])):
        last = front[-1] if front else None
        if (
            last is None
            or losses[place] < losses[last]
            or (costs[place], losses[place]) == (costs[last], losses[last])
        ):
            front.append(place)
    return front


# where a label may stand around its dot: across, up, and its alignment there; the nearest places first
Align = Literal["left", "center", "right"]
NEAR: tuple[tuple[int, int, Align], ...] = (
    (8, 0, "left"),
    (-8, 0, "right"),
    (6, 9, "left"),
    (6, -9, "left"),
    (-6, 9, "right"),
    (-6, -9, "right"),
    (0, 12, "center"),
    (0, -12, "center"),
)
SPOTS = [(across * far, up * far, align) for far in (1.0, 1.7, 2.6, 3.6, 4.8) for across, up, align in NEAR]


class _Labels(Artist):
    """Labels that are placed when the picture is drawn, once all sizes are known.

    Each takes the first spot that covers no dot and no other label and lies inside; a thin line leads to far ones.
    """

    def __init__(self, axes: Axes, labels: list[str], places: np.ndarray, edge: np.ndarray) -> None:
        super().__init__()
        self.set_in_layout(False)
        self.set_zorder(2.5)  # above the grid and the front, below the dots
        self.labels, self.places, self.edge = labels, places, edge
        axes.add_artist(self)

    def draw(self, renderer: Any) -> None:
        """Place the labels and draw them."""
        axes: Any = self.axes
        scale = renderer.points_to_pixels(1.0)
        pixels = axes.transData.transform(self.places)
        room = axes.get_window_extent(renderer)
        dots = [
            Bbox.from_extents(x - 5 * scale, y - 5 * scale, x + 5 * scale, y + 5 * scale) for x, y in pixels
        ]
        steps = []  # of the front: across, then down
        for (x, y), (next_x, next_y) in pairwise(axes.transData.transform(self.edge)):
            steps.append(Bbox.from_extents(x, y - 1, next_x, y + 1))
            steps.append(Bbox.from_extents(next_x - 1, min(y, next_y), next_x + 1, max(y, next_y)))
        taken: list[Bbox] = []
        artists: list[Artist] = []
        for index in np.argsort(-pixels[:, 1], kind="stable"):
            x, y = pixels[index]
            others = [*taken, *dots[:index], *dots[index + 1 :]]
            best: tuple[float, Text, Bbox, bool] | None = None
            for across, up, align in SPOTS:
                text = Text(
                    x + across * scale,
                    y + up * scale,
                    self.labels[index],
                    color=light("ink"),
                    fontsize=9,
                    ha=align,
                    va="center",
                )
                text.set_figure(axes.get_figure(root=True))
                box = text.get_window_extent(renderer).padded(scale)
                inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
                score = sum(box.overlaps(other) for other in others) + 0.5 * any(
                    box.overlaps(step) for step in steps
                )
                score += 0 if inside else 3
                if best is None or score < best[0]:
                    best = (score, text, box, abs(across) > 9 or abs(up) > 13)
                if score == 0:
                    break
            assert best is not None
            _, text, box, far = best
            taken.append(box)
            artists.append(text)
            if far:
                end = (min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1))
                artists.insert(0, Line2D([x, end[0]], [y, end[1]], color=light("faint"), linewidth=0.8))
        # a ground of the page's colour, so that no line strikes a name through; all grounds first, so that none hides a name
        grounds = [
            Rectangle((box.x0, box.y0), box.width, box.height, facecolor=light("surface"), linewidth=0)
            for box in taken
        ]
        for artist in (*grounds, *artists):
            artist.set_figure(axes.get_figure(root=True))
            artist.draw(renderer)


def _front_panel(panel: Data, colours: Mapping[str, str]) -> Panel:
    def usable(item: Data) -> bool:
        x, y = item.get("x"), item.get("y")
        return x is not None and y is not None and bool(np.isfinite([x, y]).all()) and x > 0

    items = [item for item in panel["items"] if usable(item)]
    places = numbers([[item["x"], item["y"]] for item in items]).reshape(-1, 2)
    # one bad method would flatten all others on a linear scale
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
            front = places[front_of(places[:, 0].tolist(), places[:, 1].tolist())]
            # up from the cheapest and on from the best: nothing lies on the lower left of the line
            edge = np.vstack([[front[0, 0], axes.get_ylim()[1]], front, [axes.get_xlim()[1], front[-1, 1]]])
            axes.step(
                edge[:, 0],
                edge[:, 1],
                where="post",
                color=light("accent"),
                linewidth=1.3,
                alpha=0.7,
                zorder=1.5,
            )
            _Labels(axes, [item["label"] for item in items], places, edge)
        for item in items:
            colour = light(colours.get(item["label"], "sky"))
            errors: dict[str, Any] = {}
            for axis in ("x", "y"):
                error = item.get(f"{axis}_std") or 0.0
                # on a logarithmic axis the lower end stays above zero
                errors[f"{axis}err"] = [[min(error, 0.9 * abs(item[axis]))], [error]]
            axes.errorbar(
                item["x"],
                item["y"],
                **errors,
                fmt="none",
                ecolor=colour,
                elinewidth=1.2,
                alpha=0.55,
                zorder=2.7,
            )
            axes.plot(item["x"], item["y"], "o", color=colour, markersize=6.5, markeredgewidth=0, zorder=3)
        set_ticks(axes)
        axes.set_title(panel.get("y_label") or "")
        axes.set_xlabel(panel.get("x_label") or "")

    return Panel(panel["title"], draw, "log scales" if steep else "log scale across")


def pareto(data: Data, colours: Mapping[str, str]) -> Plot:
    """A dot with error bars for each method, low and left being better, and the line of those that no other beats."""
    items = [item for panel in data["panels"] for item in panel["items"]]
    kinds = [kind_of(item["label"]) for item in items]
    keys = [Key("no other method is both cheaper and better", "accent")]
    if any(item.get("x_std") or item.get("y_std") for item in items):
        keys.append(Key("± 1 standard deviation over seeds", "muted", "cross"))
    keys += [Key(kind.name, kind.colour, "dot") for kind in KINDS if kind in kinds]
    panels = [_front_panel(panel, colours) for panel in data["panels"]]
    return Plot([Group(panels)], keys if panels else [], min(2, max(1, len(panels))), (480, 380))
