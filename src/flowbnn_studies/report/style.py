"""Colours, fonts and numbers: everything that decides how the report looks, in one place."""

import math
import re
from collections.abc import Iterable
from typing import Any

from flowbnn_studies.report.methods import method_of

__all__ = ["COLOURS", "RC", "assign_colours", "decimal", "duration", "light", "tick"]

# Each name is a custom property of the page: (light scheme, dark scheme). The figures are drawn in the light
# value and the page swaps it for the name, so that a figure follows the reader's scheme. Hues are those of
# Okabe & Ito (2008), the brightest darkened until they stand out on white.
COLOURS: dict[str, tuple[str, str]] = {
    "ink": ("#20242c", "#e9ebef"),
    "muted": ("#5f6673", "#a7aebb"),
    "faint": ("#b4bac4", "#596170"),
    "line": ("#e2e5ea", "#343b47"),
    "surface": ("#fefefe", "#1a1e25"),
    "page": ("#f6f7f9", "#12151a"),
    "accent": ("#00619a", "#5cb5ee"),
    "blue": ("#0072b2", "#4fabe6"),
    "vermillion": ("#d55e00", "#f4813a"),
    "green": ("#009e73", "#30c79c"),
    "purple": ("#c0609a", "#e39cc4"),
    "amber": ("#c78500", "#f0b23c"),
    "sky": ("#3b9fd6", "#8fd0f7"),
    "slate": ("#6b7280", "#98a1b0"),
    "violet": ("#7a52b8", "#a98be0"),
    "brown": ("#8a5a3c", "#c8966f"),
    "olive": ("#7c8500", "#bcc64a"),
    "crimson": ("#a6163a", "#f2617c"),
    "step1": ("#440154", "#3e4a89"),
    "step2": ("#433e85", "#31688e"),
    "step3": ("#30678d", "#26828e"),
    "step4": ("#218f8d", "#1f9e89"),
    "step5": ("#36b677", "#35b779"),
    "step6": ("#7cc142", "#6ece58"),
    "step7": ("#b3b410", "#b5de2b"),
    "step8": ("#c9a227", "#fde725"),
}
MODELS = (
    "blue",
    "vermillion",
    "green",
    "purple",
    "amber",
    "sky",
    "slate",
    "violet",
    "brown",
    "olive",
    "crimson",
)
GROUPS = ("slate", "amber", "green", "purple", "blue", "vermillion")
STEPS = tuple(f"step{number}" for number in range(1, 9))

# For matplotlib's rc_context: one point is one pixel of the page, because figures are saved at 72 dots an inch.
RC: dict[str, Any] = {
    "figure.dpi": 72,
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "svg.fonttype": "none",
    "text.parse_math": False,
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10.5,
    "text.color": COLOURS["ink"][0],
    "axes.facecolor": "none",
    "axes.edgecolor": COLOURS["faint"][0],
    "axes.labelcolor": COLOURS["muted"][0],
    "axes.labelsize": 10.5,
    "axes.titlesize": 10.5,
    "axes.linewidth": 0.9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "grid.color": COLOURS["line"][0],
    "grid.linewidth": 0.9,
    "xtick.color": COLOURS["faint"][0],
    "ytick.color": COLOURS["faint"][0],
    "xtick.labelcolor": COLOURS["muted"][0],
    "ytick.labelcolor": COLOURS["muted"][0],
    "xtick.labelsize": 10,
    "ytick.labelsize": 10,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "ytick.minor.size": 0,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "legend.frameon": False,
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.04,
}


def light(name: str) -> str:
    """The colour that figures are drawn in.

    >>> light("blue")
    '#0072b2'
    """
    return COLOURS[name][0]


def _are_steps(labels: list[str]) -> bool:
    """Whether the labels differ only in a number, as 'Length 0', 'Length 3' do."""
    without = {re.sub(r"\d+(\.\d+)?", "", label).strip().lower() for label in labels}
    numbers = [re.findall(r"\d+(?:\.\d+)?", label) for label in labels]
    return len(labels) > 2 and len(without) == 1 and all(len(found) == 1 for found in numbers)


def assign_colours(labels: Iterable[str], groups: bool = False) -> dict[str, str]:
    """A colour name for each label: a ramp where the labels are steps of one quantity, else the method's own, else hues in order.

    >>> assign_colours(["flow noise", "Gaussian noise", "mine", "yours"])
    {'flow noise': 'vermillion', 'Gaussian noise': 'blue', 'mine': 'green', 'yours': 'purple'}
    >>> list(assign_colours(["length 0", "length 6", "length 12"]).values())
    ['step1', 'step4', 'step6']
    """
    unique = list(dict.fromkeys(labels))
    if _are_steps(unique) and len(unique) <= len(STEPS):
        last = 5.0 if len(unique) <= 6 else 7.0
        places = [round(last * index / (len(unique) - 1) + 1e-9) for index in range(len(unique))]
        return {label: STEPS[place] for label, place in zip(unique, places, strict=True)}
    if groups:
        return {label: GROUPS[index % len(GROUPS)] for index, label in enumerate(unique)}
    own = {label: kind.colour for label in unique if (kind := method_of(label))}
    hues = [hue for hue in MODELS if hue not in own.values()] or list(MODELS)
    rest = [label for label in unique if label not in own]
    return {label: own[label] if label in own else hues[rest.index(label) % len(hues)] for label in unique}


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


def duration(seconds: object) -> str:
    """Seconds in the units a person would use.

    >>> duration(7.26), duration(83), duration(7320)
    ('7.3 s', '1 min 23 s', '2 h 2 min')
    """
    if not isinstance(seconds, int | float) or not math.isfinite(seconds):
        return "–"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"
