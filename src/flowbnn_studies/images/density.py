"""What the studies of densities of images share: their data and grids of pictures."""

from typing import Any, Literal

import torch
from torch import Tensor

from flowbnn.options import Count, options
from flowbnn.results import figure
from flowbnn_studies.images.data import read_images
from flowbnn_studies.runner.figures import short
from flowbnn_studies.runner.job import Job

BINARY_SEED = 2008  # of the one draw by which grey images become binary


@options(kw_only=True)
class PictureData:
    """Where the images come from.

    Args:
        source: ``"files"``, or ``"generated"``: pictures that are made on the spot, for trials.
        generated: how many of them; a quarter as many to test on.
    """

    source: Literal["files", "generated"] = "files"
    generated: Count = 200


def read_bytes(job: Job, name: str, split: str) -> tuple[Tensor, Tensor]:
    """Images in bytes and their labels, on the device of the job."""
    s: PictureData = job.settings
    found = read_images(name, split, s.source, s.generated)
    return found.images.to(job.device), found.labels.to(job.device)


def read_binary(job: Job, split: str) -> Tensor:
    """MNIST, binarised once, on the device of the job."""
    images = read_images("mnist", split, job.settings.source, job.settings.generated).images
    generator = torch.Generator().manual_seed(BINARY_SEED + (split == "test"))
    return binarise(images, generator).to(job.device)


def binarise(images: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Grey bytes become binary ones: a pixel is 1 with its grey value as the probability.

    >>> binarise(torch.tensor([0, 255], dtype=torch.uint8))
    tensor([0, 1], dtype=torch.uint8)
    """
    return (torch.rand(images.shape, generator=generator, device=images.device) * 255 < images).to(
        torch.uint8
    )


def picture_grid(images: Tensor, columns: int) -> list[Any]:
    """Images ``[N, C, H, W]`` with values from 0 to 1 as one picture, row by row, for a figure of kind ``images``.

    >>> picture_grid(torch.tensor([0.0, 1.0, 0.5, 0.25]).view(4, 1, 1, 1), 2)
    [[0.0, 1.0], [0.5, 0.25]]
    """
    images = images[: len(images) // columns * columns].float().clamp(0, 1)
    number, channels, height, width = images.shape
    rows = images.reshape(number // columns, columns, channels, height, width).permute(0, 3, 1, 4, 2)
    whole = rows.reshape(number // columns * height, columns * width, channels)
    return short(whole[..., 0] if channels == 1 else whole, 2)


def grids_figure(title: str, caption: str, pictures: dict[str, Any]) -> dict[str, Any]:
    """A figure with a grid of pictures for each label."""
    panels = [{"title": label, "pixels": pixels} for label, pixels in pictures.items()]
    return figure("images", title, caption, {"panels": panels})
