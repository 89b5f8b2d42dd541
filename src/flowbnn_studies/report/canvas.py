"""Drawing of figures: colours, fonts, formatting of numbers, and conversion of panels to inline SVG or one PNG.

A figure is a :class:`Plot`: panels that draw themselves on an empty matplotlib figure, and a legend. The page shows every panel as
a picture of its own, so that a phone stacks them. :func:`to_png` puts all panels on one sheet. No other file names a colour by its
code.
"""

import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
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
from matplotlib.transforms import Bbox

from flowbnn.plots.style import DARK, LIGHT, OKABE_ITO, settings

# Each name is a custom property of the page: (light scheme, dark scheme). Figures are drawn in the light value, which the page replaces
# by the name, so that a figure follows the reader's scheme. The hues are those of flowbnn.plots, some darkened for contrast on white.
COLOURS: dict[str, tuple[str, str]] = {
    **{name: (getattr(LIGHT, name), getattr(DARK, name)) for name in ("ink", "muted")},
    "faint": ("#b4bac4", "#596170"),
    "line": (LIGHT.faint, DARK.faint),
    "surface": (LIGHT.background, "#1a1e25"),
    "page": ("#f6f7f9", "#12151a"),
    "accent": ("#00619a", "#5cb5ee"),
    # methods
    "slate": ("#6b7280", "#98a1b0"),
    "brown": ("#8a5a3c", "#c8966f"),
    "vermillion": (OKABE_ITO["vermillion"].lower(), "#f4813a"),
    "blue": (OKABE_ITO["blue"].lower(), "#4fabe6"),
    "purple": ("#c0609a", "#e39cc4"),
    "green": (OKABE_ITO["green"].lower(), "#30c79c"),
    "olive": ("#7c8500", "#bcc64a"),
    "crimson": ("#a6163a", "#f2617c"),
    "amber": ("#c78500", "#f0b23c"),
    "violet": ("#7a52b8", "#a98be0"),
    # classes of points and heat maps
    "indigo": ("#4560b0", "#8fa6ea"),
    "sand": ("#b58f4e", "#dcbd85"),
    "sky": ("#3b9fd6", "#8fd0f7"),
    "teal": ("#17808a", "#4fc4cd"),
    # steps of one quantity
    "step1": ("#440154", "#3e4a89"),
    "step2": ("#433e85", "#31688e"),
    "step3": ("#30678d", "#26828e"),
    "step4": ("#218f8d", "#1f9e89"),
    "step5": ("#36b677", "#35b779"),
    "step6": ("#7cc142", "#6ece58"),
    "step7": ("#b3b410", "#b5de2b"),
    "step8": ("#c9a227", "#fde725"),
}
CLASSES = ("sand", "indigo", "teal", "sky")
STEPS = tuple(f"step{number}" for number in range(1, 9))


@dataclass(frozen=True)
class MethodFamily:
    """A family of methods that share a colour.

    Args:
        name: Name in a legend.
        colour: Name of the colour.
        methods: Names of the methods in kebab case. Their variants belong to the family as well.
    """

    name: str
    colour: str
    methods: tuple[str, ...]


# The first match counts: a variant of a method comes before the method.
METHOD_FAMILIES = (
    MethodFamily("variational weights", "crimson", ("bayes-by-backprop", "mnf", "ivon", "vbll")),
    MethodFamily("Laplace", "amber", ("laplace",)),
    MethodFamily("ensembles", "olive", ("deep-ensemble", "mode-ensemble", "swag")),
    MethodFamily("Markov chains", "violet", ("sgld", "hmc", "nuts")),
    MethodFamily("dropout", "green", ("mc-dropout",)),
    MethodFamily("mixture noise", "purple", ("node-noise-mixture",)),
    MethodFamily("Gaussian noise", "blue", ("node-noise-gaussian",)),
    MethodFamily("flow noise", "vermillion", ("node-noise",)),
    MethodFamily("deterministic network, same number of epochs", "brown", ("mle-longer",)),
    MethodFamily("deterministic network", "slate", ("mle", "map", "damp", "temperature")),
)

