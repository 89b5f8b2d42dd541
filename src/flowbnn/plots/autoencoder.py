"""Reconstructions and samples of an autoencoder."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowbnn.options import Count, Seed, checked
from flowbnn.plots.style import Palette, add_legend, describe_axes, drawing, to_array


def _is_image(shape: tuple[int, ...]) -> bool:
    """Returns True if examples of this shape can be shown as images, in grey or in colour."""
    return len(shape) == 2 or (len(shape) == 3 and shape[0] in (1, 3))


def tile(images: Tensor, columns: int) -> np.ndarray:
    """Returns one picture of several images, ``[rows * H, columns * W]`` or ``[rows * H, columns * W, 3]``.

    Args:
        images: Images ``[N, H, W]`` or ``[N, channels, H, W]``.
        columns: Number of images in a row. Missing images are blank.

    >>> tile(torch.zeros(3, 1, 4, 5), columns=2).shape
    (8, 10)
    """
    pictures = to_array(images)
    pictures = pictures[:, None] if pictures.ndim == 3 else pictures
    count, channels, height, width = pictures.shape
    rows = -(-count // columns)
    blank = np.full((rows * columns - count, channels, height, width), np.nan)
    grid = np.concatenate([pictures, blank]).reshape(rows, columns, channels, height, width)
    picture = grid.transpose(0, 3, 1, 4, 2).reshape(rows * height, columns * width, channels)
    return picture[..., 0] if channels == 1 else picture


def _draw_images(ax: Any, palette: Palette, images: Tensor, columns: int) -> None:
    """Draws images in rows, with thin lines between them."""
    picture = tile(images, columns)
    low, high = float(np.nanmin(picture)), float(np.nanmax(picture))
    low, high = (0.0, 1.0) if low >= 0.0 and high <= 1.0 else (low, max(high, low + 1e-12))
    brightness = np.nan_to_num((picture - low) / (high - low), nan=1.0)
    height, width = images.shape[-2:]
    ax.imshow(brightness, cmap="gray", vmin=0.0, vmax=1.0, interpolation="nearest")
    style: dict[str, Any] = {"color": palette.background, "linewidth": 2.0}
    for column in range(1, columns):
        ax.axvline(column * width - 0.5, **style)
    for row in range(1, picture.shape[0] // height):
        ax.axhline(row * height - 0.5, **style)
    ax.grid(False)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(False)


@checked
def plot_reconstructions(
    model: Any, inputs: Any, *, context: Tensor | None = None, number: Count = 8, ax: Any = None
) -> Any:
    """Plots examples above their reconstructions. Examples that are not images are drawn as lines.

    Args:
        model: Autoencoder.
        inputs: Examples ``[N, ...]``.
        context: Contexts of the examples, or None.
        number: Number of examples to show.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import torch, flowbnn as fb
    >>> ax = fb.vae.VAE((1, 8, 8), latent_dim=2, hidden=(16,)).plot_reconstructions(torch.zeros(4, 1, 8, 8))
    >>> ax.images[0].get_array().shape
    (16, 32)
    >>> fb.plots.close(ax)
    """
    examples = torch.as_tensor(inputs[:number])
    rows = None if context is None else context[:number]
    means = model.reconstruct(examples, rows).cpu()
    examples, count = examples.detach().cpu(), len(examples)
    image = _is_image(tuple(model.shape))
    with drawing(ax, (0.8 * count + 1.3, 2.1) if image else None) as (ax, palette):
        if image:
            _draw_images(ax, palette, torch.cat([examples.to(means), means]), count)
            height = means.shape[-2]
            ax.set_yticks([0.5 * height, 1.5 * height], ["example", "reconstruction"])
            ax.tick_params(axis="y", length=0, labelcolor=palette.ink)
        else:
            _draw_lines(ax, palette, examples, "example", "-")
            _draw_lines(ax, palette, means, "reconstruction", "--")
            add_legend(ax, palette)
    return ax


@checked
def plot_samples(
    model: Any,
    *,
    context: Tensor | None = None,
    number: Count = 16,
    seed: Seed = 0,
    mean: bool = True,
    ax: Any = None,
) -> Any:
    """Plots new examples of a variational autoencoder. Examples that are not images are drawn as lines.

    Args:
        model: Variational autoencoder.
        context: Contexts, one row for each example, or None.
        number: Number of examples.
        seed: Seed of the draws.
        mean: If True, the means of the decoder are shown instead of draws from it.
        ax: Axes to draw on, or None for a new figure.

    Returns:
        The axes.

    >>> import flowbnn as fb
    >>> ax = fb.vae.VAE((1, 8, 8), latent_dim=2, hidden=(16,)).plot_samples(number=4)
    >>> ax.images[0].get_array().shape
    (16, 16)
    >>> fb.plots.close(ax)
    """
    with torch.no_grad():
        draws = model.sample(number, context, seed=seed, mean=mean).cpu()
    columns = int(np.ceil(np.sqrt(number)))
    image = _is_image(tuple(model.shape))
    with drawing(ax, (4.2, 4.4) if image else None) as (ax, palette):
        if image:
            _draw_images(ax, palette, draws, columns)
            ax.set_title("prior samples", color=palette.ink, loc="left")
        else:
            _draw_lines(ax, palette, draws, "sample", "-")
            add_legend(ax, palette)
    return ax


def _draw_lines(ax: Any, palette: Palette, examples: Tensor, label: str, linestyle: str) -> None:
    """Draws each example as a line over the indices of its numbers."""
    for index, values in enumerate(to_array(examples).reshape(len(examples), -1)):
        name = label if index == 0 else None
        ax.plot(values, linestyle=linestyle, color=palette.colour(index), linewidth=1.3, label=name)
    describe_axes(ax, palette, "index", "value")
