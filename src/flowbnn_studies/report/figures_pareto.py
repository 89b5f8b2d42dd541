"""Quality against cost: which methods no other beats in both."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from matplotlib.transforms import Bbox

from flowbnn_studies.report.canvas import Group, Key, Panel, Plot, nice_ticks
from flowbnn_studies.report.methods import METHODS, method_of
from flowbnn_studies.report.schema import numbers
from flowbnn_studies.report.style import light, tick

__all__ = ["front_of", "pareto"]

Data = dict[str, Any]
# where a label may stand about its dot: across, up, and how it is aligned there; the nearest places first
Align = Literal["left", "center", "right"]
NEAR: tuple[tuple[int, int, Align], ...] = (
    (8, 0, "left"),
    (-8, 0, "right"),
    (6, 9, "left"),
    (6, -9, "left"),
    (-6, 9, "right"),
    (-6, -9, "right"),
    (0, 12, "center"),
    (0, -12, "center"),
)
SPOTS = [(across * far, up * far, align) for far in (1.0, 1.7, 2.6, 3.6, 4.8) for across, up, align in NEAR]


def front_of(costs: Sequence[float], losses: Sequence[float]) -> list[int]:
    """Places of the points that no other beats: none is at most as dear and at most as bad, and better in one; cheapest first.

    >>> front_of([1.0, 2.0, 3.0, 2.5], [0.5, 0.3, 0.4, 0.3])
    [0, 1]
    """
    order = sorted(range(len(costs)), key=lambda place: (costs[place], losses[place]))
    found: list[int] = []
    for place in order:
        if (
            not found
            or losses[place] < losses[found[-1]]
            or (costs[place] == costs[found[-1]] and losses[place] == losses[found[-1]])
        ):
            found.append(place)
    return found


class _Labels(Artist):
    """Labels that find their places when the picture is drawn, once all sizes are settled.

    Each takes the first spot that covers no dot, no other label, and stays inside; a thin line leads to far ones.
    """

    def __init__(self, axes: Axes, labels: list[str], places: np.ndarray, edge: np.ndarray) -> None:
        super().__init__()
        self.set_in_layout(False)
        self.set_zorder(2.5)  # above the grid and the front, below the dots
        self.labels, self.places, self.edge = labels, places, edge
        axes.add_artist(self)

    def draw(self, renderer: Any) -> None:
        """The labels, drawn."""
        axes, figure = self.axes, self.get_figure()
        assert axes is not None
        assert figure is not None
        scale = renderer.points_to_pixels(1.0)
        pixels = axes.transData.transform(self.places)
        room = axes.get_window_extent(renderer)
        reach = 5 * scale
        dots = [Bbox.from_extents(x - reach, y - reach, x + reach, y + reach) for x, y in pixels]
        corners = axes.transData.transform(self.edge)
        line = []  # the steps of the front: across, then down
        for (x, y), (far_x, far_y) in pairwise(corners):
            line += [
                Bbox.from_extents(x, y - 1, far_x, y + 1),
                Bbox.from_extents(far_x - 1, min(y, far_y), far_x + 1, max(y, far_y)),
            ]
        taken: list[Bbox] = []
        texts: list[Text] = []
        leads: list[Line2D] = []
        for index in np.argsort(-pixels[:, 1], kind="stable"):
            x, y = pixels[index]
            others = [*taken, *dots[:index], *dots[index + 1 :]]
            best: tuple[float, Text, Bbox, tuple[float, float]] | None = None
            for across, up, align in SPOTS:
                text = Text(
                    x + across * scale,
                    y + up * scale,
                    self.labels[index],
                    color=light("ink"),
                    fontsize=9,
                    horizontalalignment=align,
                    verticalalignment="center",
                )
                text.set_figure(figure)
                box = text.get_window_extent(renderer).padded(scale)
                inside = room.x0 <= box.x0 and box.x1 <= room.x1 and room.y0 <= box.y0 and box.y1 <= room.y1
                score = float(sum(box.overlaps(other) for other in others)) + (0.0 if inside else 3.0)
                score += 0.5 * any(box.overlaps(step) for step in line)
                if best is None or score < best[0]:
                    best = (score, text, box, (across, up))
                if score == 0:
                    break
            assert best is not None
            _, text, box, (across, up) = best
            taken.append(box)
            if abs(across) > 9 or abs(up) > 13:
                end_x = min(max(x, box.x0), box.x1)
                end_y = min(max(y, box.y0), box.y1)
                lead = Line2D([x, end_x], [y, end_y], color=light("faint"), linewidth=0.8)
                lead.set_figure(figure)
                leads.append(lead)
            texts.append(text)
        # On a ground of the page's colour, so that neither the grid nor the front strikes a name through; the grounds come first, so
        # that none hides another's name.
        for box in taken:
            ground = Rectangle(
                (box.x0, box.y0), box.width, box.height, facecolor=light("surface"), linewidth=0
            )
            ground.set_figure(figure)
            ground.draw(renderer)
        for artist in (*leads, *texts):
            artist.draw(renderer)


def _panel(panel: Data, colours: Mapping[str, str]) -> Panel:
    def there(item: Data) -> bool:
        x, y = item.get("x"), item.get("y")
        return x is not None and y is not None and bool(np.isfinite([x, y]).all()) and x > 0

    known = [item for item in panel["items"] if there(item)]
    heights = [item["y"] for item in known]
    steep = (
        bool(known) and min(heights) > 0 and max(heights) > 5 * min(heights)
    )  # one bad method would flatten the others

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set_xscale("log")
        places = numbers([[item["x"], item["y"]] for item in known]).reshape(-1, 2)
        if len(places):
            front = places[front_of(places[:, 0].tolist(), places[:, 1].tolist())]
            low, high = places[:, 0].min(), places[:, 0].max()
            axes.set_xlim(low / 1.6, max(high * 1.6, low * 4))
            down, up = places[:, 1].min(), places[:, 1].max()
            span = (up - down) or max(abs(up), 1e-3)
            if steep:
                axes.set_yscale("log")
                axes.set_ylim(down / (up / down) ** 0.12, up * (up / down) ** 0.08)
            else:
                axes.set_ylim(down - 0.12 * span, up + 0.1 * span)
            # up from the cheapest and on from the best: nobody is on the lower left of the line
            edge = np.vstack([[front[0, 0], axes.get_ylim()[1]], front, [axes.get_xlim()[1], front[-1, 1]]])
            axes.step(
                edge[:, 0],
                edge[:, 1],
                where="post",
                color=light("accent"),
                linewidth=1.3,
                alpha=0.7,
                zorder=1.5,
            )
        for item in known:
            colour = colours.get(item["label"]) or item.get("colour") or "sky"
            axes.plot(
                item["x"], item["y"], "o", color=light(colour), markersize=6.5, markeredgewidth=0, zorder=3
            )
        narrow = len(places) and places[:, 0].max() < 30 * places[:, 0].min()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if narrow else (1,), numticks=9))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(tick))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=9) if steep else nice_ticks(5))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter(FuncFormatter(tick))
        axes.set_title(panel.get("y_label") or "", loc="left", color=light("muted"), fontsize=10, pad=5)
        axes.set_xlabel(panel.get("x_label") or "")
        if len(places):
            _Labels(axes, [item["label"] for item in known], places, edge)

    return Panel(panel["title"], draw, "log scales" if steep else "log scale across")


def pareto(data: Data, colours: Mapping[str, str]) -> Plot:
    """A dot for each method, low and left being better, and the line of those that no other beats."""
    panels = [_panel(panel, colours) for panel in data["panels"]]
    keys = [Key("no other method is both cheaper and better", "accent", "line")]
    found = [method_of(item["label"]) for panel in data["panels"] for item in panel["items"]]
    if None in found:  # some methods that have no colour of their own: the families of the study
        keys += [Key(item["label"], item["colour"], "dot") for item in data.get("families") or []]
    else:
        keys += [Key(kind.name, kind.colour, "dot") for kind in METHODS if kind in found]
    return Plot([Group(panels)], keys if panels else [], min(2, max(1, len(panels))), (480, 380))