# Settings of matplotlib. One point is one pixel of the page because figures are saved at 72 dots per inch.
# fmt: off
RC: dict[str, Any] = settings(LIGHT) | {
    "figure.dpi": 72, "figure.facecolor": "none", "savefig.facecolor": "none", "axes.facecolor": "none", "svg.fonttype": "none",
    "text.parse_math": False, "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 10.5,
    "axes.labelsize": 10.5, "axes.titlesize": 10, "axes.titlepad": 5, "axes.grid.axis": "y",
    **{f"{axis}tick.labelsize": 10 for axis in "xy"}, "xtick.major.size": 3, "ytick.major.size": 0,
    **{f"axes.{name}color": COLOURS["muted"][0] for name in ("label", "title")}, "axes.edgecolor": COLOURS["faint"][0],
    "figure.constrained_layout.use": False, "figure.constrained_layout.h_pad": 0.04, "figure.constrained_layout.w_pad": 0.04,
}
# fmt: on


def light_colour(name: str) -> str:
    """Returns the code of a colour in the light scheme, in which figures are drawn.

    >>> light_colour("blue")
    '#0072b2'
    """
    return COLOURS[name][0]


def family_of(method: str | None) -> MethodFamily | None:
    """Returns the family of a method by its kebab-case name, or None.

    >>> [family_of(method).name for method in ("node-noise-planar", "mle-longer", "mle")]
    ['flow noise', 'deterministic network, same number of epochs', 'deterministic network']
    >>> family_of("mine")
    """
    families = {name: family for family in reversed(METHOD_FAMILIES) for name in family.methods}
    while method and method not in families:
        method = method.rpartition("-")[0]
    return families.get(method or "")


