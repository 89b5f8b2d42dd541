"""Rearrangements of images, which carry pixels to channels and back.

Flows of images work on ``(..., height, width, channels)``: the maps of vectors, which act on the last axis, then act on the channels
at every pixel. :class:`LULinear` is the invertible 1x1 convolution, :class:`ActNorm` the one per channel, a :class:`Coupling` whose net
is a :class:`~flowbnn.nets.GatedConvNet` the coupling of channels, and after a :class:`Checkerboard` that of a checkerboard.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import ConditionalNormal, Length
from flowbnn.options import Count, call_factory, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_dense,
    check_events,
    transform_error,
)
from flowbnn.transforms.compose import Compose, Inverse
from flowbnn.transforms.surjective import Augment

IMAGES = "images (..., height, width, channels)"


class Rearrangement(BidirectionalTransform):
    """A bijection that only moves numbers, integers as well, to where a subclass says."""

    linearity = "affine"
    event_dim = 3

    moved: Callable[[Tensor, bool], Tensor]

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_dense(value, self)
        axes = self.sample_dim if inverse else self.event_dim
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        zeros = torch.zeros(value.shape[: value.ndim - axes], dtype=dtype, device=value.device)
        return self.moved(value, inverse), zeros

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.moved(torch.empty(torch.Size(shape)), False).shape

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.moved(torch.empty(torch.Size(shape)), True).shape

    def _need(self, fits: bool, value: Tensor, wanted: str) -> None:
        if not fits:
            raise transform_error(self, f"takes {wanted}, not shape {tuple(value.shape)}", "shape")


class Reshape(Rearrangement):
    """The same numbers in another shape, for instance the image of a vector.

    Args:
        before, after: shapes of an event of the base and of the sample.

    >>> Reshape((12,), (2, 2, 3))(torch.ones(5, 12))[0].shape
    torch.Size([5, 2, 2, 3])
    """

    @checked
    def __init__(self, before: Sequence[Count], after: Sequence[Count]) -> None:
        super().__init__()
        self.before, self.after = tuple(before), tuple(after)
        if math.prod(self.before) != math.prod(self.after):
            text = f"{self.before} and {self.after} hold different numbers of entries"
            raise FlowBNNError(text, argument="after")
        self.event_dim, self.sample_axes = len(self.before), len(self.after)

    def moved(self, value: Tensor, inverse: bool) -> Tensor:
        before, after = (self.after, self.before) if inverse else (self.before, self.after)
        return value.reshape(check_events(value, before, self) + after)


class ChannelsFirst(Rearrangement):
    """``(height, width, channels)`` to ``(channels, height, width)``, the usual form of images in PyTorch; it ends a flow of images.

    >>> ChannelsFirst()(torch.ones(5, 32, 32, 3))[0].shape
    torch.Size([5, 3, 32, 32])
    """

    def moved(self, value: Tensor, inverse: bool) -> Tensor:
        self._need(value.ndim >= 3, value, "images of three axes")
        return value.movedim(-3, -1) if inverse else value.movedim(-1, -3)


class Squeeze(Rearrangement):
    r"""Squares of four pixels become channels, :math:`(H, W, C) \to (H / 2, W / 2, 4 C)` (Dinh, Sohl-Dickstein & Bengio 2017).

    The numbers that one channel has in a square stand side by side. On the way from the data to the base, as in the paper, it is
    ``Inverse(Squeeze())`` that a flow is made of, since forward means base to sample.

    >>> Squeeze()(torch.ones(5, 32, 32, 3))[0].shape
    torch.Size([5, 16, 16, 12])
    """

    def moved(self, value: Tensor, inverse: bool) -> Tensor:
        if inverse:
            fits = value.ndim >= 3 and value.shape[-1] % 4 == 0
            self._need(fits, value, f"{IMAGES} with channels divisible by 4")
            squares = value.unflatten(-1, (-1, 2, 2)).movedim((-2, -1), (-4, -2))
            return squares.flatten(-5, -4).flatten(-3, -2)
        fits = value.ndim >= 3 and value.shape[-3] % 2 == value.shape[-2] % 2 == 0
        self._need(fits, value, f"{IMAGES} with sides divisible by 2")
        return value.unflatten(-2, (-1, 2)).unflatten(-4, (-1, 2)).movedim((-4, -2), (-2, -1)).flatten(-3)


class Checkerboard(Rearrangement):
    r"""White and black squares of a checkerboard become halves of the channels, :math:`(H, W, C) \to (H, W / 2, 2C)`.

    Between it and its inverse, a coupling that keeps half of the channels keeps one colour of the board.

    >>> image = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).unsqueeze(-1)
    >>> Checkerboard()(image)[0].squeeze(1)
    tensor([[0., 1.],
            [3., 2.]])
    """

    def moved(self, value: Tensor, inverse: bool) -> Tensor:
        wanted = f"{IMAGES} with an even number of channels" if inverse else f"{IMAGES} of even width"
        self._need(value.ndim >= 3 and value.shape[-1 if inverse else -2] % 2 == 0, value, wanted)
        pairs = value.unflatten(-1, (2, -1)) if inverse else value.unflatten(-2, (-1, 2))
        odd = torch.arange(pairs.shape[-4], device=pairs.device) % 2 == 1
        exchanged = torch.where(odd[:, None, None, None], pairs.flip(-2), pairs)  # in every second row
        return exchanged.flatten(-3, -2) if inverse else exchanged.flatten(-2)


class MultiScale(Compose):
    r"""An image from a vector, level by level (Dinh, Sohl-Dickstein & Bengio 2017, section 3.6).

    On the way from the data, every level squeezes squares of pixels into channels, applies ``length`` steps, and, but for the last
    level, slices off half of the channels, whose distribution given the others is learned. Images have their channels last.

    Args:
        shape: of an image, ``(height, width, channels)``; the sides are divisible by ``2 ** levels``.
        levels, length: number of levels, and of steps at each.
        step: makes a step for so many channels, ``step(channels, number)``.
        noise: makes what gives the distribution of the channels that leave for as many that stay, ``noise(height, width, channels)``;
            by default a normal whose mean and scale a :class:`~flowbnn.nets.GatedConvNet` computes.
        context_dim: length of the context that the noise reads.
        last: how often half of the channels leave at the last level, one time after the other.

    >>> from flowbnn.transforms import ActNorm
    >>> scales = MultiScale((4, 4, 1), levels=2, length=1, step=lambda channels, number: ActNorm(channels))
    >>> scales.dim, scales(torch.ones(5, 8))[0].shape
    (8, torch.Size([5, 4, 4, 1]))
    """

    @checked
    def __init__(
        self,
        shape: Sequence[Count],
        levels: Count,
        length: Count,
        step: Callable[[int, int], Transform],
        noise: Callable[[int, int, int], nn.Module] | None = None,
        context_dim: Length = 0,
        last: Length = 0,
    ) -> None:
        if len(shape) != 3 or shape[0] % 2**levels or shape[1] % 2**levels:
            text = f"takes images (height, width, channels) with sides divisible by {2**levels} for {levels} levels"
            raise transform_error(
                self, f"{text}, not {tuple(shape)}; take fewer levels, or pad the images", "shape"
            )
        height, width, channels = shape
        noise = noise or (lambda high, wide, c: ConditionalNormal(GatedConvNet(c + context_dim, 2 * c)))
        parts: list[Transform] = []  # from the data to the base
        for level in range(levels):
            height, width, channels = height // 2, width // 2, 4 * channels
            steps = [
                call_factory(step, channels, number, name="step", kind=Transform) for number in range(length)
            ]
            parts += [Inverse(Squeeze()), *steps]
            for _ in range(1 if level < levels - 1 else last):
                channels = channels // 2
                made = call_factory(noise, height, width, channels, name="noise", kind=nn.Module)
                parts.append(Augment(channels, channels, made, context_dim=context_dim))
        self.dim = height * width * channels
        super().__init__(Reshape((self.dim,), (height, width, channels)), *reversed(parts))
