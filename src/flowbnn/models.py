"""Deterministic networks (LeNet, MLP, ResNet18, SmallConv, VGG16) whose layers have names for conversion rules."""

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn

from flowbnn.options import Bounds, Count, Dim, Positive, checked

__all__ = ["MLP", "VGG16", "LeNet", "PeriodicEmbedding", "ResNet18", "SmallConv"]

Scale = Annotated[float, Bounds(gt=0, le=8)]


class LeNet(nn.Module):
    """LeNet (LeCun et al., 1998) for images of 28x28 or 32x32.

    An adaptive pool reduces both sizes to 4x4, as in the code of Xiong's report on flow noise.

    Args:
        channels: Number of channels of the images.
        classes: Number of outputs.

    >>> LeNet(channels=1)(torch.zeros(2, 1, 28, 28)).shape
    torch.Size([2, 10])
    """

    @checked
    def __init__(self, channels: Count = 1, classes: Count = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 5)
        self.pool = nn.MaxPool2d(2)
        self.adapt = nn.AdaptiveAvgPool2d(4)
        self.fc1 = nn.Linear(16 * 4 * 4, 120)
        self.fc2 = nn.Linear(120, 84)
        self.fc3 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.adapt(self.pool(torch.relu(self.conv2(x))))
        x = torch.relu(self.fc1(x.flatten(1)))
        return self.fc3(torch.relu(self.fc2(x)))


class MLP(nn.Module):
    """Multilayer perceptron: linear layers ``fc1``, ``fc2``, ... with ReLU between them.

    Args:
        inputs: Length of the input vectors. Tensors with more axes are flattened.
        hidden: Widths of the hidden layers. One width makes the two-layer network of figure 3 of Xiong's report.
        outputs: Number of classes or regression targets.

    >>> network = MLP(2, (32,), 2)
    >>> [name for name, _ in network.named_children()], network(torch.zeros(5, 2)).shape
    (['fc1', 'fc2'], torch.Size([5, 2]))
    """

    @checked
    def __init__(self, inputs: Count = 2, hidden: Sequence[Dim] = (32,), outputs: Count = 2) -> None:
        super().__init__()
        widths = (inputs, *hidden, outputs)
        self.depth = len(widths) - 1
        for index in range(self.depth):
            self.add_module(f"fc{index + 1}", nn.Linear(widths[index], widths[index + 1]))

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        for index in range(self.depth):
            x = self.get_submodule(f"fc{index + 1}")(x if index == 0 else torch.relu(x))
        return x


