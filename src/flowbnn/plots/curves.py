"""Predictions over one real input: intervals, and samples of functions."""

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from torch import Tensor

from flowbnn.errors import value_error
from flowbnn.options import Count, Ge, Probability, checked
from flowbnn.plots.style import add_headroom, add_legend, check_kind, describe_axes, drawing, to_array

Index = Annotated[int, Ge(0)]


def ordered_inputs(inputs: Any, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs ``[B]`` in ascending order, and this order.

    Args:
        inputs: Inputs ``[B]`` or ``[B, 1]``.
        number: Number of inputs of the predictive.

    Raises:
        FlowBNNError: If the inputs are not one number for each prediction.
    """
    values = to_array(inputs)
    if values.size != number:
        raise value_error("inputs", f"{number} numbers", f"shape {values.shape}", kind="shape")
    order = np.argsort(values.reshape(-1), kind="stable")
    return values.reshape(-1)[order], order


def _column(values: Tensor, output: int) -> np.ndarray:
    """Returns one output of values ``[B, ...]``."""
    return to_array(values).reshape(len(values), -1)[:, output]


@checked
def plot_intervals(
    predictive: Any,
    inputs: Any,
    *,
    data: Sequence[Any] | None = None,
    masses: Sequence[Probability] = (0.9, 0.5),
    output: Index = 0,
    ax: Any = None,
) -> Any:
    """Plots the mean and central intervals of a curve over one real input.

    Args:
        predictive: Predictive distribution of real values for the inputs.
        inputs: Inputs ``[B]`` or ``[B, 1]``, in any order.
        data: Pair of inputs and targets to show as points, such as the training data.
        masses: Probabilities of the intervals.
        output: Index of the output, if there are several.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)
    >>> prediction = fb.predictive.GaussianPredictive(torch.stack([x, 2 * x])[..., None], 0.1)
    >>> ax = prediction.plot_intervals(x)
    >>> [text.get_text() for text in ax.get_legend().get_texts()]
    ['mean', '90 % interval', '50 % interval']
    >>> fb.plots.close(ax)
    """
    check_kind(predictive, "mean", "real values")
    x, order = ordered_inputs(inputs, len(predictive))
    mean = _column(predictive.mean, output)[order]
    bands = [
        (mass, *(_column(end, output)[order] for end in predictive.interval(mass)))
        for mass in sorted(masses, reverse=True)
    ]
    with drawing(ax) as (ax, palette):
        (line,) = ax.plot(x, mean, label="mean", zorder=3)
        for number, (mass, low, high) in enumerate(bands):
            alpha = 0.2 if number == 0 else 0.3
            ax.fill_between(
                x,
                low,
                high,
                color=line.get_color(),
                alpha=alpha,
                linewidth=0,
                label=f"{100 * mass:.4g} % interval",
            )
        if data is not None:
            points = (to_array(values).reshape(len(values), -1) for values in data)
            places, values = (column[:, min(output, column.shape[1] - 1)] for column in points)
            ax.scatter(places, values, 14, color=palette.ink, alpha=0.7, linewidths=0, zorder=4, label="data")
        describe_axes(ax, palette, "input", "target")
        ax.margins(x=0)
        add_headroom(ax, 0.18)
        add_legend(ax, palette, loc="upper center", ncols=4, columnspacing=1.2)
    return ax


@checked
def plot_functions(
    predictive: Any, inputs: Any, *, number: Count = 20, output: Index = 0, ax: Any = None
) -> Any:
    """Plots samples of functions over one real input. Each line is one network of the posterior.

    Args:
        predictive: Predictive distribution for the inputs, with its samples (``keep_samples=True``).
        inputs: Inputs ``[B]`` or ``[B, 1]``, in any order.
        number: Number of functions. With adaptive sampling, at most the number that all inputs have.
        output: Index of the output, or of the class whose probability is plotted.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> x = torch.linspace(-1, 1, 20)
    >>> prediction = fb.predictive.GaussianPredictive(torch.stack([x, 2 * x])[..., None], 0.1)
    >>> ax = prediction.plot_functions(x)
    >>> len(ax.lines)  # two samples and their mean
    3
    >>> fb.plots.close(ax)
    """
    check_kind(predictive, "sample_counts", "a predictive distribution")
    x, order = ordered_inputs(inputs, len(predictive))
    number = min(number, int(predictive.sample_counts.min()))
    samples = to_array(predictive.samples[:number]).reshape(number, len(predictive), -1)[:, order, output]
    classes = hasattr(predictive, "probabilities")
    mean = _column(predictive.probabilities if classes else predictive.mean, output)[order]
    with drawing(ax) as (ax, palette):
        colour = palette.colour(0)
        alpha = max(0.15, min(0.7, 6.0 / number))
        for index, values in enumerate(samples):
            label = "samples" if index == 0 else None
            ax.plot(x, values, color=colour, linewidth=1.0, alpha=alpha, label=label)
        ax.plot(x, mean, color=palette.ink, linewidth=2.0, label="mean")
        describe_axes(ax, palette, "input", f"probability of class {output}" if classes else "target mean")
        ax.margins(x=0)
        add_headroom(ax, 0.18)
        add_legend(ax, palette, loc="upper center", ncols=2)
        for handle in ax.get_legend().legend_handles:
            handle.set_alpha(1.0)
    return ax
