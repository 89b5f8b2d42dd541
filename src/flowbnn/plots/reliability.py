"""Reliability diagram of class probabilities."""

from typing import Any

import numpy as np
from torch import Tensor

from flowbnn.metrics.checks import IGNORED
from flowbnn.options import Count, Probability, checked
from flowbnn.plots.style import add_legend, binomial_band, check_kind, describe_axes, drawing


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
    confidence, accuracy, fraction = (
        np.array([bar[name] for bar in bars], dtype=np.float64)
        for name in ("confidence", "accuracy", "fraction")
    )
    soft = targets.is_floating_point()
    number = predictive.labels.numel() if soft else int((targets != IGNORED).sum())
    low, high = binomial_band(level, np.round(fraction * number), confidence)
    error = float((fraction * np.abs(accuracy - confidence)).sum())
    with drawing(ax, (5.0, 4.6)) as (ax, palette):
        first = not ax.collections
        if first:
            ax.plot([0, 1], [0, 1], color=palette.muted, linestyle="--", linewidth=1.1, zorder=1)
        (line,) = ax.plot(confidence, accuracy, linewidth=1.4, alpha=0.8)
        colour = line.get_color()
        left = np.array([bar["low"] for bar in bars])
        band = f"{100 * level:.4g} % of calibrated networks"
        ax.bar(
            left,
            high - low,
            1.0 / bins,
            low,
            align="edge",
            color=palette.muted if first else colour,
            alpha=0.22,
            linewidth=0,
            label=band if first else None,
        )
        size = 20.0 + 260.0 * fraction
        name = f"{label}: ECE {error:.3f}" if label else f"accuracy, ECE {error:.3f}"
        ax.scatter(
            confidence, accuracy, size, color=colour, linewidths=0, zorder=4, label=name, clip_on=False
        )
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1)
        describe_axes(ax, palette, "confidence", "accuracy")
        legend: dict[str, Any] = {"loc": "upper left", "markerscale": 0.6}
        add_legend(ax, palette, **legend)
    return ax
