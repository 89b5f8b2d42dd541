"""How the report looks: colours, fonts, and how numbers are written. No other file names a colour by its code."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import cycle
from typing import Any

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
class Kind:
    """A kind of method: its name in a legend, its colour on every page, and the methods that belong to it with their variants."""

    name: str
    colour: str
    methods: tuple[str, ...]


# The first that fits counts: a variant of a method comes before the method.
KINDS = (
    Kind("variational weights", "crimson", ("bayes-by-backprop", "mnf")),
    Kind("Laplace", "amber", ("laplace",)),
    Kind("ensembles", "olive", ("deep-ensemble", "mode-ensemble", "swag")),
    Kind("Markov chains", "violet", ("sgld", "hmc", "nuts")),
    Kind("dropout", "green", ("mc-dropout",)),
    Kind("mixture noise", "purple", ("node-noise-mixture",)),
    Kind("Gaussian noise", "blue", ("node-noise-gaussian",)),
    Kind("flow noise", "vermillion", ("node-noise",)),
    Kind("one network, trained as long", "brown", ("mle-longer",)),
    Kind("one network", "slate", ("mle", "map", "damp", "temperature")),
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


def light(name: str) -> str:
    """The code of the colour that figures are drawn in.

    >>> light("blue")
    '#0072b2'
    """
    return COLOURS[name][0]


def kind_of(method: str | None) -> Kind | None:
    """The kind of a method by its kebab-case name, if it is known.

    >>> [kind_of(method).name for method in ("node-noise-planar", "mle-longer", "mle")]
    ['flow noise', 'one network, trained as long', 'one network']
    >>> kind_of("mine")
    """
    names = {one: kind for kind in reversed(KINDS) for one in kind.methods}
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
    known = {label: kind.colour for label, method in methods.items() if (kind := kind_of(method))}
    spare = (kind.colour for kind in KINDS if kind.colour not in known.values())
    hues = cycle(("teal", "indigo", "sand", "sky", *spare))
    return {label: known.get(label) or next(hues) for label in methods}


def decimal(value: object, form: str = ".3f") -> str:
    """A number for reading: a real minus sign, an en dash where there is none.

    >>> decimal(-0.25, ".2f"), decimal(None), decimal(float("nan")), decimal(float("inf"))
    ('−0.25', '–', '–', '∞')
    """
    if not isinstance(value, int | float) or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    return format(value, form).replace("-", "−")


def tick(value: float, _position: object = None) -> str:
    """The label of a tick: as short as it can be.

    >>> tick(0.30000000000000004), tick(-2.0), tick(0.00002), tick(3e7)
    ('0.3', '−2', '2e−5', '3e7')
    """
    text = f"{value:.6g}"
    if "e" in text:
        mantissa, exponent = text.split("e")
        text = f"{mantissa}e{int(exponent)}"
    return text.replace("-", "−")


def duration(seconds: float) -> str:
    """Seconds in the units a person would use.

    >>> duration(7.26), duration(83), duration(7320)
    ('7.3 s', '1 min 23 s', '2 h 2 min')
    """
    if not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
