"""Is the confidence right? Reliability diagrams, and the six panels of document 000's figure 3."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flowbnn_studies.report.canvas import Group, Key, Panel, Plot, nice_ticks
from flowbnn_studies.report.schema import extent, numbers
from flowbnn_studies.report.style import decimal, light, tick

__all__ = ["count_inputs", "field", "reliability"]

Data = dict[str, Any]
CLASSES = ("amber", "violet", "green", "blue", "vermillion", "purple", "slate", "sky")


def _columns(bins: list[Data]) -> dict[str, np.ndarray]:
    names = ("low", "high", "confidence", "accuracy", "fraction")
    return {name: numbers([item.get(name) for item in bins]) for name in names}


def _bars(table: dict[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return (table["low"] + table["high"]) / 2, 0.86 * (table["high"] - table["low"])


def _percent(value: float, _position: object = None) -> str:
    return f"{100 * value:.4g} %"


def count_inputs(fractions: np.ndarray) -> np.ndarray | None:
    """How many inputs each bin has, from the shares alone: the smallest total of which all shares are whole parts.

    A common divisor of all counts cannot be seen, so a count may be told too small, never too large. None where the shares were
    rounded, and no total up to a hundred thousand fits.

    >>> count_inputs(np.array([0.0, 1 / 1218, 9 / 1218, 1208 / 1218])).tolist()
    [0.0, 1.0, 9.0, 1208.0]
    >>> count_inputs(np.array([0.333333, 0.666667])) is None
    True
    """
    if not fractions.size or not bool(np.isfinite(fractions).all()) or abs(float(fractions.sum()) - 1) > 1e-6:
        return None
    totals = np.arange(1, 100_001)
    fits = np.ones(len(totals), dtype=bool)
    for share in fractions[fractions > 0]:
        parts = totals * share
        fits &= np.abs(parts - np.round(parts)) < 1e-6
    return np.round(fractions * totals[fits][0]) if fits.any() else None


def _strength(fractions: np.ndarray) -> np.ndarray:
    """How firmly each bin is drawn, from 0.12 to 1 for :data:`FIRM` inputs and more; where no counts are known, by share.

    A bin of a twentieth of the inputs is firm in any case: with all inputs in one bin, no count can be told from its share.
    """
    fractions = np.nan_to_num(fractions)
    counts = count_inputs(fractions)
    firm = fractions / 0.01 if counts is None else counts / FIRM
    return np.where(fractions >= 0.05, 1.0, np.clip(np.sqrt(firm), 0.12, 1.0))


def _accuracy(axes: Axes, bins: list[Data], colour: str) -> None:
    """Bars up to the accuracy, and from the diagonal a stem to it: the stem is the calibration gap; faint where inputs are few."""
    table = _columns(bins)
    full = np.isfinite(table["accuracy"]) & np.isfinite(table["confidence"])
    middle, width = _bars(table)
    confidence, accuracy = table["confidence"][full], table["accuracy"][full]
    strength = _strength(table["fraction"])[full]
    axes.plot([0, 1], [0, 1], color=light("muted"), linestyle=(0, (4, 3)), linewidth=1.1)
    # single calls, because each bin has an opacity of its own
    for x, sure, right, wide, firm in zip(
        middle[full], confidence, accuracy, width[full], strength, strict=True
    ):
        axes.bar(x, right, wide, color=light(colour), alpha=0.45 * firm, linewidth=0)
        axes.vlines(sure, min(sure, right), max(sure, right), color=light("ink"), alpha=firm)
        # whole at the edges, too
        axes.plot(
            sure,
            right,
            "o",
            color=light("ink"),
            markersize=3.8,
            alpha=firm,
            markeredgewidth=0,
            clip_on=False,
            zorder=5,
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(nice_ticks(5))
        axis.set_major_formatter(FuncFormatter(tick))
    axes.set_title("accuracy", loc="left", color=light("muted"), fontsize=10, pad=5)


def _share(axes: Axes, bins: list[Data], colour: str, top: float) -> None:
    table = _columns(bins)
    share = np.nan_to_num(table["fraction"])
    middle, width = _bars(table)
    axes.bar(middle, share, width, color=light(colour), alpha=0.75, linewidth=0)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.06 * top if top > 0 else 1)
    axes.yaxis.set_major_locator(nice_ticks(4))
    axes.yaxis.set_major_formatter(FuncFormatter(_percent))
    axes.xaxis.set_major_formatter(FuncFormatter(tick))


def _top_share(models: list[Data]) -> float:
    shares = numbers([item["fraction"] for model in models for item in model["bins"]])
    return (extent(np.zeros(1), shares) or (0.0, 1.0))[1]


FIRM = 30  # inputs from which on a bin is drawn in full
FAINT = f"A bin is the fainter the fewer inputs it has, from one to {FIRM}; what single inputs show is mostly chance."

KEYS = [
    Key("perfect calibration", "muted", "line", "4 3"),
    Key("accuracy at the bin's mean confidence; the stem is the gap", "ink", "dot"),
]
FEW = Key("the same where inputs are few", "ink", "dot", alpha=0.3)


def _faint(models: list[Data]) -> tuple[list[Key], str]:
    """The key and the remark about faint bins, where there are any."""
    shares = [numbers([item["fraction"] for item in model["bins"]]) for model in models]
    some = any(bool(np.any(_strength(share)[np.nan_to_num(share) > 0] < 1)) for share in shares)
    return ([FEW], FAINT) if some else ([], "")


def reliability(data: Data, colours: Mapping[str, str]) -> Plot:
    """Accuracy against confidence for each model, above the share of inputs in each bin."""
    models = data["models"]
    top = _top_share(models)

    def make(model: Data) -> Panel:
        colour = colours.get(model["label"], "sky")

        def draw(figure: Figure) -> None:
            upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
            _accuracy(upper, model["bins"], colour)
            _share(lower, model["bins"], colour, top)
            upper.tick_params(axis="x", length=0, labelbottom=False)
            lower.yaxis.set_major_locator(nice_ticks(2))
            lower.set_title("share of inputs", loc="left", color=light("muted"), fontsize=10, pad=4)
            lower.set_xlabel("confidence")

        note = f"ECE\N{NO-BREAK SPACE}{decimal(model['ece'])}" if model.get("ece") is not None else ""
        return Panel(model["label"], draw, note)

    columns = 1 if len(models) == 1 else 2 if len(models) in (2, 4) else 3
    size = {1: (370, 370), 2: (370, 320), 3: (300, 300)}[columns]
    few, remark = _faint(models)
    return Plot([Group([make(model) for model in models])], [*KEYS, *few], columns, size, remark)


def _spacing(grid: np.ndarray, width: float) -> float:
    """How far apart the dots of the grid are, in pixels of the panel."""
    if len(grid) == 0:
        return width
    across = max(len(np.unique(grid[:, 0])), len(np.unique(grid[:, 1])))
    return width / max(across, 2)


def _span(models: list[Data]) -> tuple[tuple[float, float], tuple[float, float]] | None:
    # The grid is what was asked about; the points may stray far outside it.
    for name in ("grid", "points"):
        found = [numbers(model[name]).reshape(-1, 2) for model in models]
        limits = [extent(*[points[:, axis] for points in found]) for axis in (0, 1)]
        if limits[0] is not None and limits[1] is not None:
            padded = [
                (low - 0.02 * (high - low), high + 0.02 * (high - low)) for low, high in filter(None, limits)
            ]
            return padded[0], padded[1]
    return None


def _field_panel(model: Data, largest: float, span: Any, width: int) -> Panel:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        points, kinds = numbers(model["points"]).reshape(-1, 2), numbers(model["point_class"])
        grid, grid_kinds = numbers(model["grid"]).reshape(-1, 2), numbers(model["grid_class"])
        spread = model.get("grid_uncertainty")
        across = _spacing(grid, width - 40)
        if spread is None or largest <= 0:
            diameter = np.full(len(grid), 0.42 * across)
        else:
            share = np.clip(np.nan_to_num(numbers(spread)) / largest, 0, 1)
            diameter = across * (0.2 + 0.8 * share)
        for kind in np.unique(np.concatenate([kinds, grid_kinds])):
            if np.isnan(kind):
                continue
            colour = light(CLASSES[int(kind) % len(CLASSES)])
            some = kinds == kind
            axes.scatter(
                points[some, 0], points[some, 1], s=7, color=colour, alpha=0.36, linewidths=0, rasterized=True
            )
            some = grid_kinds == kind
            axes.scatter(
                grid[some, 0],
                grid[some, 1],
                s=diameter[some] ** 2,
                color=colour,
                linewidths=0,
                rasterized=True,
            )
        if span is not None:
            axes.set_xlim(*span[0])
            axes.set_ylim(*span[1])
        axes.grid(False)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(nice_ticks(5))
            axis.set_major_formatter(FuncFormatter(tick))

    return Panel(
        "Decisions" if model.get("grid_uncertainty") is None else "Decisions and their uncertainty", draw
    )


def _field_row(
    model: Data, colour: str, largest: float, top: float, span: Any, size: tuple[int, int], seed: str
) -> Group:
    def share(figure: Figure) -> None:
        axes = figure.subplots()
        _share(axes, model["bins"], colour, top)
        axes.set_title("share of inputs", loc="left", color=light("muted"), fontsize=10, pad=5)
        axes.set_xlabel("confidence")

    def accuracy(figure: Figure) -> None:
        axes = figure.subplots()
        _accuracy(axes, model["bins"], colour)
        axes.set_xlabel("confidence")

    panels = [
        _field_panel(model, largest, span, size[0]),
        Panel("How confident it is", share),
        Panel("How often it is right", accuracy),
    ]
    named = (("accuracy", model.get("accuracy")), ("ECE", model.get("ece")))
    note = ", ".join(f"{name} {decimal(value)}" for name, value in named if value is not None)
    note = f"{seed}: {note}" if seed and note else note
    return Group(panels, model["label"], note)


def field(data: Data, colours: Mapping[str, str]) -> Plot:
    """A row for each model: decisions on the plane with uncertainty as dot size, confidence, calibration."""
    models, size = data["models"], (300, 280)
    seed = f"seed {data['seed']}" if data.get("seed") is not None else ""
    spreads = [numbers(model["grid_uncertainty"]) for model in models if model.get("grid_uncertainty")]
    largest = (extent(np.zeros(1), *spreads) or (0.0, 0.0))[1]
    top, span = _top_share(models), _span(models)
    groups = [
        _field_row(model, colours.get(model["label"], "sky"), largest, top, span, size, seed)
        for model in models
    ]
    found = numbers([kind for model in models for kind in model["point_class"]])
    kinds = sorted({int(kind) for kind in found[np.isfinite(found)]})
    keys = [Key(f"class {kind}", CLASSES[kind % len(CLASSES)], "dot") for kind in kinds]
    if spreads:
        keys.append(Key("the larger the dot, the less certain", "muted", "sizes"))
    few, remark = _faint(models)
    return Plot(groups, [*keys, *KEYS, *few], 3, size, remark)
