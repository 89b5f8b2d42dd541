"""How figures are drawn: colours and fonts, how numbers are written, and from panels to inline SVG or one PNG.

A figure is a :class:`Plot`: panels that each draw themselves on an empty matplotlib figure, and a key that says what their symbols
mean. The page shows every panel as a picture of its own, so that a phone stacks them; :func:`to_png` puts all on one sheet. No other
file names a colour by its code.
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

# Each name is a custom property of the page: (light scheme, dark scheme). Figures are drawn in the light value and the page replaces it
# by the name, so that a figure follows the reader's scheme. Hues are those of Okabe and Ito (2008), darkened to stand out on white.
COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#20242c", "#e9ebef"),
    "muted": ("#5f6673", "#a7aebb"),
    "faint": ("#b4bac4", "#596170"),
    "line": ("#e2e5ea", "#343b47"),
    "surface": ("#fefefe", "#1a1e25"),
    "page": ("#f6f7f9", "#12151a"),
    "accent": ("#00619a", "#5cb5ee"),
    # methods
    "slate": ("#6b7280", "#98a1b0"),
    "brown": ("#8a5a3c", "#c8966f"),
    "vermillion": ("#d55e00", "#f4813a"),
    "blue": ("#0072b2", "#4fabe6"),
    "purple": ("#c0609a", "#e39cc4"),
    "green": ("#009e73", "#30c79c"),
    "olive": ("#7c8500", "#bcc64a"),
    "crimson": ("#a6163a", "#f2617c"),
    "amber": ("#c78500", "#f0b23c"),
    "violet": ("#7a52b8", "#a98be0"),
    # what is no method: classes of points, heat maps
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
    """A kind of method: its name in a legend, its colour on every page, and the methods that belong to it with their variants."""

    name: str
    colour: str
    methods: tuple[str, ...]


# The first that fits counts: a variant of a method comes before the method.
METHOD_FAMILIES = (
    MethodFamily("variational weights", "crimson", ("bayes-by-backprop", "mnf")),
    MethodFamily("Laplace", "amber", ("laplace",)),
    MethodFamily("ensembles", "olive", ("deep-ensemble", "mode-ensemble", "swag")),
    MethodFamily("Markov chains", "violet", ("sgld", "hmc", "nuts")),
    MethodFamily("dropout", "green", ("mc-dropout",)),
    MethodFamily("mixture noise", "purple", ("node-noise-mixture",)),
    MethodFamily("Gaussian noise", "blue", ("node-noise-gaussian",)),
    MethodFamily("flow noise", "vermillion", ("node-noise",)),
    MethodFamily("one network, trained as long", "brown", ("mle-longer",)),
    MethodFamily("one network", "slate", ("mle", "map", "damp", "temperature")),
)

# For matplotlib: one point is one pixel of the page, because figures are saved at 72 dots an inch.
# fmt: off
RC: dict[str, Any] = {
    "figure.dpi": 72, "figure.facecolor": "none", "savefig.facecolor": "none", "svg.fonttype": "none", "text.parse_math": False,
    "font.family": "sans-serif", "font.sans-serif": ["DejaVu Sans"], "font.size": 10.5, "text.color": COLOURS["ink"][0],
    "axes.facecolor": "none", "axes.edgecolor": COLOURS["faint"][0], "axes.linewidth": 0.9, "axes.axisbelow": True,
    "axes.labelcolor": COLOURS["muted"][0], "axes.labelsize": 10.5, "axes.spines.top": False, "axes.spines.right": False,
    "axes.titlesize": 10, "axes.titlecolor": COLOURS["muted"][0], "axes.titlelocation": "left", "axes.titlepad": 5,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": COLOURS["line"][0], "grid.linewidth": 0.9,
    **{f"{axis}tick.color": COLOURS["faint"][0] for axis in "xy"}, **{f"{axis}tick.labelsize": 10 for axis in "xy"},
    **{f"{axis}tick.labelcolor": COLOURS["muted"][0] for axis in "xy"}, "xtick.major.size": 3, "ytick.major.size": 0,
    "lines.linewidth": 1.8, "lines.solid_capstyle": "round", "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.04, "figure.constrained_layout.w_pad": 0.04,
}
# fmt: on


def light_colour(name: str) -> str:
    """The code of the colour that figures are drawn in.

    >>> light_colour("blue")
    '#0072b2'
    """
    return COLOURS[name][0]


def family_of(method: str | None) -> MethodFamily | None:
    """The kind of a method by its kebab-case name, if it is known.

    >>> [family_of(method).name for method in ("node-noise-planar", "mle-longer", "mle")]
    ['flow noise', 'one network, trained as long', 'one network']
    >>> family_of("mine")
    """
    names = {one: kind for kind in reversed(METHOD_FAMILIES) for one in kind.methods}
    while method and method not in names:
        method = method.rpartition("-")[0]
    return names.get(method or "")


def assign_colours(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A colour for each label: that of its method, a ramp where more than two rows share one method, hues where there is none.

    >>> assign_colours([{"label": "Flow", "method": "node-noise-planar"}, {"label": "mine"}, {"label": "yours"}])
    {'Flow': 'vermillion', 'mine': 'teal', 'yours': 'indigo'}
    >>> list(assign_colours({"label": f"length {n}", "method": "node-noise-planar"} for n in (0, 6, 12)).values())
    ['step1', 'step4', 'step6']
    """
    methods = {row["label"]: row.get("method") or "" for row in rows}
    count = len(methods)
    if 2 < count <= len(STEPS) and len(set(methods.values())) == 1 and all(methods.values()):
        last = 5.0 if count <= 6 else 7.0
        return {label: STEPS[round(last * at / (count - 1) + 1e-9)] for at, label in enumerate(methods)}
    known = {label: kind.colour for label, method in methods.items() if (kind := family_of(method))}
    spare = (kind.colour for kind in METHOD_FAMILIES if kind.colour not in known.values())
    hues = cycle(("teal", "indigo", "sand", "sky", *spare))
    return {label: known.get(label) or next(hues) for label in methods}


