"""From panels to pictures: inline SVG that follows the page's colours, or one PNG.

A figure is a :class:`Plot`: panels that each draw themselves on an empty matplotlib figure, and a key that says what their symbols
mean. The page shows every panel as a picture of its own, so that a phone stacks them; :func:`to_png` puts all on one sheet.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, SubFigure
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from flowbnn_studies.report.style import COLOURS, RC, light, tick

Sheet = Figure | SubFigure
DASHED = (0, (4, 3))


@dataclass(frozen=True)
class Key:
    """One entry of a legend; ``mark`` is 'line', 'area', 'dot', 'sizes' (two dots), 'cross' (error bars) or 'ramp' (of a heat map)."""

    label: str
    colour: str
    mark: str = "line"
    dashes: str = ""
    alpha: float = 1.0


@dataclass(frozen=True)
class Panel:
    """One picture; ``note`` is the quiet remark after its title."""

    title: str
    draw: Callable[[Sheet], None]
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Panels that stand together, under a heading if it has one."""

    panels: list[Panel]
    heading: str = ""


@dataclass(frozen=True)
class Plot:
    """A whole figure; ``size`` is that of one panel, in pixels."""

    groups: list[Group]
    keys: list[Key] = field(default_factory=list)
    columns: int = 3
    size: tuple[int, int] = (300, 225)


def panels_of(data: dict[str, Any], draw: Callable[[Axes, dict[str, Any]], None]) -> list[Panel]:
    """A panel for each of ``data["panels"]``, drawn on axes of its own."""

    def make(one: dict[str, Any]) -> Panel:
        return Panel(one["title"], lambda sheet: draw(sheet.subplots(), one), one.get("note") or "")

    return [make(one) for one in data["panels"]]


def numbers(value: object) -> np.ndarray:
    """An array of floats; null and infinity become NaN, which figures leave blank.

    >>> numbers([1, None, float("inf")])
    array([ 1., nan, nan])
    """
    array = np.array(value, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def extent(*arrays: np.ndarray) -> tuple[float, float] | None:
    """The least and the greatest of all finite numbers, or None where they do not differ.

    >>> extent(np.array([3.0, np.nan]), np.array([1.0])), extent(np.array([np.nan]))
    ((1.0, 3.0), None)
    """
    flat = np.concatenate([np.zeros(0), *[array.ravel() for array in arrays]])
    flat = flat[np.isfinite(flat)]
    return (float(flat.min()), float(flat.max())) if flat.size and flat.min() < flat.max() else None


def set_ticks(axes: Axes, x: int = 5, y: int = 5, integer: bool = False) -> None:
    """At most that many ticks on each axis, with short labels; on a logarithmic axis at 1, 2 and 5 where the range is small."""
    for axis, most in ((axes.xaxis, x), (axes.yaxis, y)):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=9))
            axis.set_minor_locator(NullLocator())
        else:
            whole = integer and axis is axes.xaxis
            axis.set_major_locator(MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole))
        axis.set_major_formatter(FuncFormatter(tick))


def pattern(dashes: str) -> Any:
    """Lengths of dashes and gaps, as matplotlib takes them; none is a solid line."""
    return (0, tuple(float(part) for part in dashes.split())) if dashes else "-"


