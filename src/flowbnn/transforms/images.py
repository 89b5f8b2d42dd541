"""Rearrangements of images, and multi-scale flows of images.

Flows of images work on ``(..., height, width, channels)``. Transforms of vectors act on the last axis, and so on the channels of
every pixel. :class:`LULinear` is then the invertible 1x1 convolution, and :class:`ActNorm` normalizes channels. A :class:`Coupling`
whose net is a :class:`~flowbnn.nets.GatedConvNet` couples channels; after a :class:`Checkerboard` it couples the squares of a
checkerboard.
"""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flowbnn.nets.convolution import GatedConvNet
from flowbnn.nets.mlp import ConditionalNormal, Length
from flowbnn.options import Count, Depth, call_factory, checked
from flowbnn.transforms.base import (
    BidirectionalTransform,
    Transform,
    check_dense,
    check_events,
    transform_error,
)
from flowbnn.transforms.compose import Compose, Inverse
from flowbnn.transforms.surjective import Augment


class Rearrangement(BidirectionalTransform):
    """Base class for bijections that only move numbers, integers as well. A subclass defines :meth:`rearrange`."""

    linearity = "affine"
    event_dim = 3

    rearrange: Callable[[Tensor, bool], Tensor]

    def compute(self, value: Tensor, context: Tensor | None, inverse: bool) -> tuple[Tensor, Tensor]:
        check_dense(value, self)
        axes = self.sample_dim if inverse else self.event_dim
        dtype = value.dtype if value.is_floating_point() else torch.get_default_dtype()
        zeros = torch.zeros(value.shape[: value.ndim - axes], dtype=dtype, device=value.device)
        return self.rearrange(value, inverse), zeros

    def forward_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.rearrange(torch.empty(torch.Size(shape)), False).shape

    def inverse_shape(self, shape: Sequence[int]) -> torch.Size:
        return self.rearrange(torch.empty(torch.Size(shape)), True).shape


def check_divisible(owner: object, sizes: Sequence[int], *divisors: int, argument: str | None = None) -> None:
    """Raises FlowBNNError unless sizes are divisible by numbers.

    Args:
        owner: Transform that is named in the message.
        sizes: Height, width and number of channels of images.
        divisors: Divisor of each size.
        argument: Argument at fault.
    """
    if len(sizes) != 3 or any(size % divisor for size, divisor in zip(sizes, divisors, strict=True)):
        text = f"needs (height, width, channels) divisible by {divisors}, got {tuple(sizes)}"
        raise transform_error(owner, text, "shape", argument=argument)


class Reshape(Rearrangement):
    """Reshapes events, for instance vectors to images.

    Args:
        base_shape: Shape of an event of the base.
        sample_shape: Shape of an event of the sample.

    >>> Reshape((12,), (2, 2, 3))(torch.ones(5, 12))[0].shape
    torch.Size([5, 2, 2, 3])
    """

    @checked
    def __init__(self, base_shape: Sequence[Count], sample_shape: Sequence[Count]) -> None:
        super().__init__()
        self.base_shape, self.sample_shape = tuple(base_shape), tuple(sample_shape)
        if math.prod(self.base_shape) != math.prod(self.sample_shape):
            text = f"needs equal sizes, got {self.base_shape} and {self.sample_shape}"
            raise transform_error(self, text, argument="sample_shape")
        self.event_dim, self.sample_axes = len(self.base_shape), len(self.sample_shape)

    def rearrange(self, value: Tensor, inverse: bool) -> Tensor:
        shapes = self.base_shape, self.sample_shape
        source, target = shapes[::-1] if inverse else shapes
        return value.reshape(check_events(value, source, self) + target)


class ChannelsFirst(Rearrangement):
    """Moves channels first: ``(height, width, channels)`` to ``(channels, height, width)``, PyTorch's usual layout. It ends a flow of
    images.

    >>> ChannelsFirst()(torch.ones(5, 32, 32, 3))[0].shape
    torch.Size([5, 3, 32, 32])
    """

    def rearrange(self, value: Tensor, inverse: bool) -> Tensor:
        check_divisible(self, value.shape[-3:], 1, 1, 1)
        return value.movedim(-3, -1) if inverse else value.movedim(-1, -3)


