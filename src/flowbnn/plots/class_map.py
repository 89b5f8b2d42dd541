"""Map of the predicted classes over two real inputs."""

from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.errors import check_shape
from flowbnn.options import Ge, NonNegative, SampleCount, Seed, checked
from flowbnn.plots.style import Palette, add_legend, blend, check_kind, describe_axes, drawing, to_array


@checked
def plot_class_map(
    posterior: Any,
    inputs: Any,
    *,
    targets: Any = None,
    samples: SampleCount | None = None,
    seed: Seed = 0,
    margin: NonNegative = 0.4,
    resolution: Annotated[int, Ge(2)] = 120,
    ax: Any = None,
) -> Any:
    r"""Plots the most probable class over two real inputs, in a colour that fades with its confidence.

    The strength of the colour is :math:`(p - 1/C) / (1 - 1/C)`, for the confidence :math:`p` and :math:`C` classes. The lines are the
    borders between classes.

    Args:
        posterior: Posterior of a classifier of two numbers.
        inputs: Points ``[N, 2]``, which set the range of the map.
        targets: Class indices ``[N]`` of the points, or None.
        samples: Number of sampled networks. The default is that of ``posterior.predict``.
        seed: Seed of the samples.
        margin: Width of the frame around the points, as a fraction of their range.
        resolution: Number of predictions along each axis.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> posterior = fb.posterior.PointPosterior(torch.nn.Linear(2, 3), fb.likelihoods.Categorical())
    >>> ax = posterior.plot_class_map(torch.randn(10, 2), targets=torch.arange(10) % 3, resolution=8)
    >>> len(ax.images)
    1
    >>> fb.plots.close(ax)
    """
    points = inputs if isinstance(inputs, Tensor) else torch.as_tensor(np.asarray(inputs))
    check_shape("inputs", points, ("points >= 1", 2))
    points = points.detach().cpu()
    points = points if points.is_floating_point() else points.float()
    low, high = points.amin(0), points.amax(0)
    spread = (high - low).clamp_min(1e-6) * margin
    low, high = low - spread, high + spread
    sides = [
        torch.linspace(float(low[axis]), float(high[axis]), resolution, dtype=points.dtype) for axis in (0, 1)
    ]
    grid = torch.cartesian_prod(*sides)
    check_kind(posterior, "collect", "a posterior")
    predictive = posterior.predict(grid, samples, seed=seed, progress=False)
    check_kind(predictive, "probabilities", "classes")
    shape = (resolution, resolution)
    labels = predictive.labels.cpu().numpy().reshape(shape).T
    confidence = to_array(predictive.confidence).reshape(shape).T
    classes = predictive.probabilities.shape[-1]
    with drawing(ax, (5.6, 4.6)) as (ax, palette):
        image = class_colours(labels, (confidence - 1.0 / classes) / (1.0 - 1.0 / classes), palette)
        extent = (float(low[0]), float(high[0]), float(low[1]), float(high[1]))
        ax.imshow(image, origin="lower", extent=extent, aspect="auto", interpolation="bilinear", zorder=0)
        ax.grid(False)
        for label in range(classes):
            if 0.0 < (labels == label).mean() < 1.0:
                inside = lead_of(predictive.probabilities, label).reshape(shape).T
                ax.contour(
                    *map(to_array, sides), inside, [0.0], colors=[palette.ink], linewidths=0.9, alpha=0.6
                )
        _draw_points(ax, palette, points.numpy(), targets)
        describe_axes(ax, palette, "input 1", "input 2")
        add_legend(ax, palette, loc="upper left", bbox_to_anchor=(1.0, 1.0), markerscale=1.5)
        ax.set_xlim(*extent[:2])
        ax.set_ylim(*extent[2:])
    return ax


def lead_of(probabilities: Tensor, label: int) -> np.ndarray:
    """Returns the probability of a class minus the largest one of the others. It is zero at the border of the class."""
    others = probabilities.clone()
    others[:, label] = 0.0
    return to_array(probabilities[:, label] - others.amax(-1))


def class_colours(labels: np.ndarray, strength: np.ndarray, palette: Palette) -> np.ndarray:
    """Returns a colour ``[..., 3]`` for each label, which fades to the background.

    Args:
        labels: Class indices ``[...]``.
        strength: Strengths of the colours ``[...]``, from 0 to 1.
        palette: Colours of the figure.
    """
    background = np.array(blend(palette.background, palette.ink, [0.0])[0])
    full = np.array([blend(palette.background, colour, [0.85])[0] for colour in palette.cycle])
    amount = np.clip(strength, 0.0, 1.0)[..., None]
    return (1.0 - amount) * background + amount * full[labels % len(full)]


def _draw_points(ax: Any, palette: Palette, points: np.ndarray, targets: Any) -> None:
    """Draws points in the colours of their classes."""
    style: dict[str, Any] = {"s": 18, "edgecolors": palette.background, "linewidths": 0.6, "zorder": 3}
    if targets is None:
        ax.scatter(*points.T, color=palette.ink, **style)
        return
    labels = to_array(targets).reshape(-1)
    for label in np.unique(labels).astype(int):
        colour = palette.colour(int(label))
        ax.scatter(*points[labels == label].T, color=colour, label=f"class {label}", **style)
