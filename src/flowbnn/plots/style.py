"""Style of all figures: colours, light and dark, and axes to draw on.

The colours are those of Okabe and Ito (2008), which people with any kind of colour blindness can tell apart. Matplotlib is imported on
use, so that importing flowbnn does not need it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from flowbnn.errors import optional_import, requirement_error
from flowbnn.options import checked

OKABE_ITO = {
    "blue": "#0072B2",
    "vermillion": "#D55E00",
    "green": "#009E73",
    "purple": "#CC79A7",
    "orange": "#E69F00",
    "sky": "#56B4E9",
    "yellow": "#F0E442",
}


@dataclass(frozen=True)
class Palette:
    """Colours of a figure.

    Args:
        ink: Colour of text and of the most important marks.
        muted: Colour of labels, ticks and reference lines.
        faint: Colour of grids and frames.
        background: Colour of the background.
        cycle: Colours of series in their order.
    """

    ink: str
    muted: str
    faint: str
    background: str
    cycle: tuple[str, ...]

    def colour(self, index: int) -> str:
        """Returns the colour of a series. The colours repeat after seven series."""
        return self.cycle[index % len(self.cycle)]


def _order(*names: str) -> tuple[str, ...]:
    return tuple(OKABE_ITO[name] for name in names)


LIGHT = Palette(
    "#20242c",
    "#5f6673",
    "#d9dde3",
    "#ffffff",
    _order("blue", "vermillion", "green", "purple", "orange", "sky", "yellow"),
)
DARK = Palette(
    "#e9ebef",
    "#a7aebb",
    "#3a4250",
    "#14181e",
    _order("sky", "orange", "green", "purple", "yellow", "vermillion", "blue"),
)
_active: ContextVar[Palette | None] = ContextVar("flowbnn_plot_style", default=None)


def pyplot() -> Any:
    """Returns ``matplotlib.pyplot``.

    Raises:
        MissingPackageError: If matplotlib is not installed.
    """
    with optional_import("flowbnn.plots", "matplotlib", "flowbnn[plots]"):
        from matplotlib import pyplot
    return pyplot


def settings(palette: Palette) -> dict[str, Any]:
    """Returns the settings of matplotlib for a palette."""
    from cycler import cycler

    return {
        "figure.figsize": (6.0, 4.0),
        "figure.dpi": 100,
        "figure.facecolor": palette.background,
        "figure.constrained_layout.use": True,
        "savefig.facecolor": "auto",
        "font.size": 11,
        "text.color": palette.ink,
        "axes.facecolor": palette.background,
        "axes.edgecolor": palette.muted,
        "axes.labelcolor": palette.ink,
        "axes.titlecolor": palette.ink,
        "axes.titlesize": 11.5,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=palette.cycle),
        "axes.axisbelow": True,
        "axes.grid": True,
        "grid.color": palette.faint,
        "grid.linewidth": 0.8,
        **{f"{axis}tick.{name}": palette.muted for axis in "xy" for name in ("color", "labelcolor")},
        "lines.linewidth": 1.8,
        "legend.frameon": False,
        "legend.fontsize": 10,
    }


@contextmanager
@checked
def style(dark: bool = False) -> Iterator[None]:
    """Context manager in which all figures have the style of flowbnn, those of matplotlib included.

    Outside of it, functions that make their own figure use the light style. Functions that draw on the axes of a user keep the style of
    these axes, and choose colours by their background.

    Args:
        dark: If True, figures have a dark background.

    >>> import torch, flowbnn as fb
    >>> prediction = fb.predictive.CategoricalPredictive(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
    >>> with fb.plots.style(dark=True):
    ...     axes = prediction.plot_reliability(torch.tensor([0, 1]))
    >>> fb.plots.palette_of(axes) is fb.plots.DARK
    True
    >>> fb.plots.close(axes)
    """
    palette = DARK if dark else LIGHT
    with pyplot().rc_context(settings(palette)):
        token = _active.set(palette)
        try:
            yield
        finally:
            _active.reset(token)


def close(ax: Any) -> None:
    """Closes the figure of some axes, which frees its memory.

    Args:
        ax: Axes that a function of this module returned.
    """
    pyplot().close(ax.figure)


def palette_of(ax: Any) -> Palette:
    """Returns the palette that is legible on the background of some axes.

    Args:
        ax: Axes of matplotlib.
    """
    from matplotlib.colors import to_rgba

    red, green, blue, alpha = to_rgba(ax.get_facecolor())
    if alpha < 0.5:
        red, green, blue, alpha = to_rgba(ax.figure.get_facecolor())
    luminance = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    return DARK if alpha >= 0.5 and luminance < 0.5 else LIGHT


@contextmanager
def drawing(ax: Any = None, size: tuple[float, float] | None = None) -> Iterator[tuple[Any, Palette]]:
    """Context manager that yields axes to draw on and their palette.

    Args:
        ax: Axes of the user, or None for a new figure, which is closed if the drawing fails.
        size: Width and height of a new figure in inches.
    """
    plt = pyplot()
    with ExitStack() as stack:
        if ax is not None:
            yield ax, palette_of(ax)
            return
        if _active.get() is None:
            stack.enter_context(style())
        figure, ax = plt.subplots(figsize=size)
        palette = palette_of(ax)
        restyle(ax, palette)
        try:
            yield ax, palette
        except BaseException:
            plt.close(figure)
            raise


def restyle(ax: Any, palette: Palette) -> None:
    """Sets the colours of ticks, which matplotlib would otherwise read from its settings when it draws the figure."""
    ax.tick_params(colors=palette.muted, labelcolor=palette.muted, labelsize=10)
    ax.grid(True, color=palette.faint, linewidth=0.8)
    ax.xaxis.get_offset_text().set_color(palette.muted)
    ax.yaxis.get_offset_text().set_color(palette.muted)


def describe_axes(ax: Any, palette: Palette, x: str = "", y: str = "", title: str = "") -> None:
    """Sets the labels and the title of axes.

    Args:
        ax: Axes of matplotlib.
        palette: Colours of the text.
        x: Label of the horizontal axis, with its unit.
        y: Label of the vertical axis, with its unit.
        title: Title. An empty text leaves the title as it is.
    """
    ax.set_xlabel(x, color=palette.ink)
    ax.set_ylabel(y, color=palette.ink)
    if title:
        ax.set_title(title, color=palette.ink, loc="left")


def add_legend(ax: Any, palette: Palette, **options: Any) -> None:
    """Adds a legend with legible text, if there is anything to explain.

    Args:
        ax: Axes of matplotlib.
        palette: Colours of the text.
        options: Options of ``Axes.legend``.
    """
    if ax.get_legend_handles_labels()[0]:
        legend = ax.legend(labelcolor=palette.ink, **{"framealpha": 0.85, "fontsize": 10, **options})
        legend.get_frame().set_facecolor(palette.background)
        legend.get_frame().set_linewidth(0.0)


def check_kind(predictive: Any, attribute: str, kind: str) -> None:
    """Raises FlowBNNError if a predictive is of another kind than a figure needs.

    Args:
        predictive: Predictive distribution.
        attribute: Name of an attribute that the right kind has.
        kind: Words for the right kind, such as ``"classes"``.
    """
    if not hasattr(predictive, attribute):
        value, hint = f"a {type(predictive).__name__}", ""
        if hasattr(predictive, "predict_dist"):  # an estimator of flowbnn.sklearn
            hint = "use its posterior_" if kind == "a posterior" else "use its predict_dist(X)"
        elif hasattr(predictive, "predict"):
            hint = "use its predict(inputs)"
        raise requirement_error("this figure", kind, value, hint, argument="predictive")


def add_headroom(ax: Any, share: float) -> None:
    """Extends the vertical axis above the data, so that a legend fits.

    Args:
        ax: Axes of matplotlib.
        share: Height of the free space, as a fraction of the range of the data.
    """
    low, high = ax.dataLim.intervaly
    spread = max(high - low, 1e-12)
    ax.set_ylim(low - 0.05 * spread, high + share * spread)


def binomial_band(level: float, number: Any, chance: Any) -> tuple[np.ndarray, np.ndarray]:
    r"""Returns the central interval of the fraction of successes of a binomial variable, :math:`\mathrm{Bin}(n, p) / n`.

    Args:
        level: Probability of the interval.
        number: Numbers of trials :math:`n`.
        chance: Probabilities of a success :math:`p`.

    >>> low, high = binomial_band(0.95, 100, 0.5)
    >>> float(low), float(high)
    (0.4, 0.6)
    """
    from scipy.stats import binom  # here, because importing scipy adds a warning filter

    low, high = binom.interval(level, number, chance)
    return np.asarray(low) / number, np.asarray(high) / number


def to_array(values: Any) -> np.ndarray:
    """Returns numbers as a float64 array on the CPU."""
    if isinstance(values, Tensor):
        values = values.detach().cpu().double().numpy()
    return np.asarray(values, dtype=np.float64)


def blend(background: str, colour: str, amounts: Sequence[float]) -> list[tuple[float, ...]]:
    """Returns colours between the background and a colour.

    Args:
        background: Colour at the amount 0.
        colour: Colour at the amount 1.
        amounts: Amounts of the second colour, from 0 to 1.
    """
    from matplotlib.colors import to_rgb

    low, high = np.array(to_rgb(background)), np.array(to_rgb(colour))
    return [tuple((1.0 - amount) * low + amount * high) for amount in amounts]
