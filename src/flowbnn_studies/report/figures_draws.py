"""The T predicted distributions of single images, as in document 002's figure 6: one sampled network is one distribution."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flowbnn_studies.report.canvas import Group, Key, Panel, Plot, nice_ticks
from flowbnn_studies.report.schema import numbers
from flowbnn_studies.report.style import light, tick

__all__ = ["draws"]

Data = dict[str, Any]
HUES = ("slate", "amber")  # the known image, the novel one


def _distribution(axes: Axes, samples: np.ndarray, classes: list[str], colour: str, title: str) -> None:
    """Every sample as a dot at each class, the mean as a bar behind them."""
    number, width = samples.shape
    axes.bar(
        np.arange(width), np.nan_to_num(samples.mean(0)), 0.8, color=light(colour), alpha=0.3, linewidth=0
    )
    # a fixed spread of the dots within their bar, so that equal ones are seen to be many
    aside = (np.arange(number) * 0.61803399 % 1.0 - 0.5) * (0.62 if number > 1 else 0.0)
    places = np.arange(width)[None, :] + aside[:, None]
    axes.scatter(
        places.ravel(),
        samples.ravel(),
        s=5 if number > 1 else 14,
        color=light(colour),
        alpha=0.6,
        linewidths=0,
        rasterized=True,
    )
    axes.set_ylim(0, 1.04)
    axes.set_xlim(-0.6, width - 0.4)
    axes.set_xticks(range(width), classes, fontsize=9)
    axes.yaxis.set_major_locator(nice_ticks(2))
    axes.yaxis.set_major_formatter(lambda value, place: tick(value))
    axes.set_title(title, loc="left", color=light("muted"), fontsize=9.5, pad=4)


def _method_panel(panel: Data, data: Data) -> Panel:
    def draw(figure: Figure) -> None:
        sides = figure.subplots(1, max(1, len(panel["sides"])), sharey=True, squeeze=False)[0]
        for axes, side, colour in zip(sides, panel["sides"], HUES, strict=False):
            samples = numbers(side["samples"])
            if samples.ndim == 2 and samples.size:
                _distribution(axes, samples, data["classes"], colour, side.get("note") or "")

    return Panel(panel["title"], draw, panel.get("note") or "")


def _picture_panel(data: Data) -> Panel:
    def draw(figure: Figure) -> None:
        sides = figure.subplots(1, max(1, len(data["images"])), squeeze=False)[0]
        for axes, image, colour in zip(sides, data["images"], HUES, strict=False):
            axes.set_axis_off()
            pixels = numbers(image["pixels"])
            if pixels.size:
                axes.imshow(np.nan_to_num(pixels), cmap="gray_r", interpolation="nearest")
            axes.set_title(image["title"], color=light(colour), fontsize=10, pad=4)

    return Panel("The two images", draw)


def draws(data: Data, colours: Mapping[str, str]) -> Plot:
    """The two images, then for each method the sampled distributions of the one and of the other side by side."""
    panels = [_method_panel(panel, data) for panel in data["panels"]]
    if panels and data.get("images"):
        panels.insert(0, _picture_panel(data))
    titles = [image["title"] for image in data.get("images") or []]
    keys = [
        Key(f"{title}: a dot for each sampled network", colour, "dot")
        for title, colour in zip(titles, HUES, strict=False)
    ]
    keys += [Key("their mean", "muted", "area", alpha=0.3)] if titles else []
    return Plot([Group(panels)], keys if panels else [], 2, (420, 150))
