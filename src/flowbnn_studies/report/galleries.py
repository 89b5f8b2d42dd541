"""Galleries: one panel for each method, image or noise dimension, all on the same axes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, to_rgb

from flowbnn_studies.report.canvas import (
    CLASSES,
    DASHED,
    METHOD_FAMILIES,
    Group,
    Key,
    Panel,
    Plot,
    Sheet,
    format_number,
    format_tick,
    light_colour,
    make_panels,
    set_ticks,
    to_floats,
    value_range,
)
from flowbnn_studies.report.charts import arrange

JsonObject = dict[str, Any]
BAND_WIDTH = 2.0  # standard deviations on either side of the mean
SMALLEST_DOT = 0.45  # diameter of grid dots without uncertainty, relative to their distance
BLANK = 0.03  # maps whose maximum is below this fraction of the scale show no colour and get a remark


def _ramp(name: str) -> LinearSegmentedColormap:
    """Returns a colour map from transparent to a colour, so that the background is the page's own."""
    colour = to_rgb(light_colour(name))
    return LinearSegmentedColormap.from_list("ramp", [(*colour, 0.0), (*colour, 1.0)])


def _decisions(model: JsonObject, largest: float, span: Any, width: int) -> Panel:
    """Plots the points and the predicted class on a grid. The size of a grid dot is the uncertainty."""

    def draw(sheet: Sheet) -> None:
        axes = sheet.subplots()
        points, classes = to_floats(model["points"]).reshape(-1, 2), to_floats(model["point_class"])
        grid, predicted = to_floats(model["grid"]).reshape(-1, 2), to_floats(model["grid_class"])
        spacing = (width - 40) / max([2, *(len(np.unique(column)) for column in grid.T)])
        size = np.full(len(grid), SMALLEST_DOT * spacing)
        if model.get("grid_uncertainty") is not None and largest > 0:
            size = spacing * (
                SMALLEST_DOT
                + (1.0 - SMALLEST_DOT)
                * np.clip(np.nan_to_num(to_floats(model["grid_uncertainty"])) / largest, 0, 1)
            )
        for label in np.unique(np.concatenate([classes, predicted])):
            if np.isfinite(label):
                colour = light_colour(CLASSES[int(label) % len(CLASSES)])
                style: Any = {"color": colour, "linewidths": 0, "rasterized": True}
                (x, y), (left, up) = points[classes == label].T, grid[predicted == label].T
                axes.scatter(x, y, s=7, alpha=0.36, **style)
                axes.scatter(left, up, s=size[predicted == label] ** 2, **style)
        if span is not None:
            axes.set_xlim(*span[0])
            axes.set_ylim(*span[1])
        axes.grid(False)
        set_ticks(axes)
        scores = (("accuracy", model.get("accuracy")), ("ECE", model.get("ece")))
        axes.set_title(
            ", ".join(f"{name} {format_number(value)}" for name, value in scores if value is not None)
        )

    return Panel(model["label"], draw)


