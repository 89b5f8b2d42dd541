"""Galleries: one panel for each method, all on the same axes. Bands around a curve, and maps of uncertainty over a plane."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flowbnn_studies.report.canvas import Group, Key, Panel, Plot, nice_ticks
from flowbnn_studies.report.schema import extent, numbers
from flowbnn_studies.report.style import light, tick

__all__ = ["bands", "maps"]

Data = dict[str, Any]
WIDE = 2.0  # standard deviations to either side
BLANK = 0.03  # a map whose greatest value is below this share of the scale shows no colour, and says so
CLASSES = ("amber", "violet", "green", "blue", "vermillion", "purple", "slate", "sky")


def _ticks(axes: Axes) -> None:
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(nice_ticks(5))
        axis.set_major_formatter(FuncFormatter(tick))


def _range(data: Data) -> tuple[float, float] | None:
    """What all panels show: the points, the truth and the means, with room for the common bands but not for the widest."""
    panels = data["panels"]
    near = [numbers(panel["points"]["y"]) for panel in panels] + [numbers(data["truth"]["y"])]
    spreads = [WIDE * numbers(panel["total"]) for panel in panels]
    far = [
        np.concatenate([numbers(p["mean"]) - s, numbers(p["mean"]) + s])
        for p, s in zip(panels, spreads, strict=True)
    ]
    flat = np.concatenate([np.zeros(0), *far])
    flat = flat[np.isfinite(flat)]
    if flat.size:
        near.append(np.quantile(flat, [0.02, 0.98]))
    found = extent(*near)
    if found is None:
        return None
    room = 0.04 * (found[1] - found[0])
    return found[0] - room, found[1] + room


def _band_panel(panel: Data, data: Data, limits: tuple[float, float] | None) -> Panel:
    x, mean = numbers(panel["x"]), numbers(panel["mean"])
    truth = data["truth"]

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for name, alpha in (("total", 0.18), ("epistemic", 0.38)):
            spread = WIDE * np.nan_to_num(numbers(panel[name]))
            if name == "total" or bool(np.any(spread > 0)):
                axes.fill_between(
                    x, mean - spread, mean + spread, color=light("sky"), alpha=alpha, linewidth=0
                )
        axes.plot(
            numbers(truth["x"]), numbers(truth["y"]), color=light("ink"), linestyle=(0, (4, 3)), linewidth=1.1
        )
        axes.plot(x, mean, color=light("sky"))
        points = panel["points"]
        axes.plot(
            numbers(points["x"]),
            numbers(points["y"]),
            "o",
            color=light("vermillion"),
            markersize=2.4,
            alpha=0.75,
            markeredgewidth=0,
        )
        edges = numbers(data.get("span") or [])
        for edge in edges[np.isfinite(edges)]:
            axes.axvline(edge, color=light("faint"), linewidth=0.9)
        if limits is not None:
            axes.set_ylim(*limits)
        span = extent(x)
        if span is not None:
            axes.set_xlim(*span)
        _ticks(axes)
        axes.set_xlabel(data.get("x_label") or "")

    return Panel(panel["title"], draw, panel.get("note") or "")


def bands(data: Data, colours: Mapping[str, str]) -> Plot:
    """The mean of each method with its epistemic band inside the band of the whole prediction."""
    if not data.get("truth"):
        data = {**data, "truth": {"x": [], "y": []}}
    limits = _range(data)
    panels = [_band_panel(panel, data, limits) for panel in data["panels"]]
    keys = [
        Key("points to learn from", "vermillion", "dot"),
        Key("predictive mean", "sky", "line"),
        Key("± 2 epistemic standard deviations", "sky", "area", alpha=0.5),
        Key("± 2 standard deviations of the whole prediction", "sky", "area", alpha=0.18),
        Key("true curve", "ink", "line", "4 3"),
    ]
    if data.get("span"):
        keys.append(Key("ends of the training range", "faint", "line"))
    return Plot([Group(panels)], keys if panels else [], 3, (300, 215))


def _map_panel(panel: Data, data: Data, top: float) -> Panel:
    x, y, values = numbers(data["x"]), numbers(data["y"]), numbers(panel["values"])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        colour = to_rgb(light("sky"))
        # From nothing to the colour, so that certain ground is the page's own, light or dark.
        ramp = LinearSegmentedColormap.from_list("ramp", [(*colour, 0.0), (*colour, 1.0)])
        spans = [x.size > 1 and bool(np.all(np.diff(x) > 0)), y.size > 1 and bool(np.all(np.diff(y) > 0))]
        if all(spans) and values.size:
            half_x, half_y = (x[1] - x[0]) / 2, (y[1] - y[0]) / 2
            box = (x[0] - half_x, x[-1] + half_x, y[0] - half_y, y[-1] + half_y)
            shown = np.nan_to_num(values)
            axes.imshow(
                shown, extent=box, origin="lower", cmap=ramp, vmin=0.0, vmax=top, interpolation="bilinear"
            )
        points, kinds = numbers(data["points"]).reshape(-1, 2), numbers(data["point_class"])
        for kind in np.unique(kinds[np.isfinite(kinds)]):
            some = kinds == kind
            axes.scatter(
                points[some, 0],
                points[some, 1],
                s=4,
                color=light(CLASSES[int(kind) % len(CLASSES)]),
                alpha=0.7,
                linewidths=0,
                rasterized=True,
            )
        if data.get("ring") is not None and all(spans):
            angle = np.linspace(0, 2 * np.pi, 181)
            axes.plot(
                data["ring"] * np.cos(angle),
                data["ring"] * np.sin(angle),
                color=light("ink"),
                linestyle=(0, (4, 3)),
                linewidth=1.1,
            )
        axes.set_aspect("equal")
        axes.grid(False)
        _ticks(axes)
        most = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
        if values.size and most < BLANK * top:
            axes.text(
                0.5,
                0.97,
                f"blank: nowhere above {tick(round(most, 3)) if most > 0 else '0'}",
                transform=axes.transAxes,
                ha="center",
                va="top",
                fontsize=10,
                bbox={"facecolor": light("surface"), "edgecolor": "none", "pad": 2.0},
            )

    return Panel(panel["title"], draw, panel.get("note") or "")


def maps(data: Data, colours: Mapping[str, str]) -> Plot:
    """How unsure each method is over the plane, in one scale of colour for all panels."""
    panels = data["panels"]
    found = extent(np.zeros(1), *[numbers(panel["values"]) for panel in panels])
    top = float(data.get("top") or (found[1] if found else 1.0))
    if top <= 0:
        top = 1.0
    kinds = numbers(data.get("point_class") or [])
    keys = [
        Key(f"{data.get('label') or 'uncertainty'}, from 0 to {tick(round(top, 3))}", "sky", "ramp"),
        *(
            Key(f"class {int(kind)}", CLASSES[int(kind) % len(CLASSES)], "dot")
            for kind in np.unique(kinds[np.isfinite(kinds)])
        ),
    ]
    if data.get("ring") is not None:
        keys.append(Key("ring of far-away inputs", "ink", "line", "4 3"))
    shown = [_map_panel(panel, data, top) for panel in panels]
    return Plot([Group(shown)], keys if panels else [], 3, (300, 275))
