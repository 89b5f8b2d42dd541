r"""Calibration of predictive distributions of real values, by the probability integral transform (PIT).

If the predictive distribution :math:`F` is correct, the PIT :math:`F(y)` of the targets is uniform on [0, 1] (Dawid, 1984).
"""

from typing import Any

import numpy as np
from torch import Tensor

from flowbnn.options import Count, Probability, checked
from flowbnn.plots.style import add_legend, binomial_band, check_kind, describe_axes, drawing, to_array


@checked
def plot_pit(
    predictive: Any, targets: Tensor, *, bins: Count = 10, level: Probability = 0.95, ax: Any = None
) -> Any:
    r"""Plots a histogram of the probability integral transform (PIT), with a band for calibrated predictions.

    A flat histogram means calibrated predictions. Peaks at both ends mean intervals that are too narrow, a peak in the middle means
    intervals that are too wide, and a slope means a bias. Each bar of calibrated predictions is :math:`\mathrm{Bin}(n, 1/b)`
    distributed, for :math:`n` targets and :math:`b` bins.

    Args:
        predictive: Predictive distribution of real values.
        targets: Targets in the shape of the predictions.
        bins: Number of bins.
        level: Probability of the band.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> prediction = fb.predictive.GaussianPredictive(torch.zeros(1, 50, 1), 1.0)
    >>> ax = prediction.plot_pit(torch.randn(50, 1), bins=5)
    >>> ax.get_ylabel()
    'targets (%)'
    >>> fb.plots.close(ax)
    """
    check_kind(predictive, "cdf", "real values")
    values = to_array(predictive.cdf(targets)).reshape(-1)
    counts, edges = np.histogram(values, bins, (0.0, 1.0))
    low, high = binomial_band(level, values.size, 1.0 / bins)
    with drawing(ax) as (ax, palette):
        share = 100.0 * counts / values.size
        ax.bar(edges[:-1], share, 0.94 / bins, align="edge", color=palette.colour(0), alpha=0.75, linewidth=0)
        ax.axhspan(
            100.0 * float(low),
            100.0 * float(high),
            color=palette.ink,
            alpha=0.16,
            linewidth=0,
            zorder=3,
            label=f"{100 * level:.4g} % of calibrated predictions",
        )
        ax.axhline(100.0 / bins, color=palette.ink, linestyle="--", linewidth=1.1, label="expected")
        ax.set_xlim(0, 1)
        ax.set_ylim(0, 1.3 * max(share.max(), 100.0 * float(high)))
        describe_axes(ax, palette, "PIT of the targets", "targets (%)")
        ax.grid(False, axis="x")
        add_legend(ax, palette, loc="upper center", ncols=2)
    return ax


@checked
def plot_coverage(
    predictive: Any, targets: Tensor, *, level: Probability = 0.95, label: str = "", ax: Any = None
) -> Any:
    r"""Plots the observed coverage of central intervals against their probability, with a band for calibrated predictions.

    A curve below the diagonal means intervals that are too narrow. The number of covered targets of calibrated predictions is
    :math:`\mathrm{Bin}(n, m)` distributed, for :math:`n` targets and intervals of probability :math:`m`.

    Args:
        predictive: Predictive distribution of real values.
        targets: Targets in the shape of the predictions.
        level: Probability of the band.
        label: Name of the method in the legend.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> prediction = fb.predictive.GaussianPredictive(torch.zeros(1, 50, 1), 1.0)
    >>> ax = prediction.plot_coverage(torch.randn(50, 1))
    >>> ax.get_ylabel()
    'observed coverage (%)'
    >>> fb.plots.close(ax)
    """
    check_kind(predictive, "cdf", "real values")
    values = to_array(predictive.cdf(targets)).reshape(-1)
    masses = np.linspace(0.0, 1.0, 101)
    covered = np.searchsorted(np.sort(2.0 * np.abs(values - 0.5)), masses + 1e-12, side="right") / values.size
    low, high = binomial_band(level, values.size, masses)
    with drawing(ax, (5.0, 4.6)) as (ax, palette):
        if not ax.lines:
            ax.plot([0, 100], [0, 100], color=palette.muted, linestyle="--", linewidth=1.1)
            ax.fill_between(
                100.0 * masses,
                100.0 * low,
                100.0 * high,
                color=palette.muted,
                alpha=0.22,
                linewidth=0,
                label=f"{100 * level:.4g} % of calibrated predictions",
            )
        colour = palette.colour(len(ax.lines) - 1)
        ax.plot(100.0 * masses, 100.0 * covered, color=colour, label=label or "observed")
        ax.set_xlim(0, 100)
        ax.set_ylim(0, 100)
        describe_axes(ax, palette, "interval probability (%)", "observed coverage (%)")
        add_legend(ax, palette, loc="upper left")
    return ax
