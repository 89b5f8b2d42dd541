"""Record of a training: the objective over epochs, and the KL divergence of each layer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from flowbnn.errors import requirement_error
from flowbnn.options import Count, checked
from flowbnn.plots.style import add_legend, describe_axes, drawing


def _history(source: Any) -> Any:
    """Returns the history of a fit.

    Raises:
        FlowBNNError: If there is none, or if it has no epochs.
    """
    history = getattr(source, "history", source)
    if not getattr(history, "records", None):
        raise requirement_error("the plot", "recorded epochs", f"a {type(source).__name__}", kind="history")
    return history


@checked
def plot_history(fit: Any, *, names: Sequence[str] = (), ax: Any = None) -> Any:
    """Plots values of a training over its epochs, by default the objective, on training and on validation data.

    Args:
        fit: Posterior, density, autoencoder, or history.
        names: Names of recorded values. The default is the ELBO, or the log-likelihood or the loss if there is no ELBO.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import flowbnn as fb
    >>> history = fb.training.History([{"elbo": -2.0, "kl": 5.0}, {"elbo": -1.0, "kl": 4.5}])
    >>> ax = fb.plots.plot_history(history)
    >>> ax.get_ylabel(), ax.lines[0].get_ydata().tolist()
    ('ELBO (nats per example)', [-2.0, -1.0])
    >>> fb.plots.close(ax)
    """
    history = _history(fit)
    objectives = {
        "elbo": "ELBO (nats per example)",
        "log_likelihood": "log-likelihood (nats per example)",
        "reconstruction": "reconstruction (nats per example)",
        "loss": "loss",
    }
    if not names:
        objective = next((name for name in objectives if name in history), history.names[0])
        names = [name for name in (objective, f"validation_{objective}") if name in history]
        label = objectives.get(objective, objective)
    else:
        label = objectives.get(names[0], names[0]) if len(names) == 1 else "value"
    series = {name: np.asarray(history[name], dtype=np.float64) for name in names}
    with drawing(ax) as (ax, palette):
        for index, (name, values) in enumerate(series.items()):
            marker = "o" if len(values) == 1 else ""
            text = "validation" if name.startswith("validation_") else "training"
            text = text if label != "value" else name.replace("_", " ")
            x = np.arange(1, len(values) + 1)
            ax.plot(x, values, marker=marker, color=palette.colour(index), label=text)
        if history.best_epoch is not None:
            place = history.best_epoch + 1
            ax.axvline(place, color=palette.muted, linestyle="--", linewidth=1.1, label="best epoch")
        _finish(ax, palette, label)
    return ax


@checked
def plot_kl(fit: Any, *, max_layers: Count = 6, ax: Any = None) -> Any:
    """Plots the KL divergence of the noise of each layer over the epochs of a training.

    Args:
        fit: Posterior or history.
        max_layers: Number of layers with a line of their own, those with the largest final values. The others are summed.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    Raises:
        FlowBNNError: If no KL divergence was recorded.

    >>> import flowbnn as fb
    >>> history = fb.training.History([{"kl": 5.0, "kl/fc1": 3.0, "kl/fc2": 2.0}, {"kl": 4.0, "kl/fc1": 3.0, "kl/fc2": 1.0}])
    >>> ax = fb.plots.plot_kl(history)
    >>> [line.get_label() for line in ax.lines]
    ['total', 'fc1', 'fc2']
    >>> fb.plots.close(ax)
    """
    history = _history(fit)
    layers = {name[3:]: np.asarray(history[name]) for name in history.names if name.startswith("kl/")}
    if not layers and "kl" not in history:
        raise requirement_error("plot_kl", "a recorded KL", hint="use plot_history", kind="history")
    ranked = sorted(layers, key=lambda name: -layers[name][-1])
    lines = {name: layers[name] for name in ranked[:max_layers]}
    if ranked[max_layers:]:
        others = np.sum([layers[name] for name in ranked[max_layers:]], axis=0)
        lines[f"{len(ranked) - max_layers} other layers"] = others
    total = np.asarray(history["kl"]) if "kl" in history else np.sum(list(layers.values()), axis=0)
    with drawing(ax) as (ax, palette):
        x = np.arange(1, len(total) + 1)
        marker = "o" if len(x) == 1 else ""
        ax.plot(x, total, color=palette.ink, linestyle="--", marker=marker, label="total")
        for index, (name, values) in enumerate(lines.items()):
            colour = palette.muted if name not in layers else palette.colour(index)
            ax.plot(x, values, color=colour, marker=marker, label=name)
        ax.set_ylim(bottom=min(0.0, ax.get_ylim()[0]))
        _finish(ax, palette, "noise KL divergence (nats)", "layer")
    return ax


def _finish(ax: Any, palette: Any, label: str, legend_title: str = "") -> None:
    """Sets the axis labels, integer ticks of the epochs, and the legend."""
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True, min_n_ticks=1))
    ax.margins(x=0.02)
    describe_axes(ax, palette, "epoch", label)
    if len(ax.lines) > 3:  # beside the axes, where it hides no line
        add_legend(ax, palette, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    else:
        add_legend(ax, palette)
    if legend_title:
        ax.get_legend().set_title(legend_title)
        ax.get_legend().get_title().set(color=palette.ink, fontsize=10)