class Squeeze(Rearrangement):
    r"""Moves squares of four pixels to channels, :math:`(H, W, C) \to (H / 2, W / 2, 4 C)` (Dinh, Sohl-Dickstein & Bengio 2017).

    The four numbers of one channel are adjacent. The paper squeezes on the way from the data to the base. Flows therefore use
    ``Inverse(Squeeze())``, because forward means base to sample.

    >>> Squeeze()(torch.ones(5, 32, 32, 3))[0].shape
    torch.Size([5, 16, 16, 12])
    """

    def rearrange(self, value: Tensor, inverse: bool) -> Tensor:
        if inverse:
            check_divisible(self, value.shape[-3:], 1, 1, 4)
            squares = value.unflatten(-1, (-1, 2, 2)).movedim((-2, -1), (-4, -2))
            return squares.flatten(-5, -4).flatten(-3, -2)
        check_divisible(self, value.shape[-3:], 2, 2, 1)
        return value.unflatten(-2, (-1, 2)).unflatten(-4, (-1, 2)).movedim((-4, -2), (-2, -1)).flatten(-3)


class Checkerboard(Rearrangement):
    r"""Moves the white and the black squares of a checkerboard to halves of the channels, :math:`(H, W, C) \to (H, W / 2, 2C)`.

    Between it and its inverse, a coupling that keeps half of the channels keeps one colour of the board.

    >>> image = torch.tensor([[0.0, 1.0], [2.0, 3.0]]).unsqueeze(-1)
    >>> Checkerboard()(image)[0].squeeze(1)
    tensor([[0., 1.],
            [3., 2.]])
    """

    def rearrange(self, value: Tensor, inverse: bool) -> Tensor:
        check_divisible(self, value.shape[-3:], 1, *((1, 2) if inverse else (2, 1)))
        pairs = value.unflatten(-1, (2, -1)) if inverse else value.unflatten(-2, (-1, 2))
        odd = torch.arange(pairs.shape[-4], device=pairs.device) % 2 == 1
        flipped = torch.where(odd[:, None, None, None], pairs.flip(-2), pairs)  # in every second row
        return flipped.flatten(-3, -2) if inverse else flipped.flatten(-2)


class MultiScale(Compose):
    """Multi-scale flow from a vector to an image (Dinh, Sohl-Dickstein & Bengio 2017, section 3.6).

    On the way from the data, every level squeezes squares of pixels into channels and applies ``length`` steps. Every level but the
    last then slices off half of the channels, whose distribution given the others is learned. Images have their channels last.

    Args:
        shape: Shape of an image, ``(height, width, channels)``. Height and width are divisible by ``2 ** levels``.
        levels: Number of levels.
        length: Number of steps at each level.
        make_step: Function ``make_step(channels, index)`` that returns a step.
        make_noise: Function ``make_noise(height, width, channels)`` that returns a module for the distribution of the channels that
            are sliced off, given as many that stay. By default a normal whose mean and scale a :class:`~flowbnn.nets.GatedConvNet`
            computes.
        context_dim: Length of the context vectors that this module reads.
        final_splits: Number of times that half of the channels are sliced off at the last level.

    >>> from flowbnn.transforms import ActNorm
    >>> scales = MultiScale((4, 4, 1), levels=2, length=1, make_step=lambda channels, index: ActNorm(channels))
    >>> scales.dim, scales(torch.ones(5, 8))[0].shape
    (8, torch.Size([5, 4, 4, 1]))
    """

    @checked
    def __init__(
        self,
        shape: Sequence[Count],
        levels: Count,
        length: Depth,
        make_step: Callable[[int, int], Transform],
        make_noise: Callable[[int, int, int], nn.Module] | None = None,
        context_dim: Length = 0,
        final_splits: Length = 0,
    ) -> None:
        check_divisible(self, shape, 2**levels, 2**levels, 1, argument="shape")
        height, width, channels = shape
        make_noise = make_noise or (
            lambda height, width, c: ConditionalNormal(GatedConvNet(c + context_dim, 2 * c))
        )
        transforms: list[Transform] = []  # from the data to the base
        for level in range(levels):
            height, width, channels = height // 2, width // 2, 4 * channels
            transforms.append(Inverse(Squeeze()))
            for index in range(length):
                transforms.append(call_factory(make_step, channels, index, name="make_step", kind=Transform))
            for _ in range(1 if level < levels - 1 else final_splits):
                channels = channels // 2
                noise = call_factory(make_noise, height, width, channels, name="make_noise", kind=nn.Module)
                transforms.append(Augment(channels, channels, noise, context_dim=context_dim))
        self.dim = height * width * channels
        super().__init__(Reshape((self.dim,), (height, width, channels)), *reversed(transforms))