class PeriodicEmbedding(nn.Module):
    r"""First layer for tables: every number is followed by features of its sines and cosines.

    .. math:: x_j \mapsto \left(x_j, \mathrm{relu}(W [\cos 2\pi c_j x_j, \sin 2\pi c_j x_j] + b)\right)

    The frequencies :math:`c_j` of each input are learned. They let a perceptron learn functions that change quickly (Gorishniy et al.
    2022, https://arxiv.org/abs/2203.05556, with one map :math:`W` for all inputs).

    Args:
        inputs: Number of inputs, which should be standardized.
        frequencies: Number of frequencies of each input.
        width: Number of features of each input.
        scale: Standard deviation of the initial frequencies.

    >>> embedding = PeriodicEmbedding(3, width=4)
    >>> embedding.outputs, embedding(torch.zeros(5, 3)).shape
    (15, torch.Size([5, 15]))
    """

    @checked
    def __init__(
        self, inputs: Count, frequencies: Count = 8, width: Count = 8, scale: Positive = 0.3
    ) -> None:
        super().__init__()
        self.scale, self.outputs = scale, inputs * (width + 1)
        self.frequencies = nn.Parameter(torch.empty(inputs, frequencies))
        self.linear = nn.Linear(2 * frequencies, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws new frequencies."""
        nn.init.normal_(self.frequencies, std=self.scale)

    def forward(self, x: Tensor) -> Tensor:
        angles = (2.0 * math.pi * self.frequencies) * x.unsqueeze(-1)
        features = torch.relu(self.linear(torch.cat([angles.cos(), angles.sin()], -1)))
        return torch.cat([x, features.flatten(-2)], -1)


class SmallConv(nn.Module):
    """Network of two convolutions with pooling and two linear layers: ``conv1``, ``conv2``, ``fc1``, ``fc2``.

    Args:
        channels: Number of channels of the images.
        classes: Number of outputs.
        width: Number of channels of the first convolution. The second one has twice as many.
        hidden: Width of the hidden linear layer.

    >>> SmallConv()(torch.zeros(3, 1, 8, 8)).shape
    torch.Size([3, 10])
    """

    @checked
    def __init__(
        self, channels: Count = 1, classes: Count = 10, width: Count = 16, hidden: Count = 64
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, padding=1)
        self.conv2 = nn.Conv2d(width, 2 * width, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(2 * width * 4, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.conv1(x)))
        x = self.pool(torch.relu(self.conv2(x)))
        return self.fc2(torch.relu(self.fc1(x.flatten(1))))


class VGG16(nn.Module):
    """VGG16 (Simonyan & Zisserman, 2015) with BatchNorm: 13 convolutions, 3 linear layers, for images of 32x32 or larger.

    The convolutions are ``conv1`` to ``conv13``, each followed by ``norm1`` to ``norm13`` and a ReLU, with a pool after the 2nd, 4th,
    7th, 10th and 13th. The feature map is then averaged over its positions. The linear layers are ``fc1`` to ``fc3``.

    Args:
        channels: Number of channels of the images.
        classes: Number of outputs.
        hidden: Width of the first two linear layers.
        width: Factor of the channels of all convolutions. Values below 1 make a network that trains quickly.

    >>> VGG16(width=0.125)(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    convolution_channels = (64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512)

    @checked
    def __init__(
        self,
        channels: Count = 3,
        classes: Count = 10,
        hidden: Count = 512,
        width: Scale = 1.0,
    ) -> None:
        super().__init__()
        widths = [max(1, round(width * number)) for number in self.convolution_channels]
        for index, (before, after) in enumerate(zip([channels, *widths], widths, strict=False), start=1):
            self.add_module(f"conv{index}", nn.Conv2d(before, after, 3, padding=1, bias=False))
            self.add_module(f"norm{index}", nn.BatchNorm2d(after))
        self.pool = nn.MaxPool2d(2)
        self.fc1 = nn.Linear(widths[-1], hidden)
        self.fc2 = nn.Linear(hidden, hidden)
        self.fc3 = nn.Linear(hidden, classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        for index in range(1, len(self.convolution_channels) + 1):
            x = torch.relu(self.get_submodule(f"norm{index}")(self.get_submodule(f"conv{index}")(x)))
            if index in (2, 4, 7, 10, 13):
                x = self.pool(x)
        x = torch.relu(self.fc1(x.mean((2, 3))))
        return self.fc3(torch.relu(self.fc2(x)))


class ResidualBlock(nn.Module):
    r"""Block of two 3x3 convolutions and a shortcut: :math:`y = \mathrm{relu}(f(x) + s(x))`.

    :math:`f` consists of ``conv1``, ``norm1``, ReLU, ``conv2`` and ``norm2``. :math:`s` is the identity, or ``shortcut`` (a 1x1
    convolution) and ``norm3`` if the shape changes.

    Args:
        before: Number of input channels.
        after: Number of output channels.
        stride: Stride of the first convolution.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(after)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(after)
        self.changes_shape = stride > 1 or before != after
        if self.changes_shape:
            self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)
            self.norm3 = nn.BatchNorm2d(after)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x)))))
        return torch.relu(inner + (self.norm3(self.shortcut(x)) if self.changes_shape else x))


class ResNet18(nn.Module):
    """ResNet18 (He et al., 2016) with BatchNorm for images of 32x32, with a first convolution of 3x3 and no pool after it.

    ``conv1`` and ``norm1`` are followed by ``block1`` to ``block8``, two each of 64, 128, 256 and 512 channels. ``block3``,
    ``block5`` and ``block7`` have a stride of 2. The feature map is then averaged over its positions, and ``fc`` is the linear
    layer. The layers of a block are ``block3.conv1``, ``block3.conv2`` and, if its shape changes, ``block3.shortcut``.

    Args:
        channels: Number of channels of the images.
        classes: Number of outputs.
        width: Factor of the channels of all blocks. Values below 1 make a network that trains quickly.

    >>> network = ResNet18(width=0.125)
    >>> network(torch.zeros(2, 3, 32, 32)).shape, network.block3.shortcut
    (torch.Size([2, 10]), Conv2d(8, 16, kernel_size=(1, 1), stride=(2, 2), bias=False))
    """

    @checked
    def __init__(self, channels: Count = 3, classes: Count = 10, width: Scale = 1.0) -> None:
        super().__init__()
        widths = [max(1, round(width * number)) for number in (64, 64, 64, 128, 128, 256, 256, 512, 512)]
        self.conv1 = nn.Conv2d(channels, widths[0], 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(widths[0])
        self.depth = len(widths) - 1
        for index in range(self.depth):
            stride = 2 if index in (2, 4, 6) else 1
            self.add_module(f"block{index + 1}", ResidualBlock(widths[index], widths[index + 1], stride))
        self.fc = nn.Linear(widths[-1], classes)
        _initialize(self)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm1(self.conv1(x)))
        for index in range(self.depth):
            x = self.get_submodule(f"block{index + 1}")(x)
        return self.fc(x.mean((2, 3)))


def _initialize(network: nn.Module) -> None:
    """Initializes the convolutions as He et al. (2015)."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
