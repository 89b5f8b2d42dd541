"""Random crops, flips and holes for a batch of images, on the device that holds it."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from flowbnn.errors import FlowBNNError, check_whole

__all__ = ["CropAndFlip", "mirrored", "moved"]


class CropAndFlip:
    r"""Move every image of a batch by up to ``padding`` pixels, mirror half of them, and cut a hole into each.

    Each output pixel is read from its place in the input, :math:`y_{ij} = x_{i + d_y,\; \pm j + d_x}`, by one gather for the
    whole batch: no loop, nothing padded, nothing waited for on a GPU. The same augmentation as padding by ``padding`` and
    cropping at random, with cutout as in DeVries and Taylor (2017, arXiv:1708.04552): the hole's centre is any pixel, so
    part of it may lie outside.

    Args:
        padding: the largest move, in both directions, each equally likely.
        flip: mirror left and right with probability one half.
        cutout: side of the square hole; 0 cuts none.
        mode: what is seen beyond the border: its mirror image (``"reflect"``) or ``fill`` (``"zeros"``).
        fill: the value of holes, and of what is beyond the border in mode ``"zeros"``.

    >>> images = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
    >>> shift = CropAndFlip(padding=1, flip=True, mode="zeros")
    >>> draws = torch.tensor([[0.9], [0.5], [0.9], [0.0], [0.0]])  # one row down, no column, no flip
    >>> shift.apply(images, draws)[0, 0]
    tensor([[ 4,  5,  6,  7],
            [ 8,  9, 10, 11],
            [12, 13, 14, 15],
            [ 0,  0,  0,  0]], dtype=torch.uint8)
    >>> CropAndFlip()(torch.rand(8, 3, 32, 32)).shape
    torch.Size([8, 3, 32, 32])
    """

    row_wise = True  # an example comes out the same whatever else is in its batch

    def __init__(
        self,
        padding: int = 4,
        flip: bool = True,
        cutout: int = 0,
        mode: Literal["reflect", "zeros"] = "reflect",
        fill: float = 0.0,
    ) -> None:
        check_whole("padding", padding, least=0)
        check_whole("cutout", cutout, least=0)
        if mode not in ("reflect", "zeros"):
            raise FlowBNNError(f"mode is 'reflect' or 'zeros', not {mode!r}")
        self.padding, self.flip, self.cutout, self.mode, self.fill = padding, flip, cutout, mode, fill

    def __repr__(self) -> str:
        return (
            f"CropAndFlip(padding={self.padding}, flip={self.flip}, cutout={self.cutout}, mode={self.mode!r}, "
            f"fill={self.fill})"
        )

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
        if images.ndim != 4:
            raise FlowBNNError(f"CropAndFlip takes images [B, C, H, W], not shape {tuple(images.shape)}")
        number, _, height, width = images.shape
        if images.dtype == torch.uint8 and self.fill not in range(256):
            raise FlowBNNError(
                f"holes in images of bytes are filled by a whole number to 255, not {self.fill}"
            )
        if self.mode == "reflect" and self.padding >= min(height, width):
            raise FlowBNNError(f"images of {height}x{width} cannot be reflected by {self.padding} pixels")
        down, right, mirrored, hole_row, hole_column = draws.unsqueeze(-1)
        rows = torch.arange(height, device=images.device).expand(number, height)
        columns = torch.arange(width, device=images.device).expand(number, width)
        moves = 2 * self.padding + 1
        from_rows = rows + (down * moves).long() - self.padding
        from_columns = columns + (right * moves).long() - self.padding
        covered = None
        if self.mode == "zeros" and self.padding:
            covered = _outside(from_rows, height).unsqueeze(2) | _outside(from_columns, width).unsqueeze(1)
        from_rows, from_columns = self._inside(from_rows, height), self._inside(from_columns, width)
        if self.flip:
            from_columns = torch.where(mirrored < 0.5, width - 1 - from_columns, from_columns)
        if self.cutout:
            hole = _hole(rows, hole_row, self.cutout).unsqueeze(2) & _hole(
                columns, hole_column, self.cutout
            ).unsqueeze(1)
            covered = hole if covered is None else covered | hole
        moved = _gather(images, from_rows.unsqueeze(2) * width + from_columns.unsqueeze(1))
        return moved if covered is None else moved.masked_fill_(covered.unsqueeze(1), self.fill)

    def _inside(self, places: Tensor, length: int) -> Tensor:
        if self.mode == "zeros":
            return places.clamp(0, length - 1)
        return length - 1 - (length - 1 - places.abs()).abs()


def _outside(places: Tensor, length: int) -> Tensor:
    return (places < 0) | (places >= length)


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


@dataclass(frozen=True)
class Moved:
    """What :func:`moved` gives."""

    down: int
    right: int

    def __post_init__(self) -> None:
        if type(self.down) is not int or type(self.right) is not int:
            raise FlowBNNError(
                f"images are moved by whole numbers of pixels, not {self.down!r} and {self.right!r}"
            )

    def __call__(self, images: Tensor) -> Tensor:
        if images.ndim < 3:
            raise FlowBNNError(
                f"moved takes images [..., C, H, W] or [B, H, W], not shape {tuple(images.shape)}"
            )
        for axis, move in ((-2, self.down), (-1, self.right)):
            length = images.shape[axis]
            if move and abs(move) >= length:
                size = "x".join(str(side) for side in images.shape[-2:])
                raise FlowBNNError(f"images of {size} cannot be moved by {move} pixels")
            if move:
                places = torch.arange(length, device=images.device) - move
                images = images.index_select(axis, length - 1 - (length - 1 - places.abs()).abs())
        return images


def moved(down: int, right: int) -> Moved:
    """A view for ``posterior.predict(images, views=[mirrored, moved(1, 1), moved(-1, -1)])``: images ``[..., H, W]`` moved by so many
    pixels, with their mirror image beyond the border, as :class:`CropAndFlip` moves them in training.

    >>> moved(0, 1)(torch.tensor([[[1, 2, 3]]]))
    tensor([[[2, 1, 2]]])
    >>> moved(-1, 0)(torch.tensor([[[1, 2], [3, 4], [5, 6]]]))
    tensor([[[3, 4],
             [5, 6],
             [3, 4]]])
    """
    return Moved(down, right)
