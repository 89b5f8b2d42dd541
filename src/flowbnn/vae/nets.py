"""Encoders and decoders of autoencoders: gated convolutions (van den Berg et al. 2018, https://arxiv.org/abs/1803.05649) and MLPs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flowbnn.errors import FlowBNNError
from flowbnn.models import MLP
from flowbnn.options import Count, checked


class Gated(nn.Module):
    r"""Gated layer :math:`a \circ \sigma(b)`.

    Args:
        layer: Layer whose output channels are :math:`a` and :math:`b`.
    """

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.layer(x).chunk(2, 1)
        return value * torch.sigmoid(gate)


class GatedConvEncoder(nn.Module):
    """Encoder of images: five gated 5x5 convolutions, two of them with stride 2, then one over the remaining pixels.

    Args:
        shape: Shape of an image, ``(channels, height, width)``. Height and width must be multiples of 4.
        features: Number of outputs.
        width: Number of channels of the first convolutions. Later ones have twice as many.

    >>> GatedConvEncoder((1, 28, 28))(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 256])
    """

    @checked
    def __init__(self, shape: Sequence[Count], features: Count = 256, width: Count = 32) -> None:
        super().__init__()
        channels, rows, columns = _image_shape(shape)
        wide = 2 * width
        self.features = features
        sizes = [(channels, width, 1), (width, width, 2), (width, wide, 1), (wide, wide, 2), (wide, wide, 1)]
        layers: list[nn.Module] = [
            Gated(nn.Conv2d(inputs, 2 * outputs, 5, stride, 2)) for inputs, outputs, stride in sizes
        ]
        last = Gated(nn.Conv2d(wide, 2 * features, (rows // 4, columns // 4)))
        self.layers = nn.Sequential(*layers, last, nn.Flatten())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class GatedConvDecoder(nn.Module):
    """Decoder of images: a gated transposed convolution to a quarter of the sides, then five 5x5 ones, two of them with stride 2.

    Args:
        latent_dim: Number of inputs.
        shape: Shape of the outputs, ``(channels, height, width)``. Height and width must be multiples of 4.
        width: Number of channels of the last convolutions. Earlier ones have twice as many.

    >>> GatedConvDecoder(40, (1, 28, 28))(torch.zeros(2, 40)).shape
    torch.Size([2, 1, 28, 28])
    """

    @checked
    def __init__(self, latent_dim: Count, shape: Sequence[Count], width: Count = 32) -> None:
        super().__init__()
        channels, rows, columns = _image_shape(shape)
        wide = 2 * width
        sizes = [(wide, wide, 1), (wide, width, 2), (width, width, 1), (width, width, 2), (width, width, 1)]
        layers: list[nn.Module] = [
            Gated(nn.ConvTranspose2d(inputs, 2 * outputs, 5, stride, 2, stride - 1))
            for inputs, outputs, stride in sizes
        ]
        first = Gated(nn.ConvTranspose2d(latent_dim, 2 * wide, (rows // 4, columns // 4)))
        self.layers = nn.Sequential(
            nn.Unflatten(1, (latent_dim, 1, 1)), first, *layers, nn.Conv2d(width, channels, 1)
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z)


def _image_shape(shape: Sequence[int]) -> tuple[int, int, int]:
    """Returns the shape of an image whose height and width are multiples of 4."""
    if len(shape) != 3 or shape[1] % 4 or shape[2] % 4:
        text = f"shape must be (channels, height, width) with height and width multiples of 4, got {tuple(shape)}"
        raise FlowBNNError(text, kind="shape", argument="shape")
    return shape[0], shape[1], shape[2]


def make_mlp_encoder(shape: Sequence[int], hidden: Sequence[int]) -> nn.Module:
    """Returns a fully connected encoder.

    Args:
        shape: Shape of an example.
        hidden: Widths of the hidden layers. The last one is the output. Without any, the encoder only flattens the example.
    """
    if not hidden:
        return nn.Flatten()
    return nn.Sequential(MLP(math.prod(shape), tuple(hidden[:-1]), hidden[-1]), nn.ReLU())


def make_mlp_decoder(latent_dim: int, hidden: Sequence[int], shape: Sequence[int]) -> nn.Module:
    """Returns a fully connected decoder.

    Args:
        latent_dim: Number of inputs.
        hidden: Widths of the hidden layers.
        shape: Shape of the outputs.
    """
    return nn.Sequential(MLP(latent_dim, tuple(hidden), math.prod(shape)), nn.Unflatten(1, tuple(shape)))
