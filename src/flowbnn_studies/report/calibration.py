"""Is the confidence right? Reliability diagrams, and decisions over a plane beside them."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from flowbnn_studies.report.canvas import DASHED, Group, Key, Panel, Plot, Sheet, extent, numbers, set_ticks
from flowbnn_studies.report.style import CLASSES, decimal, light

Data = dict[str, Any]
FEW = 0.01  # the share of inputs below which a bin is drawn faint: its accuracy is mostly chance
KEYS = [
    Key("perfect calibration", "muted", "line", "4 3"),
    Key("accuracy of a bin; stem: gap to its confidence", "ink", "dot"),
]


def _columns(bins: list[Data]) -> dict[str, np.ndarray]:
    return {
        name: numbers([item.get(name) for item in bins])
        for name in ("low", "high", "confidence", "accuracy", "fraction")
    }


def _draw_accuracy(axes: Axes, bins: list[Data], colour: str) -> None:
    """Bars up to the accuracy of each bin, and a stem from the diagonal to it: the calibration gap."""
    table = _columns(bins)
    strength = np.clip(np.sqrt(np.nan_to_num(table["fraction"]) / FEW), 0.15, 1.0)
    axes.plot([0, 1], [0, 1], color=light("muted"), linestyle=DASHED, linewidth=1.1)
    columns = (table[name] for name in ("low", "high", "confidence", "accuracy"))
    ink = light("ink")
    for low, high, confidence, accuracy, alpha in zip(*columns, strength, strict=True):
        if np.isfinite([confidence, accuracy]).all():
            middle, width = (low + high) / 2, 0.86 * (high - low)
            axes.bar(middle, accuracy, width, color=light(colour), alpha=0.45 * alpha, linewidth=0)
            axes.vlines(confidence, *sorted((confidence, accuracy)), color=ink, alpha=alpha)
            dot: Any = {"markersize": 3.8, "markeredgewidth": 0, "clip_on": False, "zorder": 5}
            axes.plot(confidence, accuracy, "o", color=ink, alpha=alpha, **dot)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.02)
    set_ticks(axes)
    axes.set_title("accuracy")
    axes.set_xlabel("confidence")


def _keys(models: list[Data]) -> list[Key]:
    shares = numbers([item["fraction"] for model in models for item in model["bins"]])
    faint = bool(np.any((shares > 0) & (shares < FEW)))
    return (
        [*KEYS, Key("faint: a bin with under 1 % of the inputs", "ink", "dot", alpha=0.3)] if faint else KEYS
    )


def reliability(data: Data, colours: Mapping[str, str]) -> Plot:
    """Accuracy against confidence for each model, above the share of inputs in each bin."""
    models = data["models"]
    top = (
        extent(np.zeros(1), numbers([item["fraction"] for model in models for item in model["bins"]]))
        or (0.0, 1.0)
    )[1]

    def make(model: Data) -> Panel:
        colour = colours.get(model["label"], "sky")

        def draw(sheet: Sheet) -> None:
            upper, lower = sheet.subplots(2, 1, sharex=True, height_ratios=(3.6, 1))
            _draw_accuracy(upper, model["bins"], colour)
            table = _columns(model["bins"])
            middle, width = (table["low"] + table["high"]) / 2, 0.86 * (table["high"] - table["low"])
            lower.bar(
                middle, np.nan_to_num(table["fraction"]), width, color=light(colour), alpha=0.75, linewidth=0
            )
            lower.set_ylim(0, 1.06 * top if top > 0 else 1)
            set_ticks(lower, 5, 2)
            lower.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g} %"))
            upper.tick_params(axis="x", length=0, labelbottom=False)
            upper.set_xlabel("")
            lower.set_title("share of inputs")
            lower.set_xlabel("confidence")

        note = f"ECE\N{NO-BREAK SPACE}{decimal(model['ece'])}" if model.get("ece") is not None else ""
        return Panel(model["label"], draw, note)

    columns = 1 if len(models) == 1 else 2 if len(models) in (2, 4) else 3
    size = {1: (370, 370), 2: (370, 320), 3: (300, 300)}[columns]
    return Plot([Group([make(model) for model in models])], _keys(models) if models else [], columns, size)


def _decisions(model: Data, largest: float, span: Any, width: int) -> Panel:
    """Points, and on a grid the predicted class, with the uncertainty as the size of the dots."""

    def draw(sheet: Sheet) -> None:
        axes = sheet.subplots()
        points, classes = numbers(model["points"]).reshape(-1, 2), numbers(model["point_class"])
        grid, decided = numbers(model["grid"]).reshape(-1, 2), numbers(model["grid_class"])
        spacing = (width - 40) / max([2, *(len(np.unique(column)) for column in grid.T)])
        size = np.full(len(grid), 0.26 * spacing)
        if model.get("grid_uncertainty") is not None and largest > 0:
            size = spacing * (
                0.26 + 0.74 * np.clip(np.nan_to_num(numbers(model["grid_uncertainty"])) / largest, 0, 1)
            )
        for label in np.unique(np.concatenate([classes, decided])):
            if np.isfinite(label):
                colour = light(CLASSES[int(label) % len(CLASSES)])
                style: Any = {"color": colour, "linewidths": 0, "rasterized": True}
                (x, y), (left, up) = points[classes == label].T, grid[decided == label].T
                axes.scatter(x, y, s=7, alpha=0.36, **style)
                axes.scatter(left, up, s=size[decided == label] ** 2, **style)
        if span is not None:
            axes.set_xlim(*span[0])
            axes.set_ylim(*span[1])
        axes.grid(False)
        set_ticks(axes)
        named = (("accuracy", model.get("accuracy")), ("ECE", model.get("ece")))
        axes.set_title(", ".join(f"{name} {decimal(value)}" for name, value in named if value is not None))

    return Panel(model["label"], draw)


def field(data: Data, colours: Mapping[str, str]) -> Plot:
    """A column for each model: decisions over the plane, with the uncertainty as dot size, above the calibration."""
    models, size = data["models"], (300, 280)
    spreads = [numbers(model["grid_uncertainty"]) for model in models if model.get("grid_uncertainty")]
    largest = (extent(np.zeros(1), *spreads) or (0.0, 0.0))[1]
    axes = [extent(*[numbers(model["grid"]).reshape(-1, 2)[:, axis] for model in models]) for axis in (0, 1)]
    span = None
    if axes[0] is not None and axes[1] is not None:
        span = [(low - 0.02 * (high - low), high + 0.02 * (high - low)) for low, high in (axes[0], axes[1])]

    def calibration(model: Data) -> Panel:
        return Panel(
            model["label"],
            lambda sheet: _draw_accuracy(sheet.subplots(), model["bins"], colours.get(model["label"], "sky")),
        )

    present = numbers([label for model in models for label in model["point_class"]])
    classes = sorted({int(label) for label in present[np.isfinite(present)]})
    keys = [Key(f"class {label}", CLASSES[label % len(CLASSES)], "dot") for label in classes]
    keys.append(Key("grid: predicted class; larger where sampled networks disagree", "muted", "sizes"))
    seed = f", seed {data['seed']}" if data.get("seed") is not None else ""
    groups = [
        Group(
            [_decisions(model, largest, span, size[0]) for model in models],
            f"What is decided, and how sure{seed}",
        ),
        Group([calibration(model) for model in models], f"How often a confidence is right{seed}"),
    ]
    return Plot(
        groups if models else [], [*keys, *_keys(models)] if models else [], min(3, max(1, len(models))), size
    )
