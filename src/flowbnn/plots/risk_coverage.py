"""Error rate against the fraction of inputs that are answered."""

from typing import Any

import numpy as np
from torch import Tensor

from flowbnn.options import checked
from flowbnn.plots.style import add_headroom, add_legend, check_kind, describe_axes, drawing, to_array


@checked
def plot_risk_coverage(
    predictive: Any, targets: Tensor, *, by: str = "entropy", label: str = "", ax: Any = None
) -> Any:
    """Plots the error rate on the most certain inputs against their fraction (Geifman & El-Yaniv, 2017).

    A lower curve is better. The dashed line is the error rate without abstention, and the dotted curve that of a perfect order, in
    which all wrong predictions are the most uncertain ones.

    Args:
        predictive: Predictive distribution of classes.
        targets: Class indices ``[B]`` or ``[B, *positions]``, of which -100 is ignored.
        by: Name of the uncertainty that orders the inputs, one of ``predictive.uncertainties``.
        label: Name of the method in the legend. The default is the name of the uncertainty.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> prediction = fb.predictive.CategoricalPredictive(torch.tensor([[[2.0, 0.0], [1.0, 0.0]]]))
    >>> ax = prediction.plot_risk_coverage(torch.tensor([0, 1]))
    >>> ax.get_xlabel()
    'coverage (% of inputs)'
    >>> fb.plots.close(ax)
    """
    check_kind(predictive, "risk_coverage", "classes")
    curve = predictive.risk_coverage(targets, by)
    coverage, risk = 100.0 * to_array(curve.coverage), 100.0 * to_array(curve.risk)
    wrong = risk[-1]
    ideal = 100.0 * np.maximum(0.0, 1.0 - (100.0 - wrong) / coverage)
    with drawing(ax) as (ax, palette):
        if not ax.lines:
            ax.axhline(wrong, color=palette.muted, linestyle="--", linewidth=1.1, label="no abstention")
            ax.plot(coverage, ideal, color=palette.muted, linestyle=":", linewidth=1.3, label="perfect order")
        name = f"{label or by.replace('_', ' ')}: AURC {100.0 * curve.area:.2f} %"
        colour = palette.colour(len(ax.lines) - 2)
        ax.plot(coverage, risk, color=colour, label=name)
        ax.set_xlim(0, 100)
        add_headroom(ax, 0.3)
        ax.set_ylim(bottom=0)
        describe_axes(ax, palette, "coverage (% of inputs)", "errors (% of the answers)")
        add_legend(ax, palette, loc="upper center", ncols=2)
    return ax