def field(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots the predictions of each model over the plane, with the uncertainty as dot size."""
    models = data["models"]
    columns, size = arrange(len(models), (300, 280))
    spreads = [to_floats(model["grid_uncertainty"]) for model in models if model.get("grid_uncertainty")]
    largest = (value_range(np.zeros(1), *spreads) or (0.0, 0.0))[1]
    axes = [
        value_range(*[to_floats(model["grid"]).reshape(-1, 2)[:, axis] for model in models])
        for axis in (0, 1)
    ]
    span = None
    if axes[0] is not None and axes[1] is not None:
        span = [(low - 0.02 * (high - low), high + 0.02 * (high - low)) for low, high in (axes[0], axes[1])]

    present = to_floats([label for model in models for label in model["point_class"]])
    classes = sorted({int(label) for label in present[np.isfinite(present)]})
    keys = [Key(f"class {label}", CLASSES[label % len(CLASSES)], "dot") for label in classes]
    keys.append(Key("grid: predicted class; larger dots where sampled networks disagree", "muted", "sizes"))
    seed = f", seed {data['seed']}" if data.get("seed") is not None else ""
    panels = [_decisions(model, largest, span, size[0]) for model in models]
    group = Group(panels, f"Predicted class and uncertainty{seed}")
    return Plot([group] if models else [], keys if models else [], columns, size, True)


def bands(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots the mean of each method with its epistemic band inside the predictive band."""
    panels = data["panels"]
    truth = data.get("truth") or {"x": [], "y": []}
    # limits of all panels: points, truth and most of the bands, but not the widest ones
    ends = [
        to_floats(panel["mean"]) + side * to_floats(panel["total"])
        for panel in panels
        for side in (-BAND_WIDTH, BAND_WIDTH)
    ]
    band_ends = np.concatenate([np.zeros(0), *ends])
    band_ends = band_ends[np.isfinite(band_ends)]
    near = [to_floats(truth["y"]), *(to_floats(panel["points"]["y"]) for panel in panels)]
    limits = value_range(*near, np.quantile(band_ends, [0.02, 0.98]) if band_ends.size else band_ends)

    def draw(axes: Axes, panel: JsonObject) -> None:
        colour, x, mean = (
            light_colour(colours.get(panel["title"], "sky")),
            to_floats(panel["x"]),
            to_floats(panel["mean"]),
        )
        for name, alpha in (("total", 0.18), ("epistemic", 0.38)):
            spread = BAND_WIDTH * np.nan_to_num(to_floats(panel[name]))
            axes.fill_between(x, mean - spread, mean + spread, color=colour, alpha=alpha, linewidth=0)
        true = (to_floats(truth[axis]) for axis in "xy")
        axes.plot(*true, color=light_colour("ink"), linestyle=DASHED, linewidth=1.1)
        axes.plot(x, mean, color=colour)
        dots: Any = {"markersize": 2.2, "alpha": 0.6, "markeredgewidth": 0}
        axes.plot(
            *(to_floats(panel["points"][axis]) for axis in "xy"), "o", color=light_colour("ink"), **dots
        )
        for edge in filter(np.isfinite, to_floats(data.get("span") or [])):
            axes.axvline(edge, color=light_colour("faint"), linewidth=0.9)
        if limits is not None:
            margin = 0.04 * (limits[1] - limits[0])
            axes.set_ylim(limits[0] - margin, limits[1] + margin)
        if (span := value_range(x)) is not None:
            axes.set_xlim(*span)
        set_ticks(axes)
        axes.set_xlabel(data.get("x_label") or "")

    keys = [
        Key("training points", "ink", "dot", alpha=0.6),
        Key("predictive mean, in the colour of the method", "muted"),
        Key("± 2 standard deviations, epistemic", "muted", "area", alpha=0.5),
        Key("± 2 standard deviations, predictive", "muted", "area", alpha=0.2),
        Key(data.get("truth_label") or "true curve", "ink", "line", "4 3"),
    ]
    keys += [Key("ends of the training range", "faint")] if data.get("span") else []
    columns, size = arrange(len(panels), (300, 215))
    return Plot([Group(make_panels(data, draw))], keys if panels else [], columns, size, True)


def maps(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots a quantity over the plane, such as the uncertainty of each method, with one colour scale, or the points of each panel."""
    panels = data["panels"]
    maximum_range = value_range(np.zeros(1), *[to_floats(panel.get("values") or []) for panel in panels])
    top = float(data.get("top") or 0.0)
    top = top if top > 0 else maximum_range[1] if maximum_range else 1.0
    x, y = to_floats(data.get("x") or []), to_floats(data.get("y") or [])
    points, labels = (
        to_floats(data.get("points") or []).reshape(-1, 2),
        to_floats(data.get("point_class") or []),
    )
    classes = [int(label) for label in np.unique(labels[np.isfinite(labels)])]
    regular = all(axis.size > 1 and bool(np.all(np.diff(axis) > 0)) for axis in (x, y))

    def draw(axes: Axes, panel: JsonObject) -> None:
        values, panel_points = (
            to_floats(panel.get("values") or []),
            to_floats(panel.get("points") or []).reshape(-1, 2),
        )
        maximum = float(np.nanmax(values)) if np.isfinite(values).any() else 0.0
        if regular and values.size:
            half_x, half_y = (x[1] - x[0]) / 2, (y[1] - y[0]) / 2
            box = (x[0] - half_x, x[-1] + half_x, y[0] - half_y, y[-1] + half_y)
            shading: Any = {"cmap": _ramp("sky"), "vmin": 0.0, "vmax": top, "interpolation": "bilinear"}
            axes.imshow(np.nan_to_num(values), extent=box, origin="lower", **shading)
        dots: Any = {"linewidths": 0, "rasterized": True}
        for label in classes:
            (left, up), colour = points[labels == label].T, light_colour(CLASSES[label % len(CLASSES)])
            axes.scatter(left, up, s=4, alpha=0.7, color=colour, **dots)
        if panel_points.size:
            axes.scatter(
                panel_points[:, 0], panel_points[:, 1], s=3, alpha=0.5, color=light_colour("ink"), **dots
            )
            if regular:
                axes.set(xlim=(x[0], x[-1]), ylim=(y[0], y[-1]))
        if data.get("ring") is not None and regular:
            angle = np.linspace(0, 2 * np.pi, 181)
            circle = data["ring"] * np.array([np.cos(angle), np.sin(angle)])
            axes.plot(*circle, color=light_colour("ink"), linestyle=DASHED, linewidth=1.1)
        axes.set_aspect("equal")
        axes.grid(False)
        set_ticks(axes)
        if values.size and maximum < BLANK * top:
            _mark_blank(axes, maximum)

    columns, size = arrange(len(panels), (300, 275))
    keys = _map_keys(data, top, classes) if panels else []
    return Plot([Group(make_panels(data, draw))], keys, columns, size, regular)


def _mark_blank(axes: Axes, maximum: float) -> None:
    """Writes the maximum on a map without visible colour."""
    text = f"blank: maximum {format_tick(round(maximum, 3)) if maximum > 0 else '0'}"
    style: Any = {"transform": axes.transAxes, "ha": "center", "va": "top", "fontsize": 10}
    style["bbox"] = {"facecolor": light_colour("surface"), "edgecolor": "none", "pad": 2.0}
    axes.text(0.5, 0.97, text, **style)


def _map_keys(data: JsonObject, top: float, classes: list[int]) -> list[Key]:
    """Returns the legend of maps."""
    label = data.get("label") or "uncertainty"
    keys = [Key(f"{label}, from 0 to {format_tick(round(top, 3))}", "sky", "ramp")]
    keys += [Key(f"class {number}", CLASSES[number % len(CLASSES)], "dot") for number in classes]
    if data.get("ring") is not None:
        keys.append(Key("ring of out-of-distribution inputs", "ink", "line", "4 3"))
    return keys


def _after_pictures(pictures: list[JsonObject], rows: int, size: float, panels: list[Panel]) -> list[Panel]:
    """Returns the panels preceded by one panel with the images.

    Args:
        pictures: Images and their titles.
        rows: Number of rows of images.
        size: Font size of the titles.
        panels: Panels that follow.
    """

    def draw(sheet: Sheet) -> None:
        places = sheet.subplots(rows, -(-len(pictures) // rows), squeeze=False).ravel()
        for axes in places:
            axes.set_axis_off()
        for axes, image in zip(places, pictures, strict=False):
            if (pixels := to_floats(image["pixels"])).size:
                axes.imshow(np.nan_to_num(pixels), cmap="gray_r", interpolation="nearest")
            axes.set_title(image["title"], loc="center", fontsize=size)

    return [Panel("Images", draw), *panels] if panels and pictures else panels


def draws(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots the class probabilities of sampled networks for a known image (grey) and a novel one (colour of the method)."""
    classes = data.get("classes") or []
    long = any(len(name) > 3 for name in classes)

    def distribution(axes: Axes, samples: np.ndarray, colour: str) -> None:
        count, width = samples.shape
        axes.bar(np.arange(width), np.nan_to_num(samples.mean(0)), 0.8, color=colour, alpha=0.3, linewidth=0)
        # the dots are spread within their bar by a fixed pattern, so that equal ones remain visible
        jitter = (np.arange(count) * 0.61803399 % 1.0 - 0.5) * (0.62 if count > 1 else 0.0)
        places = np.arange(width)[None, :] + jitter[:, None]
        size = 5 if count > 1 else 14
        axes.scatter(
            places.ravel(), samples.ravel(), s=size, color=colour, alpha=0.6, linewidths=0, rasterized=True
        )
        axes.set_ylim(0, 1.04)
        axes.set_xlim(-0.6, width - 0.4)
        set_ticks(axes, 5, 2)
        words: Any = {"fontsize": 8, "rotation": 40, "ha": "right", "rotation_mode": "anchor"} if long else {}
        axes.set_xticks(
            range(width), classes or [str(place) for place in range(width)], **{"fontsize": 9, **words}
        )

    def make(panel: JsonObject) -> Panel:
        def draw(sheet: Sheet) -> None:
            row = sheet.subplots(1, max(1, len(panel["sides"])), sharey=True, squeeze=False)[0]
            for place, (axes, side) in enumerate(zip(row, panel["sides"], strict=True)):
                samples = to_floats(side["samples"])
                if samples.ndim == 2 and samples.size:
                    distribution(
                        axes, samples, light_colour(colours.get(panel["title"], "sky") if place else "slate")
                    )
                    axes.set_title(side.get("note") or "", fontsize=9.5)

        return Panel(panel["title"], draw, panel.get("note") or "")

    pictures = data.get("images") or []
    panels = _after_pictures(pictures, 1, 10, [make(panel) for panel in data["panels"]])
    marks = ("faint", "left, grey"), ("ink", "right, in the colour of the method")
    keys = [
        Key(f"{image['title']} ({words})", colour, "area", alpha=0.4)
        for image, (colour, words) in zip(pictures, marks, strict=False)
    ]
    keys += [
        Key("dot: one sampled network", "muted", "dot"),
        Key("bar: mean of the networks", "muted", "area", alpha=0.3),
    ]
    return Plot([Group(panels)], keys if panels else [], 2, (420, 185 if long else 150), True)


def shares(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots the probabilities of all classes as parts of a bar at each of several places, with the images."""
    classes, pictures = data.get("classes") or [], data.get("images") or []
    hues = [family.colour for family in METHOD_FAMILIES]  # here they stand for classes

    def draw(axes: Axes, panel: JsonObject) -> None:
        x, fractions = to_floats(panel["x"]), np.nan_to_num(to_floats(panel["shares"]))
        width = 0.8 * (float(np.diff(x).min()) if x.size > 1 else 1.0)
        if fractions.shape == (x.size, len(classes)):
            bottom = np.zeros(x.size)
            for place, heights in enumerate(fractions.T):
                axes.bar(x, heights, width, bottom, color=light_colour(hues[place % len(hues)]), linewidth=0)
                bottom = bottom + heights
        axes.set_ylim(0, 1)
        set_ticks(axes, 5, 2)
        last = max(1, x.size - 1)
        even = (step for step in range(1, last + 1) if last % step == 0 and last // step <= 4)
        axes.set_xticks(x[:: next(even)])
        axes.set_xlabel(data.get("x_label") or "")

    panels = _after_pictures(pictures, 2, 8.5, make_panels(data, draw))
    keys = [Key(label, hues[place % len(hues)], "area") for place, label in enumerate(classes)]
    columns, _ = arrange(len(panels))
    return Plot([Group(panels)], keys if panels else [], columns, (300, 165), True)


def mass_levels(values: np.ndarray, masses: tuple[float, ...]) -> list[float]:
    """Returns the density levels whose level sets hold the given fractions of the mass: regions of highest density.

    >>> mass_levels(np.array([[4.0, 3.0], [2.0, 1.0]]), (0.5, 0.9))
    [2.0, 3.0]
    """
    ordered = np.sort(np.nan_to_num(values).clip(min=0).ravel())[::-1]
    if ordered.size == 0 or ordered.sum() <= 0:
        return []
    cumulative = np.cumsum(ordered) / ordered.sum()
    return sorted({float(ordered[int(np.searchsorted(cumulative, mass))]) for mass in masses})


def density(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots densities of single noise dimensions with their number of modes, then of pairs of dimensions."""
    panels, pairs = data["panels"], data.get("pairs") or []
    limits = value_range(*[to_floats(panel["x"]) for panel in panels])

    def line(panel: JsonObject) -> Panel:
        def draw(sheet: Sheet) -> None:
            axes, x, posterior = sheet.subplots(), to_floats(panel["x"]), to_floats(panel["posterior"])
            axes.fill_between(x, 0, posterior, color=light_colour("teal"), alpha=0.2, linewidth=0)
            axes.plot(x, posterior, color=light_colour("teal"))
            if panel.get("prior") is not None:
                axes.plot(
                    x, to_floats(panel["prior"]), color=light_colour("muted"), linestyle=DASHED, linewidth=1.3
                )
            if limits is not None:
                axes.set_xlim(*limits)
            axes.set_ylim(bottom=0)
            axes.grid(False)
            set_ticks(axes)
            axes.yaxis.set_visible(False)
            axes.spines["left"].set_visible(False)
            axes.set_xlabel("noise z")

        modes = panel.get("modes")
        note = "" if modes is None else f"{int(modes)} mode{'' if int(modes) == 1 else 's'}"
        return Panel(panel["title"].replace("noise dimension", "dimension"), draw, note)

    def pair(panel: JsonObject) -> Panel:
        def draw(sheet: Sheet) -> None:
            axes = sheet.subplots()
            x, y, values = (
                to_floats(panel["x"]),
                to_floats(panel["y"]),
                np.nan_to_num(to_floats(panel["density"])),
            )
            box = (x[0], x[-1], y[0], y[-1])
            axes.imshow(
                values, extent=box, origin="lower", aspect="auto", cmap=_ramp("teal"), interpolation="bicubic"
            )
            levels = [
                level for level in mass_levels(values, (0.5, 0.9)) if values.min() < level < values.max()
            ]
            if levels:
                axes.contour(x, y, values, levels=levels, colors=[light_colour("ink")], linewidths=1.0)
            axes.grid(False)
            set_ticks(axes)
            axes.set_xlabel(panel.get("x_label") or "")
            axes.set_ylabel(panel.get("y_label") or "")

        return Panel(panel["title"].replace("noise dimension", "dimension"), draw)

    all_panels = [*(line(panel) for panel in panels), *(pair(panel) for panel in pairs)]
    keys = [Key("posterior", "teal", "area", alpha=0.5)] if panels else []
    keys += [Key("prior", "muted", "line", "4 3")] if any(panel.get("prior") for panel in panels) else []
    keys += [Key("contours of 50 % and 90 % of the mass", "ink")] if pairs else []
    columns, size = arrange(len(all_panels), (300, 225 if pairs else 190))
    return Plot([Group(all_panels)], keys, columns, size)


def images(data: JsonObject, colours: Mapping[str, str]) -> Plot:
    """Plots examples, each beside its predicted probabilities."""

    def make(panel: JsonObject) -> Panel:
        pixels = to_floats(panel["pixels"])
        bars = [bar for bar in panel.get("bars") or [] if bar.get("value") is not None]
        best = max([float(bar["value"]) for bar in bars], default=0.0)

        def draw(sheet: Sheet) -> None:
            picture, *charts = sheet.subplots(
                1, 2 if bars else 1, width_ratios=(1, 1.25)[: 2 if bars else 1], squeeze=False
            )[0]
            picture.set_axis_off()
            if pixels.size:
                span = value_range(pixels)
                scaled = (pixels - span[0]) / (span[1] - span[0]) if span and pixels.ndim == 3 else pixels
                picture.imshow(scaled, cmap="gray_r", interpolation="nearest")
            for chart in charts:
                likely = sorted(sorted(bars, key=lambda bar: -bar["value"])[:10], key=bars.index)
                for place, bar in enumerate(likely):
                    colour = light_colour("teal" if bar["value"] == best else "faint")
                    chart.barh(place, bar["value"], height=0.72, color=colour)
                    if bar["value"] >= 0.05 * max(best, 1e-12):
                        style: Any = {"va": "center", "fontsize": 9, "color": light_colour("muted")}
                        chart.text(bar["value"] + 0.03, place, format_number(bar["value"], ".2f"), **style)
                chart.set_yticks(range(len(likely)), [bar["label"][:14] for bar in likely], fontsize=9)
                chart.invert_yaxis()
                chart.set_xlim(0, max(1.0, best) * 1.28)
                chart.xaxis.set_visible(False)
                chart.spines["bottom"].set_visible(False)
                chart.grid(False)

        return Panel(panel["title"], draw)

    keys = [
        Key("probability of the most likely class", "teal", "area"),
        Key("probability of other classes", "faint", "area"),
    ]
    all_panels = [make(panel) for panel in data["panels"]]
    columns, size = arrange(len(all_panels), (300, 160))
    has_bars = any(panel.get("bars") for panel in data["panels"])
    return Plot([Group(all_panels)], keys if has_bars else [], columns, size)