def format_number(value: object, form: str = ".3f") -> str:
    """A number for reading: a real minus sign, an en dash where there is none.

    >>> format_number(-0.25, ".2f"), format_number(None), format_number(float("nan")), format_number(float("inf"))
    ('−0.25', '–', '–', '∞')
    """
    if not isinstance(value, int | float) or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return format(value, form).replace("-", "−")


def format_tick(value: float, _position: object = None) -> str:
    """The label of a tick: as short as it can be.

    >>> format_tick(0.30000000000000004), format_tick(-2.0), format_tick(0.00002), format_tick(3e7)
    ('0.3', '−2', '2e−5', '3e7')
    """
    text = f"{value:.6g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def format_duration(seconds: float) -> str:
    """Seconds in the units a person would use.

    >>> format_duration(7.26), format_duration(83), format_duration(7320)
    ('7.3 s', '1 min 23 s', '2 h 2 min')
    """
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


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


def make_panels(data: dict[str, Any], draw: Callable[[Axes, dict[str, Any]], None]) -> list[Panel]:
    """A panel for each of ``data["panels"]``, drawn on axes of its own."""

    def make(one: dict[str, Any]) -> Panel:
        return Panel(one["title"], lambda sheet: draw(sheet.subplots(), one), one.get("note") or "")

    return [make(one) for one in data["panels"]]


def to_floats(value: object) -> np.ndarray:
    """An array of floats; null and infinity become NaN, which figures leave blank.

    >>> to_floats([1, None, float("inf")])
    array([ 1., nan, nan])
    """
    array = np.array(value, dtype=np.float64)
    return np.where(np.isfinite(array), array, np.nan)


def value_range(*arrays: np.ndarray) -> tuple[float, float] | None:
    """The least and the greatest of all finite numbers, or None where they do not differ.

    >>> value_range(np.array([3.0, np.nan]), np.array([1.0])), value_range(np.array([np.nan]))
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
        axis.set_major_formatter(FuncFormatter(format_tick))


def line_style(dashes: str) -> Any:
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
                labelcolor=light_colour("muted"),
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
