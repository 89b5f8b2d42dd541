"""Changes to images: random crops, flips and holes for training, other views for prediction, noise as a novelty."""

from collections.abc import Sequence
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError
from flowbnn.options import Count, Ge, checked, options


@options
class CropAndFlip:
    r"""Move every image of a batch by up to ``padding`` pixels, mirror half of them, and cut a hole into each.

    Each output pixel is read from its place in the input, :math:`y_{ij} = x_{i + d_y,\; \pm j + d_x}`, by one gather for the
    whole batch: no loop, nothing padded, nothing waited for on a GPU. The same augmentation as padding by reflection and
    cropping at random, with cutout as in DeVries and Taylor (2017, arXiv:1708.04552): the hole's centre is any pixel, so
    part of it may lie outside. Holes are zero.

    Args:
        padding: the largest move, in both directions, each equally likely.
        flip: mirror left and right with probability one half.
        cutout: side of the square hole; 0 cuts none.

    >>> images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    >>> draws = torch.tensor([[0.9], [0.5], [0.9], [0.0], [0.0]])  # one row down, no column, no flip
    >>> CropAndFlip(padding=1).apply(images, draws)[0, 0]
    tensor([[ 4,  5,  6,  7],
            [ 8,  9, 10, 11],
            [12, 13, 14, 15],
            [ 8,  9, 10, 11]], dtype=torch.uint8)
    >>> CropAndFlip()(torch.rand(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    row_wise: ClassVar[bool] = True  # an example comes out the same whatever else is in its batch

    padding: Annotated[int, Ge(0)] = 4
    flip: bool = True
    cutout: Annotated[int, Ge(0)] = 0

    def __call__(self, images: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """The images ``[B, C, H, W]``, each under a draw of its own; type, device and memory format stay."""
        return self.apply(images, self.draw(len(images), images.device, generator))

    def draw(self, number: int, device: torch.device, generator: torch.Generator | None = None) -> Tensor:
        """What :meth:`apply` needs for ``number`` images: ``[5, number]`` uniform numbers in [0, 1).

        In this order: move down, move right, flip (below one half), row and column of the hole's centre. They are drawn
        where the generator is; inside a CUDA graph that must be the device.
        """
        source = device if generator is None else generator.device
        return torch.rand(5, number, generator=generator, device=source).to(device, non_blocking=True)

    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """The images under the given draws."""
        if images.ndim != 4 or self.padding >= min(images.shape[2:]):
            raise FlowBNNError(
                f"images [B, C, H, W] with sides above {self.padding} can be moved by as many pixels, not {tuple(images.shape)}"
            )
        number, _, height, width = images.shape
        down, right, mirrored, hole_row, hole_column = draws.unsqueeze(-1)
        rows = torch.arange(height, device=images.device).expand(number, height)
        columns = torch.arange(width, device=images.device).expand(number, width)
        moves = 2 * self.padding + 1
        from_rows = _reflected(rows + (down * moves).long() - self.padding, height)
        from_columns = _reflected(columns + (right * moves).long() - self.padding, width)
        if self.flip:
            from_columns = torch.where(mirrored < 0.5, width - 1 - from_columns, from_columns)
        moved = _gather(images, from_rows.unsqueeze(2) * width + from_columns.unsqueeze(1))
        if not self.cutout:
            return moved
        down_hole, across_hole = _hole(rows, hole_row, self.cutout), _hole(columns, hole_column, self.cutout)
        return moved.masked_fill_((down_hole.unsqueeze(2) & across_hole.unsqueeze(1)).unsqueeze(1), 0)


def _reflected(places: Tensor, length: int) -> Tensor:
    """Places beyond either end of an axis, mirrored back onto it."""
    return length - 1 - (length - 1 - places.abs()).abs()


def _hole(places: Tensor, where: Tensor, side: int) -> Tensor:
    """The ``side`` places around a centre that is anywhere on the axis."""
    start = (where * places.shape[1]).long() - side // 2
    return (places >= start) & (places < start + side)


def _gather(images: Tensor, source: Tensor) -> Tensor:
    """Each pixel from its source ``[B, H, W]``, counted along rows; contiguous or channels-last as the images are."""
    number, channels, height, width = images.shape
    pixels = height * width
    index = source.reshape(number, pixels)
    if channels > 1 and images.is_contiguous(memory_format=torch.channels_last):
        flat = images.permute(0, 2, 3, 1).reshape(number, pixels, channels)
        moved = flat.gather(1, index.unsqueeze(2).expand(-1, -1, channels))
        return moved.view(number, height, width, channels).permute(0, 3, 1, 2)
    flat = images.reshape(number, channels, pixels)
    return flat.gather(2, index.unsqueeze(1).expand(-1, channels, -1)).view(images.shape)


def mirrored(images: Tensor) -> Tensor:
    """Images ``[..., H, W]`` with left and right exchanged: another view, for ``posterior.predict(images, views=[mirrored])``.

    >>> mirrored(torch.tensor([[1, 2, 3]]))
    tensor([[3, 2, 1]])
    """
    return images.flip(-1)


@options
class Moved:
    """A view for ``posterior.predict(images, views=[mirrored, Moved(1, 1), Moved(-1, -1)])``: images ``[..., C, H, W]`` moved by so
    many pixels, with their mirror image beyond the border, as :class:`CropAndFlip` moves them in training.

    >>> Moved(0, 1)(torch.tensor([[[1, 2, 3]]]))
    tensor([[[2, 1, 2]]])
    >>> Moved(-1, 0)(torch.tensor([[[1, 2], [3, 4], [5, 6]]]))
    tensor([[[3, 4],
             [5, 6],
             [3, 4]]])
    """

    down: int
    right: int

    def __call__(self, images: Tensor) -> Tensor:
        fits = images.ndim >= 3 and abs(self.down) < images.shape[-2] and abs(self.right) < images.shape[-1]
        if not fits:
            raise FlowBNNError(
                f"images of shape {tuple(images.shape)} cannot be moved by {self.down}, {self.right}"
            )
        for axis, move in ((-2, self.down), (-1, self.right)):
            if move:
                length = images.shape[axis]
                places = torch.arange(length, device=images.device) - move
                images = images.index_select(axis, _reflected(places, length))
        return images


@checked
def novel_noise(number: Count, shape: Sequence[int], generator: torch.Generator | None = None) -> Tensor:
    """Images that show nothing, ``[number, *shape]``: every pixel uniform in [0, 1], as a novelty no network should trust.

    >>> novel_noise(2, (3, 32, 32), torch.Generator().manual_seed(0)).shape
    torch.Size([2, 3, 32, 32])
    """
    return torch.rand(number, *shape, generator=generator, device=generator.device if generator else None)