def assign_colours(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Assigns a colour to each label.

    A label has the colour of its method. Labels without a method have hues of their own. If more than two rows share one method,
    the colours are a ramp.

    >>> assign_colours([{"label": "Flow", "method": "node-noise-planar"}, {"label": "mine"}, {"label": "yours"}])
    {'Flow': 'vermillion', 'mine': 'teal', 'yours': 'indigo'}
    >>> list(assign_colours({"label": f"length {n}", "method": "node-noise-planar"} for n in (0, 6, 12)).values())
    ['step1', 'step4', 'step6']
    """
    methods = {row["label"]: row.get("method") or "" for row in rows}
    count = len(methods)
    if 2 < count <= len(STEPS) and len(set(methods.values())) == 1 and all(methods.values()):
        last = 5.0 if count <= 6 else 7.0
        return {label: STEPS[round(last * index / (count - 1) + 1e-9)] for index, label in enumerate(methods)}
    assigned = {label: family.colour for label, method in methods.items() if (family := family_of(method))}
    unused = (family.colour for family in METHOD_FAMILIES if family.colour not in assigned.values())
    hues = cycle(("teal", "indigo", "sand", "sky", *unused))
    return {label: assigned.get(label) or next(hues) for label in methods}


def format_number(value: object, form: str = ".3f") -> str:
    """Formats a number with a real minus sign. A missing number is an en dash.

    >>> format_number(-0.25, ".2f"), format_number(None), format_number(float("nan")), format_number(float("inf"))
    ('−0.25', '–', '–', '∞')
    """
    if not isinstance(value, int | float) or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return format(value, form).replace("-", "−")


def format_tick(value: float, _position: object = None) -> str:
    """Formats the label of a tick as briefly as possible.

    >>> format_tick(0.30000000000000004), format_tick(-2.0), format_tick(0.00002), format_tick(3e7)
    ('0.3', '−2', '2e−5', '3e7')
    """
    text = f"{value:.6g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def format_duration(seconds: float) -> str:
    """Formats seconds in readable units.

    >>> format_duration(7.26), format_duration(83), format_duration(7320)
    ('7.3 s', '1 min 23 s', '2 h 2 min')
    """
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, remainder = divmod(round(seconds), 60)
    return f"{minutes} min {remainder} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


Sheet = Figure | SubFigure
DASHED = (0, (4, 3))


@dataclass(frozen=True)
class Key:
    """One entry of a legend.

    Args:
        label: Text of the entry.
        colour: Name of the colour.
        mark: Symbol: 'line', 'area', 'dot', 'sizes' (two dots), 'cross' (error bars) or 'ramp' (of a heat map).
        dashes: Lengths of dashes and gaps; empty for a solid line.
        alpha: Opacity.
    """

    label: str
    colour: str
    mark: str = "line"
    dashes: str = ""
    alpha: float = 1.0


@dataclass(frozen=True)
class Panel:
    """One picture.

    Args:
        title: Title above the picture.
        draw: Function that draws on an empty figure.
        note: Remark after the title.
    """

    title: str
    draw: Callable[[Sheet], None]
    note: str = ""


@dataclass(frozen=True)
class Group:
    """Panels that are shown together.

    Args:
        panels: Panels of the group.
        heading: Heading of the group; empty for none.
    """

    panels: list[Panel]
    heading: str = ""


@dataclass(frozen=True)
class Plot:
    """A complete figure.

    Args:
        groups: Groups of panels.
        keys: Entries of the legend.
        columns: Number of panels in a row.
        size: Width and height of one panel, in pixels.
        same_axes: All panels of a group have the same axes, so that the layout of the first one fits all.
    """

    groups: list[Group]
    keys: list[Key] = field(default_factory=list)
    columns: int = 3
    size: tuple[int, int] = (300, 225)
    same_axes: bool = False


def make_panels(data: dict[str, Any], draw: Callable[[Axes, dict[str, Any]], None]) -> list[Panel]:
    """Returns a panel for each entry of ``data["panels"]``, drawn on axes of its own."""

    def make(entry: dict[str, Any]) -> Panel:
        return Panel(entry["title"], lambda sheet: draw(sheet.subplots(), entry), entry.get("note") or "")

    return [make(entry) for entry in data["panels"]]


def to_floats(value: object) -> np.ndarray:
    """Converts to an array of floats. Null and infinity become NaN, which figures leave blank.

    >>> to_floats([1, None, float("inf")])
    array([ 1., nan, nan])
    """
    array = np.array(value, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def value_range(*arrays: np.ndarray) -> tuple[float, float] | None:
    """Returns the smallest and the largest finite number, or None if they are equal or missing.

    >>> value_range(np.array([3.0, np.nan]), np.array([1.0])), value_range(np.array([np.nan]))
    ((1.0, 3.0), None)
    """
    flat = np.concatenate([np.zeros(0), *[array.ravel() for array in arrays]])
    flat = flat[np.isfinite(flat)]
    return (float(flat.min()), float(flat.max())) if flat.size and flat.min() < flat.max() else None


def set_ticks(axes: Axes, x: int = 5, y: int = 5, integer: bool = False) -> None:
    """Sets at most the given number of ticks on each axis, with short labels.

    A logarithmic axis of small range has ticks at 1, 2 and 5.
    """
    for axis, limit in ((axes.xaxis, x), (axes.yaxis, y)):
        if axis.get_scale() == "log":
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,), numticks=9))
            axis.set_minor_locator(NullLocator())
        else:
            integer_axis = integer and axis is axes.xaxis
            axis.set_major_locator(MaxNLocator(limit, steps=[1, 2, 2.5, 5, 10], integer=integer_axis))
        axis.set_major_formatter(FuncFormatter(format_tick))


def line_style(dashes: str) -> Any:
    """Returns lengths of dashes and gaps in matplotlib's format; an empty text is a solid line."""
    return (0, tuple(float(part) for part in dashes.split())) if dashes else "-"


@contextmanager
def _drawing(seed: str = "flowbnn") -> Iterator[None]:
    """Context manager that applies our matplotlib settings to one drawing and then restores those of the user."""
    with warnings.catch_warnings(), matplotlib.rc_context():
        # The browser's fonts show characters that the measuring font lacks.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from")
        start: Any = {
            name: value for name, value in matplotlib.rcParamsDefault.items() if "backend" not in name
        }
        matplotlib.rcParams.update(start | RC | {"svg.hashsalt": seed})
        yield


def to_svg(
    panel: Panel, size: tuple[int, int], name: str, alt: str, layouts: dict[Any, list[Bbox]] | None = None
) -> str:
    """Returns the panel as an ``<svg>`` element for a page, with named colours and identifiers of its own.

    Args:
        panel: Panel to draw.
        size: Width and height, in pixels.
        name: Prefix of the identifiers, different for every picture of a page.
        alt: Text for readers who cannot see the picture.
        layouts: Places of the axes of earlier panels with the same axes, which are reused. Computing them takes half of the time.
    """
    layouts = {} if layouts is None else layouts
    with _drawing(name):
        figure = Figure(figsize=(size[0] / 72, size[1] / 72), layout="constrained")
        panel.draw(figure)
        kind = tuple(axes.axison for axes in figure.axes)  # images have no axes
        if kind in layouts:
            figure.set_layout_engine("none")
            for axes, place in zip(figure.axes, layouts[kind], strict=True):
                axes.set_position(place)
        figure.set_dpi(150)  # resolution of rasterized parts; the rest stays vector graphics
        stream = io.BytesIO()
        FigureCanvasSVG(figure).print_svg(stream, metadata={"Date": None})
        layouts[kind] = [axes.get_position(original=True) for axes in figure.axes]
    tree = ElementTree.fromstring(stream.getvalue())
    _strip(tree)
    _rename_identifiers(tree, name)
    tree.attrib = {"viewBox": f"0 0 {size[0]} {size[1]}", "role": "img", "aria-label": alt}
    return ElementTree.tostring(tree, encoding="unicode")


def _strip(tree: ElementTree.Element) -> None:
    """Removes namespaces, metadata, styles and white space."""
    for element in tree.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {key.rpartition("}")[2]: value for key, value in element.attrib.items()}
        for child in list(element):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                element.remove(child)
        element.tail = None
        if element.tag != "text":
            element.text = None


def _rename_identifiers(tree: ElementTree.Element, prefix: str) -> None:
    """Prefixes the identifiers in use, removes the others, replaces colours by names and shortens coordinates."""
    reference = re.compile(r"(?<=^#)[\w-]+$|(?<=url\(#)[\w-]+")
    references = {
        match
        for element in tree.iter()
        for value in element.attrib.values()
        if len(value) < 200  # longer values are images
        for match in reference.findall(value)
    }
    for element in tree.iter():
        if element.attrib.get("id") not in references:
            element.attrib.pop("id", None)
        for key, value in element.attrib.items():
            if key == "id":
                element.attrib[key] = f"{prefix}-{value}"
            elif key == "style":
                element.attrib[key] = _with_names(value)
            elif key == "d":
                element.attrib[key] = " ".join(
                    re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}", value).split()
                )
            elif key in ("href", "clip-path") and len(value) < 200:
                element.attrib[key] = value.replace("#", f"#{prefix}-")


