"""Reliability diagram of class probabilities."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from flowbnn.metrics.checks import IGNORED
from flowbnn.options import Count, Probability, checked
from flowbnn.plots.style import Palette, add_legend, binomial_band, check_kind, describe_axes, drawing


@checked
def plot_reliability(
    predictive: Any,
    targets: Tensor,
    *,
    bins: Count = 15,
    level: Probability = 0.95,
    label: str = "",
    ax: Any = None,
) -> Any:
    r"""Plots accuracy against confidence (DeGroot & Fienberg, 1983), with a band for perfectly calibrated networks.

    In a bin of :math:`n` inputs with mean confidence :math:`c`, the accuracy of a perfectly calibrated network is
    :math:`\mathrm{Bin}(n, c) / n`. The band is the central interval of this distribution (Bröcker & Smith, 2007). Points outside of it
    show a significant difference. The area of a point is proportional to its fraction of the inputs.

    Args:
        predictive: Predictive distribution of classes.
        targets: Class indices or soft labels, as in ``predictive.evaluate``.
        bins: Number of bins of equal width.
        level: Probability of the band.
        label: Name of the method in the legend.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> prediction = fb.predictive.CategoricalPredictive(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
    >>> ax = prediction.plot_reliability(torch.tensor([0, 1]))
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('confidence', 'accuracy')
    >>> fb.plots.close(ax)
    """
    check_kind(predictive, "reliability", "classes")
    bars = [bar for bar in predictive.reliability(targets, bins) if bar["fraction"] > 0]
    soft = targets.is_floating_point()
    number = predictive.labels.numel() if soft else int((targets != IGNORED).sum())
    left, confidence, accuracy, fraction = _columns(bars)
    low, high = binomial_band(level, np.round(fraction * number), confidence)
    error = float((fraction * np.abs(accuracy - confidence)).sum())
    with drawing(ax, (5.0, 4.6)) as (ax, palette):
        first = not ax.collections
        name = f"{label}: ECE {error:.3f}" if label else f"accuracy, ECE {error:.3f}"
        colour = draw_bins(ax, palette, bars, label=name)
        ax.bar(
            left,
            high - low,
            1.0 / bins,
            low,
            align="edge",
            color=palette.muted if first else colour,
            alpha=0.22,
            linewidth=0,
            label=f"{100 * level:.4g} % of calibrated networks" if first else None,
        )
        legend: dict[str, Any] = {"loc": "upper left", "markerscale": 0.6}
        add_legend(ax, palette, **legend)
    return ax


def _columns(bins: Sequence[Mapping[str, Any]]) -> Iterator[np.ndarray]:
    """Returns the left ends, confidences, accuracies and fractions of bins."""
    names = ("low", "confidence", "accuracy", "fraction")
    return (np.array([entry[name] for entry in bins], dtype=np.float64) for name in names)


def draw_bins(
    ax: Any, palette: Palette, bins: Sequence[Mapping[str, Any]], colour: str | None = None, label: str = ""
) -> str:
    """Draws accuracy against confidence of bins on axes, with the diagonal if the axes are empty.

    Args:
        ax: Axes of matplotlib.
        palette: Colours of the figure.
        bins: Bins with inputs, as in ``predictive.reliability``.
        colour: Colour of the points. The default is the next one of the axes.
        label: Name in the legend.

    Returns:
        The colour.
    """
    _, confidence, accuracy, fraction = _columns(bins)
    if not ax.collections:
        ax.plot([0, 1], [0, 1], color=palette.muted, linestyle="--", linewidth=1.1, zorder=1)
    (line,) = ax.plot(confidence, accuracy, color=colour, linewidth=1.4, alpha=0.8)
    style: dict[str, Any] = {"color": line.get_color(), "linewidths": 0, "zorder": 4, "clip_on": False}
    ax.scatter(confidence, accuracy, 20.0 + 260.0 * fraction, label=label, **style)
    ax.set_xlim(0, 1)
    ax.set_ylim(0, 1)
    describe_axes(ax, palette, "confidence", "accuracy")
    return str(line.get_color())
