"""From panels to pictures: inline SVG that follows the page's colours, or one PNG.

A figure is a ``Plot``: panels that each know how to draw themselves on an empty matplotlib figure, and a key. The
page sets every panel as a picture of its own, so that a phone stacks them; ``to_png`` puts them all on one sheet.
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
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.legend_handler import HandlerTuple
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from flowbnn_studies.report.style import COLOURS, RC, light

__all__ = ["Group", "Key", "Panel", "Plot", "nice_ticks", "to_png", "to_svg"]


@dataclass(frozen=True)
class Key:
    """One entry of a legend; ``mark`` is 'line', 'area', 'dot', 'sizes' (two dots) or 'ramp' (from nothing to the colour)."""

    label: str
    colour: str
    mark: str = "line"
    dashes: str = ""
    alpha: float | None = None


@dataclass(frozen=True)
class Panel:
    """One picture: ``note`` is the quiet remark after its title."""

    title: str
    draw: Callable[[Figure], None]
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Panels that stand together, under a heading if it has one."""

    panels: list[Panel]
    heading: str = ""
    note: str = ""


@dataclass(frozen=True)
class Plot:
    """A whole figure; ``size`` is that of one panel, in pixels, ``remark`` what its caption says of how it is drawn."""

    groups: list[Group]
    keys: list[Key] = field(default_factory=list)
    columns: int = 3
    size: tuple[int, int] = (300, 225)
    remark: str = ""


def nice_ticks(most: int, whole: bool = False) -> MaxNLocator:
    """At most that many ticks, in steps of 1, 2, 2.5 or 5."""
    return MaxNLocator(most, steps=[1, 2, 2.5, 5, 10], integer=whole)


def _settings(seed: str) -> Any:
    """Everything from a clean start but the backend, which matplotlib does not put back."""
    start = {name: value for name, value in matplotlib.rcParamsDefault.items() if "backend" not in name}
    return {**start, **RC, "svg.hashsalt": seed}


