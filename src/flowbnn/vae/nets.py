"""Encoders and decoders for images, of gated convolutions (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.models import MLP
from flowbnn.options import Count, checked


class Gated(nn.Module):
    r""":math:`a \circ \sigma(b)` of a layer that gives twice as many channels."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.layer(x).chunk(2, 1)
        return value * torch.sigmoid(gate)


class GatedConvEncoder(nn.Module):
    """Five gated 5x5 convolutions, two of them with a stride of 2, and one over all that is left.

    Args:
        shape: of an image, ``(channels, height, width)``, with sides that 4 divides.
        features: numbers that come out.
        width: channels of the first convolutions; later ones have twice as many.

    >>> GatedConvEncoder((1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 256])
    """

    @checked
    def __init__(self, shape: Sequence[Count], features: Count = 256, width: Count = 32) -> None:
        super().__init__()
        channels, height, side = _image(shape)
        wide = 2 * width
        self.features = features
        plan = [(channels, width, 1), (width, width, 2), (width, wide, 1), (wide, wide, 2), (wide, wide, 1)]
        parts: list[nn.Module] = [
            Gated(nn.Conv2d(before, 2 * after, 5, stride, 2)) for before, after, stride in plan
        ]
        last = Gated(nn.Conv2d(wide, 2 * features, (height // 4, side // 4)))
        self.layers = nn.Sequential(*parts, last, nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class GatedConvDecoder(nn.Module):
    """The way back: one gated transposed convolution to a quarter of the image, then 5x5 ones, two of them doubling the sides.

    Args:
        latent_dim: numbers that go in.
        shape: of the outputs, ``(channels, height, width)``.
        width: as in :class:`GatedConvEncoder`.

    >>> GatedConvDecoder(40, (1, 28, 28))(torch.zeros(2, 40)).shape
    torch.Size([2, 1, 28, 28])
    """

    @checked
    def __init__(self, latent_dim: Count, shape: Sequence[Count], width: Count = 32) -> None:
        super().__init__()
        channels, height, side = _image(shape)
        wide = 2 * width
        plan = [(wide, wide, 1), (wide, width, 2), (width, width, 1), (width, width, 2), (width, width, 1)]
        parts: list[nn.Module] = [
            Gated(nn.ConvTranspose2d(before, 2 * after, 5, stride, 2, stride - 1))
            for before, after, stride in plan
        ]
        first = Gated(nn.ConvTranspose2d(latent_dim, 2 * wide, (height // 4, side // 4)))
        self.layers = nn.Sequential(
            nn.Unflatten(1, (latent_dim, 1, 1)), first, *parts, nn.Conv2d(width, channels, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)


def _image(shape: Sequence[int]) -> tuple[int, int, int]:
    if len(shape) != 3 or shape[1] % 4 or shape[2] % 4:
        raise FlowBNNError(
            f"a gated convolutional network takes images of (channels, height, width) with sides that 4 divides, not {tuple(shape)}",
            kind="shape",
            argument="shape",
        )
    return shape[0], shape[1], shape[2]


def encoder_of(shape: Sequence[int], hidden: Sequence[int]) -> nn.Module:
    """A fully connected encoder, whose last hidden layer is what it gives; without any, it gives the example itself."""
    if not hidden:
        return nn.Flatten()
    return nn.Sequential(MLP(math.prod(shape), tuple(hidden[:-1]), hidden[-1]), nn.ReLU())


def decoder_of(latent_dim: int, hidden: Sequence[int], shape: Sequence[int]) -> nn.Module:
    """A fully connected decoder."""
    return nn.Sequential(MLP(latent_dim, tuple(hidden), math.prod(shape)), nn.Unflatten(1, tuple(shape)))
