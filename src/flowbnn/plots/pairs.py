"""Pairs of noise variables, or of weights, of a posterior."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from flowbnn.errors import check_name, value_error
from flowbnn.options import Ge, SampleCount, Seed, checked
from flowbnn.plots.style import Palette, describe_axes, drawing, restyle, to_array


@checked
def plot_pairs(
    posterior: Any,
    *,
    layer: str = "",
    units: Sequence[Annotated[int, Ge(0)]] | None = None,
    samples: SampleCount = 1000,
    seed: Seed = 0,
    ax: Any = None,
) -> Any:
    """Plots the joint posterior of a few noise variables of one layer: histograms on the diagonal, pairs of samples below it.

    For posteriors of weights, the variables are entries of one weight.

    Args:
        posterior: Posterior with draws of noise or of weights.
        layer: Name of the layer or weight. The default is the first one.
        units: Indices of the variables, from two to six. The default is the first three, or both of two.
        samples: Number of samples.
        seed: Seed of the samples.
        ax: Axes whose area the panels fill, or None for a new figure.

    Returns:
        The axes. The panels are its ``child_axes``, row by row.

    Raises:
        FlowBNNError: If the posterior has no such layer or no such variable.

    >>> import torch, flowbnn as fb
    >>> network = fb.to_stochastic(torch.nn.Linear(4, 2), {"*": fb.noise.NormalAffine()})
    >>> posterior = fb.posterior.NoisePosterior(network, fb.likelihoods.Categorical())
    >>> ax = posterior.plot_pairs(units=(0, 2), samples=20)
    >>> len(ax.child_axes)  # two histograms and one pair
    3
    >>> fb.plots.close(ax)
    """
    draws = posterior.draws(samples, seed)
    layer = layer or next(iter(draws))
    check_name(layer, draws, "layer", kind="name", argument="layer")
    values = to_array(draws[layer]).reshape(samples, -1)
    units = range(min(3, values.shape[1])) if units is None else units
    if not 2 <= len(units) <= 6 or max(units) >= values.shape[1]:
        raise value_error("units", f"2 to 6 indices below {values.shape[1]}", tuple(units))
    size = 1.5 * len(units) + 1.2
    with drawing(ax, (size, size)) as (ax, palette):
        ax.set_axis_off()
        ax.set_title(f"layer '{layer}' ({samples:,} samples)", color=palette.ink, loc="left")
        _draw_grid(ax, palette, values[:, list(units)], list(units))
    return ax


def _draw_grid(ax: Any, palette: Palette, values: np.ndarray, units: list[int]) -> None:
    """Draws the panels of a lower triangle."""
    count = len(units)
    low, high = values.min(0), values.max(0)
    ends = np.stack([low, high], 1) + 0.05 * np.stack([low - high, high - low], 1) + [-1e-6, 1e-6]
    cell, gap = 1.0 / count, 0.03
    for row in range(count):
        for column in range(row + 1):
            place = (column * cell, 1.0 - (row + 1) * cell, cell - gap, cell - gap)
            panel = ax.inset_axes(place)
            panel.set_facecolor("none")
            restyle(panel, palette)
            if row == column:
                panel.hist(values[:, row], 25, color=palette.colour(0), alpha=0.75)
                panel.set_yticks([])
            else:
                panel.scatter(
                    values[:, column], values[:, row], 4, color=palette.colour(0), alpha=0.4, linewidths=0
                )
                panel.set_ylim(*ends[row])
            panel.set_xlim(*ends[column])
            panel.locator_params(nbins=3)
            panel.tick_params(labelsize=8.5)
            bottom, left = row == count - 1, column == 0 and row > 0
            panel.tick_params(labelbottom=bottom, labelleft=left)
            describe_axes(
                panel,
                palette,
                f"unit {units[column]}" if bottom else "",
                f"unit {units[row]}" if left else "",
            )
