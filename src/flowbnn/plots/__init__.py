"""Figures, in one call each.

Every function takes a predictive, posterior, density or comparison first, then targets or inputs, and ``ax=``. It draws on these axes,
or on a new figure, and returns the axes. The functions are also methods:

>>> import torch, flowbnn as fb
>>> prediction = fb.predictive.CategoricalPredictive(torch.tensor([[[2.0, 0.0], [0.0, 1.0]]]))
>>> ax = prediction.plot_reliability(torch.tensor([0, 1]))
>>> fb.plots.close(ax)

Figures need matplotlib, ``pip install flowbnn[plots]``, which is imported when the first figure is drawn.
"""

from flowbnn.plots.autoencoder import plot_reconstructions, plot_samples
from flowbnn.plots.calibration import plot_coverage, plot_pit
from flowbnn.plots.chains import plot_ranks, plot_trace
from flowbnn.plots.class_map import plot_class_map
from flowbnn.plots.comparison import plot_comparison
from flowbnn.plots.curves import plot_functions, plot_intervals
from flowbnn.plots.density import plot_density
from flowbnn.plots.history import plot_history, plot_kl
from flowbnn.plots.novelty import plot_novelty
from flowbnn.plots.pairs import plot_pairs
from flowbnn.plots.reliability import plot_reliability
from flowbnn.plots.risk_coverage import plot_risk_coverage
from flowbnn.plots.style import DARK, LIGHT, Palette, close, palette_of, style

__all__ = [
    "DARK",
    "LIGHT",
    "Palette",
    "close",
    "palette_of",
    "plot_class_map",
    "plot_comparison",
    "plot_coverage",
    "plot_density",
    "plot_functions",
    "plot_history",
    "plot_intervals",
    "plot_kl",
    "plot_novelty",
    "plot_pairs",
    "plot_pit",
    "plot_ranks",
    "plot_reconstructions",
    "plot_reliability",
    "plot_risk_coverage",
    "plot_samples",
    "plot_trace",
    "style",
]
