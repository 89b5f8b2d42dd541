"""Recipes that serve images as well as vectors."""

from collections.abc import Sequence
from typing import Any

from torch import nn

from flowbnn.distributions import Base
from flowbnn.errors import FlowBNNError
from flowbnn.flows.base import Bins, Named, Widths
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import Length
from flowbnn.options import Count, checked
from flowbnn.transforms import (
    ActNorm,
    AffineMap,
    ChannelsFirst,
    Dequantization,
    GlowStep,
    MultiScale,
    Transform,
    Univariate,
)


class Glow(Named):
    """Steps of ActNorm, an invertible linear map and an affine coupling (Kingma & Dhariwal 2018, https://arxiv.org/abs/1807.03039).

    For images, ``Glow((3, 32, 32), length=8, levels=3)``, the linear maps are 1x1 convolutions, the couplings have gated convolutions,
    and at every level but the last half of the channels leave, as in :class:`~flowbnn.transforms.MultiScale`.

    Args:
        dim: length of the vectors, or the shape ``(channels, height, width)`` of images.
        length: number of steps; of images, at each level.
        hidden: widths of the networks; of images, one residual block of so many channels for each.
        data_start: ActNorm normalises the first training batch, for densities of data; noise starts at the identity.
        levels, values: of images: number of levels, and of values of a pixel, which is an integer from 0. Such densities are
            bounds on log-probabilities by uniform dequantization; with ``values=None`` pixels are real numbers.
        context_dim, base: as in :class:`NICE`.

    >>> import torch
    >>> flow = Glow((1, 4, 4), length=1, levels=2, hidden=(4,))
    >>> flow().log_prob(torch.randint(256, (5, 1, 4, 4))).shape
    torch.Size([5])
    """

    @checked
    def __init__(
        self,
        dim: Count | Sequence[Count],
        context_dim: Length = 0,
        length: Count = 4,
        hidden: Widths = (64, 64),
        data_start: bool = False,
        base: Base | None = None,
        levels: Count = 3,
        values: Bins | None = 256,
    ) -> None:
        settings: dict[str, Any] = {"hidden": hidden, "context_dim": context_dim, "data_start": data_start}

        def step(channels: int, number: int) -> Transform:
            net = _image_net(channels // 2, channels - channels // 2, AffineMap(), hidden, context_dim)
            return GlowStep(channels, permute=True, data_start=data_start, net=net)

        if not isinstance(dim, int):
            scales = _scales(dim, levels, length, step, hidden, context_dim)
            super().__init__(scales.dim, context_dim, base, scales, *_pixels(values))
            return
        one = [ActNorm(1, data_start=data_start)] if dim == 1 else []  # which has nothing to mix
        steps = [GlowStep(dim, flip=bool(step % 2), **settings) for step in range(length) if dim > 1]
        super().__init__(dim, context_dim, base, *one, *steps)


def _image_net(
    kept: int, moved: int, univariate: Univariate, hidden: Widths, context_dim: int
) -> GatedConvNet:
    return GatedConvNet(kept, univariate.per_entry * moved, hidden[0], len(hidden), context_dim)


def _scales(
    shape: Sequence[int],
    levels: int,
    length: int,
    step: Any,
    hidden: Widths,
    context_dim: int,
    noise: Any = None,
) -> MultiScale:
    if len(shape) != 3 or not hidden:
        raise FlowBNNError(
            f"an image has the shape (channels, height, width), and its networks at least one width, not {tuple(shape)}",
            kind="shape",
            argument="dim",
        )
    return MultiScale(
        (*shape[1:], shape[0]), levels, length, step, noise, hidden[0], len(hidden), context_dim
    )


def _pixels(values: int | None, noise: nn.Module | None = None) -> list[Transform]:
    """What ends a flow of images: integers, if they are, and channels first."""
    return [*([] if values is None else [Dequantization(values, noise)]), ChannelsFirst()]
