"""Bars: one number for each method, such as its cost over the plain network's."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from flowbnn_studies.report.canvas import Group, Panel, Plot, nice_ticks
from flowbnn_studies.report.schema import numbers
from flowbnn_studies.report.style import decimal, light, tick

__all__ = ["bars"]

Data = dict[str, Any]


def bars(data: Data, colours: Mapping[str, str]) -> Plot:
    """Lying bars with their values, and a line at the level that they are measured against."""

    def make(panel: Data) -> Panel:
        items = panel["bars"]
        values = np.nan_to_num(numbers([item["value"] for item in items]))

        def draw(figure: Figure) -> None:
            axes = figure.subplots()
            places = np.arange(len(items))[::-1]
            shades = [light(colours.get(item["label"], "sky")) for item in items]
            axes.barh(places, values, 0.66, color=shades, alpha=0.75, linewidth=0)
            top = max([*values.tolist(), panel.get("level") or 0.0, 1e-9])
            for place, value in zip(places, values, strict=True):
                axes.text(value + 0.015 * top, place, decimal(float(value), ".3g"), va="center", fontsize=9.5)
            if panel.get("level") is not None:
                axes.axvline(panel["level"], color=light("ink"), linestyle=(0, (4, 3)), linewidth=1.1)
            axes.set_yticks(places, [item["label"] for item in items])
            axes.set_xlim(0, 1.14 * top)
            axes.grid(False)
            axes.xaxis.set_major_locator(nice_ticks(4))
            axes.xaxis.set_major_formatter(FuncFormatter(tick))
            axes.set_xlabel(panel.get("x_label") or "")

        return Panel(panel["title"], draw)

    count = len(data["panels"])
    longest = max([len(panel["bars"]) for panel in data["panels"]], default=1)
    size = (320 if count > 2 else 400, 60 + 24 * longest)
    return Plot([Group([make(panel) for panel in data["panels"]])], [], min(3, max(1, count)), size)
