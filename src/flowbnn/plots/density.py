"""Densities of one or two numbers, with samples."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from flowbnn.errors import value_error
from flowbnn.options import Count, Ge, Probability, Seed, checked
from flowbnn.plots.style import Palette, add_legend, blend, describe_axes, drawing, to_array

LogDensity = Callable[[Tensor], Tensor]


@checked
def plot_density(
    density: Any,
    data: Any = None,
    *,
    context: Any = None,
    samples: Count = 1000,
    seed: Seed = 0,
    masses: Sequence[Probability] = (0.95, 0.8, 0.5, 0.2),
    resolution: Annotated[int, Ge(2)] = 150,
    ax: Any = None,
) -> Any:
    r"""Plots a density of one or two numbers, and samples of it.

    One number: the density as a line, and a histogram of the data or, without data, of the samples. Two numbers: highest density
    regions of the given probabilities, with samples and data as points. A region of mass :math:`m` contains the points whose
    log-density is at least the quantile :math:`1 - m` of the log-densities of samples.

    Args:
        density: Fitted density, target fit, flow, or distribution.
        data: Examples to compare with, ``[N, D]``, or None.
        context: Context of a conditional density, one row ``[1, C]``, or None.
        samples: Number of samples.
        seed: Seed of the samples.
        masses: Probabilities of the regions of two numbers.
        resolution: Number of evaluations along each axis.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    Raises:
        FlowBNNError: If the density has more than two numbers.

    >>> import torch, flowbnn as fb
    >>> ax = fb.plots.plot_density(fb.flows.RealNVP(2), samples=50, resolution=10)
    >>> ax.get_xlabel(), ax.get_ylabel()
    ('x₁', 'x₂')
    >>> fb.plots.close(ax)
    """
    draws, log_prob = _samples_and_log_density(density, context, samples, seed)
    if draws.shape[-1] > 2:
        raise value_error("density", "1-d or 2-d", f"{draws.shape[-1]}-d", "plot its marginals", kind="shape")
    points = to_array(draws)
    examples = None if data is None else to_array(data).reshape(-1, draws.shape[-1])
    sides = [
        _range(points[:, axis], None if examples is None else examples[:, axis])
        for axis in range(draws.shape[-1])
    ]
    lines = [torch.linspace(*side, resolution, dtype=draws.dtype) for side in sides]
    with torch.no_grad():
        values = to_array(log_prob(torch.cartesian_prod(*lines).reshape(-1, len(lines))))
        levels = to_array(log_prob(draws))
    if len(lines) == 1:
        return _draw_line(to_array(lines[0]), np.exp(values), points[:, 0], examples, ax)
    chosen = sorted({float(np.quantile(levels, 1.0 - mass)) for mass in masses})
    grid = [to_array(line) for line in lines]
    with drawing(ax, (5.2, 4.8)) as (ax, palette):
        _draw_regions(ax, palette, grid, values.reshape(resolution, resolution).T, chosen)
        text = ", ".join(f"{100 * mass:.4g}" for mass in sorted(masses))
        describe_axes(ax, palette, "x₁", "x₂", f"regions of {text} % probability")
        if examples is not None:
            ax.scatter(
                *examples.T, 7, color=palette.colour(1), alpha=0.6, linewidths=0, label="data", zorder=3
            )
        size = 5.0 if samples > 300 else 9.0
        ax.scatter(*points.T, size, color=palette.ink, alpha=0.35, linewidths=0, label="samples", zorder=2)
        ax.set_xlim(*sides[0])
        ax.set_ylim(*sides[1])
        add_legend(ax, palette, markerscale=2.0)
        for handle in ax.get_legend().legend_handles:
            handle.set_alpha(0.9)
    return ax


def _samples_and_log_density(
    density: Any, context: Any, samples: int, seed: int
) -> tuple[Tensor, LogDensity]:
    """Returns samples ``[samples, D]`` on the CPU, and a function of points ``[N, D]`` that returns log-densities."""
    if hasattr(density, "score"):  # a fitted density, in the units of the data
        draws, log_prob = density.sample(samples, context, seed=seed), density.log_prob
        device = draws.device
        return _as_rows(draws).cpu(), lambda x: log_prob(x.to(device), _repeat(context, len(x)))
    if hasattr(density, "flow"):
        density = density.flow
    with torch.no_grad():
        distribution = density(context) if isinstance(density, nn.Module) else density
    tensors = density.parameters() if isinstance(density, nn.Module) else ()
    devices = sorted({tensor.device.index for tensor in tensors if tensor.is_cuda})
    with torch.no_grad(), torch.random.fork_rng(devices):
        torch.manual_seed(seed)
        draws = distribution.sample((samples,))
    device, vector = draws.device, bool(getattr(distribution, "event_shape", (1,)))
    return _as_rows(draws).cpu(), lambda x: distribution.log_prob((x if vector else x[:, 0]).to(device))


def _as_rows(draws: Tensor) -> Tensor:
    """Returns draws as rows, ``[N, D]``."""
    return draws.reshape(len(draws), -1).detach()


def _repeat(context: Any, rows: int) -> Any:
    """Returns one row of context as often as there are points."""
    return None if context is None else torch.as_tensor(context).expand(rows, -1)


def _range(samples: np.ndarray, examples: np.ndarray | None) -> tuple[float, float]:
    """Returns the range of an axis, which leaves out the most extreme samples."""
    low, high = np.quantile(samples, [0.002, 0.998])
    if examples is not None:
        low, high = min(low, examples.min()), max(high, examples.max())
    spread = 0.08 * max(high - low, 1e-6)
    return float(low - spread), float(high + spread)


def _draw_regions(
    ax: Any, palette: Palette, grid: Sequence[np.ndarray], values: np.ndarray, levels: list[float]
) -> None:
    """Draws highest density regions, from faint to strong."""
    top = max(float(np.nanmax(values)), levels[-1]) + 1.0
    colours = blend(palette.background, palette.colour(0), np.linspace(0.25, 0.9, len(levels)).tolist())
    ax.contourf(*grid, np.nan_to_num(values, nan=-1e300, neginf=-1e300), [*levels, top], colors=colours)
    ax.grid(False)


def _draw_line(
    x: np.ndarray, values: np.ndarray, samples: np.ndarray, examples: np.ndarray | None, ax: Any
) -> Any:
    """Draws a density of one number, and a histogram of the data or of the samples."""
    name, values_to_count = ("samples", samples) if examples is None else ("data", examples[:, 0])
    heights, edges = np.histogram(
        values_to_count, min(40, max(8, round(values_to_count.size**0.5))), (x[0], x[-1])
    )
    with drawing(ax) as (ax, palette):
        density = heights / values_to_count.size / np.diff(edges)
        ax.stairs(density, edges, fill=True, color=palette.colour(1), alpha=0.35, label=name)
        ax.plot(x, values, color=palette.colour(0), label="density")
        ax.set_xlim(x[0], x[-1])
        ax.set_ylim(bottom=0)
        describe_axes(ax, palette, "x", "density (1 / unit of x)")
        add_legend(ax, palette)
    return ax
