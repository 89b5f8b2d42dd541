"""Histogram of an uncertainty of known against novel inputs."""

from typing import Any

import numpy as np

from flowbnn.errors import describe_value, value_error
from flowbnn.metrics import novelty_auroc
from flowbnn.options import Count, checked
from flowbnn.plots.style import add_legend, describe_axes, drawing, to_array


def _axis_label(predictive: Any, by: str) -> str:
    """Returns the name of an uncertainty with its unit."""
    if hasattr(predictive, "probabilities"):
        labels = {
            "entropy": "normalized entropy",
            "risk": "risk (1 − confidence)",
            "epistemic": "mutual information (nats)",
            "aleatoric": "expected entropy (nats)",
            "total_variance": "total variance",
        }
    else:
        labels = {
            "std": "standard deviation (target unit)",
            "epistemic": "epistemic variance (squared unit)",
            "variance": "variance (squared unit)",
            "aleatoric": "aleatoric variance (squared unit)",
        }
    return labels.get(by, by)


@checked
def plot_novelty(known: Any, novel: Any, *, by: str = "", bins: Count = 30, ax: Any = None) -> Any:
    """Plots histograms of an uncertainty of known and of novel inputs, with the AUROC of their separation.

    Args:
        known: Predictive distribution of inputs like the training data.
        novel: Predictive distribution of other inputs.
        by: Name of the uncertainty, one of ``known.uncertainties``. The default is the first one.
        bins: Number of bins.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> known = fb.predictive.CategoricalPredictive(torch.tensor([[[5.0, 0.0], [0.0, 4.0]]]))
    >>> novel = fb.predictive.CategoricalPredictive(torch.tensor([[[0.1, 0.0], [0.0, 0.3]]]))
    >>> ax = known.plot_novelty(novel)
    >>> ax.get_title(loc="left")
    'AUROC 1.000'
    >>> fb.plots.close(ax)
    """
    for name, predictive in (("known", known), ("novel", novel)):
        if not hasattr(predictive, "uncertainty"):
            raise value_error(name, "a predictive distribution", describe_value(predictive), "use predict()")
    by = by or known.uncertainties[0]
    scores = [each.uncertainty(by).detach().flatten().cpu() for each in (known, novel)]
    area = novelty_auroc(*scores)
    values = [to_array(each) for each in scores]
    low, high = min(each.min() for each in values), max(each.max() for each in values)
    edges = np.linspace(low, high if high > low else low + 1.0, bins + 1)
    with drawing(ax) as (ax, palette):
        for index, (label, each) in enumerate(zip(("known inputs", "novel inputs"), values, strict=True)):
            counts, _ = np.histogram(each, edges)
            share = 100.0 * counts / each.size
            colour = palette.colour(index)
            ax.stairs(share, edges, fill=True, color=colour, alpha=0.4, label=f"{label} ({each.size:,})")
            ax.stairs(share, edges, color=colour, linewidth=1.5)
        ax.set_xlim(edges[0], edges[-1])
        describe_axes(ax, palette, _axis_label(known, by), "inputs (%)", f"AUROC {area:.3f}")
        add_legend(ax, palette)
    return ax