@contextmanager
def _drawing(seed: str = "flowbnn") -> Iterator[None]:
    """Our settings, for the length of one drawing: the user's own matplotlib settings stay as they are."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # A label in a script that the measuring font lacks is still shown, by the fonts of the browser.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        matplotlib.rcParams.update(_settings(seed))
        yield


def _figure(size: tuple[float, float]) -> Figure:
    return Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")


def _through_names(style: str) -> str:
    names = {pair[0]: name for name, pair in COLOURS.items()}

    def swap(match: re.Match[str]) -> str:
        name = names.get(match.group().lower())
        return f"var(--{name})" if name else match.group()

    style = re.sub(r"#[0-9a-fA-F]{6}\b", swap, style)
    return re.sub(
        r"'DejaVu Sans'[^;]*", "inherit", re.sub(r"\bfont: ([\d.]+px) [^;]*", r"font-size: \1", style)
    )


def to_svg(panel: Panel, size: tuple[int, int], name: str, alt: str) -> str:
    """The panel as an ``<svg>`` element to set into a page: no outside names, no identifiers but its own.

    Args:
        panel: what to draw.
        size: width and height, in pixels.
        name: a prefix for the identifiers inside, different for every picture of a page.
        alt: what a reader who cannot see the picture is told.
    """
    with _drawing(name):
        figure = _figure(size)
        panel.draw(figure)
        figure.set_dpi(200)  # of what is rasterized inside; everything else stays a drawing
        stream = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
    tree = ElementTree.fromstring(stream.getvalue())
    return _clean(tree, size, name, alt)


def _clean(tree: ElementTree.Element, size: tuple[int, int], name: str, alt: str) -> str:
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
        for key in list(element.attrib):
            value = element.attrib.pop(key)
            element.attrib[key.rpartition("}")[2]] = value
        element.tail = None
        if element.tag != "text":
            element.text = None
    used = set()
    for element in tree.iter():
        for value in element.attrib.values():
            used.update(re.findall(r"^#([\w-]+)$|url\(#([\w-]+)\)", value) if len(value) < 200 else [])
    wanted = {identifier for pair in used for identifier in pair if identifier}
    for element in tree.iter():
        if element.attrib.get("id") not in wanted:
            element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            if key == "id":
                element.attrib[key] = f"{name}-{value}"
            elif key == "style":
                element.attrib[key] = _through_names(value)
            elif key == "d":
                short = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found.group()):.1f}", value)
                element.attrib[key] = " ".join(short.split())
            elif key in ("href", "clip-path") and len(value) < 200:
                element.attrib[key] = value.replace("#", f"#{name}-")
    tree.attrib.clear()
    tree.attrib.update({"viewBox": f"0 0 {size[0]} {size[1]}", "role": "img", "aria-label": alt})
    return ElementTree.tostring(tree, encoding="unicode")


def _pixels(figure: Figure, scale: float) -> np.ndarray:
    figure.set_dpi(72 * scale)
    figure.set_facecolor("white")
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())[..., :3].copy()


def _handle(key: Key) -> Any:
    colour = light(key.colour)
    if key.mark == "sizes":
        return tuple(
            Line2D([], [], color=colour, marker="o", linestyle="none", markersize=size, markeredgewidth=0)
            for size in (2.5, 9)
        )
    if key.mark == "ramp":
        return tuple(
            Line2D(
                [],
                [],
                color=colour,
                alpha=alpha,
                marker="s",
                linestyle="none",
                markersize=8,
                markeredgewidth=0,
            )
            for alpha in (0.15, 0.55, 1.0)
        )
    if key.mark == "line":
        return Line2D([], [], color=colour, linestyle=_dashes(key.dashes))
    marker = "s" if key.mark == "area" else "o"
    size = 8 if marker == "s" else 6
    edge = 0.0 if key.alpha is not None else None
    return Line2D(
        [],
        [],
        color=colour,
        marker=marker,
        linestyle="none",
        markersize=size,
        alpha=key.alpha,
        markeredgewidth=edge,
    )


def _dashes(pattern: str) -> Any:
    return (0, tuple(float(part) for part in pattern.split())) if pattern else "-"


def _heading(plot: Plot, title: str, width: int, scale: float) -> np.ndarray:
    # A label costs its length and its mark; as many to a line as the longest of them allows.
    longest = max([len(key.label) for key in plot.keys], default=0) * 6.5 + 48
    columns = max(1, min(len(plot.keys), int((width - 16) // longest)))
    lines = -(-len(plot.keys) // columns)
    height = 34 + lines * 18
    figure = Figure(figsize=(width / 72, height / 72))
    figure.text(10 / width, 1 - 10 / height, title, va="top", fontsize=13, weight="bold")
    if plot.keys:
        figure.legend(
            [_handle(key) for key in plot.keys],
            # matplotlib drops entries that begin with an underscore.
            [f" {key.label}" if key.label.startswith("_") else key.label for key in plot.keys],
            loc="upper left",
            bbox_to_anchor=(2 / width, 1 - 26 / height),
            ncols=columns,
            handler_map={tuple: HandlerTuple(ndivide=None)},
            labelcolor=light("muted"),
            borderaxespad=0.3,
        )
    return _pixels(figure, scale)


def _strip(text: str, note: str, width: int, scale: float) -> np.ndarray:
    figure = Figure(figsize=(width / 72, 26 / 72))
    shown = figure.text(10 / width, 0.3, text, va="baseline", fontsize=11.5, weight="bold")
    if note:
        box = shown.get_window_extent(FigureCanvasAgg(figure).get_renderer())
        figure.text(box.x1 / width + 8 / width, 0.3, note, va="baseline", color=light("muted"))
    return _pixels(figure, scale)


def _blank(height: int, width: int) -> np.ndarray:
    return np.full((height, width, 3), 255, dtype=np.uint8)


def _sheet_row(panels: list[Panel], plot: Plot, scale: float) -> np.ndarray:
    tiles = []
    for panel in panels:
        figure = _figure((plot.size[0], plot.size[1] + 22))
        panel.draw(figure)
        title = f"{panel.title} ({panel.note})" if panel.note else panel.title
        if title:
            figure.suptitle(_short(title, plot.size[0]), x=0, ha="left", fontsize=10.5, weight="bold")
        tiles.append(_pixels(figure, scale))
    while len(tiles) < plot.columns:
        tiles.append(_blank(*tiles[0].shape[:2]))
    gap = _blank(tiles[0].shape[0], int(10 * scale))
    return np.hstack([gap, *[part for tile in tiles for part in (tile, gap)]])


def _short(text: str, width: float) -> str:
    most = int(width / 6.6)
    return text if len(text) <= most else text[: most - 1].rstrip() + "…"


def to_png(plot: Plot, title: str, scale: float = 2.0) -> bytes:
    """The whole figure on one white sheet, with its title, its key and its panels' titles.

    Args:
        plot: what to draw.
        title: the line at the top.
        scale: picture elements per pixel of the page.
    """
    with _drawing():
        rows = []
        for group in plot.groups:
            strip = (group.heading, group.note)
            for start in range(0, len(group.panels), plot.columns):
                row = _sheet_row(group.panels[start : start + plot.columns], plot, scale)
                if start == 0 and group.heading:
                    rows.append(_strip(*strip, round(row.shape[1] / scale), scale))
                rows.append(row)
        width = max((row.shape[1] for row in rows), default=int(600 * scale))
        rows.insert(0, _heading(plot, title, round(width / scale), scale))
        wide = max(row.shape[1] for row in rows)
        rows = [np.hstack([row, _blank(row.shape[0], wide - row.shape[1])]) for row in rows]
        stream = io.BytesIO()
        imsave(stream, np.vstack(rows), format="png")
    return stream.getvalue()