def _with_names(style: str) -> str:
    """Returns a style attribute with the page's names of colours and the page's font."""
    names = {pair[0]: f"var(--{name})" for name, pair in COLOURS.items()}
    style = re.sub(r"#[0-9a-fA-F]{6}\b", lambda match: names.get(match[0].lower(), match[0]), style)
    style = re.sub(r"\bfont: ([\d.]+px) [^;]*", r"font-size: \1", style)
    return re.sub(r"'DejaVu Sans'[^;]*", "inherit", style)


def to_png(plot: Plot, title: str, scale: float = 2.0) -> bytes:
    """Returns the figure as one PNG on a white sheet, with its title, legend and the titles of its panels."""
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
        head, *bodies = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False).ravel()
        head.text(10 / width, 1 - 10 / heights[0], title, va="top", fontsize=13, weight="bold")
        if plot.keys:
            _draw_legend(head, plot.keys, columns, width, heights[0])
        for row, (heading, panels) in zip(bodies, rows, strict=True):
            if heading:
                row.suptitle(heading, x=10 / width, ha="left", fontsize=12, weight="bold")
            for cell, panel in zip(
                row.subfigures(1, plot.columns, squeeze=False).ravel(), panels, strict=False
            ):
                text = f"{panel.title} ({panel.note})" if panel.note else panel.title
                limit = int(plot.size[0] / 6.4)  # characters that fit, by their mean width
                text = text if len(text) <= limit else text[: limit - 1].rstrip() + "…"
                cell.suptitle(text, x=10 / plot.size[0], ha="left", fontsize=10.5, weight="bold")
                panel.draw(cell)
        stream = io.BytesIO()
        FigureCanvasAgg(figure).print_png(stream)
    return stream.getvalue()


def _draw_legend(head: SubFigure, keys: list[Key], columns: int, width: float, height: float) -> None:
    """Draws the legend below the title."""
    # matplotlib drops entries that begin with an underscore
    labels = [f" {key.label}" if key.label.startswith("_") else key.label for key in keys]
    legend = head.legend(
        [_handle(key) for key in keys],
        labels,
        loc="upper left",
        bbox_to_anchor=(2 / width, 1 - 30 / height),
        ncols=columns,
        handler_map={tuple: HandlerTuple(ndivide=None)},
        labelcolor=light_colour("muted"),
        borderaxespad=0.3,
    )
    legend.set_in_layout(False)


def _handle(key: Key) -> Any:
    """Returns the symbol of a legend entry."""

    def mark(size: float, marker: str = "o", alpha: float = key.alpha, edge: float = 0.0) -> Line2D:
        style: Any = {"color": light_colour(key.colour), "alpha": alpha, "linestyle": "none"}
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
    return Line2D([], [], color=light_colour(key.colour), linestyle=line_style(key.dashes), alpha=key.alpha)
