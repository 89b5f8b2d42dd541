"""What the noise learned: posterior densities against their prior; and pictures with what was predicted."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flowbnn_studies.report.canvas import Group, Key, Panel, Plot, nice_ticks
from flowbnn_studies.report.schema import extent, numbers
from flowbnn_studies.report.style import decimal, light, tick

__all__ = ["density", "images", "mass_levels"]

Data = dict[str, Any]
COLOUR = "sky"  # no method's own


def _modes(count: object) -> str:
    if not isinstance(count, int | float):
        return ""
    return f"{int(count)} mode" + ("" if int(count) == 1 else "s")


def _title(title: str) -> str:
    """The title on one line: that it is noise, the figure says."""
    return title.replace("noise dimension", "dimension")


def _line_panel(panel: Data, limits: tuple[float, float] | None) -> Panel:
    x, posterior = numbers(panel["x"]), numbers(panel["posterior"])

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.fill_between(x, np.zeros_like(posterior), posterior, color=light(COLOUR), alpha=0.2, linewidth=0)
        axes.plot(x, posterior, color=light(COLOUR))
        if panel.get("prior") is not None:
            axes.plot(x, numbers(panel["prior"]), color=light("muted"), linestyle=(0, (4, 3)), linewidth=1.3)
        if limits is not None:
            axes.set_xlim(*limits)
        axes.set_ylim(bottom=0)
        axes.grid(False)
        axes.yaxis.set_visible(False)
        axes.spines["left"].set_visible(False)
        axes.xaxis.set_major_locator(nice_ticks(5))
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.set_xlabel("noise z")

    return Panel(_title(panel["title"]), draw, _modes(panel.get("modes")))


def mass_levels(values: np.ndarray, masses: tuple[float, ...]) -> list[float]:
    """Heights whose level sets hold the given shares of the whole: the regions of highest density.

    >>> mass_levels(np.array([[4.0, 3.0], [2.0, 1.0]]), (0.5, 0.9))
    [2.0, 3.0]
    """
    ordered = np.sort(np.nan_to_num(values).clip(min=0).ravel())[::-1]
    if ordered.size == 0 or ordered.sum() <= 0:
        return []
    held = np.cumsum(ordered) / ordered.sum()
    return sorted({float(ordered[int(np.searchsorted(held, mass))]) for mass in masses})


def _pair_panel(pair: Data) -> Panel:
    x, y, values = numbers(pair["x"]), numbers(pair["y"]), np.nan_to_num(numbers(pair["density"]))

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        colour = to_rgb(light("sky"))
        # From nothing to the colour, so that empty ground is the page's own, light or dark.
        ramp = LinearSegmentedColormap.from_list("ramp", [(*colour, 0.0), (*colour, 0.95)])
        fine_x, fine_y = np.linspace(x[0], x[-1], 160), np.linspace(y[0], y[-1], 160)
        rows = np.stack([np.interp(fine_x, x, row) for row in values])
        smooth = np.stack([np.interp(fine_y, y, column) for column in rows.T], axis=1)
        box = (x[0], x[-1], y[0], y[-1])
        axes.imshow(smooth, extent=box, origin="lower", aspect="auto", cmap=ramp, interpolation="bilinear")
        levels = [level for level in mass_levels(values, (0.5, 0.9)) if values.min() < level < values.max()]
        if levels:
            axes.contour(x, y, values, levels=levels, colors=[light("ink")], linewidths=1.0)
        axes.grid(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(nice_ticks(5))
            axis.set_major_formatter(FuncFormatter(tick))
        axes.set_xlabel(pair.get("x_label") or "")
        axes.set_ylabel(pair.get("y_label") or "")

    return Panel(_title(pair["title"]), draw)


def density(data: Data, colours: Mapping[str, str]) -> Plot:
    """Posterior of single noise dimensions with the number of their modes, then pairs of dimensions."""
    panels, pairs = data["panels"], data.get("pairs") or []
    limits = extent(*[numbers(panel["x"]) for panel in panels])
    groups = [Group([_line_panel(panel, limits) for panel in panels])] if panels else []
    keys = [Key("posterior", COLOUR, "area")] if panels else []
    if any(panel.get("prior") is not None for panel in panels):
        keys.append(Key("prior", "muted", "line", "4 3"))
    if pairs:
        heading = "Two dimensions at once"
        groups.append(
            Group([_pair_panel(pair) for pair in pairs], heading, "lines hold 50 % and 90 % of the mass")
        )
    return Plot(groups, keys, 3, (300, 190 if not pairs else 225))


def _short(label: str) -> str:
    return label if len(label) <= 14 else label[:13] + "…"


def _image_panel(panel: Data) -> Panel:
    pixels = numbers(panel["pixels"])
    bars = [bar for bar in panel.get("bars") or [] if bar.get("value") is not None]

    def draw(figure: Figure) -> None:
        if bars:
            picture, chart = figure.subplots(1, 2, width_ratios=(1, 1.25))
        else:
            picture, chart = figure.subplots(), None
        picture.set_axis_off()
        if pixels.size:
            span = extent(pixels)
            shown = (pixels - span[0]) / (span[1] - span[0]) if span and pixels.ndim == 3 else pixels
            picture.imshow(shown, cmap="gray_r", interpolation="nearest")
        if chart is None:
            return
        best = max(float(bar["value"]) for bar in bars)
        shown_bars = sorted(sorted(bars, key=lambda bar: -bar["value"])[:10], key=bars.index)
        for place, bar in enumerate(shown_bars):
            colour = light(COLOUR if bar["value"] == best else "faint")
            chart.barh(place, bar["value"], height=0.72, color=colour)
            if bar["value"] >= 0.05 * max(best, 1e-12):
                chart.text(
                    bar["value"] + 0.03,
                    place,
                    decimal(bar["value"], ".2f"),
                    va="center",
                    fontsize=9,
                    color=light("muted"),
                )
        chart.set_yticks(range(len(shown_bars)), [_short(bar["label"]) for bar in shown_bars], fontsize=9)
        chart.invert_yaxis()
        chart.set_xlim(0, max(1.0, best) * 1.28)
        chart.xaxis.set_visible(False)
        chart.spines["bottom"].set_visible(False)
        chart.grid(False)

    return Panel(panel["title"], draw)


def images(data: Data, colours: Mapping[str, str]) -> Plot:
    """Examples, each beside the probabilities it was given."""
    return Plot([Group([_image_panel(panel) for panel in data["panels"]])], [], 3, (300, 160))
