"""Comparison of methods by one metric."""

from typing import Any

import numpy as np

from flowbnn.errors import check_name
from flowbnn.options import checked
from flowbnn.plots.style import add_legend, describe_axes, drawing


@checked
def plot_comparison(comparison: Any, metric: str = "nll", *, ax: Any = None) -> Any:
    """Plots one metric of all methods, the best one on top: means with one standard deviation over seeds, and each seed as a dot.

    Args:
        comparison: Result of :func:`flowbnn.compare`.
        metric: Key of the metric, such as ``"nll"``, ``"ece"`` or ``"training"``.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    Raises:
        FlowBNNError: If the comparison has no such metric.

    >>> import flowbnn as fb
    >>> rows = {("mle", 0): {"values": {"nll": 0.5}}, ("mle", 1): {"values": {"nll": 0.7}}}
    >>> from flowbnn.compare.candidates import CANDIDATES
    >>> from flowbnn.compare.comparison import Comparison
    >>> from flowbnn.compare.results import SeedResults
    >>> ax = Comparison(CANDIDATES[:1], SeedResults([0, 1], rows)).plot()
    >>> ax.get_xlabel()
    'NLL (lower is better)'
    >>> fb.plots.close(ax)
    """
    metrics = {each.key: each for each in comparison.metrics}
    check_name(metric, metrics, "metric", kind="name", argument="metric")
    column = metrics[metric]
    cells = [(row["label"], row["values"].get(metric)) for row in comparison.table_rows()]
    rows = [(label, cell) for label, cell in cells if cell is not None and cell["mean"] is not None]
    sign = -1.0 if column.better == "higher" else 1.0
    rows.sort(key=lambda row: sign * row[1]["mean"])
    places = np.arange(len(rows))[::-1]
    means = np.array([cell["mean"] for _, cell in rows])
    errors = np.array([cell["std"] or 0.0 for _, cell in rows])
    several = any(cell["std"] is not None for _, cell in rows)
    with drawing(ax, (6.4, 1.3 + 0.34 * len(rows))) as (ax, palette):
        if several:
            for index, (place, (_, cell)) in enumerate(zip(places, rows, strict=True)):
                label = "one seed" if index == 0 else None
                values = [value for value in cell["per_seed"] if value is not None]
                height = np.full(len(values), place)
                ax.scatter(
                    values, height, 14, color=palette.muted, alpha=0.6, linewidths=0, label=label, zorder=2
                )
        ax.errorbar(
            means,
            places,
            xerr=errors if several else None,
            fmt="o",
            color=palette.colour(0),
            elinewidth=2.0,
            capsize=3.0,
            markersize=6.5,
            label="mean ± 1 standard deviation" if several else "one seed",
            zorder=3,
        )
        ax.set_yticks(places, [label for label, _ in rows])
        ax.tick_params(axis="y", labelcolor=palette.ink)
        ax.set_ylim(-0.7, len(rows) + 0.5)
        ax.grid(False, axis="x")
        direction = f" ({column.better} is better)" if column.better in ("higher", "lower") else ""
        describe_axes(ax, palette, column.label + direction)
        add_legend(ax, palette, loc="upper center", ncols=2)
    return ax