@contextmanager
def _drawing(seed: str = "flowbnn") -> Iterator[None]:
    """Our settings for the length of one drawing; the user's own matplotlib settings stay as they are."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # A label in a script that the measuring font lacks is still shown, by the fonts of the browser.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        start: Any = {
            name: value for name, value in matplotlib.rcParamsDefault.items() if "backend" not in name
        }
        matplotlib.rcParams.update(start | RC | {"svg.hashsalt": seed})
        yield


def to_svg(panel: Panel, size: tuple[int, int], name: str, alt: str) -> str:
    """The panel as an ``<svg>`` element to set into a page: colours by name, no identifiers but its own.

    Args:
        panel: what to draw.
        size: width and height, in pixels.
        name: a prefix for the identifiers inside, different for every picture of a page.
        alt: what a reader who cannot see the picture is told.
    """
    with _drawing(name):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        panel.draw(figure)
        figure.set_dpi(150)  # of what is rasterized inside; everything else stays a drawing
        stream = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    tree = ElementTree.fromstring(stream.getvalue())
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
        element.tail = None
        if element.tag != "text":
            element.text = None
    reference = re.compile(r"(?<=^#)[\w-]+$|(?<=url\(#)[\w-]+")
    used = {
        match
        for element in tree.iter()
        for value in element.attrib.values()
        if len(value) < 200
        for match in reference.findall(value)
    }
    for element in tree.iter():
        if element.attrib.get("id") not in used:
            element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            if key == "id":
                element.attrib[key] = f"{name}-{value}"
            elif key == "style":
                element.attrib[key] = _with_names(value)
            elif key == "d":
                element.attrib[key] = " ".join(
                    re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}", value).split()
                )
            elif key in ("href", "clip-path") and len(value) < 200:
                element.attrib[key] = value.replace("#", f"#{name}-")
    tree.attrib = {"viewBox": f"0 0 {size[0]} {size[1]}", "role": "img", "aria-label": alt}
    return ElementTree.tostring(tree, encoding="unicode")


def _with_names(style: str) -> str:
    """A style attribute with the page's names for colours, and the page's font."""
    names = {pair[0]: f"var(--{name})" for name, pair in COLOURS.items()}
    style = re.sub(r"#[0-9a-fA-F]{6}\b", lambda match: names.get(match[0].lower(), match[0]), style)
    style = re.sub(r"\bfont: ([\d.]+px) [^;]*", r"font-size: \1", style)
    return re.sub(r"'DejaVu Sans'[^;]*", "inherit", style)


def to_png(plot: Plot, title: str, scale: float = 2.0) -> bytes:
    """The whole figure on one white sheet, with its title, its key and its panels' titles."""
    rows = [
        (group.heading if start == 0 else "", group.panels[start : start + plot.columns])
        for group in plot.groups
        for start in range(0, len(group.panels), plot.columns)
    ]
    width = max(plot.columns * (plot.size[0] + 10), 420)
    longest = max([len(key.label) for key in plot.keys], default=0) * 6.5 + 48
    columns = max(1, min(len(plot.keys), int((width - 16) // longest)))
    heights = [
        38 + 18 * -(-len(plot.keys) // columns),
        *(plot.size[1] + (50 if heading else 26) for heading, _ in rows),
    ]
    with _drawing():
        figure = Figure(
            figsize=(width / 72, sum(heights) / 72), dpi=72 * scale, facecolor="white", layout="constrained"
        )
        head, *parts = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
        head.text(10 / width, 1 - 10 / heights[0], title, va="top", fontsize=13, weight="bold")
        if plot.keys:
            # matplotlib drops entries that begin with an underscore
            labels = [f" {key.label}" if key.label.startswith("_") else key.label for key in plot.keys]
            legend = head.legend(
                [_handle(key) for key in plot.keys],
                labels,
                loc="upper left",
                bbox_to_anchor=(2 / width, 1 - 30 / heights[0]),
                ncols=columns,
                handler_map={tuple: HandlerTuple(ndivide=None)},
                labelcolor=light("muted"),
                borderaxespad=0.3,
            )
            legend.set_in_layout(False)
        for part, (heading, panels) in zip(parts, rows, strict=True):
            if heading:
                part.suptitle(heading, x=10 / width, ha="left", fontsize=12, weight="bold")
            for cell, panel in zip(
                part.subfigures(1, plot.columns, squeeze=False).ravel(), panels, strict=False
            ):
                text = f"{panel.title} ({panel.note})" if panel.note else panel.title
                most = int(plot.size[0] / 6.4)
                text = text if len(text) <= most else text[: most - 1].rstrip() + "…"
                cell.suptitle(text, x=10 / plot.size[0], ha="left", fontsize=10.5, weight="bold")
                panel.draw(cell)
        stream = io.BytesIO()
        FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()


def _handle(key: Key) -> Any:
    """What stands before a label of the legend."""

    def mark(size: float, marker: str = "o", alpha: float = key.alpha, edge: float = 0.0) -> Line2D:
        style: Any = {"color": light(key.colour), "alpha": alpha, "linestyle": "none"}
        return Line2D([], [], marker=marker, markersize=size, markeredgewidth=edge, **style)

    match key.mark:
        case "sizes":
            return mark(2.5), mark(9)
        case "ramp":
            return tuple(mark(8, "s", alpha) for alpha in (0.15, 0.55, 1.0))
        case "area":
            return mark(8, "s")
        case "dot":
            return mark(6)
        case "cross":
            return mark(9, "+", 1.0, edge=1.2)
    return Line2D([], [], color=light(key.colour), linestyle=pattern(key.dashes), alpha=key.alpha)
